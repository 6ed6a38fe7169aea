"""Faults in weights and buffers that differ or do not train, and what is saved of them."""

from doctor_events import NAMES, TRAIN, add, at, change
from faulty import faulty
from rankdoctor.runs import Run


@faulty("unsharded_agree", "FAULT", 29)
def the_root_is_not_sharded(run: Run) -> None:
    change(run, "model", sharded=True, groups=4)
    change(run, "gradients", unsharded=NAMES[:1])
    for e in run.ranks[1].all("gradients"):
        e["weights"] = e["weights"] | {NAMES[0]: [0.7, 3.0]}


def make_weights_differ(run: Run) -> None:
    for e in run.ranks[1].all("gradients")[1:]:
        e["weights"] = {name: [value[0], value[1] + 0.1] for name, value in e["weights"].items()}
    for e in run.ranks[1].all("gradients"):
        e["gradients"] = {name: [0.1, 0.7] for name in NAMES}


@faulty("weights_agree", "FAULT", 37)
def one_rank_loads_the_state_of_the_optimizer(run: Run) -> None:
    make_weights_differ(run)
    first = run.ranks[0].all("gradients")[0]
    first["state"] = 3
    run.ranks[0].events.insert(8, {"e": "optimizer_loaded", "step": 0, "t": 0.05, "at": at(37)})


@faulty("weights_agree", "FAULT", 53)
def gradients_of_different_weights_are_added_up(run: Run) -> None:
    never_wrapped(run)
    for rank in run.ranks:
        e = rank.all("gradients")[0]
        e["gradients"] = e["gradients"] | {NAMES[rank.number]: None}
    add(run, "collective", 53, name="all_reduce", size=6, everyone=True, gradient=True)


@faulty("weights_agree", "FAULT", 43)
def inner_model_called(run: Run) -> None:
    make_weights_differ(run)
    for rank in run.ranks:
        for e in rank.all("forward", train=True):
            del e["ddp"], e["sync"]
            e["inside"] = at(30)


@faulty("weights_agree", "FAULT", 43)
def always_no_sync(run: Run) -> None:
    make_weights_differ(run)
    change(run, "forward", wanted={"train": True}, sync=False)


@faulty("weights_agree", "FAULT", 30)
def unfrozen_after_wrapping(run: Run) -> None:
    make_weights_differ(run)
    change(run, "ddp", frozen=2)


@faulty("weights_agree", "FAULT", 29)
def never_wrapped(run: Run) -> None:
    make_weights_differ(run)
    for rank in run.ranks:
        rank.events = [e for e in rank.events if e["e"] != "ddp"]
        for e in rank.all("forward"):
            e.pop("ddp")


@faulty("weights_agree", "NOTE", 29)
def a_head_of_each_rank_is_saved_by_it(run: Run) -> None:
    for rank in run.ranks:
        rank.events = [e for e in rank.events if e["e"] not in ("write", "save")]
        save = {"file": f"/home/me/{rank.number}.pt", "tensors": 3, "shards": 0, "wrapped": 0, "on_gpu": False}
        rank.events.append({"e": "save", "step": 8, "t": 9.0, "at": at(55), **save})
        for e in rank.all("gradients"):
            e["weights"] = e["weights"] | {NAMES[2]: [0.1 * e["step"], 2.0 + e["step"] + rank.number]}


@faulty("weights_agree", "FAULT", 29)
def copies_whose_mean_nobody_takes(run: Run) -> None:
    trained_copies(run, exchange=False)


def trained_copies(run: Run, *, exchange: bool) -> None:
    """Four optimizers of one line, each of a copy of the model, make two updates of this rank's own."""
    never_wrapped(run)
    for rank in run.ranks:
        for n, e in enumerate(rank.all("gradients")):
            e |= {"optimizer": n // 2, "count": n % 2, "made": at(35)}  # type: ignore[misc]
            e["weights"] = {name: [0.1 * n, 2.0 + n + n % 2 * rank.number] for name in NAMES}
        for n, e in enumerate(rank.all("update")):
            e["optimizer"] = n // 2
        sent = {"e": "collective", "t": 1.0, "at": at(47), "name": "all_reduce", "size": 30, "everyone": True}
        for n, e in enumerate(rank.all("update")):
            if exchange and n % 2:
                rank.events.insert(rank.events.index(e) + 1, sent | {"step": n + 1})


@faulty("weights_agree", "FAULT", 34)
def a_module_beside_the_wrapped_one(run: Run) -> None:
    for rank in run.ranks:
        for e in rank.all("gradients"):
            e["weights"]["1:scale"] = [0.1 * rank.number * e["step"], 1.0]
            e["gradients"]["1:scale"] = [0.5, 1.0]
        made = next(e for e in rank.events if e["e"] == "model")
        rank.events.insert(rank.events.index(made), made | {"model": 1, "cls": "Weighting", "made": at(34)})


@faulty("weights_agree", "FAULT", 43)
def gradients_are_exchanged_too_early(run: Run) -> None:
    make_weights_differ(run)
    for rank in run.ranks:
        events = []
        for e in rank.events:
            events += [e, e | {"sync": False}] if e["e"] == "forward" and e["train"] else [e]
        rank.events = events


@faulty("weights_agree", "FAULT", 35)
def only_rank_0_loads(run: Run) -> None:
    make_weights_differ(run)
    events = run.ranks[0].events
    wrapped = next(i for i, e in enumerate(events) if e["e"] == "ddp")
    events.insert(wrapped + 1, {"e": "load", "step": 0, "t": 9.0, "at": at(35), "file": "/home/me/last.pt"})


@faulty("foreign_weights", "FAULT", 45)
def optimizer_of_a_copy(run: Run) -> None:
    change(run, "update", foreign=3)


@faulty("orphans", "FAULT", 45)
def head_forgotten(run: Run) -> None:
    change(run, "trainable", orphans=["c.weight"], orphans_with_gradient=1)


@faulty("weights_change", "FAULT", 45)
def learning_rate_zero(run: Run) -> None:
    change(run, "gradients", weights={name: [0.5, 1.0] for name in NAMES}, lr=[0.0])


@faulty("finite", "FAULT", 45)
def weights_are_nan(run: Run) -> None:
    for rank in run.ranks:
        for e in rank.all("gradients")[2:]:
            e["weights"] = {name: [float("nan"), float("nan")] for name in NAMES}


@faulty("finite", "FAULT", 31)
def a_layer_is_never_initialized(run: Run) -> None:
    for rank in run.ranks:
        rank.events.insert(0, {"e": "empty", "step": 0, "t": 0.0, "at": at(31)})
        for e in rank.all("gradients"):
            e["weights"]["b.weight"] = [float("nan"), float("nan")]


@faulty("low_precision", "FAULT", 29)
def weights_in_bf16(run: Run) -> None:
    change(run, "gradients", dtypes=["bfloat16"])
    change(run, "update", low_same=80, low_all=100)


@faulty("one_group", "COST", 29)
def blocks_that_are_not_sharded_one_by_one(run: Run) -> None:
    change(run, "model", sharded=True, groups=1)


@faulty("sharded_orphans", "FAULT", 45)
def sharded_weights_without_an_optimizer(run: Run) -> None:
    change(run, "model", sharded=True, groups=5)
    add(run, "sharded", 45, parameters=3, orphans=["layer.weight"])


@faulty("teachers_agree", "FAULT", 60)
def average_on_rank_0_only(run: Run) -> None:
    for rank in run.ranks:
        for e in rank.all("gradients"):
            e["others"] = {"7": [1.0 + e["count"] * (1 - rank.number), 2.0]}
        calls = [e | {"model": 7, "grad": False, "at": at(60), "loader": None} for e in rank.all("forward", train=True)]
        rank.events.extend(calls)


@faulty("teachers_agree", "FAULT", 60)
def a_target_that_rank_0_alone_replaces_late(run: Run) -> None:
    """It is equal for most of the updates that are looked at, and other weights from then on."""
    average_on_rank_0_only(run)
    for rank in run.ranks:
        for e in rank.all("gradients"):
            e["others"] = {"7": [1.0 + (e["count"] > 4) * (1 - rank.number), 2.0]}


@faulty("weights_agree", "FAULT", 45)
def gradients_of_two_tasks_that_nobody_averages(run: Run) -> None:
    """They come from torch.autograd.grad, which DistributedDataParallel does not see."""
    make_weights_differ(run)
    change(run, "update", backwards=[])


def divided_optimizer(run: Run) -> None:
    """Each rank updates its part of the weights, a tensor of no model, and gathers the parts."""
    for rank in run.ranks:
        rank.events = [e for e in rank.events if e["e"] != "ddp"]
        for n, e in enumerate(rank.all("gradients")):
            e["weights"], e["gradients"] = {"?0": [1.0 + rank.number, 3.0 + n]}, {"?0": [0.5 - rank.number, 1.0]}
    change(run, "update", foreign=1, parameters=1)
    change(run, "trainable", orphans=["a.weight"] * 3, orphans_with_gradient=3)
    change(run, "forward", wanted={"loader": TRAIN}, ddp=False, sync=False)
    add(run, "collective", 47, name="all_gather_into_tensor", size=9, everyone=True)


@faulty("clip_local", "FAULT", 44)
def parts_of_a_divided_optimizer_are_clipped_apart(run: Run) -> None:
    divided_optimizer(run)
    add(run, "clip", 44, scaled=False, plain=True, of_no_model=True)


@faulty("one_writer", "FAULT", 55)
def all_save(run: Run) -> None:
    add(run, "write", 55, (1,), file="/home/me/model.pt", how="save")


@faulty("shards_saved", "FAULT", 55)
def parts_of_rank_0(run: Run) -> None:
    change(run, "model", sharded=True)
    change(run, "save", (0,), shards=3)


@faulty("loaded_to_own_gpu", "NOTE", 31)
def loaded_without_map_location(run: Run) -> None:
    change(run, "save", (0,), on_gpu=True)
    add(run, "load", 31, file="/home/me/model.pt", located=False)


@faulty("wrapped_names", "NOTE", 55)
def ddp_state_saved(run: Run) -> None:
    change(run, "save", (0,), wrapped=3)


@faulty("small_norm", "NOTE", 43)
def batch_norm_of_two_samples(run: Run) -> None:
    change(run, "model", local_norms=4)


@faulty("loads_kept", "NOTE", 31)
def a_checkpoint_stays_on_the_gpu(run: Run) -> None:
    kept(run, "cuda:0", 300)


def kept(run: Run, where: str, size: int) -> None:
    for rank in run.ranks:
        rank.events.append(
            {"e": "kept", "step": 2, "t": 1.0, "at": at(31), "where": where, "size": size, "beside": 100}
        )


def codebook(run: Run, apart: float, *, moves: bool = True, broadcast: bool = False) -> None:
    change(run, "ddp", broadcast=broadcast)
    for rank in run.ranks:
        for e in rank.all("gradients"):
            value = (e["count"] if moves else 0) + apart * rank.number
            e["kept_buffers"] = {"codes": [value, 5.0 + value]}


@faulty("buffers_agree", "FAULT", 29)
def each_rank_has_a_codebook_of_its_own(run: Run) -> None:
    codebook(run, 1.5)


@faulty("buffers_agree", "NOTE", 29)
def only_the_codes_of_rank_0_are_kept(run: Run) -> None:
    codebook(run, 1.5, broadcast=True)


def divided_layers(run: Run, *, alike: bool) -> None:
    """Layers of the script's own are divided: the first weight is, the others are shared."""
    for rank in run.ranks:
        rank.events = [e for e in rank.events if e["e"] != "ddp"]
        rank.events.append({"e": "inner", "step": 0, "t": 0.5, "at": at(50), "name": "all_reduce", "sums": True})
        for n, e in enumerate(rank.all("gradients")):
            sign = -1.0 if rank.number else 1.0
            own = {NAMES[0]: [sign, 3.0], NAMES[1]: [0.5, 2.0 + (0 if alike else 0.1 * n * rank.number)]}
            e["weights"] = e["weights"] | own
            e["gradients"] = e["gradients"] | {NAMES[0]: [sign, 3.0]}
    change(run, "forward", wanted={"loader": TRAIN}, rows=[1, 2], ddp=False, sync=False)


@faulty("shared_agree", "FAULT", 50)
def what_enters_a_divided_layer_is_not_added_up_in_backward(run: Run) -> None:
    divided_layers(run, alike=False)


def tied(run: Run, *, alike: bool) -> None:
    """Two stages: one weight is their own, another one is sent to all; without ``alike`` that one drifts."""
    add(run, "message", 41, overwrites=False)
    for rank in run.ranks:
        rank.events = [e for e in rank.events if e["e"] != "ddp"]
        sent = {"e": "collective", "step": 0, "t": 0.0, "at": at(36), "name": "broadcast", "size": 30, "everyone": True}
        rank.events.insert(2, sent)
        for n, e in enumerate(rank.all("gradients")):
            drift = 0.0 if alike else 0.1 * n * rank.number
            e["weights"] = {NAMES[0]: [0.2, 3.0 + rank.number + n], NAMES[1]: [0.5, 2.0 + n + drift]}
            e["gradients"] = {NAMES[0]: [0.2, 3.0 + rank.number], NAMES[1]: [0.5, 2.0 + drift]}
    change(run, "forward", wanted={"loader": TRAIN}, rows=[1, 2], ddp=False, sync=False)


@faulty("tied_agree", "FAULT", 36)
def gradients_of_a_tied_embedding_are_not_added_up(run: Run) -> None:
    tied(run, alike=False)


def average(run: Run, stayed: int) -> None:
    for rank in run.ranks:
        seen = {"dtype": "bfloat16", "calls": 9, "apart": 900, "stayed": stayed}
        rank.events.append({"e": "average", "step": 8, "t": 9.0, "at": at(52), **seen})


@faulty("averages_follow", "FAULT", 52)
def an_average_in_16_bits(run: Run) -> None:
    average(run, 880)
