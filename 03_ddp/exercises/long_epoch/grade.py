"""With any number of ranks and workers, each sample is trained on once in an epoch, in as many steps on each rank."""

from collections import Counter
from collections.abc import Iterator
from itertools import groupby

from clinic.observe import Rank
from clinic.runs import Fault, Script

BATCH = 4
VAL = 30
RUNS = (
    # ranks, workers, samples, epochs; shares that differ by one sample have different numbers of batches here
    (2, 0, 33, 1),
    (2, 2, 98, 1),
    (1, 2, 50, 2),
    (2, 0, 31, 1),
)


def grade(script: Script) -> Iterator[str]:
    """Yield a line for each thing that is still wrong."""
    for ranks, workers, samples, epochs in RUNS:
        of_workers = f"{workers or 'no'} workers{' each' * (workers > 0 and ranks > 1)}"
        where = f"with {ranks} rank{'s' * (ranks > 1)}, {of_workers}, {samples} samples and batches of {BATCH}"
        flags = ("--batch_size", BATCH, "--num_workers", workers, "--epochs", epochs)
        each_on_its_node = [0] * ranks
        try:
            run = script.run(*flags, ranks=ranks, local_ranks=each_on_its_node, train=samples, val=VAL)
        except Fault as fault:
            yield f"{where}, {fault}"
            return
        if wrong := list(faults_of(run.ranks, workers, samples, epochs)):
            yield from (f"{where}, {line}" for line in wrong)
            return
    workers, samples = 2, 50
    flags = ("--batch_size", BATCH, "--num_workers", workers, "--save_interval", 5)
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
    shown = []
    for number, of_ranks in enumerate(zip(*batches, strict=True), 1):
        steps = [len(of_rank) for of_rank in of_ranks]
        if len(set(steps)) > 1:
            yield f"the ranks have different numbers of batches in epoch {number}: {' and '.join(map(str, steps))}"
            return
        shown.append([[sample for batch in of_rank for sample in batch] for of_rank in of_ranks])
        seen = Counter(sample for of_rank in shown[-1] for sample in of_rank)
        if seen.total() - len(seen) > readers:
            yield f"the ranks train on {len(seen)} different samples in epoch {number}, but {seen.total()} times"
            return
        if (left_out := samples - len(seen)) > BATCH * readers:
            yield f"no rank trains on {left_out} of the samples in epoch {number}"
            return
    if epochs > 1 and shown[0] == shown[1]:
        yield "epochs 1 and 2 have the same order"
    if (processes := min(max(len(call.children) for call in rank.training) for rank in ranks)) < workers:
        yield f"the samples are loaded by {processes} workers of a rank"
    validated = Counter(sample for rank in ranks for sample in rank.validated)
    if len(validated) < VAL or validated.total() != epochs * VAL:
        yield "the ranks do not validate each validation sample once in an epoch"


def epochs_of(rank: Rank) -> list[list[list[int]]]:
    """Return the batches of each epoch."""
    parts = groupby(rank.shown, lambda call: call.training)
    return [[call.samples for call in calls] for training, calls in parts if training]
