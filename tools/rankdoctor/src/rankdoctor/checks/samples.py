"""Which samples the ranks train on, and in which order."""

import contextlib
import itertools
from collections import defaultdict
from collections.abc import Iterator

from ..events import Event
from ..runs import Run
from .apart import several_models
from .base import ONE_EPOCH, CannotJudge, Finding, Observed, check, fault, hint, need, need_none, need_use, seen
from .inputs import ordered_apart, same_inputs


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
    need_none(several_models(run))
    planned = {
        kind: passes if all(_is_planned(run, parts) for parts in passes) else passes[:1]  # a rank can have one more
        for kind, passes in run.epochs(run.training).items()
        if _is_planned(run, passes[0])
    }
    if not planned:
        apart = list(ordered_apart(run))
        yield from apart or same_inputs(run)
        return
    numbers = [n for passes in planned.values() for parts in passes for e in parts.values() for n in run.numbers(e)]
    seen(len(numbers), "samples of all ranks, compared by their numbers")
    doubts = []
    for kind, passes in planned.items():  # later epochs too: a sampler can count them on rank 0 only
        if positions := _positions_in_a_part(run, kind, passes):
            yield positions
            continue
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


def _positions_in_a_part(run: Run, kind: tuple, passes: list[dict[int, Event]]) -> Finding | None:
    """Return the finding if all ranks draw the first n of n x ranks samples: positions in a part are no numbers.

    Only of samples that are drawn with replacement: ranks that have all of the same samples are found anyway.
    """
    orders = [run.numbers(event) for parts in passes for event in parts.values()]
    drawn, part = [number for order in orders for number in order], (kind[2] or 0) // run.world
    again = any(len(set(order)) < 0.95 * len(order) for order in orders)
    if part < 16 or len(drawn) < 64 or not again or not 0.9 * part < max(drawn) <= part:
        return None
    return fault(
        run.made(next(iter(passes[0].values()))["loader"]).get("sampler_at") or kind[0],
        f"all ranks draw from the first {part} of {kind[2]} samples, and no rank ever draws another one: as if the "
        f"positions in a rank's part of the data were the numbers of its samples (sampler: {kind[3]})",
        "look the positions that are drawn up in the part: part[positions]",
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
            if finding := _never_told(run, kind, events):
                yield finding
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


def _never_told(run: Run, kind: tuple, events: list[Event]) -> Finding | None:
    """Return the finding if a sampler inside a batch sampler stays in one epoch, and gives the same samples again."""
    sets = [frozenset(run.numbers(event)) for event in events]
    epochs = [event.get("epochs") or {} for event in events]
    untold = [name for name, epoch in epochs[0].items() if all(one.get(name) == epoch for one in epochs)]
    if not untold or len(set(sets)) > 1:
        return None
    text = (
        f"all {len(events)} passes have the same {len(sets[0])} of {kind[2]} samples: {untold[0]}, which the batch "
        f"sampler has, is in epoch {epochs[0][untold[0]]} in each of them"
    )
    fix = f"call set_epoch(epoch) of the {untold[0]} itself before each epoch: loader.sampler is another one"
    return fault(events[1]["at"], text, fix)


@check("No validation sample is trained on.", exercise="held_out", after=("same_split",))
def held_out(run: Run) -> Iterator[Finding]:
    """If each rank splits the data with random numbers of its own, one rank trains on what another one validates."""
    validated = _by_base(run, run.validating)
    bases = _by_base(run, run.training).keys() & validated.keys()
    need(bases, "training and validation samples come from different data sets, or have no numbers")
    need_none(several_models(run))
    judged = 0
    for base in sorted(bases):
        passes = [(kind, found) for kind, passes in validated[base] if (found := _trained_before(run, base, passes))]
        judged += sum(len(read) for _, (read, _) in passes)
        everything = set().union(*(read for _, (read, _) in passes))
        common = len(set().union(*(read & trained for _, (read, trained) in passes)))
        at = next((e["at"] for e in run.first.all("split")), passes[0][0][0] if passes else "")
        text = f"{len(everything)} samples are validated, and {common} of them are trained on by some rank"
        if common > 0.9 * len(everything):
            yield hint(at, text, "if this is not the training accuracy: split the data first")
        elif common:
            yield fault(at, text, "split with the same seed on all ranks, such as random_split(..., generator=...)")
    need(judged, "samples are evaluated before the training only, such as for features or to choose some of them")
    seen(judged, "validation samples")


def _by_base(run: Run, loaders: set[str]) -> dict[int, list[tuple[tuple, list[dict[int, Event]]]]]:
    """Return for each data set the passes over it, or over parts of it, as `Run.epochs` does.

    A data set has the number that it has on the lowest of the ranks: others may have made more or fewer of them.
    """
    found: dict[int, list[tuple[tuple, list[dict[int, Event]]]]] = defaultdict(list)
    for kind, passes in run.epochs(loaders).items():
        with_numbers = [parts for parts in passes if all("base" in e for e in parts.values()) and run.same_data(parts)]
        if with_numbers:
            found[with_numbers[0][min(with_numbers[0])]["base"]].append((kind, with_numbers))
    return found


def _trained_before(run: Run, base: int, passes: list[dict[int, Event]]) -> tuple[set[int], set[int]] | None:
    """Return what the first validation after some training reads, and what was trained on before; None: there is none.

    Of each training loader the first pass counts, because in a cross-validation a sample changes its side later.
    """
    training = [first for _, (first, *_) in _by_base(run, run.training)[base]]
    for parts in passes:
        before = [e for first in training for rank, e in first.items() if rank in parts and e["t"] < parts[rank]["t"]]
        if before:
            read = {number for e in parts.values() for number in run.numbers(e)}
            return read, {number for e in before for number in run.numbers(e)}
    return None


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
