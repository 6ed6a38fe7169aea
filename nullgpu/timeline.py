"""The report of the clock: how busy the GPU was, what it waited for, and the time line."""

import json
import os
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

KERNEL, TRANSFER, NETWORK, HOST_WAITS, WAITS_FOR_RANK = range(5)
"""kinds of spans: enum Work in src/clock.h"""
NOT_COUNTED = 3
"""first updates, in which PyTorch chooses kernels and allocates memory, if --skip does not say another number"""
DATA, HOST, COMMUNICATION, COPIES = "data", "the host", "communication", "copies"
ADVICE = {
    DATA: "the loader limits it: more workers, or samples that are cheaper to read (lesson 01)",
    HOST: "it is launch-bound, or the host waits too often: larger batches, CUDA graphs, torch.compile, no .item()",
    COMMUNICATION: "communication limits it: larger batches per GPU, fewer exchanges (lessons 03 and 05)",
    COPIES: "copies limit it: pinned memory and non_blocking=True, so that they overlap",
}
ADVICE_ON_RANKS = (
    "rank {rank} is slower than this one: the same work for every rank; below is what rank {rank} waits for"
)


@dataclass
class Span:
    """A piece of work on a stream, or a time in which the host or the stream waited; in seconds of simulated time."""

    start: float
    end: float
    blocked: float
    stream: int
    kind: int
    name: str


def read(file: Path) -> list[Span]:
    """Return the spans that src/clock.cpp has written."""
    spans = []
    for line in file.read_text().splitlines():
        start, end, blocked, stream, kind, name = line.split("\t")
        spans.append(Span(float(start), float(end), float(blocked), int(stream), int(kind), name))
    return spans


def overlap(start: float, end: float, parts: list[tuple[float, float]]) -> float:
    """Return how much of a time lies within the parts, which do not overlap each other."""
    return sum(max(0.0, min(end, b) - max(start, a)) for a, b in parts)


def idle(
    spans: list[Span], loading: list[tuple[float, float]], begin: float, end: float
) -> tuple[float, dict[str, float]]:
    """Return how long the GPU computed between two times, and how long it waited for what.

    A GPU is busy if any of its streams has a kernel. What it waits for is what the stream waits for that computes
    next: another stream (a copy, a collective, or "rank 1", which is not ready for it), a batch, or the host.
    """
    work = sorted((s for s in spans if s.kind == KERNEL and s.end > begin and s.start < end), key=lambda s: s.start)
    others = [s for s in spans if s.kind in (TRANSFER, NETWORK)]
    ends = {round(s.end, 9): s.kind for s in others}
    for_ranks = [s for s in spans if s.kind == WAITS_FOR_RANK]
    waits: defaultdict[str, float] = defaultdict(float)
    busy, last = 0.0, begin
    for span in work:
        start, stop = max(span.start, begin), min(span.end, end)
        if start > last:
            blocked = min(span.blocked, start) - last if span.blocked > last else 0.0
            kind = ends.get(round(span.blocked, 9))
            if blocked > 0 and kind is not None:
                left = blocked
                for wait in for_ranks if kind == NETWORK else ():
                    part = min(left, overlap(last, last + blocked, [(wait.start, wait.end)]))
                    waits[wait.name.removeprefix("waits for ")] += part
                    left -= part
                waits[COPIES if kind == TRANSFER else COMMUNICATION] += left
            else:  # another stream of kernels, which was launched late itself
                blocked = 0.0
            late = start - last - max(blocked, 0.0)
            for_data = min(late, overlap(last, start, loading))
            waits[DATA] += for_data
            waits[HOST] += late - for_data
        busy += max(0.0, stop - max(start, last))
        last = max(last, stop)
    if end > last:
        for_data = overlap(last, end, loading)
        waits[DATA] += for_data
        waits[HOST] += end - last - for_data
    return busy, waits


def with_article(name: str) -> str:
    """Return the name of a GPU after "a" or "an"."""
    return f"{'an' if name[0] in 'AHL' else 'a'} {name}"


@dataclass
class Summary:
    """How one rank spent the updates that count."""

    updates: int
    seconds: float
    """of an update"""
    busy: float
    waits: dict[str, float]
    """shares of the time, the largest first"""

    def listed(self) -> str:
        """Return what it waits for, in words; "" if nothing."""
        return ", ".join(f"{what} {share:.0%}" for what, share in self.waits.items() if share > 0.005)


def summary(found: dict[str, Any], spans: list[Span], skip: int) -> Summary | None:
    """Return how a rank spent its updates, without the first ones; None if it made fewer than two."""
    updates = found["updates"]
    updates = updates[min(skip, max(len(updates) - 2, 0)) :]
    if len(updates) < 2:
        return None
    begin, end = updates[0], updates[-1]
    busy, waits = idle(spans, [tuple(pair) for pair in found["loading"]], begin, end)
    total = end - begin
    shares = {what: seconds / total for what, seconds in sorted(waits.items(), key=lambda pair: -pair[1])}
    return Summary(len(updates) - 1, total / (len(updates) - 1), busy / total, shares)


def lines_of(
    found: dict[str, Any], spans: list[Span], figures: dict[str, Any], skip: int = NOT_COUNTED
) -> Iterator[str]:
    """Yield the lines of the report on rank 0."""
    it = summary(found, spans, skip)
    if it is None:
        yield f"clock of {with_article(figures['name'])}: fewer than two updates of weights were seen"
        return
    yield (
        f"clock of {with_article(figures['name'])} (simulated): {it.updates} updates, {1e3 * it.seconds:.2f} ms each, "
        f"GPU busy {it.busy:.0%} of the time"
    )
    if it.listed():
        yield f"  it waits for {it.listed()}"
    top = sorted(found["seconds"].items(), key=lambda pair: -pair[1])[:5]
    whole = sum(found["seconds"].values()) or 1
    yield "  longest operations: " + ", ".join(f"{name} {seconds / whole:.0%}" for name, seconds in top)
    if found["unknown"]:
        listed = ", ".join(f"{name} ({count})" for name, count in list(found["unknown"].items())[:4])
        yield f"  without a known time, counted as shortest kernels: {listed}"
    worst, share = next(iter(it.waits.items()), ("", 0.0))
    if share > 0.1:
        advice = ADVICE.get(worst) or ADVICE_ON_RANKS.format(rank=worst.removeprefix("rank "))
        yield f"  first thing to change: {advice}"
    minute = 60 * found["real"] / max(found["simulated"], 1e-9)
    yield f"  The host's time is this machine's; a simulated minute took {minute:.0f} s. Losses are not computed."


def show(folder: Path, figures: dict[str, Any], trace: Path | None, skip: int = NOT_COUNTED) -> None:
    """Print the report of rank 0 and a line for each other rank, and write the time line if that is wanted."""
    files = sorted(folder.glob("clock*.json"), key=lambda file: int(file.stem.removeprefix("clock")))
    ranks = {int(file.stem.removeprefix("clock")): json.loads(file.read_text()) for file in files}
    if not ranks:
        print("nullgpu: clock: the command has used no GPU")
        return
    spans = {rank: read(folder / f"spans{rank}.tsv") for rank in ranks}
    first = next(iter(ranks))
    for line in lines_of(ranks[first], spans[first], figures, skip):
        print(f"nullgpu: {line}")
    for rank, found in list(ranks.items())[1:]:
        if it := summary(found, spans[rank], skip):
            print(f"nullgpu:   rank {rank}: GPU busy {it.busy:.0%}; it waits for {it.listed() or 'nothing'}")
    cpus = len(os.sched_getaffinity(0))
    if len(ranks) > 1:
        print(f"nullgpu:   These {len(ranks)} ranks and their loaders shared {cpus} CPUs, as their nodes would not.")
    if trace:
        events = [event for rank, found in ranks.items() for event in events_of(rank, found, spans[rank])]
        trace.write_text(json.dumps({"traceEvents": events}))
        print(f"nullgpu: the time line is in {trace}: open it at https://ui.perfetto.dev")


def events_of(rank: int, found: dict[str, Any], spans: list[Span]) -> list[dict[str, Any]]:
    """Return the time line of a rank in the format of Chrome's tracing: a row for the host, and one for each stream."""
    rows = {
        stream: number for number, stream in enumerate(sorted({s.stream for s in spans if s.kind != HOST_WAITS}), 1)
    }
    names = {0: "host waits"} | {row: f"stream {row}" for row in rows.values()}
    events: list[dict[str, Any]] = [
        {"name": "thread_name", "ph": "M", "pid": rank, "tid": row, "args": {"name": name}}
        for row, name in names.items()
    ]
    events.append({"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"rank {rank}"}})
    batches = [Span(a, b, 0, 0, HOST_WAITS, "wait for a batch") for a, b in found["loading"]]
    for span in (*spans, *batches):
        row = 0 if span.kind == HOST_WAITS else rows[span.stream]
        times = {"ts": 1e6 * span.start, "dur": 1e6 * (span.end - span.start)}
        events.append({"name": span.name, "ph": "X", "pid": rank, "tid": row, **times})
    return events
