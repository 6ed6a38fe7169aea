"""The results of two ranks are those of the model that they save, which is about that of one rank with the same steps.

The script validates the checkpoint that it resumes from: so a single rank says what the model in it computes.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as differentiable
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.module import register_module_forward_pre_hook

from clinic.coded import FIRST_VAL, label_of, numbers_of
from clinic.observe import Shown
from clinic.runs import Fault, Observed, Script, difference, percent

STEPS, VAL = 10, 61
FLAGS = ("--global_batch_size", 32, "--optimizer", "sgd")
BRIGHTER = 0.1
"""in units of the standard deviation of all pixels: so much brighter are the images that rank 1 trains on"""
CLOSE = 1e-5
"""relative; the order in which float32 numbers are added up changes a tenth of it or less"""
ALIKE = 0.03
"""relative; averaging the statistics of the ranks, instead of using those of the global batch, changes a third of it"""


def grade(script: Script) -> Iterator[str]:
    """Yield a line for each thing that is still wrong."""
    flags = ("--lr", 0.003, "--epochs", 2)
    run = train(script, *flags, ranks=2, stop_after=STEPS + 1)  # in the second epoch
    again = train(script, *flags, "--resume", "true", ranks=1, run_dir=run.run_dir)
    outputs = outputs_of(list(itertools.takewhile(lambda call: not call.training, again[0].shown)))
    targets = label_of(FIRST_VAL + torch.arange(VAL))
    loss, right = F.cross_entropy(outputs, targets).item(), int((outputs.argmax(1) == targets).sum())
    reported = run.epochs[0]
    where = "after an epoch on two ranks, the reported"
    if not math.isclose(reported["val_loss"], loss, rel_tol=CLOSE, abs_tol=1e-6):
        yield f"{where} loss is {reported['val_loss']:.7g}, but that of the model in the checkpoint is {loss:.7g}"
    elif abs((accuracy := reported["val_accuracy"]) * VAL - right) > 1e-3:
        yield f"{where} accuracy is {accuracy:.2%}, but that of the model in the checkpoint is {right / VAL:.2%}"

    still = ("--lr", 1e-12)  # the weights stay as they are
    bright = set(run[1].trained[: len(run[1].trained) // 2])
    two, one = (train(script, *still, ranks=ranks, bright=bright) for ranks in (2, 1))
    found, expected = (outputs_of([call for rank in run.ranks for call in rank.shown]) for run in (two, one))
    if not (off := difference(found - expected.mean(0), expected - expected.mean(0))) < ALIKE:
        yield (
            "if the weights are left as they are, two ranks do not end with the model of one rank that had the same "
            f"global batches: what it computes for the validation samples differs by {percent(off)}"
        )
    if not one[0].extra["change"] < ALIKE:
        yield "in training, the model does not normalize what its layers compute"


def train(script: Script, *flags: object, ranks: int, bright: set[int] = frozenset(), **what: Any) -> Observed:  # noqa: ANN401
    """Run the script, in which some images are brighter in training."""
    watch = partial(prepare, bright=bright)
    return script.run(*FLAGS, *flags, ranks=ranks, train=32 * STEPS, val=VAL, keep=True, watch=watch, **what)


def outputs_of(calls: Sequence[Shown]) -> torch.Tensor:
    """Return what the model computes for each validation sample, (VAL, 10) float64."""
    outputs: dict[int, torch.Tensor] = {}
    for call in calls:
        if not call.training and call.outputs is not None:
            outputs |= dict(zip(call.samples, call.outputs.double(), strict=True))
    numbers = range(FIRST_VAL, FIRST_VAL + VAL)
    if missing := [number for number in numbers if number not in outputs]:
        raise Fault(f"no rank passes {len(missing)} of {VAL} validation samples to the model in evaluation mode")
    return torch.stack([outputs[number] for number in numbers])


def prepare(_: Path, bright: set[int]) -> Callable[[], dict[str, float]]:
    """Make images brighter, let `nn.SyncBatchNorm` work on CPUs, and note how the model depends on the contrast."""
    torch.nn.SyncBatchNorm = SyncBatchNorm  # type: ignore[misc]
    noted: dict[str, float] = {}

    def before_forward(module: nn.Module, arguments: tuple) -> tuple | None:
        (images, *_) = arguments
        is_model = module.training and torch.is_grad_enabled() and next(module.parameters(), None) is not None
        if not is_model or images.is_meta or images.shape[1:] != (1, 28, 28) or hasattr(images, "seen"):
            return None
        if not noted and dist.get_world_size() == 1:
            noted["change"] = change_by_contrast(getattr(module, "module", module), images)
        is_bright = torch.tensor([number in bright for number in numbers_of(images).tolist()])
        images = images + BRIGHTER * is_bright.view(-1, 1, 1, 1)
        images.seen = True  # so that the layers of the model are left alone
        return (images,)

    if bright:
        register_module_forward_pre_hook(before_forward)
    return lambda: noted


def change_by_contrast(model: nn.Module, images: torch.Tensor) -> float:
    """Return how much the outputs of a model that trains change if its inputs are multiplied, relative to them.

    If the first layer has no bias, and its outputs are normalized, nothing changes.
    """
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        outputs, changed = (model.forward(factor * images) for factor in (1, 4))
        model.load_state_dict(before)
    return difference(changed - outputs.mean(0), outputs - outputs.mean(0))


class SyncBatchNorm(_BatchNorm):
    """Computes on CPUs what PyTorch's layer of the same name computes on GPUs."""

    convert_sync_batchnorm = classmethod(nn.SyncBatchNorm.convert_sync_batchnorm.__func__)  # type: ignore[attr-defined]

    def __init__(self, features: int, eps: float = 1e-5, momentum: float = 0.1, *_: object, **__: object) -> None:
        super().__init__(features, eps, momentum)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalize over the batches of all ranks in training, and with the running statistics in validation."""
        if not self.training:
            return F.batch_norm(input, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps)
        count = torch.full((input.shape[1],), float(input[:, 0].numel()))
        sums = torch.stack((input.sum((0, 2, 3)), (input * input).sum((0, 2, 3)), count))
        total, squares, count = differentiable.all_reduce(sums)
        mean, variance = total / count, squares / count - (total / count) ** 2
        with torch.no_grad():
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(variance * count / (count - 1), self.momentum)
        weight, bias = (weight.view(-1, 1, 1) for weight in (self.weight, self.bias))
        return (input - mean.view(-1, 1, 1)) * (variance.view(-1, 1, 1) + self.eps).rsqrt() * weight + bias
