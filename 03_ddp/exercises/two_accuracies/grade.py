"""What two ranks report is that of the model they save, and that model is about that of one rank with the same steps."""

from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from clinic.coded import FIRST_VAL, label_of, numbers_of
from clinic.observe import Fault, Observed, Script

FLAGS = ("--global_batch_size", 32, "--optimizer", "sgd")
TRAIN, VAL = 320, 61
BRIGHTER = 0.3
"""added to the images that rank 1 trains on, so that its statistics differ from those of rank 0"""
CLOSE = 1e-4
ALIKE = 0.05


def grade(script: Script) -> Iterator[str]:
    """Yield a line for each thing that is still wrong."""
    run_dir = script.folder / "two_epochs"
    run = script.run(
        *FLAGS, "--lr", 0.1, "--epochs", 2, ranks=2, train=TRAIN, val=VAL, run_dir=run_dir, watch=partial(note, run_dir)
    )
    for epoch, name in ((1, "checkpoint.previous.pt"), (2, "checkpoint.pt")):
        yield from faults_of_the_log(run, epoch, name)

    still = ("--lr", 1e-12)
    run_dir = script.folder / "two_ranks"
    two = script.run(
        *FLAGS, *still, ranks=2, train=TRAIN, val=VAL, run_dir=run_dir, watch=partial(note, run_dir, bright=1)
    )
    run_dir = script.folder / "one_rank"
    bright = set(two[1].trained)
    one = script.run(
        *FLAGS, *still, ranks=1, train=TRAIN, val=VAL, run_dir=run_dir, watch=partial(note, run_dir, bright=bright)
    )
    a, b = (outputs_of(run, "checkpoint.pt") for run in (two, one))
    off = (a - b).norm() / (b - b.mean(0)).norm()
    print("OFF", off.item())
    if not off < ALIKE:
        yield (
            "with a learning rate of almost zero, two ranks save another model than one rank with the same global batches: "
            f"its outputs for the validation samples differ by {off:.0%}"
        )
    print("SCALE", one[0].extra["scale"])
    if not one[0].extra["scale"] < ALIKE:
        yield "the model no longer normalizes in training: brighter images change what its layers compute"


def faults_of_the_log(run: Observed, epoch: int, name: str) -> Iterator[str]:
    outputs = outputs_of(run, name)
    targets = label_of(FIRST_VAL + torch.arange(VAL))
    loss = F.cross_entropy(outputs, targets).item()
    right = (outputs.argmax(1) == targets).sum().item()
    log = run.epochs[epoch - 1]
    print("LOG", loss, log["val_loss"], right, log["val_accuracy"] * VAL)
    if abs(loss - log["val_loss"]) > CLOSE * loss or abs(right - log["val_accuracy"] * VAL) > 0.01:
        yield (
            f"on two ranks, the reported loss after epoch {epoch} is {log['val_loss']:.5f} and the accuracy "
            f"{log['val_accuracy']:.2%}, but the model in the checkpoint has {loss:.5f} and {right / VAL:.2%}"
        )


def outputs_of(run: Observed, name: str) -> torch.Tensor:
    """Return what the model in a checkpoint says to each validation sample."""
    found = {}
    for rank in run.ranks:
        found |= rank.extra[name]
    missing = [number for number in range(FIRST_VAL, FIRST_VAL + VAL) if number not in found]
    if missing:
        raise Fault(f"{len(missing)} validation samples were seen by no rank")
    return torch.stack([found[number] for number in range(FIRST_VAL, FIRST_VAL + VAL)])


def note(run_dir: Path, script: Path, bright: Any = None) -> Callable[[], dict[str, Any]]:
    """Note what the models in the checkpoints say to the samples that this rank validates."""
    torch.nn.SyncBatchNorm = SyncBatchNorm
    depth = 0
    model: list[nn.Module] = []
    inputs: dict[int, torch.Tensor] = {}
    noted: dict[str, Any] = {}

    def before(module: nn.Module, arguments: tuple) -> tuple | None:
        nonlocal depth
        depth += 1
        if depth > 1 or next(module.parameters(), None) is None or arguments[0].is_meta:
            return None
        images = arguments[0]
        numbers = numbers_of(images).tolist()
        if not module.training:
            inputs.update(zip(numbers, images.clone(), strict=True))
            return None
        model[:] = [getattr(module, "module", module)]
        if "scale" not in noted:
            noted["scale"] = 1.0
            if dist.get_world_size() == 1:
                with torch.no_grad():
                    a, b = (deepcopy(model[0])(factor * images) for factor in (1, 4))
                noted["scale"] = ((a - b).norm() / (a - a.mean(0)).norm()).item()
        if bright is None:
            return None
        if isinstance(bright, int):
            is_bright = torch.full((len(images),), dist.get_rank() == bright)
        else:
            is_bright = torch.tensor([number in bright for number in numbers])
        return (images + BRIGHTER * is_bright.view(-1, 1, 1, 1),)

    def after(module: nn.Module, arguments: tuple, outputs: object) -> None:
        nonlocal depth
        depth -= 1

    register_module_forward_pre_hook(before)
    register_module_forward_hook(after, always_call=True)

    def finish() -> dict[str, Any]:
        for name in ("checkpoint.previous.pt", "checkpoint.pt"):
            if (run_dir / name).exists():
                model[0].load_state_dict(torch.load(run_dir / name, weights_only=False)["model"])
                with torch.no_grad():
                    outputs = model[0].eval()(torch.stack(list(inputs.values()))) if inputs else []
                noted[name] = dict(zip(inputs, outputs, strict=True))
        return noted

    return finish


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor) -> torch.Tensor:
        values = values.clone()
        dist.all_reduce(values)
        return values

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient


class SyncBatchNorm(nn.modules.batchnorm._BatchNorm):
    """Computes on CPUs what PyTorch's layer of this name computes on GPUs."""

    def __init__(self, num_features: int, eps: float = 1e-5, momentum: float | None = 0.1, affine: bool = True, track_running_stats: bool = True, process_group: Any = None, device: Any = None, dtype: Any = None, **options: Any) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype, **options)

    def _check_input_dim(self, input: torch.Tensor) -> None:
        pass

    convert_sync_batchnorm = classmethod(nn.SyncBatchNorm.convert_sync_batchnorm.__func__)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return super().forward(input)
        axes = [0, *range(2, input.dim())]
        count = torch.full((input.shape[1],), input.numel() / input.shape[1])
        total, squares, count = _SumOverRanks.apply(torch.stack((input.sum(axes), (input * input).sum(axes), count)))
        mean = total / count
        variance = squares / count - mean * mean
        if self.track_running_stats:
            self.num_batches_tracked += 1
            momentum = 1 / self.num_batches_tracked.item() if self.momentum is None else self.momentum
            with torch.no_grad():
                self.running_mean.lerp_(mean, momentum)
                self.running_var.lerp_(variance * count / (count - 1), momentum)
        shape = (1, -1, *[1] * (input.dim() - 2))
        output = (input - mean.view(shape)) * (variance + self.eps).rsqrt().view(shape)
        if self.affine:
            output = output * self.weight.view(shape) + (0 if self.bias is None else self.bias.view(shape))
        return output
