"""Run by test_train_05.py as several ranks: rank 0 prints, as JSON, what they found together."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lab.launching import load_script
from lab.process_group import process_group
from workshop.loaders.sampler import BatchLoader, DistributedBatchSampler

LESSON = load_script(Path(sys.argv[1]))
CPU = torch.device("cpu")
GLOBAL_BATCH, STEPS, VAL_SAMPLES = 20, 4, 61
VIT = {"vit_width": 16, "vit_depth": 3, "lr": 0.01}
VOLUMES = {"dataset": "nbody", "crop_size": 8}
UNET = {**VOLUMES, "model": "unet3d", "unet_width": 4, "unet_depth": 2, "lr": 0.01}
SGD = {**VIT, "optimizer": "sgd"}
VARIANTS = {
    "vit": VIT,
    "keep": VIT | {"shard": "keep"},
    "root": VIT | {"shard": "root"},
    "checkpointing": VIT | {"activation_checkpointing": True},
    "accumulate": VIT | {"accumulate": 4},
    "fused": VIT | {"fused": True},
    "all at once": VIT | {"activation_checkpointing": True, "accumulate": 3, "fused": True, "shard": "keep"},
    "bf16": VIT | {"precision": "bf16"},
    "fp16": VIT | {"precision": "fp16"},
    "sgd": SGD,
    "clipped": SGD | {"max_grad_norm": 0.1},
    "fp16, clipped": SGD | {"precision": "fp16", "max_grad_norm": 0.1},
    "volumes": {**VOLUMES, "model": "vit", "vit_patch": 4, **VIT},
    "unet3d": UNET | {"shard": "root"},
    "cnn": {"model": "mnist_cnn", "dropout": False, "shard": "root"},
}


class Batches(BatchLoader):
    """The batches of a rank."""

    def __init__(self, inputs: torch.Tensor, targets: torch.Tensor, rank: int, world_size: int) -> None:
        self.inputs, self.targets = inputs, targets
        self.dataset = range(len(inputs))
        self.batch_sampler = DistributedBatchSampler(
            len(inputs), GLOBAL_BATCH // world_size, rank=rank, num_replicas=world_size
        )

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return ((self.inputs[indices], self.targets[indices]) for indices in self.batch_sampler.batches())


def samples(dataset: str, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random samples, the same on all ranks."""
    numbers = torch.Generator().manual_seed(number)
    if dataset == "nbody":
        inputs, targets = (torch.randn(number, channels, 8, 8, 8, generator=numbers) for channels in (4, 5))
        return inputs, targets
    return torch.randn(number, 1, 28, 28, generator=numbers), torch.arange(number) % 10


def train_sharded(config: Any, rank: int, world_size: int) -> dict:  # noqa: ANN401
    """Return what lesson 05 finds: the losses of all steps over all ranks, then that of the validation samples."""
    torch.manual_seed(config.seed + rank)
    model = LESSON.shard_model(config, rank, CPU, world_size)
    optimizer = LESSON.make_optimizer(config, model)
    scaler = torch.amp.GradScaler("cpu", enabled=config.precision == "fp16")
    losses = []
    for inputs, targets in Batches(*samples(config.dataset, GLOBAL_BATCH * STEPS), rank, world_size):
        loss = LESSON.train_step(config, model, optimizer, scaler, inputs, targets)
        dist.all_reduce(loss)
        losses.append(loss.item() / world_size)
    validation = Batches(*samples(config.dataset, VAL_SAMPLES), rank, world_size)
    assert config.dataset == "nbody" or len(validation) == (4 if rank == 0 else 3), "not a rank with a batch less"
    val_loss, _ = LESSON.evaluate(config, model, validation, CPU)
    stored = sum(weight.to_local().numel() for group in optimizer.param_groups for weight in group["params"])
    return {"losses": [*losses, val_loss], "stored": stored}


def train_plain(config: Any) -> dict:  # noqa: ANN401
    """Return what one process finds that knows nothing of sharding, number formats and parts of a batch."""
    torch.manual_seed(config.seed)
    model = LESSON.make_model(config)
    optimizer = LESSON.make_optimizer(config, model)
    losses = []
    for inputs, targets in Batches(*samples(config.dataset, GLOBAL_BATCH * STEPS), 0, 1):
        optimizer.zero_grad()
        loss = LESSON.loss_function(model(inputs), targets)
        loss.backward()
        if config.max_grad_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
        optimizer.step()
        losses.append(loss.item())
    model.eval()
    with torch.no_grad():
        inputs, targets = samples(config.dataset, VAL_SAMPLES)
        losses.append(LESSON.loss_function(model(inputs), targets).item())
    return {"losses": losses, "stored": sum(weight.numel() for weight in model.parameters())}


def main() -> None:
    """Train every variant sharded and plain."""
    found = {}
    with process_group() as (rank, world_size, _):
        for name, flags in VARIANTS.items():
            config = LESSON.Config(**flags)
            found[name] = {"sharded": train_sharded(config, rank, world_size), "plain": train_plain(config)}
    if rank == 0:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
