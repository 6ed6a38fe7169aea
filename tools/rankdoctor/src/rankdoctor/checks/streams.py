"""Streams: which samples their readers give, the ranks and their workers."""

from collections import Counter
from collections.abc import Iterator

from ..events import Event
from ..runs import Run
from .base import Finding, check, fault, need, need_none, need_use, seen


@check("A pass of a stream gives no sample to two readers.", after=("same_samples", "stream_repeats"), ranks=True)
def stream_shared(run: Run) -> Iterator[Finding]:
    """Ranks and workers that order the files differently before they take every k-th read some twice, others never.

    Samples are known by what they hold, in the first pass, also if their values come in another order.
    """
    streams = [e for e in run.first.all("loader") if e["iterable"] and e["loader"] in run.training]
    need_use(streams, "streams (IterableDataset)")
    need(not run.model_parallel, "ranks of a model-parallel group read the same samples")
    for stream in streams:
        ends = [[e for e in rank.all("pass_end", loader=stream["loader"]) if "bags" in e][:1] for rank in run.ranks]
        need(
            all(found and found[0]["complete"] for found in ends), "the first pass was not read to its end: see --full"
        )
        for key in ("file", "bags"):
            given = [run.samples.get(found[0][key], []) for found in ends]
            if not all(given):
                continue
            counts = Counter(sample for of_rank in given for sample in of_rank)
            repeated = sum(counts.values()) - len(counts)
            readers = run.world * max(1, stream["workers"])
            on_two = sum(count > 1 for count in counts.values())
            if repeated > 0.05 * counts.total() and on_two > run.world and max(counts.values()) <= readers:
                text = (
                    f"{on_two} of the {len(counts)} different samples in the first pass of all ranks come from "
                    f"several of the {readers} readers (ranks and their workers)"
                )
                if key == "bags":
                    text += ", with their values in another order"
                fix = (
                    "give all readers the same list, in the same order, and let each take its own part: "
                    "list[rank * workers + worker :: ranks * workers]; a shuffle before it needs one seed for all"
                )
                yield fault(stream["at"], text, fix)
                return
            need(repeated <= 0.05 * counts.total(), f"{repeated} samples of the first pass are equal to others")
        seen(sum(map(len, given)), "samples of the first pass of all ranks, all different")


@check("Each worker of a stream gives samples of its own.", exercise="long_epoch")
def stream_repeats(run: Run) -> Iterator[Finding]:
    """Every worker of a loader has a copy of an IterableDataset, so without a split each gives all samples."""
    streams = [e for e in run.first.all("loader") if e["iterable"] and e["loader"] in run.training]
    need_use(streams, "streams (IterableDataset)")
    need(run.any("pass", workers=2), "the stream has fewer than two workers: try --workers")
    doubts = []
    for stream in streams:
        batches = _batches_of_first_pass(run, stream)
        rows = [row for batch in batches for row in batch]
        repeated = sum(count - 1 for count in Counter(rows).values())
        distinct = all(len(set(batch)) > 0.9 * len(batch) for batch in batches)
        if distinct and repeated > 0.4 * len(rows) > 0:
            text = f"{repeated} of the first {len(rows)} samples of the stream come again from another worker"
            fix = "let __iter__ give each worker its own part, by torch.utils.data.get_worker_info()"
            yield fault(stream["at"], text, fix)
        if repeated > 0.05 * len(rows) or len(rows) < 4:
            doubts.append(f"{repeated} of the first {len(rows)} samples of the stream are equal")
        else:
            seen(len(rows), "first samples of the stream, all different")
    need_none(doubts)


def _batches_of_first_pass(run: Run, stream: Event) -> list[list[int]]:
    """Return the rows of each batch. Raises CannotJudge if a model gets some batches twice, as in SAM."""
    passes, given, found = 0, 0, []
    for e in run.first.events:
        passes += e["e"] == "pass" and e["loader"] == stream["loader"]
        if passes == 1 and e.get("loader") == stream["loader"]:
            given += e["e"] == "batch"
            if e["e"] == "forward":
                found.append(e.get("rows", []))
    need(len(found) <= given, "models are called several times with a batch of the stream")
    return found
