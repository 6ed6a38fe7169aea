"""Whether a number means the same on all ranks: of a sample, and of a name."""

from collections.abc import Iterator

from ..events import Event
from ..runs import Run
from .base import Finding, check, fault, hint, need, need_none, need_use, seen, some
from .weights import joined_later


@check("A number means the same sample on all ranks.", after=("same_split", "same_scaling"), ranks=True)
def same_meaning(run: Run) -> Iterator[Finding]:
    """Class numbers from a set, from hash(), or from files in the order of listdir() can differ between processes.

    Ranks that each have data of their own, with nothing in common, may be meant; that is not judged.
    """
    probes = run.samples_read
    need(probes, "no data set could be read by numbers after the training")
    doubts: list[str] = []
    for events in probes:
        numbers = [n for n in events[0]["contents"] if all(n in e["contents"] for e in events)]
        if len(numbers) < 2:
            doubts.append("the ranks have parts of a data set")
            continue
        if finding := _meaning(run, events, numbers, doubts):
            yield finding
            return
    need_none(doubts)


def _meaning(run: Run, events: tuple[Event, ...], numbers: list[str], doubts: list[str]) -> Finding | None:
    """Return the finding if samples of the same numbers differ between ranks; otherwise note what was seen."""
    first = events[0]["contents"]
    parts = [p for p, _ in enumerate(first[numbers[0]]) if all(p < len(e["steady"]) and e["steady"][p] for e in events)]
    lengths = {len(e["contents"][n]) for e in events for n in numbers}
    if not parts or len(lengths) > 1:
        doubts.append("the samples are random, or of several forms")
        return None
    differ = {p: [n for n in numbers if len({e["contents"][n][p][0] for e in events}) > 1] for p in parts}
    if not any(differ.values()):
        seen(len(numbers), f"samples with {len(parts)} parts each, equal on all ranks")
        return None
    other = next(e for e in events[1:] if any(e["contents"][n] != first[n] for n in numbers))
    same = [p for p in parts if not differ[p] and _says_something(first, numbers, p)]
    wrong = next(p for p in parts if differ[p])
    number = differ[wrong][0]
    shown = (
        f"{'collate_fn of ' if events[0].get('collated') else ''}{events[0]['cls']}[{number}]"
        f"{events[0]['names'][wrong]} is {first[number][wrong][2]} on rank 0, and "
        f"{other['contents'][number][wrong][2]} on rank {events.index(other)}"
    )
    names = [name for name, value in events[0]["attributes"].items() if other["attributes"].get(name, value) != value]
    lines = [events[0]["lines"][name] for name in names if name in events[0]["lines"]]
    at = (
        lines[0] if lines else next((e["at"] for e in run.first.all("loader") if e["dataset"] == events[0]["cls"]), "?")
    )
    which = some(f"{events[0]['cls']}.{name}" for name in names)
    because = f"; not the same on all ranks: {which}" if names else ""
    fix = "make the order the same in all processes: sorted(...) for sets, files and names, and a seed for each shuffle"
    if same:
        return fault(
            at,
            f"{shown}, while the rest of the sample is equal, in {len(differ[wrong])} of {len(numbers)}{because}",
            fix,
        )
    rows = [{str([e["contents"][n][p][0] for p in parts]) for n in e["contents"]} for e in events]
    common = len(set.intersection(*rows))
    if common > 0.1 * min(map(len, rows)) and common > 1 and _divided_by_number(run, events[0]["cls"]):
        text = (
            f"{len(differ[wrong])} of {len(numbers)} numbers mean other samples on another rank, and {common} samples "
            "are on all of them"
        )
        return fault(at, f"{text}{because}", fix)
    patterns = [p for p in parts if first[numbers[0]][p][1]]
    if patterns and all(e["contents"][n][p][1] == first[n][p][1] for e in events for n in numbers for p in patterns):
        return fault(at, f"{shown}: with equal patterns, so the same things have other numbers{because}", fix)
    if not common and all(differ.values()) and _divided_by_number(run, events[0]["cls"]):
        text = (
            f"{shown}: each rank has data of its own, and the sampler divides their numbers, so nobody trains on the "
            f"rest of each rank's data{because}"
        )
        return hint(
            at,
            text,
            "make, read and split the data alike on all ranks; if they are meant to be of this rank alone, without a "
            "sample in common, leave out the DistributedSampler",
        )
    doubts.append("each rank has data of its own")
    return None


def _divided_by_number(run: Run, dataset: str) -> bool:
    """Return whether the ranks share the numbers of a data set among them, so that these must mean the same."""
    for kind, passes in run.epochs(run.training | run.validating).items():
        orders = [set(run.numbers(event)) for event in passes[0].values() if "file" in event]
        if kind[1] == dataset and len(orders) == run.world and all(orders):
            return sum(map(len, orders)) - len(set().union(*orders)) <= run.world
    return False


def _says_something(contents: dict[str, list], numbers: list[str], part: int) -> bool:
    """Return whether a part of the samples varies, and is not only their number."""
    values = {contents[n][part][0] for n in numbers}
    return len(values) > 1 and len(numbers) > 3 and any(contents[n][part][2] != n for n in numbers)


@check("A name has the same number on all ranks.", after=("same_meaning",), ranks=True)
def same_numbering(run: Run) -> Iterator[Finding]:
    """A vocabulary that each rank makes from its own part of the texts gives the rows of an embedding two meanings."""
    compared = 0
    by_name = [{e["name"]: e for e in rank.all("mapping")} for rank in run.ranks]
    need_use(by_name[0], "a dictionary that numbers names, such as a vocabulary")
    for name, first in by_name[0].items():
        others = [(rank, found[name]) for rank, found in enumerate(by_name) if rank and name in found]
        for rank, other in others:
            common = first["entries"].keys() & other["entries"].keys()
            wrong = sorted(word for word in common if first["entries"][word] != other["entries"][word])
            compared += len(common) if not wrong else 0
            if len(common) >= 4 and len(wrong) > 0.1 * len(common):
                word = wrong[0]
                yield fault(
                    first["at"],
                    f"{name} gives {word!r} the number {first['entries'][word]} on rank 0, and "
                    f"{other['entries'][word]} on rank {rank}; so it is with {len(wrong)} of {len(common)} names",
                    "make it once, from all data and in a sorted order, and give it to all ranks: a file, or "
                    "broadcast_object_list",
                )
                return
    seen(compared, "names with the same number on all ranks")


APART = 1e-3
"""difference of two means, as a part of the scale, from which on it is said"""


@check("The numbers that scale samples are the same on all ranks.", ranks=True)
def same_scaling(run: Run) -> Iterator[Finding]:
    """Mean and std of a rank's own part of the data give the model the same quantity in other units on each rank."""
    names = {e["name"]: None for e in run.first.all("statistics")}
    of_ranks = {name: [rank.all("statistics", name=name)[:1] for rank in run.ranks] for name in names}
    need(
        not joined_later(run.aligned("gradients")),
        "the ranks train apart, and average some of the weights now and then",
    )
    pairs = {name: [e for found in events for e in found] for name, events in of_ranks.items() if all(events)}
    need_use(pairs, "a mean and a std that stay the same while it trains")
    doubts: list[str] = []
    agreed = 0
    for name, events in pairs.items():
        first, other = (
            events[0]["pair"],
            max((e["pair"] for e in events[1:]), key=lambda p: _apart(events[0]["pair"], p)),
        )
        if _apart(first, other) < APART:
            agreed += 1
        elif "local" in name or "rank" in name:
            doubts.append(f"{name} differ, and their names say so")
        else:
            yield hint(
                events[0]["at"],
                f"{name} differ between the ranks ({first[0][0]:.4g} and {first[1][0]:.4g} on rank 0, "
                f"{other[0][0]:.4g} and {other[1][0]:.4g} on another; sums if there are several), and stay as they "
                "are: if they are of a rank's own part of the data and scale samples or targets, the same quantity has "
                "other units on each rank",
                "compute them from all of the data: all_reduce the number of samples, the sum and the sum of squares",
            )
            return
    need_none(doubts)
    seen(agreed, "pairs such as mean and std, equal on all ranks")


def _apart(one: list[list[float]], other: list[list[float]]) -> float:
    """Return how far two pairs are apart, as a part of the first one's scale."""
    scale = max(one[1][1], 1e-12)
    return max(abs(one[0][0] - other[0][0]), abs(one[1][0] - other[1][0])) / scale
