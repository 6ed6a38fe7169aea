"""The results of two ranks are those of the model that they save, which is about that of one rank with the same steps.

In two of the runs, the images that rank 1 trains on are a little brighter, so that the statistics of the ranks differ.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from clinic.coded import FIRST_VAL, label_of, numbers_of
from clinic.observe import Fault, Observed, Script, percent

TRAIN, VAL = 320, 61
FLAGS = ("--global_batch_size", 32, "--optimizer", "sgd")
CHECKPOINTS = ("checkpoint.previous.pt", "checkpoint.pt")
BRIGHTER = 0.1
"""in units of the standard deviation of all pixels"""
CLOSE = 1e-5
"""relative; the order in which float32 numbers are added up changes a tenth of it or less"""
ALIKE = 0.03
"""relative; averaging the statistics of the ranks, instead of using those of the global batch, changes a third of it"""


def grade(script: Script) -> Iterator[str]:
    """Yield a line for each thing that is still wrong."""
    run = train(script, "two_epochs", "--lr", 0.003, "--epochs", 2, ranks=2)
    wrong_logs = [line for epoch, name in enumerate(CHECKPOINTS, 1) for line in wrong_results(run, epoch, name)]
    yield from wrong_logs[:1]

    first_epoch = run[1].trained[: len(run[1].trained) // 2]
    still = ("--lr", 1e-12)  # the weights stay as they are
    two = train(script, "two_ranks", *still, ranks=2, bright=first_epoch)
    one = train(script, "one_rank", *still, ranks=1, bright=first_epoch)
    off = difference(*(outputs_of(run, "checkpoint.pt") for run in (two, one)))
    if not off < ALIKE:
        yield (
            "if the weights are left as they are, two ranks do not end with the model of one rank that had the same "
            f"global batches: what it computes for the validation samples differs by {percent(off)}"
        )
    if not one[0].extra["change"] < ALIKE:
        yield "in training, the model does not normalize what its layers compute"
    if any(rank.extra["unchanged"] for rank in two.ranks):
        yield "training has not changed the running statistics in the checkpoint"


def train(script: Script, name: str, *flags: object, ranks: int, bright: Sequence[int] = ()) -> Observed:
    """Run the script with ``note``."""
    run_dir = script.folder / name
    watch = partial(note, run_dir=run_dir, bright=set(bright))
    return script.run(*FLAGS, *flags, ranks=ranks, train=TRAIN, val=VAL, run_dir=run_dir, watch=watch)


def difference(outputs: torch.Tensor, expected: torch.Tensor) -> float:
    """Return how much outputs (samples, 10) differ, relative to how much they differ from sample to sample."""
    return ((outputs - expected).norm() / (expected - expected.mean(0)).norm()).item()


def wrong_results(run: Observed, epoch: int, checkpoint: str) -> Iterator[str]:
    """Compare what is reported of an epoch with the results of the model in its checkpoint."""
    outputs = outputs_of(run, checkpoint)
    targets = label_of(FIRST_VAL + torch.arange(VAL))
    loss = F.cross_entropy(outputs, targets).item()
    right = (outputs.argmax(1) == targets).sum().item()
    reported = run.epochs[epoch - 1]
    where = f"after epoch {epoch} on two ranks, the reported"
    if not math.isclose(reported["val_loss"], loss, rel_tol=CLOSE, abs_tol=1e-6):
        yield f"{where} loss is {reported['val_loss']:.7g}, but that of the model in the checkpoint is {loss:.7g}"
    if abs(reported["val_accuracy"] * VAL - right) > 1e-3:
        yield (
            f"{where} accuracy is {reported['val_accuracy']:.2%}, but that of the model in the checkpoint is "
            f"{right / VAL:.2%}"
        )


def outputs_of(run: Observed, checkpoint: str) -> torch.Tensor:
    """Return what the model in a checkpoint computes for each validation sample, (VAL, 10) float64."""
    outputs: dict[int, torch.Tensor] = {}
    for rank in run.ranks:
        if rank.extra["error"]:
            raise Fault(f"the model in the checkpoint cannot be loaded: {rank.extra['error']}")
        outputs |= rank.extra.get(checkpoint, {})
    numbers = range(FIRST_VAL, FIRST_VAL + VAL)
    if missing := [number for number in numbers if number not in outputs]:
        raise Fault(f"no rank passes {len(missing)} of {VAL} validation samples to the model in evaluation mode")
    return torch.stack([outputs[number] for number in numbers])


def note(_: Path, run_dir: Path, bright: set[int]) -> Callable[[], dict[str, Any]]:
    """Note what the models in the checkpoints compute for the samples that this rank validates; see `Script.run`."""
    torch.nn.SyncBatchNorm = SyncBatchNorm  # type: ignore[misc]
    depth = 0
    models: list[nn.Module] = []
    inputs: dict[int, torch.Tensor] = {}
    statistics: list[torch.Tensor] = []
    """before training"""
    noted: dict[str, Any] = {"error": "", "unchanged": False}

    def before_forward(module: nn.Module, arguments: tuple) -> tuple | None:
        nonlocal depth
        depth += 1
        if depth > 1 or next(module.parameters(), None) is None or arguments[0].is_meta:
            return None
        (images,) = arguments
        numbers = numbers_of(images).tolist()
        if not module.training:
            inputs.update(zip(numbers, images.clone(), strict=True))
            return None
        if not models:
            models.append(getattr(module, "module", module))
            statistics.extend(buffer.clone() for buffer in statistics_of(models[0]))
        alone = dist.get_world_size() == 1
        if alone and "change" not in noted:
            noted["change"] = change_by_contrast(models[0], images)
        is_bright = torch.tensor([number in bright for number in numbers])
        return (images + BRIGHTER * is_bright.view(-1, 1, 1, 1),)

    def after_forward(*_: object) -> None:
        nonlocal depth
        depth -= 1

    register_module_forward_pre_hook(before_forward)
    register_module_forward_hook(after_forward, always_call=True)

    def finish() -> dict[str, Any]:
        nonlocal depth
        depth += 1  # what is called here is none of the script's calls
        for name in CHECKPOINTS:
            if not (run_dir / name).exists() or not inputs or not models:
                continue
            try:
                models[0].load_state_dict(torch.load(run_dir / name, weights_only=False)["model"])
            except (KeyError, RuntimeError, TypeError, AttributeError) as error:
                noted["error"] = shorten(f"{type(error).__name__}: {error}", 200, placeholder=" ...")
                break
            with torch.no_grad():
                outputs = models[0].eval()(torch.stack(list(inputs.values()))).double()
            noted[name] = dict(zip(inputs, outputs, strict=True))
            noted["unchanged"] = bool(statistics) and all(map(torch.equal, statistics, statistics_of(models[0])))
        return noted

    return finish


def statistics_of(model: nn.Module) -> list[torch.Tensor]:
    """Return the buffers that hold statistics; the number of batches of a batch norm is an integer."""
    return [buffer for buffer in model.buffers() if buffer.is_floating_point()]


def change_by_contrast(model: nn.Module, images: torch.Tensor) -> float:
    """Return how much the outputs of a model that trains change if its inputs are multiplied, relative to them.

    If the first layer has no bias, and its outputs are normalized, nothing changes.
    """
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        outputs, changed = (model(factor * images) for factor in (1, 4))
        model.load_state_dict(before)
    return difference(changed, outputs)


class SumOverRanks(torch.autograd.Function):
    """An all-reduce; its gradient is the sum of the gradients of all ranks."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:  # noqa: ANN401
        ctx.group = group
        values = values.clone()
        dist.all_reduce(values, group=group)
        return values

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # noqa: ANN401
        gradient = gradient.clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class SyncBatchNorm(_BatchNorm):
    """Computes on CPUs what PyTorch's layer of the same name computes on GPUs."""

    convert_sync_batchnorm = classmethod(nn.SyncBatchNorm.convert_sync_batchnorm.__func__)  # type: ignore[attr-defined]

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: dist.ProcessGroup | None = None,
        **options: Any,  # noqa: ANN401
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, **options)
        self.process_group = process_group

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalize over the batches of all ranks in training, and with the running statistics in validation."""
        if not self.training:
            use_batch = self.running_mean is None
            return F.batch_norm(
                input, self.running_mean, self.running_var, self.weight, self.bias, use_batch, 0.0, self.eps
            )
        axes = [0, *range(2, input.dim())]
        count = torch.full((input.shape[1],), float(input[:, 0].numel()))
        sums = torch.stack((input.sum(axes), (input * input).sum(axes), count))
        total, squares, count = SumOverRanks.apply(sums, self.process_group)
        mean = total / count
        variance = squares / count - mean * mean
        if self.running_mean is not None and self.running_var is not None:
            assert self.num_batches_tracked is not None
            self.num_batches_tracked += 1
            factor = 1 / self.num_batches_tracked.item() if self.momentum is None else self.momentum
            with torch.no_grad():
                self.running_mean.lerp_(mean, factor)
                self.running_var.lerp_(variance * count / (count - 1), factor)
        shape = (1, -1, *[1] * (input.dim() - 2))
        normalized = (input - mean.view(shape)) * (variance + self.eps).rsqrt().view(shape)
        if self.weight is not None:
            normalized = normalized * self.weight.view(shape)
        return normalized if self.bias is None else normalized + self.bias.view(shape)
