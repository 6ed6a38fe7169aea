"""How busy a simulated GPU was, and what it waited for, from the spans that the clock has noted."""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from .interface import MOST_SPANS, Span, Work

LONGEST = 12
"""operations that are listed"""
COMPUTES = (Work.KERNEL, Work.GIVES_WAY)
DATA, HOST, COMMUNICATION, COPIES = "data", "the host", "communication", "copies"
"""what a GPU can wait for, beside "rank 1" and so on"""


def overlap(start: float, end: float, parts: list[tuple[float, float]]) -> float:
    """Return how much of a time lies within the parts, which do not overlap each other."""
    return sum(max(0.0, min(end, b) - max(start, a)) for a, b in parts)


def merged(parts: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the same times as parts that do not overlap each other."""
    found: list[tuple[float, float]] = []
    for start, end in sorted(parts):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found


def label(span: Span) -> str:
    """Return what the GPU waits for while this lasts and nothing computes."""
    if span.kind == Work.WAITS_FOR_RANK:
        return span.name.removeprefix("waits for ")
    return COPIES if span.kind == Work.TRANSFER else COMMUNICATION


class Others:
    """What streams do beside computing: copies, collectives, and waits for other ranks, one after the other in each."""

    KINDS = (Work.TRANSFER, Work.NETWORK, Work.WAITS_FOR_RANK)

    def __init__(self, spans: list[Span]) -> None:
        self.spans = spans
        self.of_stream: defaultdict[int, list[Span]] = defaultdict(list)
        for span in sorted(spans, key=lambda span: span.start):
            if span.kind in self.KINDS:
                self.of_stream[span.stream].append(span)
        self.ends = {stream: [span.end for span in found] for stream, found in self.of_stream.items()}

    def between(self, stream: int, begin: float, end: float) -> Iterator[Span]:
        """Yield the copies, collectives and waits of a stream between two times."""
        found = self.of_stream.get(stream, [])
        for index in range(bisect_right(self.ends.get(stream, []), begin), len(found)):
            if found[index].start >= end:
                return
            yield found[index]

    def cause(self, span: Span) -> Span | None:
        """Return the copy or collective of another stream that a kernel waited for; None if there is none.

        Kernels of another stream are no cause: they were launched late themselves.
        """
        cause = self.spans[span.cause] if span.cause >= 0 else None
        return cause if cause is not None and cause.kind in self.KINDS else None

    def reasons(self, span: Span, begin: float, end: float) -> Iterator[tuple[str, float, float]]:
        """Yield what a kernel waited for in the time before it, with (start, end), the surest reasons first.

        It waits for what is before it in its own stream, and for the end of what its stream waits for: itself, or the
        copies before it.
        """
        before = list(self.between(span.stream, begin, end))
        for other in before:
            yield label(other), max(other.start, begin), min(other.end, end)
        for waiting in (span, *before):
            cause = self.cause(waiting)
            if cause is None or cause.end <= begin:
                continue
            until = min(cause.end, end)
            for other in self.between(cause.stream, begin, until):
                yield label(other), max(other.start, begin), min(other.end, until)
            yield label(cause), begin, until


def idle(
    spans: list[Span], loading: list[tuple[float, float]], begin: float, end: float
) -> tuple[float, dict[str, float]]:
    """Return how long the GPU computed between two times, and how long it waited for what.

    A GPU is busy if any of its streams has a kernel. What it waits for is what the stream waits for that computes
    next: a copy, a collective, or "rank 1", which is not ready for it; otherwise a batch, or the host.
    """
    work = sorted((s for s in spans if s.kind in COMPUTES and s.end > begin and s.start < end), key=lambda s: s.start)
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


@dataclass
class Summary:
    """How one rank spent the updates that count."""

    updates: int
    seconds: float
    """of an update"""
    busy: float
    """share of the time in which the GPU computes"""
    waits: dict[str, float]
    """shares of the time in which it waits, by what for, the largest first"""
    operations: dict[str, float] = field(default_factory=dict)
    """seconds of the operations that take the longest, in these updates"""

    @property
    def for_ranks(self) -> float:
        """The share of the time in which it waits for other ranks."""
        return sum(share for what, share in self.waits.items() if what.startswith("rank "))

    def as_json(self) -> dict[str, Any]:
        """Return this for programs."""
        return asdict(self)


def summary(found: dict[str, Any], spans: list[Span], skip: int) -> Summary | None:
    """Return how a rank spent its updates, without the first ones; None if it made fewer than two.

    Args:
        found: what `clock.write` has noted of the rank.
        spans: of the rank.
        skip: number of first updates that do not count; those in which operations were observed do not count either.
    """
    updates = found["updates"]
    if len(spans) >= MOST_SPANS:  # later ones were not noted, and would look like idle times
        updates = [ended for ended in updates if ended <= spans[-1].end]
    updates = updates[min(max(skip, found["observed"]), max(len(updates) - 2, 0)) :]
    if len(updates) < 2:
        return None
    begin, end = updates[0], updates[-1]
    busy, waits = idle(spans, [tuple(pair) for pair in found["loading"]], begin, end)
    total = end - begin
    shares = {what: seconds / total for what, seconds in sorted(waits.items(), key=lambda pair: -pair[1])}
    return Summary(len(updates) - 1, total / (len(updates) - 1), busy / total, shares, longest(spans, begin, end))


def longest(spans: list[Span], begin: float, end: float) -> dict[str, float]:
    """Return the operations that take the longest between two times, and their seconds."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for span in spans:
        if span.kind == Work.KERNEL and span.end > begin and span.start < end:
            seconds[span.name] += min(span.end, end) - max(span.start, begin)
    return dict(sorted(seconds.items(), key=lambda pair: -pair[1])[:LONGEST])


def chrome_events(rank: int, loading: list[tuple[float, float]], spans: list[Span]) -> list[dict[str, Any]]:
    """Return the time line of a rank in the format of Chrome's tracing: a row for the host, and one for each stream."""
    streams = sorted({s.stream for s in spans if s.kind != Work.HOST_WAITS})
    rows = {stream: number for number, stream in enumerate(streams, 1)}
    names = {0: "host waits"} | {row: f"stream {row}" for row in rows.values()}
    events: list[dict[str, Any]] = [
        {"name": "thread_name", "ph": "M", "pid": rank, "tid": row, "args": {"name": name}}
        for row, name in names.items()
    ]
    events.append({"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"rank {rank}"}})
    batches = [Span(a, b, -1, 0, Work.HOST_WAITS, "wait for a batch") for a, b in loading]
    for span in (*spans, *batches):
        row = 0 if span.kind == Work.HOST_WAITS else rows[span.stream]
        times = {"ts": 1e6 * span.start, "dur": 1e6 * (span.end - span.start)}
        events.append({"name": span.name, "ph": "X", "pid": rank, "tid": row, **times})
    return events
