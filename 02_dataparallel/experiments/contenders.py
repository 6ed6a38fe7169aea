"""The same work by one device, DataParallel and DistributedDataParallel: who competes, and the table of results."""

import statistics
from dataclasses import dataclass, field
from typing import Any

from lab.tables import format_table
from workshop.profiling.throughput import Throughput

KINDS = ("SYNTHETIC", "FULL")


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One way to do the work."""

    name: str
    lesson: str = ""
    ranks: int | None = None
    """None: one process without a launcher"""
    threads: int = 1
    """CPU threads of each process"""
    reason: str = ""
    """why it is not measured; empty where it is"""
    trials: dict[str, list[float]] = field(default_factory=dict)
    """samples/s in each trial, by kind"""


def contenders(gpus: int, cpus: int, ranks: int | None = None) -> list[Contender]:
    """Return who competes on a machine; the first is what the others are compared with.

    Without GPUs the threads are the devices: two ranks of one thread are compared with one process of one thread and
    with one that has all threads.
    """
    if gpus == 0:
        found = [Contender(name="one process, 1 thread", lesson="01_single_gpu")]
        if cpus > 1:
            found.append(Contender(name=f"one process, {cpus} threads", lesson="01_single_gpu", threads=cpus))
        ranks = ranks or 2
        ddp = Contender(name=f"DDP, {ranks} ranks of 1 thread", lesson="03_ddp", ranks=ranks)
    else:
        ranks = ranks or gpus
        share = max(1, cpus // ranks)
        found = [Contender(name="one GPU", lesson="01_single_gpu", threads=cpus)]
        ddp = Contender(name=f"DDP, {ranks} rank(s) of one GPU", lesson="03_ddp", ranks=ranks, threads=share)
    if gpus < 2:
        found.append(Contender(name="DataParallel", reason=f"not measured: needs two GPUs, found {gpus}"))
    else:
        found.append(Contender(name=f"DataParallel, {gpus} GPUs", lesson="02_dataparallel", threads=cpus))
    return [*found, ddp]


def shared_batch(ranks: int, at_least: int = 64) -> int:
    """Return the smallest global batch from ``at_least`` on that so many ranks can share."""
    return -(-at_least // ranks) * ranks


def rows(measured: list[Contender]) -> list[dict[str, Any]]:
    """Return a row for each contender: mean and std of its samples/s, and the ratio of its mean to the first one's."""
    first = measured[0].trials
    found = []
    for one in measured:
        row: dict[str, Any] = {"name": one.name, "lesson": one.lesson, "ranks": one.ranks, "threads": one.threads}
        if one.reason:
            row = {"name": one.name, "reason": one.reason}
        for kind, trials in one.trials.items():
            ratio = statistics.mean(trials) / statistics.mean(first[kind])
            row[kind] = Throughput(trials).to_dict() | {"ratio": ratio}
        found.append(row)
    return found


def comparison_table(found: list[dict[str, Any]]) -> str:
    """Return the rows as text, in samples/s, with the ratio to the first row."""
    lines = []
    for row in found:
        cells = [row.get("reason", ""), "", "", ""]
        if "reason" not in row:
            cells = [c for kind in KINDS for c in (str(Throughput(row[kind]["trials"])), f"{row[kind]['ratio']:.2f}x")]
        lines.append([row["name"], *cells])
    return format_table(["", "SYNTHETIC samples/s", "ratio", "FULL samples/s", "ratio"], lines, left=(0,))
