"""Which samples the ranks train on, and in which order."""

import contextlib
import itertools
from collections import Counter
from collections.abc import Iterator

from ..events import Event
from ..runs import Run
from .base import (
    ONE_EPOCH,
    CannotJudge,
    Finding,
    Observed,
    check,
    fault,
    hint,
    need,
    need_none,
    need_use,
    seen,
    some,
)

COMPARED = 12
"""training steps of which the inputs are compared"""
OF_A_PASS = 50
"""such steps, where an own loader may order the samples"""
LEAST_COMMON = 16
"""inputs that two ranks must have in common before it is said that each has an order of its own"""


@check(
    "Every rank trains on samples of its own.",
    exercise="same_half",
    after=("same_split",),
    ranks=True,
)
def same_samples(run: Run) -> Iterator[Finding]:
    """Ranks that compute the same samples do the same work: an epoch is then several epochs, and no step is larger."""
    if run.model_parallel:
        raise CannotJudge("the model is split over several dimensions of ranks, some of which rightly share samples")
    planned = {
        kind: passes if all(_is_planned(run, parts) for parts in passes) else passes[:1]  # a rank can have one more
        for kind, passes in run.epochs(run.training).items()
        if _is_planned(run, passes[0])
    }
    if not planned:
        apart = list(_ordered_apart(run))
        yield from apart or same_inputs(run)
        return
    numbers = [n for passes in planned.values() for parts in passes for e in parts.values() for n in run.numbers(e)]
    seen(len(numbers), "samples of all ranks, compared by their numbers")
    doubts = []
    for kind, passes in planned.items():  # later epochs too: a sampler can count them on rank 0 only
        found = (f for number, parts in enumerate(passes, start=1) for f in _common_samples(run, kind, parts, number))
        yield from itertools.islice(found, 1)
        yield from itertools.islice((f for parts in passes for f in _drawn_apart(run, kind, parts)), 1)
        for parts in passes:
            orders = [run.numbers(event) for event in parts.values()]
            common = sum(map(len, map(set, orders))) - len(set().union(*orders))
            if any(len(set(order)) < 0.95 * len(order) for order in orders):
                doubts.append("samples are drawn with replacement, so ranks may have some in common")
            elif common > run.world:
                doubts.append(f"the ranks have {common} samples of {len(orders[0])} in common")
    need_none(doubts)
    with contextlib.suppress(CannotJudge):  # samples that are drawn: other numbers, and perhaps the same values
        before = list(Observed.now)
        yield from same_inputs(run)
        Observed.now[:] = before


def _is_planned(run: Run, parts: dict[int, Event]) -> bool:
    """Return whether all ranks have made this pass, and the numbers of its samples can be compared."""
    return len(parts) == run.world and all("file" in e for e in parts.values()) and run.same_data(parts)


def _common_samples(run: Run, kind: tuple, parts: dict[int, Event], epoch: int) -> Iterator[Finding]:
    """Yield what two ranks have in common in an epoch."""
    orders = {rank: run.numbers(event) for rank, event in parts.items()}
    pair = max(itertools.combinations(orders, 2), key=lambda pair: _overlap(orders[pair[0]], orders[pair[1]]))
    one, other = orders[pair[0]], orders[pair[1]]
    common, order = len(set(one) & set(other)), ", in the same order" if one == other else ""
    is_shared = "Distributed" in kind[3]  # only what it adds, so that all ranks have as many, may be common
    if is_shared and 0.1 < _overlap(one, other) <= 0.7 and common > run.world:
        text = f"ranks {pair[0]} and {pair[1]} both train on {common} of their {len(one)} samples in epoch {epoch}"
        fix = "split and order the data set in the same way on all ranks, before the sampler divides it: with a seed"
        if epoch > 1:
            fix = "let all ranks call set_epoch with the same number before each epoch"
        at = run.made(parts[pair[0]]["loader"]).get("sampler_at") or kind[0]
        yield fault(at, f"{text} (sampler: {kind[3]})", fix)
    elif _overlap(one, other) > 0.5 and len(one) >= 4:
        text = f"ranks {pair[0]} and {pair[1]} train on the same {common} samples of {kind[2]} in an epoch{order}"
        yield fault(
            kind[0],
            f"{text} (sampler: {kind[3]})",
            "give the loader a DistributedSampler with the rank and world size of the whole job",
        )


def _drawn_apart(run: Run, kind: tuple, parts: dict[int, Event]) -> Iterator[Finding]:
    """Yield the finding if the ranks give as many samples as there are, but each has drawn its share by itself."""
    orders = [run.numbers(event) for event in parts.values()]
    given, different, size = sum(map(len, orders)), len(set().union(*orders)), kind[2] or 0
    batch = run.world * (run.made(next(iter(parts.values()))["loader"])["batch_size"] or 16)
    if any(len(set(order)) < len(order) for order in orders) or "Distributed" in kind[3]:
        return
    if size > 8 * run.world and abs(given - size) <= min(batch, size // 8) and different < 0.9 * given:
        text = (
            f"the ranks train on {given} of {size} samples in an epoch, but only {different} differ: some come on "
            f"several ranks, and {size - different} never"
        )
        fix = "let all ranks order the samples with the same seed, and each take its own part of that order"
        yield fault(run.made(next(iter(parts.values()))["loader"]).get("sampler_at") or kind[0], text, fix)


def _overlap(one: list[int], other: list[int]) -> float:
    """Return the share of common samples; 0 if samples are drawn with replacement, because they then can be common.

    If they are even in the same order, they are drawn from the same seed.
    """
    if one == other and len(set(one)) > 4:
        return 1.0
    if len(set(one)) < 0.95 * len(one) or len(set(other)) < 0.95 * len(other):
        return 0.0
    return len(set(one) & set(other)) / max(1, min(len(one), len(other)))


@check("The samples are shared between the ranks once.", ranks=True)
def shared_once(run: Run) -> Iterator[Finding]:
    """If a library splits a loader that has a DistributedSampler already, most samples are left out."""
    at = next((e["sampler_at"] for e in run.first.all("loader") if e.get("sampler_at")), "")
    need_use(at, "DistributedSampler")
    epochs = run.epochs(run.training)
    covered, other_data = 0, False
    for kind, passes in epochs.items():
        orders = [run.numbers(event) for event in passes[0].values() if "file" in event]
        step = run.world * (run.made(next(iter(passes[0].values()))["loader"])["batch_size"] or 1)
        different, given = len(set().union(*orders)), sum(map(len, orders))
        if len(orders) < run.world or not kind[2]:
            continue
        if not run.same_data(passes[0]):
            other_data = True
            continue
        one_share = abs(different - kind[2] / run.world) <= step < (kind[2] - different) / 2
        if different == given and one_share:
            text = f"only {different} of {kind[2]} samples are trained on in an epoch"
            yield fault(at, text, "leave out the DistributedSampler: the library that prepares the loader has its own")
        covered += different if kind[2] - different <= step else 0
    need(not other_data, "a number means another sample on another rank")
    seen(covered, "samples of an epoch, which are all but the last batch")


def same_inputs(run: Run) -> Iterator[Finding]:
    """Compare what the models were given, where no sampler says which samples those are."""
    calls = run.together("forward", train=True, grad=True)[:COMPARED]
    as_they_are: list[list[list[int]]] = [[e.get("rows", []) for e in events] for events in calls]
    in_any_order: list[list[list[int]]] = [[e.get("bags", []) for e in events] for events in calls]
    yield from _common_inputs(run, as_they_are, "")
    if all(all(rows) for rows in in_any_order):  # images that a transform has flipped, turned or shifted
        yield from _common_inputs(run, in_any_order, ", with their values in another order, as by a flip or a shift")


def _common_inputs(run: Run, steps: list[list[list[int]]], how: str) -> Iterator[Finding]:
    """Yield what rank 0 and another rank have in common; ``steps`` are the hashes of the inputs of each rank."""
    if not how and _trains_one_model(run) and (number := _same_batches(steps)):
        first = run.first.all("forward", train=True, grad=True)[0]
        text = f"ranks 0 and 1 give the model the same inputs in the same order, in all of the first {number} steps"
        fix = "let each rank read or generate its own part: with a seed that has the rank of the whole job in it"
        yield fault(run.made(first["loader"])["at"] if first["loader"] else first["at"], text, fix)
        return
    steps = [rows for rows in steps if all(rows) and len(set(rows[0])) > len(rows[0]) / 2]
    different = {frozenset(rows[0]) for rows in steps}
    need(len(steps) < 3 or len(different) > 1, "the model gets the same inputs in every step, such as a whole graph")
    seen(len(steps), "training steps, of each the inputs of all ranks", 2)
    rows_of = [[row for rows in steps for row in rows[rank]] for rank in range(run.world)]
    common, other = max((len(set(rows_of[0]) & set(rows_of[rank])), rank) for rank in range(1, run.world))
    equal = sum(set(rows[0]) == set(rows[other]) for rows in steps)
    early = _in_both(steps[: (len(steps) + 1) // 2], 0, other)  # none: the ranks have exchanged files after an epoch
    without_repeats = all(len(set(rows)) > 0.95 * len(rows) for rows in rows_of)
    if equal == len(steps) or (without_repeats and early and common > 0.6 * len(rows_of[0])):
        first = run.first.all("forward", train=True, grad=True)[0]
        at = run.made(first["loader"])["at"] if first["loader"] else first["at"]
        text = (
            f"{common} of the {len(set(rows_of[0]))} inputs of rank 0's model in {len(steps)} steps came to rank "
            f"{other} too{how}"
        )
        seed = run.seeded_alike("torch", first["t"]) or run.seeded_alike("numpy", first["t"])
        if not first["loader"] and seed:
            at = seed["at"]  # what is generated follows from it
        fix = "let each rank read or generate its own part: by its rank, or with a seed that has the rank in it"
        yield fault(at, text, fix)
    need(common <= run.world, f"the ranks had {common} inputs in common in {len(steps)} steps")


def _trains_one_model(run: Run) -> bool:
    """Return whether the ranks train one model, and not each its own, as in a search."""
    adds_up = any(e.get("gradient") for e in run.first.all("collective"))
    return adds_up or run.sharded or bool(run.first.all("ddp"))


def _same_batches(steps: list[list[list[int]]]) -> int:
    """Return the number of steps if two ranks have equal batches in all of them, also if a batch has many equal rows.

    So it is in reinforcement learning. The steps must differ from each other, and most must not repeat one row.
    """
    steps = [rows for rows in steps if all(rows)]
    varied = [rows for rows in steps if len(set(rows[0])) > 2 and len(rows[0]) > 2]
    are_equal = all(rows[0] == rows[1] for rows in steps if len(rows) > 1)
    is_new = len({tuple(rows[0]) for rows in steps}) == len(steps)
    return len(steps) if len(varied) > 2 and len(varied) > len(steps) / 2 and are_equal and is_new else 0


def _ordered_apart(run: Run) -> Iterator[Finding]:
    """Yield the finding if no rank has an input twice, but two ranks have many in common: each has its own order.

    Numbers that each step draws anew would come twice on one rank as soon as on two. Looked at are the inputs before
    the first that a rank has twice, which are those of one pass; or of two, if the passes divide whole files, but then
    there is nothing in common in the first half of the steps.
    """
    if not _trains_one_model(run):
        return
    second = [e["step"] for loader in run.training for e in run.first.all("pass", loader=loader)[1:2]]
    calls = [
        events
        for events in run.together("forward", train=True, grad=True)[:OF_A_PASS]
        if len({e["model"] for e in events}) == 1 and events[0]["step"] < min(second, default=OF_A_PASS)
    ]
    inputs = min((len(e.get("further", [])) + 1 for events in calls for e in events), default=0)
    for which in range(inputs):
        given = [[[e.get("rows", []), *e.get("further", [])][which] for e in events] for events in calls]
        given = given[: _steps_without_repeats(given)]
        one, other = max(
            itertools.combinations(range(run.world), 2), key=lambda pair: len(_in_both(given, *pair)), default=(0, 0)
        )
        common, size = len(_in_both(given, one, other)), sum(len(rows[one]) for rows in given)
        early = len(_in_both(given[: len(given) // 2], one, other))
        if len(given) > 2 and common >= LEAST_COMMON and 0.08 < common / size <= 0.6 and early > 0.1 * common:
            text = (
                f"in {len(given)} steps, ranks {one} and {other} both get {common} of their {size} samples, before "
                "either gets one a second time: each rank shuffles by itself what the ranks then divide, so some "
                "samples are on several ranks, and others on none"
            )
            fix = "order the samples with the same seed on all ranks (seed + epoch), and let each take its own part"
            yield fault(calls[0][0]["at"], text, fix)
            return


def _steps_without_repeats(given: list[list[list[int]]]) -> int:
    """Return how many steps begin a training before a rank has an input twice; ``given`` are those of each rank."""
    before: list[set[int]] = [set() for _ in given[0]] if given else []
    for number, of_ranks in enumerate(given):
        for had, rows in zip(before, of_ranks, strict=True):
            if len(set(rows)) < len(rows) or had & set(rows):
                return number
            had.update(rows)
    return len(given)


def _in_both(given: list[list[list[int]]], one: int, other: int) -> set[int]:
    """Return the inputs that two ranks have in common."""
    return {row for rows in given for row in rows[one]} & {row for rows in given for row in rows[other]}


@check("A pass of a stream gives no sample to two readers.", after=("same_samples", "stream_repeats"), ranks=True)
def stream_shared(run: Run) -> Iterator[Finding]:
    """Ranks and workers that order the files differently before they take every k-th read some twice, others never.

    Samples are known by what they hold, in the first pass, also if their values come in another order.
    """
    streams = [e for e in run.first.all("loader") if e["iterable"] and e["loader"] in run.training]
    need_use(streams, "streams (IterableDataset)")
    need(not run.model_parallel, "ranks of a model-parallel group read the same samples")
    for stream in streams:
        ends = [[e for e in rank.all("pass_end", loader=stream["loader"]) if "bags" in e][:1] for rank in run.ranks]
        need(
            all(found and found[0]["complete"] for found in ends), "the first pass was not read to its end: see --full"
        )
        for key in ("file", "bags"):
            given = [run.samples.get(found[0][key], []) for found in ends]
            if not all(given):
                continue
            counts = Counter(sample for of_rank in given for sample in of_rank)
            repeated = sum(counts.values()) - len(counts)
            readers = run.world * max(1, stream["workers"])
            on_two = sum(count > 1 for count in counts.values())
            if repeated > 0.05 * counts.total() and on_two > run.world and max(counts.values()) <= readers:
                text = (
                    f"{on_two} of the {len(counts)} different samples in the first pass of all ranks come from "
                    f"several of the {readers} readers (ranks and their workers)"
                )
                if key == "bags":
                    text += ", with their values in another order"
                fix = (
                    "give all readers the same list, in the same order, and let each take its own part: "
                    "list[rank * workers + worker :: ranks * workers]; a shuffle before it needs one seed for all"
                )
                yield fault(stream["at"], text, fix)
                return
            need(repeated <= 0.05 * counts.total(), f"{repeated} samples of the first pass are equal to others")
        seen(sum(map(len, given)), "samples of the first pass of all ranks, all different")


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


@check("Every epoch has a new order of the samples.", exercise="same_order")
def same_order(run: Run) -> Iterator[Finding]:
    """The same batches in each epoch let a model learn worse; DistributedSampler needs set_epoch for a new order."""
    judged = 0
    for kind, passes in run.epochs(run.training).items():
        events = [parts[0] for parts in passes if 0 in parts]
        if len(events) < 2 or len(run.numbers(events[0])) < 4:
            continue
        judged += 1
        order = run.numbers(events[0])
        if order != run.numbers(events[1]):
            continue
        if sum(a > b for a, b in itertools.pairwise(order)) <= 1:
            text = f"the {len(order)} training samples come in the order of the data set in every epoch: no shuffling"
            yield hint(kind[0], text, "shuffle=True, or a sampler that shuffles")
        else:
            line = events[1]["at"].rpartition(":")[2]
            text = (
                f"passes 1 and 2 of this loader, which line {line} begins, have the same order of the {len(order)} "
                f"samples (sampler: {kind[3]})"
            )
            at = run.made(events[1]["loader"]).get("sampler_at") or events[1]["at"]
            yield fault(at, text, "call set_epoch(epoch) of this sampler before each epoch")
    for e in run.first.all("second_pass"):
        if e["loader"] in run.training and e["changed"]:
            judged += 1
            if e["equal"]:
                made = run.made(e["loader"])
                text = (
                    f"the second pass of this stream begins with the same batches as the first, although "
                    f"{e['changed'][0]} of its data set has changed"
                )
                fix = "workers that are kept have copies of the data set: share the epoch with them, or start them anew"
                yield fault(made["at"], text, fix if made["workers"] else "let the order follow from the epoch")
    need(judged, ONE_EPOCH)
    seen(judged, "loaders, of each the order of two passes")


@check("No validation sample is trained on.", exercise="held_out", after=("same_split",))
def held_out(run: Run) -> Iterator[Finding]:
    """If each rank splits the data with random numbers of its own, one rank trains on what another one validates."""
    trained, validated = _by_base(run, run.training), _by_base(run, run.validating)
    bases = trained.keys() & validated.keys()
    need(bases, "training and validation samples come from different data sets, or have no numbers")
    seen(sum(len(validated[base][0]) for base in bases), "validation samples")
    for base in sorted(bases):
        common, at = len(trained[base][0] & validated[base][0]), validated[base][1]
        at = next((e["at"] for e in run.first.all("split")), at)
        text = f"{len(validated[base][0])} samples are validated, and {common} of them are trained on by some rank"
        if common > 0.9 * len(validated[base][0]):
            yield hint(at, text, "if this is not the training accuracy: split the data first")
        elif common:
            yield fault(at, text, "split with the same seed on all ranks, such as random_split(..., generator=...)")


def _by_base(run: Run, loaders: set[str]) -> dict[int, tuple[set[int], str]]:
    """Return for each data set the samples that any rank gets of it at first, and where a loader for them was made.

    Only the first pass counts, because in a cross-validation a sample changes its side later.
    """
    found: dict[int, tuple[set[int], str]] = {}
    for kind, passes in run.epochs(loaders).items():
        for event in (e for e in passes[0].values() if "base" in e and run.same_data(passes[0])):
            found.setdefault(event["base"], (set(), kind[0]))[0].update(run.numbers(event))
    return found


@check(
    "random_split splits the data in the same way on all ranks.",
    exercise="held_out",
    ranks=True,
)
def same_split(run: Run) -> Iterator[Finding]:
    """With other random numbers on each rank, the splits differ: one rank trains on what another one validates."""
    splits = run.together("split")
    need_use(splits, "random_split")
    compared = 0
    for events in splits:
        same_place = len({e["at"] for e in events}) == 1 and len({str(e.get("sizes")) for e in events}) == 1
        contents = {e["content"] for e in events}
        if not same_place or not events[0].get("sizes") or len(contents) > 1:
            continue  # the ranks have different data
        compared += sum(events[0]["sizes"])
        if len({e.get("order") for e in events}) > 1:
            text = f"the ranks split the {sum(events[0]['sizes'])} samples in different ways"
            fix = "split with the same seed on all ranks: random_split(..., generator=torch.Generator().manual_seed(1))"
            yield (fault if contents != {0} else hint)(events[0]["at"], text, fix)
    need(compared, "the ranks have different data sets, or split them at other lines")
    seen(compared, "samples, split alike on all ranks")


@check("Each worker of a stream gives samples of its own.", exercise="long_epoch")
def stream_repeats(run: Run) -> Iterator[Finding]:
    """Every worker of a loader has a copy of an IterableDataset, so without a split each gives all samples."""
    streams = [e for e in run.first.all("loader") if e["iterable"] and e["loader"] in run.training]
    need_use(streams, "streams (IterableDataset)")
    need(run.any("pass", workers=2), "the stream has fewer than two workers: try --workers")
    doubts = []
    for stream in streams:
        batches = _batches_of_first_pass(run, stream)
        rows = [row for batch in batches for row in batch]
        repeated = sum(count - 1 for count in Counter(rows).values())
        distinct = all(len(set(batch)) > 0.9 * len(batch) for batch in batches)
        if distinct and repeated > 0.4 * len(rows) > 0:
            text = f"{repeated} of the first {len(rows)} samples of the stream come again from another worker"
            fix = "let __iter__ give each worker its own part, by torch.utils.data.get_worker_info()"
            yield fault(stream["at"], text, fix)
        if repeated > 0.05 * len(rows) or len(rows) < 4:
            doubts.append(f"{repeated} of the first {len(rows)} samples of the stream are equal")
        else:
            seen(len(rows), "first samples of the stream, all different")
    need_none(doubts)


def _batches_of_first_pass(run: Run, stream: Event) -> list[list[int]]:
    passes, found = 0, []
    for e in run.first.events:
        passes += e["e"] == "pass" and e["loader"] == stream["loader"]
        if passes == 1 and e["e"] == "forward" and e["loader"] == stream["loader"]:
            found.append(e.get("rows", []))
    return found


@check("A number means the same sample on all ranks.", after=("same_split",), ranks=True)
def same_meaning(run: Run) -> Iterator[Finding]:
    """Class numbers from a set, from hash(), or from files in the order of listdir() can differ between processes.

    Ranks that each have data of their own, with nothing in common, may be meant; that is not judged.
    """
    probes = run.together("samples")
    need(probes, "no data set could be read by numbers after the training")
    doubts: list[str] = []
    for events in probes:
        numbers = [n for n in events[0]["contents"] if all(n in e["contents"] for e in events)]
        if len({e["cls"] for e in events}) > 1 or len(numbers) < 2:
            doubts.append("the ranks have parts of a data set, or different ones")
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
        return hint(at, text, "make the data with one seed on all ranks, or leave out the DistributedSampler")
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
