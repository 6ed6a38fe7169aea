"""With any number of ranks and workers, each sample is trained on once in an epoch, in as many steps on each rank."""

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path

from torch.nn.parallel import DistributedDataParallel

from clinic.notes import Rank
from clinic.observe import Script

BATCH = 4
VAL = 30
RUNS = (
    # ranks, workers, samples: where a share of a rank or a worker is a multiple of the batch, its neighbour's is not
    (2, 0, 161),
    (2, 1, 159),
    (2, 2, 194),
    (1, 3, 100),
)
EPOCHS = 2


def grade(script: Script) -> Iterator[str]:
    """Yield a line for each thing that is still wrong."""
    for ranks, workers, samples in RUNS:
        run = script.run(
            *("--batch_size", BATCH, "--num_workers", workers, "--epochs", EPOCHS),
            ranks=ranks,
            local_ranks=[0] * ranks,  # a node for each
            train=samples,
            val=VAL,
            watch=without_communication,
        )
        where = f"with {count(ranks, 'rank')}, {count(workers, 'worker')} each and {samples} samples in batches of {BATCH}"
        wrong = list(faults_of(run.ranks, workers, samples))
        yield from (f"{where}, {line}" for line in wrong)
        if wrong:
            return


def faults_of(ranks: list[Rank], workers: int, samples: int) -> Iterator[str]:
    """Yield what is wrong with the batches of a run."""
    batches = [epochs_of(rank) for rank in ranks]
    if any(len(epochs) != EPOCHS for epochs in batches):
        yield "it does not train for two epochs"
        return
    readers = max(1, workers) * len(ranks)
    for number, epoch in enumerate(zip(*batches, strict=True), 1):
        seen = Counter(sample for of_rank in epoch for batch in of_rank for sample in batch)
        repeated, left_out = seen.total() - len(seen), samples - len(seen)
        if repeated > readers:
            yield f"the samples of epoch {number} are trained on {seen.total() / samples:.2g} times on average"
        if left_out > BATCH * readers:
            yield f"{left_out} samples are trained on by no rank in epoch {number}"
        steps = [len(of_rank) for of_rank in epoch]
        if len(set(steps)) > 1:
            yield f"rank 0 takes {steps[0]} steps in epoch {number}, but rank 1 takes {steps[1]}"
        if repeated > readers or left_out > BATCH * readers or len(set(steps)) > 1:
            return
    first, second = ([[batch for batch in of_rank[epoch]] for of_rank in batches] for epoch in (0, 1))
    if first == second:
        yield "both epochs have the same order"
    if Counter(sample for rank in ranks for sample in rank.validated).total() != EPOCHS * VAL:
        yield "the validation samples are not validated once in each epoch"


def epochs_of(rank: Rank) -> list[list[list[int]]]:
    """Return the batches of each epoch."""
    return [[call.samples for call in calls] for training, calls in groupby(rank.shown, lambda c: c.training) if training]


def without_communication(_: Path) -> Callable[[], None]:
    """Let no step wait for the other ranks, which may take no such step; see `Script.run`."""
    forward = DistributedDataParallel.forward

    def alone(ddp: DistributedDataParallel, *arguments: object, **keywords: object) -> object:
        ddp.require_backward_grad_sync = False
        return forward(ddp, *arguments, **keywords)

    DistributedDataParallel.forward = alone
    return lambda: None


def count(number: int, what: str) -> str:
    """Return such as "1 rank", "2 ranks"."""
    return f"{number} {what}{'' if number == 1 else 's'}"
