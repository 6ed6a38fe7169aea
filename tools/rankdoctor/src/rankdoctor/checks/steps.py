"""Whether all ranks take the same steps and call the same collectives; why a run hangs."""

from collections.abc import Iterator

from ..events import Event
from ..runs import Run
from .base import Finding, check, fault, hint, need, need_use, seen

ALONE = (" in select", " in poll", " in sleep", " in read")
"""where a process stands that waits for its workers, for instance, and not for another rank"""
SIZED = ("all_reduce", "broadcast", "reduce")


@check("All ranks have the same number of training batches.", exercise="one_image_more", ranks=True)
def equal_steps(run: Run) -> Iterator[Finding]:
    """Every step averages gradients over all ranks, so a rank with one step more waits for ranks that have ended."""
    epochs = run.epochs(run.training)
    need(epochs, "no training with a DataLoader was seen")
    need(not run.any("join"), "the script uses Join, for uneven numbers of steps")
    seen(sum(e.get("batches") or 0 for passes in epochs.values() for e in passes[0].values()), "batches of all ranks")
    exchanging = run.sharded or run.any("ddp")
    for kind, passes in epochs.items():
        counts = {rank: event.get("batches") for rank, event in passes[0].items()}
        if exchanging and len(counts) == run.world and len(set(counts.values())) > 1:
            listed = ", ".join(f"rank {rank}: {count}" for rank, count in sorted(counts.items()))
            yield fault(
                kind[0],
                f"the ranks have different numbers of batches in an epoch ({listed})",
                "leave out the last global batch if it cannot be shared, or use DistributedSampler",
            )


@check(
    "All ranks call the same collectives in the same order.",
    exercise="one_image_more",
    after=("equal_steps",),
    ranks=True,
)
def same_collectives(run: Run) -> Iterator[Finding]:
    """A collective ends when every rank has called it; a different one in its place hangs, or mixes up the values."""
    lists = [rank.all("collective", everyone=True) for rank in run.ranks]
    need_use(any(lists), "collectives of its own")
    need(not run.any("join"), "the script uses Join, which answers the collectives of ranks that have ended")
    seen(min(map(len, lists)), "collectives of each rank", 0)
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


def _described(events: tuple[Event, ...]) -> str:
    sizes = [f" of {e['size']} values" if e["size"] else "" for e in events]
    return "; ".join(
        f"rank {rank}: {e['name']}{size} at {_short(e['at'])}"
        for rank, (e, size) in enumerate(zip(events, sizes, strict=True))
    )


@check("No rank waits for ever.", after=("equal_steps", "same_collectives"), exercise="one_image_more")
def hang(run: Run) -> Iterator[Finding]:
    """A rank that waits for another one hangs until the timeout of the process group, and then the job fails."""
    launch = run.launch
    need(launch.ended != "time", "the time limit came while the script still ran")
    seen(sum(len(rank.all("update")) for rank in run.ranks), "updates of all ranks", 0)
    if launch.ended in ("hang", "lost") and launch.stuck and not run.crashed:
        places = {rank.number: launch.stuck.get(rank.events[0]["pid"]) for rank in run.ranks if rank.events}
        need(
            not all(place and place.endswith(ALONE) for place in places.values()),
            "the run was ended because nothing moved, but no rank waited for another one",
        )
        listed = "; ".join(f"rank {n}: {_short(place) if place else 'ended'}" for n, place in places.items())
        at = next((place.split(" in ")[0] for place in places.values() if place), "?")
        yield fault(
            at,
            f"ranks wait for others that do not come ({listed})",
            "let all ranks take the same path to each collective, also to those in backward()",
        )


def _short(place: str) -> str:
    return place.rsplit("/", 1)[-1]


@check("Every process group has the timeout that was asked for.", ranks=True)
def timeouts(run: Run) -> Iterator[Finding]:
    """The timeout of init_process_group holds for the default group only; new_group() has its own, 10 minutes."""
    asked = next((e["timeout"] for e in run.first.all("init") if e.get("timeout")), None)
    need_use(asked, "a timeout for init_process_group")
    groups = [e for e in run.first.all("group") if e["ranks"] is None or run.first.number in e["ranks"]]
    seen(len(groups) + 1, "process groups")
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
    need_use(run.sharded or run.any("part"), "sharded weights")
    seen(len(run.first.all("update")), "updates")
    places = {e["at"]: e for e in run.first.all("part")}
    for place, e in places.items():
        count = len(run.first.all("part", at=place))
        text = f"{count} times the value of a sharded tensor is read, of which this rank has a part ({e['placement']})"
        yield fault(place, text, "tensor.full_tensor().item(), on all ranks")
