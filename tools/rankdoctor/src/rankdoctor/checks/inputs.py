"""What the models of the ranks are given, where no sampler says which samples those are."""

import itertools
from collections.abc import Iterator

from ..runs import Run
from .base import Finding, fault, need, seen

COMPARED = 12
"""training steps of which the inputs are compared"""
OF_A_PASS = 50
"""such steps, where an own loader may order the samples"""
LEAST_COMMON = 16
"""inputs that two ranks must have in common before it is said that each has an order of its own"""


def same_inputs(run: Run) -> Iterator[Finding]:
    """Compare what the models were given, where no sampler says which samples those are."""
    first = next(iter(run.aligned("gradients")), ())
    need(len({frozenset(e["weights"]) for e in first}) < 2, "the ranks have different weights, as of divided tables")
    # beside a wrapped model, another may have a part of its weights on each rank, and rightly get all samples
    wrapped = {e["model"] for events in run.training_calls for e in events if e.get("ddp") or "inside" in e}
    calls = [events for events in run.training_calls if not wrapped or events[0]["model"] in wrapped][:COMPARED]
    as_they_are: list[list[list[int]]] = [[e.get("rows", []) for e in events] for events in calls]
    in_any_order: list[list[list[int]]] = [[e.get("bags", []) for e in events] for events in calls]
    found = False
    for finding in _common_inputs(run, as_they_are, ""):
        found = True
        yield finding
    if not found and all(all(rows) for rows in in_any_order):  # images that a transform has flipped, turned or shifted
        yield from _common_inputs(run, in_any_order, ", with their values in another order, as by a flip or a shift")


def _common_inputs(run: Run, steps: list[list[list[int]]], how: str) -> Iterator[Finding]:
    """Yield what rank 0 and another rank have in common; ``steps`` are the hashes of the inputs of each rank."""
    if not how and _trains_one_model(run) and (number := _same_batches(steps)):
        first = run.training_calls[0][0]
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
        first = run.training_calls[0][0]
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


def ordered_apart(run: Run) -> Iterator[Finding]:
    """Yield the finding if no rank has an input twice, but two ranks have many in common: each has its own order.

    Numbers that each step draws anew would come twice on one rank as soon as on two. Looked at are the inputs before
    the first that a rank has twice, which are those of one pass; or of two, if the passes divide whole files, but then
    there is nothing in common in the first half of the steps. A stream that was read to its end has a check of its own.
    """
    if not _trains_one_model(run) or any(e["complete"] and "bags" in e for e in run.first.all("pass_end")):
        return
    second = [e["step"] for loader in run.training for e in run.first.all("pass", loader=loader)[1:2]]
    calls = [
        events
        for events in run.training_calls[:OF_A_PASS]
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
