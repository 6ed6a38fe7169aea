"""Weak and strong scaling: which runs a study needs, and what follows from their samples per second.

All ratios are of means; only the cost of communication, which is small, is a median over pairs of trials that were
measured right after each other.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from workshop.measuring.tables import format_table
from workshop.profiling.throughput import Throughput

KINDS = ("IO", "SYNTHETIC", "FULL", "BARRIER", "COMPUTE")
Trials = dict[str, list[float]]


@dataclass(frozen=True)
class Setting:
    """One run of the study: how many ranks, and the samples per step of each."""

    ranks: int
    batch_size: int


def powers_of_two(highest: int) -> list[int]:
    """Return 1, 2, 4, ... up to ``highest``."""
    return [2**i for i in range(highest.bit_length())]


def settings(max_ranks: int, batch_size: int, global_batch_size: int) -> dict[str, list[Setting]]:
    """Return the runs of weak scaling (each rank keeps its batch) and strong scaling (all ranks share one batch).

    Strong scaling ends where the batch cannot be shared evenly. A setting may be in both: it is measured once.
    """
    counts = powers_of_two(max_ranks)
    weak = [Setting(ranks, batch_size) for ranks in counts]
    strong = [Setting(ranks, global_batch_size // ranks) for ranks in counts if global_batch_size % ranks == 0]
    return {"weak": weak, "strong": strong}


def joined(earlier: Trials, later: Trials) -> Trials:
    """Return the trials of two rounds together."""
    return {kind: earlier.get(kind, []) + trials for kind, trials in later.items()}


def rows(scaling: str, study: Sequence[Setting], measured: dict[Setting, Trials]) -> list[dict[str, Any]]:
    """Return a row for each number of ranks, with what follows from comparing it with the first, which is one rank.

    - ``speedup``: FULL samples/s, in units of one rank's.
    - ``efficiency``: speedup over ranks; 1 is ideal.
    - ``machine_ceiling``: the efficiency of ranks that compute the same and never talk (COMPUTE).
    - ``matrix_ceiling``: that of matrix products, which need no memory to speak of; None where not measured.
    - ``against_ceiling``: efficiency over machine_ceiling, so what communication and loading leave of it.
    - ``with_communication``: SYNTHETIC over COMPUTE of the same ranks.
    - ``communication_overhead``: 1 minus that: the share of a step's time that communication takes.
    - ``with_barrier`` and ``waiting``: the same two for BARRIER, so for waiting without gradients to send.
    """
    first = measured[study[0]]
    found = []
    for setting in study:
        trials = measured[setting]

        def efficiency(kind: str, ranks: int = setting.ranks, trials: Trials = trials) -> float:
            return statistics.mean(trials[kind]) / statistics.mean(first[kind]) / ranks

        with_communication, with_barrier = (_against_compute(trials, kind) for kind in ("SYNTHETIC", "BARRIER"))
        found.append(
            {
                "scaling": scaling,
                "ranks": setting.ranks,
                "batch_size": setting.batch_size,
                **{kind: Throughput(trials[kind]).record() for kind in KINDS},
                "speedup": setting.ranks * efficiency("FULL"),
                "efficiency": efficiency("FULL"),
                "machine_ceiling": efficiency("COMPUTE"),
                "matrix_ceiling": efficiency("MATRIX") if "MATRIX" in trials else None,
                "against_ceiling": efficiency("FULL") / efficiency("COMPUTE"),
                "with_communication": with_communication,
                "communication_overhead": 1 - with_communication,
                "with_barrier": with_barrier,
                "waiting": 1 - with_barrier,
            }
        )
    return found


def _against_compute(trials: Trials, kind: str) -> float:
    """Return the speed of one kind of trial over that of COMPUTE, as the median of pairs."""
    return statistics.median(speed / alone for speed, alone in zip(trials[kind], trials["COMPUTE"], strict=True))


def scaling_table(found: list[dict[str, Any]]) -> str:
    """Return the rows as text."""
    ratios = ("efficiency", "ceiling", "of ceiling", "comm. overhead", "waiting")
    header = ["scaling", "ranks", "batch/rank", *KINDS, *ratios]
    return format_table(header, [cells(row) for row in found])


def cells(row: dict[str, Any]) -> list[str]:
    """Return what a table shows of a row: samples/s as mean +/- std, ratios in percent."""
    throughputs = [str(Throughput(row[kind]["trials"])) for kind in KINDS]
    names = ("efficiency", "machine_ceiling", "against_ceiling", "communication_overhead", "waiting")
    return [
        row["scaling"],
        str(row["ranks"]),
        str(row["batch_size"]),
        *throughputs,
        *(f"{row[name]:.0%}" for name in names),
    ]


def verdict(found: list[dict[str, Any]]) -> str:
    """Say in words what the largest number of ranks of one kind of scaling comes to, and what it loses to whom."""
    last = found[-1]
    if last["ranks"] == 1:
        return f"{last['scaling'].capitalize()} scaling: only one rank, so nothing to compare."
    matrix = "" if last["matrix_ceiling"] is None else f"; matrix products alone, {last['matrix_ceiling']:.0%}"
    name = f"{last['scaling'].capitalize()} scaling, 1 to {last['ranks']} ranks"
    return (
        f"{name}: {last['speedup']:.2f} times the samples/s of one, {last['efficiency']:.0%} of ideal. "
        f"Ranks that never talk reach {last['machine_ceiling']:.0%} of ideal here{matrix}. "
        f"With communication, the same ranks train at {last['with_communication']:.2f} of their speed without; with "
        f"nothing but a barrier in each step, at {last['with_barrier']:.2f}."
    )
