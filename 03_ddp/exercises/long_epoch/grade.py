"""With any number of ranks and workers, each sample is trained on once in an epoch, in as many steps on each rank.

The ranks log each step and each collective before they begin it, and wait until the other ranks have logged theirs.
So ranks with unequal numbers of batches are found before they wait for each other, however busy the machine is.
"""

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from itertools import groupby
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import psutil
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from clinic.notes import Rank
from clinic.observe import Fault, Script

BATCH = 4
VAL = 30
RUNS = (
    # ranks, workers, samples, epochs; shares that differ by one sample have different numbers of batches here
    (2, 0, 33, 1),
    (2, 2, 98, 1),
    (1, 2, 50, 2),
    (2, 0, 31, 1),
)
COLLECTIVES = (
    "all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "barrier", "broadcast",
    "broadcast_object_list", "gather", "gather_object", "monitored_barrier", "reduce", "scatter",
    "scatter_object_list",
)  # fmt: skip
STEP, COLLECTIVE = "s", "c"


def grade(script: Script) -> Iterator[str]:
    """Yield a line for each thing that is still wrong."""
    for number, (ranks, workers, samples, epochs) in enumerate(RUNS):
        of_workers = f"{workers or 'no'} workers{' each' * (workers > 0 and ranks > 1)}"
        where = f"with {ranks} rank{'s' * (ranks > 1)}, {of_workers}, {samples} samples and batches of {BATCH}"
        notes = script.folder / f"steps_{number}"
        notes.mkdir()
        try:
            run = script.run(
                *("--batch_size", BATCH, "--num_workers", workers, "--epochs", epochs),
                ranks=ranks,
                local_ranks=[0] * ranks,  # each on a node of its own
                train=samples,
                val=VAL,
                watch=partial(compare_steps, notes=notes, ranks=ranks),
            )
        except Fault:
            if not (apart := sorted(notes.glob("apart_*"))):
                raise
            yield f"{where}, the ranks have different numbers of batches: {apart[0].read_text()}"
            return
        if wrong := list(faults_of(run.ranks, workers, samples, epochs)):
            yield from (f"{where}, {line}" for line in wrong)
            return
    workers, samples = 2, 50
    flags = ("--batch_size", BATCH, "--num_workers", workers)
    stopped = script.run(*flags, train=samples, val=VAL, stop_after=5)
    resumed = script.run(*flags, "--resume", "true", train=samples, val=VAL, run_dir=stopped.run_dir)
    seen = Counter(stopped[0].trained + resumed[0].trained)
    if seen.total() - len(seen) > workers or samples - len(seen) > BATCH * workers:
        yield (
            f"when one rank with {workers} workers is stopped after 5 steps and resumed, it trains on {len(seen)} of "
            f"{samples} samples in this epoch, {seen.total()} times together"
        )


def faults_of(ranks: list[Rank], workers: int, samples: int, epochs: int) -> Iterator[str]:
    """Yield what is wrong with the batches of a run."""
    batches = [epochs_of(rank) for rank in ranks]
    if any(len(of_rank) != epochs for of_rank in batches):
        yield f"a rank does not train for {epochs} epoch{'s' * (epochs > 1)}"
        return
    readers = max(1, workers) * len(ranks)
    shown = [
        [[sample for batch in of_rank[epoch] for sample in batch] for of_rank in batches] for epoch in range(epochs)
    ]
    for number, of_ranks in enumerate(shown, 1):
        seen = Counter(sample for of_rank in of_ranks for sample in of_rank)
        if seen.total() - len(seen) > readers:
            yield f"the ranks train on {len(seen)} different samples in epoch {number}, but {seen.total()} times"
            return
        if (left_out := samples - len(seen)) > BATCH * readers:
            yield f"no rank trains on {left_out} of the samples in epoch {number}"
            return
    if epochs > 1 and shown[0] == shown[1]:
        yield "epochs 1 and 2 have the same order"
    if (processes := min(rank.extra for rank in ranks)) < workers:
        yield f"the samples are loaded by {processes} workers of a rank"
    validated = Counter(sample for rank in ranks for sample in rank.validated)
    if len(validated) < VAL or validated.total() != epochs * VAL:
        yield "the ranks do not validate each validation sample once in an epoch"


def epochs_of(rank: Rank) -> list[list[list[int]]]:
    """Return the batches of each epoch."""
    parts = groupby(rank.shown, lambda call: call.training)
    return [[call.samples for call in calls] for training, calls in parts if training]


def compare_steps(_: Path, notes: Path, ranks: int) -> Callable[[], int]:
    """Compare each step and collective with those of the other ranks; end the ranks if they are not the same.

    Returns: What returns the number of processes that were started before the first step.
    """
    rank = int(os.environ.get("RANK", 0))
    (notes / f"pid_{rank}").write_text(str(os.getpid()))
    mine = (notes / f"events_{rank}").open("a")
    events = ""
    started = 0
    started_before_training = 0
    own_start = BaseProcess.start

    def start(process: BaseProcess) -> None:
        nonlocal started
        started += 1
        own_start(process)

    def note(event: str) -> None:
        nonlocal events, started_before_training
        if event == STEP and STEP not in events:
            started_before_training = started
        events += event
        mine.write(event)
        mine.flush()
        for other in range(ranks):
            theirs = event_of(other, len(events) - 1)
            if theirs and theirs != event:
                longer, shorter = (rank, other) if event == STEP else (other, rank)
                step = events[:-1].count(STEP) + 1
                text = f"rank {longer} begins step {step}, for which rank {shorter} has no batch"
                (notes / f"apart_{rank}").write_text(text)
                os._exit(0)

    def event_of(other: int, number: int) -> str:
        """Return an event of another rank, when it has come to it; nothing if that rank has ended."""
        file = notes / f"events_{other}"
        while not file.exists() or file.stat().st_size <= number:
            time.sleep(0.001)
            if has_ended(notes / f"pid_{other}"):
                break
        return file.read_text()[number : number + 1] if file.exists() else ""

    def noting(event: str, own: Callable) -> Callable:
        def noted(*arguments: Any, **keywords: Any) -> Any:  # noqa: ANN401
            note(event)
            return own(*arguments, **keywords)

        return noted

    BaseProcess.start = start
    DistributedDataParallel.forward = noting(STEP, DistributedDataParallel.forward)
    for name in COLLECTIVES:
        setattr(dist, name, noting(COLLECTIVE, getattr(dist, name)))
    return lambda: started_before_training


def has_ended(pid: Path) -> bool:
    """Whether the process with this number is no more, or is only waited for by the one that started it."""
    try:
        return psutil.Process(int(pid.read_text())).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
    except (FileNotFoundError, ValueError):  # it has not begun
        return False
