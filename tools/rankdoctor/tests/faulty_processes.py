"""Faults in processes, collectives, devices and time."""

from doctor_events import NAMES, SAMPLES, STEPS, TRAIN, add, at, change
from faulty import faulty
from rankdoctor.runs import Run


@faulty("timeouts", "NOTE", 5)
def a_group_without_the_timeout(run: Run) -> None:
    change(run, "init", timeout=7200.0)
    for rank in run.ranks:
        rank.events.insert(2, {"e": "group", "step": 0, "t": 0.0, "at": at(5), "ranks": [0, 1], "timeout": None})


@faulty("equal_steps", "FAULT", 10)
def one_batch_more(run: Run) -> None:
    change(run, "pass", (1,), {"loader": TRAIN}, batches=5)


@faulty("same_collectives", "FAULT", 53)
def collectives_per_batch(run: Run) -> None:
    for rank in run.ranks:
        extra = next(e for e in rank.events if e["e"] == "collective")
        rank.events.extend(extra | {"name": "barrier", "size": None} for _ in range(rank.number))


@faulty("hang", "FAULT", 45)
def two_ranks_wait(run: Run) -> None:
    run.launch.ended = "hang"
    run.launch.stuck = {1000: f"{at(45)} in backward", 1001: f"{at(53)} in all_reduce"}


@faulty("waits", "COST", 46)
def item_in_each_step(run: Run) -> None:
    change(run, "update", waits={f"{at(46)} item": 1})


@faulty("collectives_per_step", "COST", 47)
def loss_reduced_in_each_step(run: Run) -> None:
    add(run, "collective", 47, name="all_reduce", size=1, everyone=True)


@faulty("workers_restarted", "COST", 10)
def workers_not_kept(run: Run) -> None:
    change(run, "loader", wanted={"loader": TRAIN}, workers=2)
    change(run, "pass", wanted={"loader": TRAIN}, workers=2)


@faulty("loading", "COST", 10)
def slow_samples(run: Run) -> None:
    change(run, "batch", wait=0.03)


@faulty("graphs_kept", "COST", 44)
def losses_are_collected_in_each_epoch(run: Run) -> None:
    for rank in run.ranks:
        updates = rank.all("update")
        more = [dict(e) for e in updates]
        rank.events[-3:-3] = more
        for number, e in enumerate([*updates, *more]):
            e["graphs"] = 1 + number % 8


@faulty("graphs_kept", "COST", 44)
def loss_summed_with_graph(run: Run) -> None:
    for rank in run.ranks:
        for number, e in enumerate(rank.all("update"), start=1):
            e["graphs"] = number


@faulty("many_objects", "COST", 10)
def list_of_lists(run: Run) -> None:
    change(run, "loader", workers=2)
    change(run, "dataset", wanted={"dataset": 0}, objects=(50_000, "samples"))


def unused(run: Run, rank: int, number: int, *names: str) -> None:
    event = {"e": "unused", "step": number, "t": 1.0, "at": at(44), "number": number, "names": [*names]}
    run.ranks[rank].events.append(event | {"missing": len(names)})


@faulty("same_unused", "FAULT", 43)
def a_batch_without_targets_on_one_rank(run: Run) -> None:
    for number in range(4):
        unused(run, 0, number)
    unused(run, 1, 3, "c.weight")


def sharded_gradients(run: Run, *without: str) -> None:
    """A model that fully_shard divides; rank 1 has no gradient of these weights in the third update."""
    change(run, "model", sharded=True, groups=5)
    for rank in run.ranks:
        rank.events = [e for e in rank.events if e["e"] != "ddp"]
    run.ranks[1].all("gradients")[2]["gradients"] |= dict.fromkeys(without)


@faulty("same_unused", "FAULT", 44)
def a_sharded_layer_that_one_rank_does_not_need(run: Run) -> None:
    sharded_gradients(run, NAMES[0])


@faulty("device_exists", "FAULT", 6)
def a_gpu_of_another_task(run: Run) -> None:
    run.launch.gpus_per_task = 1
    devices(run, 1)


@faulty("device_exists", "FAULT", 6)
def the_rank_instead_of_the_local_rank(run: Run) -> None:
    run.launch.nodes = 2
    devices(run, 1)


def devices(run: Run, gpus: int, asked: bool = False) -> None:
    for rank in run.ranks:
        event = {"e": "device", "step": 0, "t": 0.0, "at": at(6), "index": rank.number, "gpus": gpus, "asked": asked}
        rank.events.insert(2, event)


def data_of_its_own_on_each_rank(run: Run, batches: int) -> None:
    """Rank 1 has another, smaller data set, from which its loader makes so many batches."""
    for e in run.ranks[1].events:
        if e["e"] == "dataset" and e["dataset"] == 0:
            e["size"] = SAMPLES - 2
        elif e["e"] == "pass" and e["loader"] == TRAIN:
            e["batches"] = batches


@faulty("equal_steps", "FAULT", 10)
def other_data_and_one_batch_less_on_rank_1(run: Run) -> None:
    data_of_its_own_on_each_rank(run, STEPS - 1)


@faulty("equal_steps", "FAULT", 10)
def a_stream_that_ends_earlier_on_one_rank(run: Run) -> None:
    stream(run, 4, 2)


def stream(run: Run, *batches: int, complete: tuple[bool, bool] = (True, True)) -> None:
    change(run, "loader", wanted={"loader": TRAIN}, iterable=True)
    for rank in run.ranks:
        for e in rank.all("pass", loader=TRAIN):
            del e["file"], e["batches"]
        events = [e for e in rank.events if e["e"] == "batch" and e["loader"] == TRAIN]
        for last in (events[3], events[7]):
            ended = {"e": "pass_end", "step": last["step"], "t": last["t"], "loader": TRAIN}
            ended |= {"batches": batches[rank.number], "complete": complete[rank.number]}
            rank.events.insert(1 + max(i for i, e in enumerate(rank.events) if e is last), ended)


@faulty("hang", "FAULT", 44)
def one_rank_ends_while_another_waits(run: Run) -> None:
    run.ranks[1].events = [e for e in run.ranks[1].events if e["e"] != "end"]
    text = "[enforce fail at pair.cc] Connection closed by peer [127.0.0.1]:6231"
    run.ranks[1].events.append({"e": "error", "step": 8, "t": 9.0, "at": at(44), "type": "RuntimeError", "text": text})
    run.launch.statuses = [0, 1]


@faulty("profiled", "COST", 40)
def a_profiler_around_everything(run: Run) -> None:
    trace(run, 16)


def trace(run: Run, updates: int) -> None:
    for rank in run.ranks:
        rank.events.append({"e": "profiled", "step": 8, "t": 9.0, "at": at(40), "updates": updates})


def own_collectives(run: Run) -> None:
    """The script adds its gradients up, with async_op=True, and waits."""
    add(run, "collective", 44, name="all_reduce", size=9, everyone=True, own=True, gradient=True, in_step=False)


@faulty("waited_for", "FAULT", 44)
def handles_that_nobody_waits_for(run: Run) -> None:
    own_collectives(run)
    add(run, "unwaited", 44, (1,), count=5, values=6)


def messages(run: Run, overwrites: bool) -> None:
    add(run, "message", 41, overwrites=overwrites)


def a_halo(run: Run, backward: bool) -> None:
    """The forward of a Function sends and receives; with ``backward`` its backward does, too."""
    add(run, "inner", 41, name="message", sums=False, features=False, in_function=True)
    if backward:
        add(run, "message", 42, overwrites=False, backward=True)


@faulty("messages_return", "FAULT", 41)
def a_halo_whose_gradient_stays(run: Run) -> None:
    a_halo(run, backward=False)


def a_gather(run: Run, exchanges: int, came: list[float], ranks: list[list[int]] | None = None) -> None:
    """The forward of a Function gathers; its backward gets these gradients, as sums, on each rank."""
    for rank, value in zip(run.ranks, came, strict=True):
        group = ranks[rank.number] if ranks else [0, 1]
        fields = {"at": at(41), "ranks": group, "exchanges": exchanges, "came": [[value, 5.0]]}
        rank.events.insert(-3, {"e": "gathered_back", "step": 2, "t": 2.0, **fields})


@faulty("messages_return", "FAULT", 41)
def a_gather_whose_gradient_stays(run: Run) -> None:
    a_gather(run, 0, [1.0, 2.0])


@faulty("kept_inputs", "FAULT", 41)
def parts_of_a_batch_are_received_into_one_tensor(run: Run) -> None:
    messages(run, True)
