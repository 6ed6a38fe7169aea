"""Whether the ranks train one model, or several: members of an ensemble, folds of a cross-validation, a search."""

import math
from typing import Literal

from ..events import Event
from ..runs import Run

TOLERANCE = 1e-6
SMALLEST = 16
"""elements of a tensor that may hold weights or gradients"""
FEWEST_TRAININGS = 3
"""optimizers of one line that make updates, of which each trains a copy of a model"""
COMMON = 0.05
"""share of their samples that ranks have in common if these are not shared among them"""


def differing(events: tuple[Event, ...], what: Literal["gradients", "weights"]) -> list[str]:
    """Return the names whose sums are not the same on all ranks; a name that some rank lacks is not compared."""
    found = []
    for name, first in events[0][what].items():
        others = [e[what][name] for e in events[1:] if name in e[what]]
        if any(not equal(first, other) for other in others):
            found.append(name)
    return found


def equal(one: list[float] | None, other: list[float] | None) -> bool:
    """Return whether the sums of two tensors are equal within rounding; None is a tensor that is not there."""
    if one is None or other is None:
        return one is None and other is None
    if any(map(math.isnan, (*one, *other))):
        return any(map(math.isnan, one)) == any(map(math.isnan, other))
    return all(a == b or abs(a - b) <= TOLERANCE * max(one[1], other[1]) for a, b in zip(one, other, strict=True))


def drift(run: Run) -> bool:
    """Return whether the weights of the ranks differ at times and are equal later, as those that are averaged are."""
    if run.world < 2:
        return False
    unequal = [bool(differing(events, "weights")) for events in run.aligned("gradients")]
    return any(unequal) and not all(unequal[unequal.index(True) :])


def trains_several(run: Run, steps: list[tuple[Event, ...]]) -> bool:
    """Return whether each rank trains a model of its own, as in a search for hyperparameters: nothing is exchanged."""
    if run.any("ddp") or run.sharded or drift(run):
        return False
    return all(differing(events, "gradients") and differing(events, "weights") for events in steps)


def several_models(run: Run) -> list[str]:
    """Return why the ranks seem to train several models, such as the members of an ensemble."""
    reason = why_apart(run)
    return chosen_models(run) or ([f"each rank trains a model of its own: {reason}"] if reason else [])


def chosen_models(run: Run) -> list[str]:
    """Return why the ranks train several models on purpose.

    If the ordinary run shows that, a provoked one does not count: it may end before the ranks save their models.
    """
    if run.ordinary and run.ordinary.ranks and (why := chosen_models(run.ordinary)):
        return why
    if any(e.get("among", run.world) < run.world for e in run.first.all("ddp")):
        return ["DistributedDataParallel averages over some of the ranks, as the script asks"]
    steps = run.aligned("gradients")
    if saves_apart(run) and steps and trains_several(run, steps) and differing(steps[0], "weights"):
        return ["each rank trains a model of its own, and saves it to a file of its own"]
    return []


def saves_apart(run: Run) -> bool:
    """Return whether each rank saves tensors, and to files of its own."""
    files = [{e["file"] for e in rank.all("save") if e["file"] and e["tensors"]} for rank in run.ranks]
    return all(files) and sum(map(len, files)) == len(set.union(*files))


def why_apart(run: Run) -> str:
    """Return what shows that ranks which exchange nothing need not be meant to train one model; nothing, if they are.

    A script that shares its samples among the ranks, or begins with the same weights by an exchange, means one model.
    """
    if run.ordinary and run.ordinary.ranks and (reason := why_apart(run.ordinary)):
        return reason
    steps = run.aligned("gradients")
    parallel = run.any("ddp") or run.sharded or run.model_parallel or run.any("join") or run.any("functional")
    if run.world < 2 or parallel or len(steps) < 2 or drift(run):
        return ""
    # the first gradients are equal if the ranks begin alike
    if not all(differing(events, "gradients") for events in steps[1:]) or not differing(steps[-1], "weights"):
        return ""
    if any(rank.all("collective", gradient=True) for rank in run.ranks):
        return ""
    sizes = {sum(e.get("size") or 0 for e in rank.all("model")) for rank in run.ranks}
    if len(sizes) > 1:
        return f"their models have different sizes: {', '.join(f'{size:,}' for size in sorted(sizes))} weights"
    exchanges = steps_with_exchange(run)
    rates = [e.get("made_lr") for e in steps[0]]
    if len(set(map(str, rates))) > 1 and len(exchanges) < len(steps) / 2:
        return "their optimizers were made with different learning rates"
    if exchanges:
        return ""
    if are_folds(run):
        return "each validates samples that only other ranks train on, as in a cross-validation"
    return "the samples are not shared among them either" if have_samples_in_common(run) else ""


def short_trainings(run: Run) -> set[int]:
    """Return the optimizers of rank 0 that each train for a while on this rank alone, and then something is exchanged.

    So do the inner loops of Reptile, and the clients of federated averaging, if each begins with a copy of a model:
    there are several optimizers of one line, whose weights are equal on all ranks before their first update, and
    between one and the next, ranks exchange tensors that may hold weights.
    """
    of_lines: dict[str, dict[int, list[tuple[Event, ...]]]] = {}
    for events in run.aligned("gradients"):
        number = events[0]["optimizer"]
        if events[0]["count"] == 0 and events[0].get("made"):
            of_lines.setdefault(events[0]["made"], {})[number] = []
        for trainings in of_lines.values():
            if number in trainings:
                trainings[number].append(events)
    exchanges = steps_with_exchange(run)
    found: set[int] = set()
    for trainings in of_lines.values():
        firsts = [steps[0] for steps in trainings.values()]
        if len(firsts) < FEWEST_TRAININGS or any(differing(events, "weights") for events in firsts):
            continue
        starts = [events[0]["step"] for events in firsts]
        lasts = [steps[-1][0]["step"] for steps in trainings.values()][:-1]
        between = [
            any(last < step <= start for step in exchanges) for last, start in zip(lasts, starts[1:], strict=True)
        ]
        if all(between):
            found |= set(trainings)
    return found


def steps_with_exchange(run: Run) -> set[int]:
    """Return the updates before the last one, around which ranks exchange a tensor that may hold weights."""
    last = max(e["step"] for rank in run.ranks for e in rank.all("gradients"))
    calls = [e for rank in run.ranks for e in rank.all("collective")]
    return {e["step"] for e in calls if (e["size"] or 0) >= SMALLEST and e["step"] <= last}


def are_folds(run: Run) -> bool:
    """Return whether no rank validates what it trains on, and others train on all of that."""
    trained, validated = (numbers_of(run, loaders) for loaders in (run.training, run.validating))
    if not all(trained) or not all(validated):
        return False
    return all(
        not own & trained[rank] and own <= set().union(*trained[:rank], *trained[rank + 1 :])
        for rank, own in enumerate(validated)
    )


def numbers_of(run: Run, loaders: set[str]) -> list[set[int]]:
    """Return for each rank the numbers of the samples in its first passes of these loaders."""
    found: list[set[int]] = [set() for _ in run.ranks]
    for passes in run.epochs(loaders).values():
        if run.same_data(passes[0]) and all("file" in e for e in passes[0].values()):
            for rank, event in passes[0].items():
                found[rank].update(run.numbers(event))
    return found


def have_samples_in_common(run: Run) -> bool:
    """Return whether ranks train on many of the same samples, by their numbers or by what the models get."""
    if any("Distributed" in run.made(loader)["sampler"] for loader in run.training):
        return False
    ranks = numbers_of(run, run.training)
    if not all(ranks):
        ranks = [
            {row for e in rank.all("forward", train=True, grad=True) for row in e.get("rows") or []}
            for rank in run.ranks
        ]
    pairs = [(one, other) for number, one in enumerate(ranks) for other in ranks[number + 1 :]]
    return all(len(one & other) > COMMON * min(len(one), len(other)) for one, other in pairs)
