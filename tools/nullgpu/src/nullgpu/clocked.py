"""The report of the clock: a rank's updates, what its GPU waits for, what to change first; as text and as figures."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from . import curves
from .interface import read_spans
from .timeline import COMMUNICATION, COPIES, DATA, HOST, Summary, chrome_events, summary

OF_LAUNCHES = ("observed", "is_observed", "launches", "of_other_sizes", "unknown", "known_by")
ADVICE = {
    DATA: "the loader limits it: more workers, or samples that are cheaper to read",
    HOST: "it is launch-bound, or the host waits too often: larger batches, CUDA graphs, torch.compile, no .item()",
    COMMUNICATION: "communication limits it: larger batches per GPU, fewer exchanges",
    COPIES: "copies limit it: pinned memory and non_blocking=True, so that they overlap",
}
SLOWER = "rank {rank} is slower than this one: the same work for every rank; below is what rank {rank} waits for"
IN_TURN = (
    "the ranks wait for one another in turn: give all of them equal work in each step (for example, sequences of one "
    "length for all ranks); or they differ because they share the CPUs of this machine (--host)"
)


def show(folder: Path, gpu: dict[str, Any], trace: Path | None, skip: int) -> dict[str, Any]:
    """Print the report of rank 0 and a line for each other rank, and write the time line if that is wanted.

    Args:
        folder: in which the processes of the command have left what they noted.
        gpu: its figures (see gpus.py).
        trace: file for the time line.
        skip: number of first updates that do not count.

    Returns: The figures of the report: "gpu" and, for each of "ranks", its number "rank", "updates", "seconds" of an
        update, the share "busy", shares in "waits"; "operations" and their seconds; "observed", the number of first
        updates in which operations were observed, and "is_observed", whether they still were at the end; "launches"
        after that, how many of them are "of_other_sizes" than any that was observed, and "unknown" kernels with their
        number; "known_by", shares of the observed seconds: known from a "trace", by curves fitted to this "gpu", and by
        "scaled" ones; "real" and "simulated" seconds, "advice"; a rank without two updates has no "seconds".
    """
    name = gpu["name"]
    files = sorted(folder.glob("clock*.json"), key=lambda file: int(file.stem.removeprefix("clock")))
    noted = {int(file.stem.removeprefix("clock")): json.loads(file.read_text()) for file in files}
    if not noted:
        print("nullgpu: clock: the command has used no GPU, or failed before")
        return {"gpu": name, "ranks": []}
    spans = {rank: read_spans((folder / f"spans{rank}.tsv").read_text()) for rank in noted}
    summaries = {rank: summary(found, spans[rank], skip) for rank, found in noted.items()}
    known = {rank: it for rank, it in summaries.items() if it}
    ranks = []
    for rank, found in noted.items():
        it = known.get(rank)
        others = {other: one for other, one in known.items() if other != rank}
        row = {"rank": rank, **(it.as_json() if it else {}), "advice": advice(it, others) if it else ""}
        row |= {name: found[name] for name in OF_LAUNCHES}
        ranks.append(row | {"real": found["real"], "simulated": found["simulated"]})
    who = "" if name == curves.measured_on() else gpu["clock"].get("measured", {}).get("by", "nobody")
    for line in text(name, ranks, who):
        print(f"nullgpu: {line}")
    if trace:
        events = [e for rank, found in noted.items() for e in chrome_events(rank, found["loading"], spans[rank])]
        trace.write_text(json.dumps({"traceEvents": events}))
        print(f"nullgpu: the time line is in {trace}: open it at https://ui.perfetto.dev")
    return {"gpu": name, "ranks": ranks}


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


def with_article(name: str) -> str:
    """Return the name of a GPU after "a" or "an"."""
    return f"{'an' if name[0] in 'AHL' else 'a'} {name}"


def listed(waits: dict[str, float]) -> str:
    """Return in words what a GPU waits for; "" if nothing."""
    return ", ".join(f"{what} {share:.0%}" for what, share in waits.items() if share > 0.005)


def origins(name: str, rank: dict[str, Any], who: str) -> Iterator[str]:
    """Yield the lines that say how well the durations of the GPU's work are known.

    Args:
        name: of the GPU.
        rank: its figures.
        who: who has timed kernels of this GPU, "" for the one that the curves were made with.
    """
    base, known = curves.measured_on(), rank["known_by"]
    texts = {
        "trace": "from the trace",
        "gpu": f"by curves fitted to kernels of {with_article(name)}{who and f' that {who} timed'}",
        "scaled": f"by curves of {with_article(base)}, scaled to the peaks of {with_article(name)}: not timed on one",
    }
    parts = [f"{known[by]:.0%} {said}" for by, said in texts.items() if known[by] >= 0.005]
    yield f"  durations: {'; '.join(parts)}"
    if rank["of_other_sizes"] > 0.005 * rank["launches"]:
        share = rank["of_other_sizes"] / rank["launches"]
        first = f"the first {rank['observed']} updates"
        yield f"  {share:.0%} of the launches are scaled from other sizes, which {first} had"
    if rank["unknown"]:
        most = ", ".join(
            f"{kernel} ({count})" if count else kernel for kernel, count in list(rank["unknown"].items())[:4]
        )
        yield f"  without a known time, estimated: {most}"
    if rank["is_observed"]:
        yield "  operations were observed to the end, so the host was slower than without the clock"


def text(name: str, ranks: list[dict[str, Any]], who: str) -> Iterator[str]:
    """Yield the lines of the report: on the first rank, then one for each of the others."""
    first, *others = ranks
    if "seconds" not in first:
        yield f"clock of {with_article(name)}: fewer than two updates of weights were seen"
        return
    yield (
        f"clock of {with_article(name)} (simulated): {first['updates']} updates, {1e3 * first['seconds']:.2f} ms each, "
        f"GPU busy {first['busy']:.0%} of the time"
    )
    if waits := listed(first["waits"]):
        yield f"  it waits for {waits}"
    top = sorted(first["operations"].items(), key=lambda pair: -pair[1])[:5]
    whole = sum(first["operations"].values()) or 1
    yield "  longest operations: " + ", ".join(f"{operation} {seconds / whole:.0%}" for operation, seconds in top)
    yield from origins(name, first, who)
    if first["advice"]:
        yield f"  first thing to change: {first['advice']}"
    minute = 60 * first["real"] / max(first["simulated"], 1e-9)
    yield f"  The host's time is this machine's; a simulated minute took {minute:.0f} s. Losses are not computed."
    known = [it for it in others if "seconds" in it]
    for it in known:
        yield f"  rank {it['rank']}: GPU busy {it['busy']:.0%}; it waits for {listed(it['waits']) or 'nothing'}"
    if known:
        cpus = len(os.sched_getaffinity(0))
        yield f"  These {len(ranks)} ranks and their loaders shared {cpus} CPUs; on nodes with more, add --host"
