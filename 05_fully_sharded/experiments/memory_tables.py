"""The tables of what fills the memory: the experiments of lesson 05 print them, and its pages show them.

Each function returns a header and rows of cells. The parts of a peak stand beside each other and add up to it.
"""

from collections.abc import Sequence
from typing import Any

GB = 1e9
MB = 1e6
SHARDED, RECOMPUTED, PARTS = "sharded over 8 ranks", "recomputed", "in 4 parts"
"""names of the three cures that `what_fills_memory.py` tries on each row"""
ADVICE = {SHARDED: "shard", RECOMPUTED: "recompute", PARTS: "split the batch"}
HELPS = 0.25
"""a cure is recommended if it takes at least this share off the peak"""
NO_CURE = "no cure alone"
Table = tuple[list[str], list[list[str]]]


def advice(peak: int, cures: dict[str, int | None]) -> str:
    """Return which cures take at least a quarter off the peak, the one that takes most first.

    Args:
        peak: bytes without any cure.
        cures: bytes with each cure; None where it is impossible, such as half a sample.
    """
    found = sorted((least, name) for name, least in cures.items() if least is not None)
    return ", ".join(ADVICE[name] for least, name in found if least <= (1 - HELPS) * peak) or NO_CURE


def what_fills(rows: Sequence[dict[str, Any]]) -> Table:
    """Return what the memory holds at the peak, in GB, for each model and batch."""
    shown = ("parameters", "gradients", "optimizer state", "activations", "temporaries", "batch")
    header = ["GB", "weights", *shown[1:], "peak"]
    return header, [
        [what_is_trained(row), *(f"{row['parts'][part] / GB:.3f}" for part in shown), f"{row['peak'] / GB:.3f}"]
        for row in rows
    ]


def what_helps(rows: Sequence[dict[str, Any]]) -> Table:
    """Return when the peak is, which share of it the state is, and the peak with each cure, in GB."""
    header = ["GB", "peak", "it is in", "state", SHARDED, RECOMPUTED, PARTS, "what helps"]
    return header, [
        [
            what_is_trained(row),
            f"{row['peak'] / GB:.3f}",
            row["moment"],
            f"{row['state_share']:.0%}",
            *("-" if peak is None else f"{peak / GB:.3f}" for peak in row["cures"].values()),
            advice(row["peak"], row["cures"]),
        ]
        for row in rows
    ]


def what_is_trained(row: dict[str, Any]) -> str:
    """Return model, batch and format of a row."""
    return f"{row['model']}, batch {row['batch_size']}, {row['precision']}"


def forecast(rows: Sequence[dict[str, Any]]) -> Table:
    """Return what a rank needs at the peak, and what that is, for each way of sharing a model.

    Weights are counted with the optimizer state, because a rank stores both all the time; gradients with the copies of
    them that are sent; the batch with the activations.
    """
    unit, name, digits = (MB, "MB", 1) if max(row["peak"] for row in rows) < GB else (GB, "GB", 2)
    together = (
        ("parameters", "optimizer state"),
        ("gradients", "gradients to send"),
        ("gathered weights",),
        ("activations", "batch"),
        ("temporaries",),
    )
    header = [name, "weights, optimizer", "gradients", "gathered weights", "activations", "temporaries", "peak"]
    return [*header, "it is in"], [
        [
            way_and_ranks(row),
            *(f"{sum(row['parts'][part] for part in parts) / unit:,.{digits}f}" for parts in together),
            f"{row['peak'] / unit:,.{digits}f}",
            row["moment"],
        ]
        for row in rows
    ]


def times(rows: Sequence[dict[str, Any]]) -> Table:
    """Return the bounds of the time of a step for each way of sharing a model, and how long the row was computed."""
    header = ["time", "computing", "communication", "a step, full overlap", "no overlap", "CPU time of this row"]
    return header, [
        [
            way_and_ranks(row),
            *(format_seconds(row["step"][part]) for part in ("compute", "communication", "full overlap", "no overlap")),
            f"{row['cpu_seconds']:.0f} s",
        ]
        for row in rows
    ]


def way_and_ranks(row: dict[str, Any]) -> str:
    """Return how the model of a row is shared, and by how many ranks."""
    way = "DDP" if row["way"] == "ddp" else row["way"]
    groups = f" in {row['replicas']} groups (HSDP)" if row["replicas"] > 1 else ""
    return f"{way} on {row['ranks']:,}{groups}{', recomputed' if row['checkpointing'] else ''}"


def format_seconds(seconds: float) -> str:
    """Return a duration to three digits, in the unit that suits it."""
    unit, value = next(
        (unit, seconds * per_second)
        for unit, per_second in (("s", 1), ("ms", 1e3), ("µs", 1e6), ("ns", 1e9))
        if seconds * per_second >= 1 or unit == "ns"
    )
    return f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2}f} {unit}"
