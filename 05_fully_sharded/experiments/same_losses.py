"""Does sharding change what a model learns? The same model and batches: one plain process, DDP, and each form of FSDP2.

    python experiments/same_losses.py                  # 1, 2, 3 and 4 ranks on this machine's CPUs: about a minute
    python experiments/same_losses.py --ranks 2        # one number of ranks

Each row trains a small language model for four steps of 24 samples, however many ranks share them, and then computes
the loss of 61 validation samples, which no number of ranks divides. They are compared with one plain process, whose
loop has nothing of train.py but its model, its loss and its optimizer. "DDP" wraps this model as in lesson 03. The
other rows call the functions of train.py. You should see differences that are rounding errors: sums are taken in
another order.
"""

import argparse
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from lab import results
from lab.flags import Parser
from lab.launching import load_script, run, torchrun
from lab.process_group import process_group
from mean_loss import mean_loss
from sharded_models import mean_of_step, training_of
from workshop.errors import run_reporting_user_errors
from workshop.loaders.sampler import BatchLoader, DistributedBatchSampler
from workshop.paths import REPOSITORY
from workshop.ranks import Ranks

LESSON: Any = load_script(REPOSITORY / "05_fully_sharded")
CPU = torch.device("cpu")
GLOBAL_BATCH, STEPS, VAL_SAMPLES, LENGTH = 24, 4, 61, 16
SMALL = {"width": 64, "depth": 3, "lr": 0.003, "sequence_length": LENGTH}
WAYS: dict[str, dict[str, Any]] = {
    "`--shard blocks`": {},
    "`--shard keep`": {"shard": "keep"},
    "`--shard root`": {"shard": "root"},
    "`--replicas 2` (HSDP)": {"replicas": 2},
    "`--accumulate 3`": {"accumulate": 3},
    "`--accumulate 3 --reduce_each_part true`": {"accumulate": 3, "reduce_each_part": True},
    "`--activation_checkpointing true`": {"activation_checkpointing": True},
    "`--fused true`": {"fused": True},
    "recomputed, accumulated, `keep`": {"activation_checkpointing": True, "accumulate": 3, "shard": "keep"},
    "`--precision bf16`": {"precision": "bf16"},
    "`--shard none` (DDP)": {"shard": "none"},
    "`--shard none --accumulate 3`": {"shard": "none", "accumulate": 3},
    "`--optimizer sgd`, clipped at 0.1": {"optimizer": "sgd", "max_grad_norm": 0.1},
    "the same with `--precision fp16`": {"optimizer": "sgd", "max_grad_norm": 0.1, "precision": "fp16"},
}
"""flags of train.py"""
NO_FORMATS = {"precision": "fp32"}
Weights = dict[str, torch.Tensor]


class Batches(BatchLoader):
    """Random bytes as the batches of a rank; each is (inputs, targets), (N, T) int64."""

    batch_sampler: DistributedBatchSampler

    def __init__(self, samples: int, rank: int, world_size: int) -> None:
        self.bytes = torch.randint(256, (samples, LENGTH + 1), generator=torch.Generator().manual_seed(samples))
        self.dataset = range(samples)
        self.batch_sampler = DistributedBatchSampler(
            samples, GLOBAL_BATCH // world_size, rank=rank, num_replicas=world_size
        )

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return ((self.bytes[i, :-1], self.bytes[i, 1:]) for i in self.batch_sampler.batches())


def train_plain(config: Any, rank: int = 0, world_size: int = 1, ddp: bool = False) -> tuple[list[float], Weights]:  # noqa: ANN401
    """Train without sharding, formats and parts, by a loop of its own; return losses and weights."""
    torch.manual_seed(config.seed)
    model = LESSON.make_model(config)
    wrapped = DistributedDataParallel(model) if ddp else model
    optimizer = LESSON.make_optimizer(config, model)
    losses = []
    for inputs, targets in Batches(GLOBAL_BATCH * STEPS, rank, world_size):
        optimizer.zero_grad()
        loss = mean_loss(wrapped(inputs), targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
        optimizer.step()
        losses.append(mean_over_ranks(loss.detach(), world_size))
    model.eval()
    with torch.no_grad():
        for inputs, targets in Batches(VAL_SAMPLES, 0, 1):
            losses.append(mean_loss(model(inputs), targets).item() * len(inputs) / VAL_SAMPLES)
    return [*losses[:STEPS], sum(losses[STEPS:])], model.state_dict()


def mean_over_ranks(loss: torch.Tensor, world_size: int) -> float:
    """Return the mean of a loss () over all ranks."""
    if world_size > 1:
        dist.all_reduce(loss)
    return loss.item() / world_size


def train_sharded(config: Any, rank: int, world_size: int) -> tuple[list[float], Weights, int]:  # noqa: ANN401
    """Train with the functions of train.py.

    Returns:
        The losses of the steps and of the validation samples, over all ranks; the weights, whole; and how many of them
        this rank stores.
    """
    torch.manual_seed(config.seed + rank)
    ranks = Ranks(rank=rank, world_size=world_size, device=CPU)
    model = LESSON.distribute_model(config, ranks)
    training = training_of(config, model, ranks)
    optimizer = training.optimizer
    losses = []
    for inputs, targets in Batches(GLOBAL_BATCH * STEPS, rank, world_size):
        losses.append(mean_over_ranks(mean_of_step(config, training, inputs, targets), world_size))
    losses.append(LESSON.evaluate(config, training, Batches(VAL_SAMPLES, rank, world_size))[0])
    # The optimizer's weights are always the sharded ones; the model may have gathered its own for the validation.
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    stored = sum((weight.to_local() if isinstance(weight, DTensor) else weight).numel() for weight in weights)
    return losses, get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)), stored


def largest(found: list[float], expected: list[float]) -> float:
    """Return the largest relative difference of two lists."""
    return max(abs(one / other - 1) for one, other in zip(found, expected, strict=True))


def largest_of(found: Weights, expected: Weights) -> float:
    """Return the largest difference of a weight, as a share of the learning rate: AdamW moves each by about that."""
    assert found.keys() == expected.keys()
    return max((found[name] - expected[name]).abs().max().item() for name in expected) / SMALL["lr"]


def on_ranks(file: Path) -> None:
    """As one of some ranks: train in all ways; rank 0 writes how far each is from one plain process."""
    rows: dict[str, list[float | None]] = {}
    with process_group(on_cpu=True) as (rank, world_size, _):
        losses, found = train_plain(LESSON.Config(**SMALL), rank, world_size, ddp=True)
        plain, weights = train_plain(LESSON.Config(**SMALL))
        rows["DDP"] = [losses[-2], losses[-1], largest(losses, plain), largest_of(found, weights), 1.0]
        for name, flags in WAYS.items():
            if world_size % flags.get("replicas", 1):
                continue
            config = LESSON.Config(**SMALL | flags)
            plain, weights = train_plain(LESSON.Config(**SMALL | flags | NO_FORMATS))
            losses, found, stored = train_sharded(config, rank, world_size)
            total = sum(weight.numel() for weight in weights.values())
            if rank == 0:  # the other ranks get no whole weights
                differences = largest(losses, plain), largest_of(found, weights)
                rows[name] = [losses[-2], losses[-1], *differences, stored / total]
        if rank == 0:
            file.write_text(json.dumps(rows))


def rank_counts(text: str) -> list[int]:
    """Read numbers of ranks, with commas between them."""
    if not all(word.isdecimal() and int(word) > 0 and GLOBAL_BATCH % int(word) == 0 for word in text.split(",")):
        raise argparse.ArgumentTypeError(f"takes divisors of {GLOBAL_BATCH} with commas between them, got {text}")
    return [int(word) for word in text.split(",")]


def main() -> None:
    """Start each number of ranks, and store one table of all."""
    parser = Parser(__doc__)
    parser.add_argument("--ranks", type=rank_counts, default=[1, 2, 3, 4], help="with commas (default: 1,2,3,4)")
    parser.add_argument("--write", type=Path, help="file that a rank which this script starts writes its rows to")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.write is not None:
        on_ranks(arguments.write)
        return
    rows: list[list[results.Cell]] = []
    for count in arguments.ranks:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "rows.json")
            words = [*torchrun(count), Path(__file__).resolve(), "--write", file]
            run(words, Path.cwd(), on_cpu=True, threads=1, quiet=True)
            ranks = "1 rank" if count == 1 else f"{count} ranks"
            rows += [[f"{ranks}, {name}", *cells] for name, cells in json.loads(file.read_text()).items()]
    losses, differences = ["fourth step's loss", "validation loss"], ["losses differ by", "weights differ by"]
    results.store(
        "same_losses",
        title="The same model, and the same samples in each step",
        columns=["", *losses, *differences, "stored on rank 0"],
        rows=rows,
        formats=dict.fromkeys(losses, ",.7f") | dict.fromkeys(differences, ".1e") | {"stored on rank 0": ".0%"},
        spread="difference of the losses: largest relative one from one process in float32; of the weights: in "
        "learning rates",
    )


if __name__ == "__main__":
    run_reporting_user_errors(main)
