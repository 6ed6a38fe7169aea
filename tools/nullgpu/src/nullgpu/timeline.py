"""The report of the clock: how busy the GPU was, what it waited for, and the time line."""

import json
import os
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

KERNEL, TRANSFER, NETWORK, HOST_WAITS, WAITS_FOR_RANK = range(5)
"""kinds of spans: enum Work in src/clock.h"""
MOST_SPANS = 400_000
"""that src/clock.cpp notes"""
NOT_COUNTED = 3
"""first updates, in which PyTorch chooses kernels and allocates memory, if --skip does not say another number"""
DATA, HOST, COMMUNICATION, COPIES = "data", "the host", "communication", "copies"
ADVICE = {
    DATA: "the loader limits it: more workers, or samples that are cheaper to read (lesson 01)",
    HOST: "it is launch-bound, or the host waits too often: larger batches, CUDA graphs, torch.compile, no .item()",
    COMMUNICATION: "communication limits it: larger batches per GPU, fewer exchanges (lessons 03 and 05)",
    COPIES: "copies limit it: pinned memory and non_blocking=True, so that they overlap",
}
SLOWER = "rank {rank} is slower than this one: the same work for every rank; below is what rank {rank} waits for"
IN_TURN = (
    "the ranks wait for one another in turn: give all of them equal work in each step (03_ddp/experiments/"
    "sequence_lengths.md); or they differ because they share the CPUs of this machine (--host)"
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


def label(span: Span) -> str:
    """Return what the GPU waits for while this lasts and nothing computes."""
    if span.kind == WAITS_FOR_RANK:
        return span.name.removeprefix("waits for ")
    return COPIES if span.kind == TRANSFER else COMMUNICATION


class Others:
    """What streams do beside computing: copies, collectives, and waits for other ranks, one after the other in each."""

    def __init__(self, spans: list[Span]) -> None:
        self.of_stream: defaultdict[int, list[Span]] = defaultdict(list)
        for span in sorted(spans, key=lambda span: span.start):
            if span.kind in (TRANSFER, NETWORK, WAITS_FOR_RANK):
                self.of_stream[span.stream].append(span)
        self.ends = {stream: [span.end for span in found] for stream, found in self.of_stream.items()}
        self.ending = {round(span.end, 9): span for found in self.of_stream.values() for span in found}

    def between(self, stream: int, begin: float, end: float) -> Iterator[Span]:
        """Yield the copies, collectives and waits of a stream between two times."""
        found = self.of_stream.get(stream, [])
        for index in range(bisect_right(self.ends.get(stream, []), begin), len(found)):
            if found[index].start >= end:
                return
            yield found[index]

    def reasons(self, span: Span, begin: float, end: float) -> Iterator[tuple[str, float, float]]:
        """Yield what a kernel waited for in the time before it, with (start, end), the surest reasons first.

        It waits for what is before it in its own stream, and for the end of what its stream waits for.
        """
        streams = [(span.stream, end)]
        cause = self.ending.get(round(span.blocked, 9))
        if cause is not None and span.blocked > begin:  # and not a stream of kernels, which was launched late itself
            streams.append((cause.stream, min(span.blocked, end)))
        for stream, until in streams:
            for other in self.between(stream, begin, until):
                yield label(other), max(other.start, begin), min(other.end, until)
        if len(streams) > 1 and cause is not None:
            yield label(cause), begin, min(span.blocked, end)


def idle(
    spans: list[Span], loading: list[tuple[float, float]], begin: float, end: float
) -> tuple[float, dict[str, float]]:
    """Return how long the GPU computed between two times, and how long it waited for what.

    A GPU is busy if any of its streams has a kernel. What it waits for is what the stream waits for that computes
    next: a copy, a collective, or "rank 1", which is not ready for it; otherwise a batch, or the host.
    """
    work = sorted((s for s in spans if s.kind == KERNEL and s.end > begin and s.start < end), key=lambda s: s.start)
    others = Others(spans)
    waits: defaultdict[str, float] = defaultdict(float)

    def share_out(since: float, until: float, reasons: Iterable[tuple[str, float, float]]) -> None:
        known: list[tuple[float, float]] = []
        for what, first, last in reasons:
            new = last - first - overlap(first, last, known)
            if new > 0:
                waits[what] += new
                known = merged([*known, (first, last)])
        late = until - since - overlap(since, until, known)
        for_data = min(late, overlap(since, until, loading))
        waits[DATA] += for_data
        waits[HOST] += late - for_data

    busy, last = 0.0, begin
    for span in work:
        start, stop = max(span.start, begin), min(span.end, end)
        if start > last:
            share_out(last, start, others.reasons(span, last, start))
        busy += max(0.0, stop - max(start, last))
        last = max(last, stop)
    if end > last:
        share_out(last, end, ())
    return busy, waits


def merged(parts: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the same times as parts that do not overlap each other."""
    found: list[tuple[float, float]] = []
    for start, end in sorted(parts):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found


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

    @property
    def for_ranks(self) -> float:
        """The share of the time in which it waits for other ranks."""
        return sum(share for what, share in self.waits.items() if what.startswith("rank "))

    def listed(self) -> str:
        """Return what it waits for, in words; "" if nothing."""
        return ", ".join(f"{what} {share:.0%}" for what, share in self.waits.items() if share > 0.005)


def summary(found: dict[str, Any], spans: list[Span], skip: int) -> Summary | None:
    """Return how a rank spent its updates, without the first ones; None if it made fewer than two."""
    updates = found["updates"]
    if len(spans) >= MOST_SPANS:  # later ones were not noted, and would look like idle times
        updates = [ended for ended in updates if ended <= spans[-1].end]
    updates = updates[min(skip, max(len(updates) - 2, 0)) :]
    if len(updates) < 2:
        return None
    begin, end = updates[0], updates[-1]
    busy, waits = idle(spans, [tuple(pair) for pair in found["loading"]], begin, end)
    total = end - begin
    shares = {what: seconds / total for what, seconds in sorted(waits.items(), key=lambda pair: -pair[1])}
    return Summary(len(updates) - 1, total / (len(updates) - 1), busy / total, shares)


def advice(it: Summary, others: dict[int, Summary]) -> str:
    """Return what to change first on a rank, from what it and other ranks wait for; "" if it hardly waits."""
    shares = {what: share for what, share in it.waits.items() if not what.startswith("rank ")}
    worst, share = max(shares.items(), key=lambda pair: pair[1], default=("", 0.0))
    if it.for_ranks > max(share, 0.1):
        name = max((what for what in it.waits if what.startswith("rank ")), key=lambda what: it.waits[what])
        rank = int(name.removeprefix("rank "))
        slower = rank in others and others[rank].for_ranks < it.for_ranks / 3
        return SLOWER.format(rank=rank) if slower else IN_TURN
    return ADVICE[worst] if share > 0.1 else ""


def lines_of(
    found: dict[str, Any], it: Summary | None, figures: dict[str, Any], others: dict[int, Summary]
) -> Iterator[str]:
    """Yield the lines of the report on rank 0; ``others`` are the other ranks."""
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
    if first_change := advice(it, others):
        yield f"  first thing to change: {first_change}"
    minute = 60 * found["real"] / max(found["simulated"], 1e-9)
    yield f"  The host's time is this machine's; a simulated minute took {minute:.0f} s. Losses are not computed."


def show(folder: Path, figures: dict[str, Any], trace: Path | None, skip: int = NOT_COUNTED) -> None:
    """Print the report of rank 0 and a line for each other rank, and write the time line if that is wanted."""
    files = sorted(folder.glob("clock*.json"), key=lambda file: int(file.stem.removeprefix("clock")))
    ranks = {int(file.stem.removeprefix("clock")): json.loads(file.read_text()) for file in files}
    if not ranks:
        print("nullgpu: clock: the command has used no GPU, or failed before")
        return
    spans = {rank: read(folder / f"spans{rank}.tsv") for rank in ranks}
    summaries = {rank: summary(found, spans[rank], skip) for rank, found in ranks.items()}
    first, *rest = ranks
    others = {rank: it for rank in rest if (it := summaries[rank])}
    for line in lines_of(ranks[first], summaries[first], figures, others):
        print(f"nullgpu: {line}")
    for rank, it in others.items():
        print(f"nullgpu:   rank {rank}: GPU busy {it.busy:.0%}; it waits for {it.listed() or 'nothing'}")
    cpus = len(os.sched_getaffinity(0))
    if others:
        print(
            f"nullgpu:   These {len(ranks)} ranks and their loaders shared {cpus} CPUs; on nodes with more, add --host"
        )
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
