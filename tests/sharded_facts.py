"""Run by test_train_05.py as several ranks: rank 0 prints, as JSON, what they found together."""

import json
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lab.launching import load_script
from lab.process_group import process_group
from workshop.loaders.sampler import BatchLoader, DistributedBatchSampler
from workshop.models.gpt import SIZES, GPTSize
from workshop.paths import REPOSITORY

LESSON = load_script(REPOSITORY / "05_fully_sharded")
DDP_LESSON = load_script(REPOSITORY / "04_mixed_precision")
CPU = torch.device("cpu")
GLOBAL_BATCH, STEPS, VAL_SAMPLES = 20, 4, 61
VIT = {"vit_width": 16, "vit_depth": 3, "lr": 0.01}
VOLUMES = {"dataset": "nbody", "crop_size": 8}
SGD = {**VIT, "optimizer": "sgd"}
SIZES["gpt_test"] = GPTSize(width=64, depth=3, head_dimension=16)
TEXT = {"dataset": "text", "model": "gpt_test", "lr": 0.01}
VARIANTS = {
    "language": TEXT,
    "language, all at once": TEXT | {"activation_checkpointing": True, "accumulate": 3, "shard": "keep"},
    "blocks": VIT,
    "keep": VIT | {"shard": "keep"},
    "root": VIT | {"shard": "root"},
    "recomputed": VIT | {"activation_checkpointing": True},
    "accumulate": VIT | {"accumulate": 4},
    "clipped": SGD | {"max_grad_norm": 0.1},
    "fused": VIT | {"fused": True},
    "all at once": VIT | {"activation_checkpointing": True, "accumulate": 3, "fused": True, "shard": "keep"},
    "bf16": VIT | {"precision": "bf16"},
    "fp16, clipped": SGD | {"precision": "fp16", "max_grad_norm": 0.1},
    "volumes": {**VOLUMES, "model": "vit", "vit_patch": 4, **VIT},
    "unet3d": {**VOLUMES, "model": "unet3d", "unet_width": 4, "unet_depth": 2, "lr": 0.01, "shard": "root"},
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
    if dataset == "text":
        text = torch.randint(256, (number, 17), generator=numbers)
        return text[:, :-1], text[:, 1:]
    return torch.randn(number, 1, 28, 28, generator=numbers), torch.arange(number) % 10


def train_sharded(config: Any, rank: int, world_size: int) -> dict:  # noqa: ANN401
    """Return the losses of all steps over all ranks, then loss and accuracy of the validation samples."""
    torch.manual_seed(config.seed + rank)
    model = LESSON.shard_model(config, rank, CPU, world_size)
    optimizer = LESSON.make_optimizer(config, model)
    scaler = torch.amp.GradScaler("cpu", enabled=config.precision == "fp16")
    losses = []
    for inputs, targets in Batches(*samples(config.dataset, GLOBAL_BATCH * STEPS), rank, world_size):
        loss = LESSON.train_step(config, model, optimizer, scaler, inputs, targets)
        dist.all_reduce(loss)
        losses.append(loss.item() / world_size)
    val_loss, accuracy = LESSON.evaluate(
        config, model, Batches(*samples(config.dataset, VAL_SAMPLES), rank, world_size), CPU
    )
    stored = sum(weight.to_local().numel() for group in optimizer.param_groups for weight in group["params"])
    return {"losses": [*losses, val_loss], "accuracy": accuracy, "stored": stored}


def train_ddp(config: Any, rank: int, world_size: int) -> list[float]:  # noqa: ANN401
    """Return the losses of lesson 04's training step with DDP."""
    torch.manual_seed(config.seed)
    flags = {"model": "vit", "vit_width": config.vit_width, "vit_depth": config.vit_depth, "lr": config.lr}
    own = DDP_LESSON.Config(**flags, precision="fp32")
    model = DDP_LESSON.make_model(own)
    ddp_model = nn.parallel.DistributedDataParallel(model)
    optimizer = DDP_LESSON.make_optimizer(own, model)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    losses = []
    for inputs, targets in Batches(*samples(config.dataset, GLOBAL_BATCH * STEPS), rank, world_size):
        loss = DDP_LESSON.train_step(own, ddp_model, optimizer, scaler, inputs, targets).detach()
        dist.all_reduce(loss)
        losses.append(loss.item() / world_size)
    return losses


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
        outputs = model(inputs)
        losses.append(LESSON.loss_function(outputs, targets).item())
    accuracy = None
    if config.dataset == "mnist":
        accuracy = (outputs.argmax(dim=1) == targets).double().mean().item()
    stored = sum(weight.numel() for weight in model.parameters())
    return {"losses": losses, "accuracy": accuracy, "stored": stored}


def main() -> None:
    """Train every variant that the command line names, sharded and plain; and the first one with DDP."""
    found: dict[str, Any] = {}
    with process_group() as (rank, world_size, _):
        for name in sys.argv[1:]:
            config = LESSON.Config(**VARIANTS[name])
            found[name] = {"sharded": train_sharded(config, rank, world_size), "plain": train_plain(config)}
        found["DDP"] = train_ddp(LESSON.Config(**VIT), rank, world_size)
    if rank == 0:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
