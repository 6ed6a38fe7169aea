"""Sums over the ranks: what a script adds up, and what it divides by it."""

from collections import defaultdict
from collections.abc import Iterator

from ..runs import Run
from .base import Finding, check, fault, need, need_use, seen


@check("A total is added up over the ranks once.", ranks=True)
def added_once(run: Run) -> Iterator[Finding]:
    """all_reduce writes the total into the tensor; what is counted into it afterwards is added to all ranks' total."""
    totals = run.first.all("total")
    need_use(totals, "a tensor that is added up over the ranks several times")
    of_lines = defaultdict(list)
    for e in totals:
        of_lines[e["at"]].append(e)
    for at, events in of_lines.items():
        again = [e for e in events if e["again"]]
        if len(again) < 2 or len(again) < 0.6 * len(events):
            seen(len(events), "times that a tensor was added up anew")
            continue
        yield fault(
            at,
            f"{len(again)} of {len(events)} times the tensor that is added up over the ranks still held the total of "
            f"the time before (up to {max(e['before'] for e in again):.6g}), so that is counted {run.world} times "
            "more",
            "keep what this rank has counted apart: all_reduce a copy of it, or once, after the loop",
        )


@check("A loss that is divided by a total of all ranks is not averaged over them.", ranks=True)
def divided_once(run: Run) -> Iterator[Finding]:
    """DDP and FSDP average gradients, so a loss divided by the count of all ranks is divided by their number twice."""
    divisors = run.first.all("divisor")
    need_use(divisors, "a loss that is divided by a total of all ranks")
    seen(len(divisors), "losses that are divided by a total", 2)
    averaging = run.first.all("ddp") or (run.sharded and not run.model_parallel)
    need(averaging, "the gradients are not averaged by DDP or FSDP")
    steps = [e["factor"] for e in run.first.all("gradients") if e["factor"]]
    # by what the gradients are multiplied afterwards; clipping makes them smaller
    need(all(factor < 1.01 for factor in steps), "the script multiplies the gradients after backward")
    need(not any(e.get("gradient") for e in run.first.all("collective")), "the script adds up gradients itself")
    plain = [e for e in divisors if abs(e["times"] - 1) < 0.01 and abs(e["total"] - e["own"]) > 0.01 * e["own"]]
    if len(plain) > 0.8 * len(divisors):
        first = plain[0]
        yield fault(
            first["at"],
            f"the loss is divided by a total of all ranks ({first['total']:.6g}, of which this rank has "
            f"{first['own']:.6g}; all_reduce in line {first['summed_at'].rpartition(':')[2]}), and then its gradients "
            f"are averaged: they are {run.world} times too small, and the more so the more ranks there are",
            "multiply the loss by the number of ranks: sum of this rank * world_size / total",
        )
    right = [e for e in divisors if abs(e["times"] - run.world) < 0.01 * run.world]
    need(len(right) > 0.8 * len(divisors), "the loss is multiplied by other numbers, too")


@check("An update uses norms of whole weights.", ranks=True)
def norms_of_parts(run: Run) -> Iterator[Finding]:
    """Trust ratios (LARS, LAMB) of one rank's rows differ between the ranks, and change with their number."""
    need_use(run.sharded, "sharded weights")
    events = run.first.all("part_norm")
    need_use(events, "norms in an optimizer of the script's own")
    if len(events) > 1:
        yield fault(
            events[0]["at"],
            f"in {len(events)} updates the optimizer takes norms of this rank's part of a weight ({events[0]['count']} "
            "in the first of them), and the ranks exchange nothing: each part of a weight gets another update",
            "take the norm of the sharded weight itself (a DTensor's norm is that of the whole), or all-reduce the "
            "squares",
        )
