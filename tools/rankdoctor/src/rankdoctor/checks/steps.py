"""Whether all ranks take the same steps and call the same collectives; why a run hangs."""

from collections.abc import Iterator

from ..events import Event
from ..runs import Run, passes_with_batches, says_peer_is_gone
from .apart import equal
from .base import Finding, check, fault, hint, need, need_none, need_use, seen, shows

ALONE = (" in select", " in poll", " in sleep", " in read")
"""where a process stands that waits for its workers, for instance, and not for another rank"""
SIZED = ("all_reduce", "broadcast", "reduce")


@check("All ranks have the same number of training batches.", exercise="one_image_more", ranks=True)
def equal_steps(run: Run) -> Iterator[Finding]:
    """Every step averages gradients over all ranks, so a rank with one step more waits for ranks that have ended."""
    alike = run.epochs(run.training)
    epochs = with_own_sizes(alike, run.world)
    need(epochs, "no training with a DataLoader was seen")
    need(not run.any("join"), "the script uses Join, for uneven numbers of steps")
    exchanging = run.sharded or run.any("ddp")
    compared, doubts = 0, []
    for kind, passes in epochs.items():
        for parts in passes:
            counts = {rank: batches_of(run, rank, event) for rank, event in parts.items()}
            if len(counts) < run.world:
                continue
            ended = [number for number, is_all in counts.values() if is_all]
            more = max(number for number, _ in counts.values())
            if ended and min(ended) < more:
                if all(n + fillers_of(run, rank, parts[rank]) >= more for rank, (n, _) in counts.items()):
                    compared += sum(ended)  # a rank without a batch takes part in the step with something else
                    continue
                listed = ", ".join(
                    f"rank {rank}: {number}{'' if is_all else ' or more'}"
                    for rank, (number, is_all) in sorted(counts.items())
                )
                if run.launch.name and any(n > given_of(run, rank, parts[rank]) for rank, (n, _) in counts.items()):
                    doubts.append("passes were cut before a rank came to its end, where it may fill in: see --full")
                    continue
                text = f"the ranks have different numbers of batches in an epoch ({listed})"
                fix = "leave out the last global batch if it cannot be shared, or use DistributedSampler"
                if len(alike[kind][0]) < run.world:
                    fix = "take as many steps on each rank as the rank with the fewest batches has, or use Join"
                if not parts[0].get("batches"):
                    fix = "give each rank equally many samples of the stream, stop at the shortest, or use Join"
                if exchanging:
                    yield fault(kind[0], text, fix)
                    break
                doubts.append(text)
            elif len(ended) < run.world:
                doubts.append("the stream was cut before it ended: see --full")
            else:
                compared += sum(ended)
    need_none(doubts)
    seen(compared, "batches of all ranks, equally many on each")


def with_own_sizes(epochs: dict[tuple, list[dict[int, Event]]], world: int) -> dict[tuple, list[dict[int, Event]]]:
    """Return passes with those of one line put together in which each rank has a data set of its own size."""
    found = {kind: passes for kind, passes in epochs.items() if len(passes[0]) == world}
    rest = [kind for kind in epochs if kind not in found]
    for line in {kind[0]: None for kind in rest}:
        kinds = [kind for kind in rest if kind[0] == line]
        ranks = [rank for kind in kinds for rank in epochs[kind][0]]
        if len(ranks) == len(set(ranks)) == world:
            together = zip(*(epochs[kind] for kind in kinds), strict=False)
            found[kinds[0]] = [{rank: e for parts in ones for rank, e in parts.items()} for ones in together]
    return found


def fillers_of(run: Run, number: int, event: Event) -> int:
    """Return how many more calls of a model in training than batches there are from the begin of a pass to the next."""
    rank = next(rank for rank in run.ranks if rank.number == number)
    count, begun = 0, False
    for e in rank.events:
        if e is event:
            begun = True
        elif begun and e["e"] == "pass" and e["loader"] in run.training:
            break
        elif begun and e["e"] == "forward" and e["train"] and e["grad"]:
            count += 1
        elif begun and e["e"] == "batch" and e["loader"] == event["loader"]:
            count -= 1
    return count


def given_of(run: Run, number: int, event: Event) -> int:
    """Return how many batches a rank took from a pass of a stream; of another loader, how many there are."""
    if event.get("batches"):
        return event["batches"]
    rank = next(rank for rank in run.ranks if rank.number == number)
    return next((given for passed, given in passes_with_batches(rank) if passed is event), 0)


def batches_of(run: Run, number: int, event: Event) -> tuple[int, bool]:
    """Return how many batches a pass of a rank has, and whether these are all of them."""
    if event.get("batches"):
        return event["batches"], True
    rank = next(rank for rank in run.ranks if rank.number == number)
    given, begun = 0, False
    for e in rank.events:
        if e is event:
            begun = True
        elif begun and e.get("loader") == event["loader"]:
            if e["e"] == "pass_end":
                return e["batches"], e["complete"]
            if e["e"] == "pass":
                break
            given += e["e"] == "batch"
    return given, False


@check(
    "All ranks call the same collectives in the same order.",
    exercise="one_image_more",
    after=("equal_steps", "same_unused"),
    ranks=True,
)
def same_collectives(run: Run) -> Iterator[Finding]:
    """A collective ends when every rank has called it; a different one in its place hangs, or mixes up the values."""
    lists = [rank.all("collective", everyone=True) for rank in run.ranks]
    need_use(any(lists), "collectives of its own")
    need(not run.any("join"), "the script uses Join, which answers the collectives of ranks that have ended")
    for number, events in enumerate(zip(*lists, strict=False)):
        if len({(e["name"], e["size"] if e["name"] in SIZED else 0) for e in events}) > 1:
            yield fault(
                events[0]["at"],
                f"collective number {number + 1} is not the same on all ranks: {_described(events)}",
                "call every collective on all ranks, outside of conditions and loops that depend on the rank",
            )
            return
    counts = [len(events) for events in lists]
    if len(set(counts)) > 1 and run.launch.ended in ("end", "lost", "hang") and not run.crashed:
        extra = lists[counts.index(max(counts))][min(counts)]
        yield fault(
            extra["at"],
            f"the ranks called {counts} collectives: {extra['name']} was not called by all of them",
            "call every collective on all ranks, outside of conditions and loops that depend on the rank",
        )
    need(
        len(set(counts)) == 1 or run.launch.ended == "enough", f"the ranks called {counts} collectives, then one failed"
    )
    failed = run.launch.ended == "end" and any(run.launch.statuses)
    need(not failed, "a rank has failed, and the collectives of DDP and FSDP are not among those that are counted")
    seen(min(counts), "collectives of the script's own, called alike by all ranks")


def _described(events: tuple[Event, ...]) -> str:
    sizes = [f" of {e['size']} values" if e["size"] else "" for e in events]
    return "; ".join(
        f"rank {rank}: {e['name']}{size} at {_short(e['at'])}"
        for rank, (e, size) in enumerate(zip(events, sizes, strict=True))
    )


@check(
    "No rank waits for ever.",
    after=("equal_steps", "same_collectives", "same_unused", "shards_saved"),
    exercise="one_image_more",
)
def hang(run: Run) -> Iterator[Finding]:
    """A rank that waits for another one hangs until the timeout of the process group, and then the job fails."""
    launch = run.launch
    need(launch.ended != "time", "the time limit came while the script still ran")
    need(not run.crashed, "a rank failed, so others waited for it")
    fix = "let all ranks take the same path to each collective, also to those in backward()"
    if launch.ended in ("hang", "lost") and launch.stuck:
        places = {rank.number: launch.stuck.get(rank.events[0]["pid"]) for rank in run.ranks if rank.events}
        need(
            not all(place and place.endswith(ALONE) for place in places.values()),
            "the run was ended because nothing moved, but no rank waited for another one",
        )
        listed = "; ".join(f"rank {n}: {_short(place) if place else 'ended'}" for n, place in places.items())
        at = next((place.split(" in ")[0] for place in places.values() if place), "?")
        yield fault(at, f"ranks wait for others that do not come ({listed})", fix)
    lost = [(rank, e) for rank in run.ranks for e in rank.all("error") if says_peer_is_gone(e)]
    ended = [rank for rank in run.ranks if not rank.all("error") and rank.all("end")]
    if not launch.stuck and lost and ended:
        (rank, error), gone = lost[0], ended[0]
        steps = [len(one.all("update")) for one in (gone, rank)]
        text = (
            f"rank {gone.number} came to its end after {steps[0]} updates, while rank {rank.number}, after {steps[1]}, "
            "still waited for it here: with NCCL that is a hang until the timeout"
        )
        yield fault(error["at"], text, "let all ranks take the same number of steps, and call the same collectives")
    updates = {len(rank.all("update")) for rank in run.ranks}
    if run.whole:
        shows(f"all {run.world} ranks came to their end, after {max(updates)} updates")
    elif launch.ended in ("enough", "stopped") and len(updates) == 1 and max(updates):
        shows(f"all {run.world} ranks made {max(updates)} updates")
    else:
        need(False, "not all ranks came to the end of the script")


def _short(place: str) -> str:
    return place.rsplit("/", 1)[-1]


@check("What a model sends to other ranks in forward comes back in backward.")
def messages_return(run: Run) -> Iterator[Finding]:
    """The gradient of what a rank has received belongs to the rank that sent it, which must add it to its own.

    So it is with the halo of a domain that is divided among the ranks, and with the keys of a sequence that is. If all
    ranks compute the same loss of what was gathered, they have the same gradient of it, and nothing is lost.
    """
    sent = [e for e in run.first.all("inner", name="message") if e.get("in_function")]
    backs = run.together("gathered_back")
    need_use(sent or backs, "messages or gathers in the forward of a torch.autograd.Function")
    need(len(run.first.all("update")) > 1, "no two updates were seen")
    if sent and not run.any("message", backward=True):
        yield fault(
            sent[0]["at"],
            f"the forward of a torch.autograd.Function sends and receives here, {len(sent)} times in training, and no "
            "backward sends anything: the gradient of what came from another rank is lost",
            "send the gradient of the received part back, and add it to that of the part that was sent",
        )
        return
    if lost := [events for events in backs if _is_lost(events)]:
        yield fault(
            lost[0][0]["at"],
            f"the forward of a torch.autograd.Function gathers from all ranks here; in {len(lost)} of {len(backs)} "
            "backward passes the gradient of what it gathered is another one on each rank, and backward exchanges "
            "nothing: what the loss of another rank says of this rank's part is lost",
            "add up the gradient over the ranks in backward (all_reduce or reduce_scatter), then take this rank's part",
        )
        return
    if sent:
        seen(len(run.first.all("message", backward=True)), "messages in backward")
    if backs:
        seen(len(backs), "gradients of what a Function gathered, exchanged in backward or alike on all ranks")


@check("An update waits for the collectives that add its gradients up.")
def waited_for(run: Run) -> Iterator[Finding]:
    """With async_op=True a collective returns before its tensor has the sum; only wait() of its handle says when."""
    need_use(any(rank.all("collective", gradient=True) for rank in run.ranks), "collectives of its own for gradients")
    for rank in run.ranks:
        if found := rank.all("unwaited"):
            yield fault(
                found[0]["at"],
                f"nothing has waited for {found[0]['count']} of the collectives that are started here when update "
                f"{found[0]['step'] + 1} uses their tensors, {found[0]['values']} gradients in all: it may use values "
                "that are not added up yet, or not on all ranks",
                "keep every handle that async_op=True returns, and call wait() for each before step()",
            )
            return
    seen(len(run.first.all("update")), "updates")


@check("Every process group has the timeout that was asked for.", ranks=True)
def timeouts(run: Run) -> Iterator[Finding]:
    """The timeout of init_process_group holds for the default group only; new_group() has its own, 10 minutes."""
    asked = next((e["timeout"] for e in run.first.all("init") if e.get("timeout")), None)
    need_use(asked, "a timeout for init_process_group")
    groups = [e for e in run.first.all("group") if e["ranks"] is None or run.first.number in e["ranks"]]
    need_use(groups, "process groups beside the default one")
    seen(len(groups), "further process groups")
    without = [e for e in groups if not e["timeout"] and not run.any("timeout")]
    if without:
        text = (
            f"{len(without)} process group(s) made without a timeout have PyTorch's default, and not the "
            f"{asked:.0f} s of init_process_group"
        )
        yield hint(without[0]["at"], text, "new_group(..., timeout=timeout), or set the timeout of each group")


@check("The value of a sharded tensor is the value over all ranks.", ranks=True)
def sharded_values(run: Run) -> Iterator[Finding]:
    """item() of a sharded tensor, such as the norm of a sharded gradient, returns the value of one rank's shard."""
    places = {e["at"]: e for e in run.first.all("part")}
    need_use(places, "values of sharded tensors")
    for place, e in places.items():
        count = len(run.first.all("part", at=place))
        text = f"{count} times the value of a sharded tensor is read, of which this rank has a part ({e['placement']})"
        yield fault(place, text, "tensor.full_tensor().item(), on all ranks")


@check("Each rank uses a GPU that it has.")
def device_exists(run: Run) -> Iterator[Finding]:
    """The GPUs of a rank have the numbers from 0 to torch.cuda.device_count() - 1, also if a launcher binds others."""
    used = [(rank, e) for rank in run.ranks for e in rank.all("device")]
    fix = "local_rank % torch.cuda.device_count(), which is right with all GPUs of a node and with one"
    highest = {rank.number: max([e["index"] for r, e in used if r is rank], default=0) for rank in run.ranks}
    by_rank = run.launch.nodes > 1 and all(number == index for number, index in highest.items())
    for rank, e in used:
        if e["index"] >= e["gpus"]:
            text = f"rank {rank.number} asks for GPU {e['index']}, but it sees {e['gpus']}, numbered from 0"
            need(
                run.launch.gpus_per_task or by_rank or e["gpus"] < run.launch.world_size // run.launch.nodes,
                f"{text}: the doctor gives a node as many GPUs as ranks",
            )
            yield fault(e["at"], text, "the local rank instead of the rank" if by_rank else fix)
            return
    for rank in run.ranks:
        for e in rank.all("error"):
            if "invalid device ordinal" in e["text"]:
                yield fault(e["at"], f"rank {rank.number} asks for a GPU that it does not see", fix)
                return
    need_use(used, "numbers of GPUs")
    by_local_rank = [e for _, e in used if e["index"] > 0 and not e["asked"]]
    if run.launch.launcher == "srun" and not run.launch.gpus_per_task and by_local_rank:
        text = (
            "the GPU is that of the local rank: right if srun gives each task all GPUs of its node, an error on all "
            "tasks but the first if it binds them (--gpus-per-task, --gpu-bind)"
        )
        yield hint(by_local_rank[0]["at"], text, f"{fix}; --gpus_per_task 1 tries it")
    seen(len(used), "numbers of GPUs, all below their count")


def _is_lost(events: tuple[Event, ...]) -> bool:
    """Return whether a gathered tensor got other gradients on the ranks of a group, and none of them exchanged any."""
    if any(e["exchanges"] for e in events):
        return False
    groups = {tuple(e["ranks"] or ()) for e in events}
    return any(
        not equal(one, other)
        for group in groups
        for first, *others in [[e["came"] for e in events if tuple(e["ranks"] or ()) == group]]
        for came in others
        for one, other in zip(first, came, strict=False)
    )
