"""Runs in which no weight moves: what the script prints, to compare validations on one rank and on several.

On several ranks, the weights are trained until the first evaluation. Rank 0 stores them there; from then on they are
put back after each update. The run on one rank begins with the stored ones. So all validations are those of the same
weights. Running statistics of batch norm never move, because they would differ between ranks.

Weights that have hardly been trained often give every sample the same answer, and then a wrong count of right answers
is right by chance. So noise that follows from the content of each sample is added to what a model says in evaluation:
the same on any rank, and in any batch.
"""
# ruff: noqa: ANN401  (it passes on the arguments of functions of any kind)

import os
import sys
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ..events import weight_key
from ..trail import note, user_line
from .common import CONFIG, local, patch, quietly

MOST_LINES = 2000
SPREAD = 1.0
"""standard deviation of the noise that is added to the outputs of a model in evaluation"""
LONGEST = 500
"""characters of a line that are kept"""


@dataclass
class Frozen:
    """The weights before the update that is being made, and the text that is being printed."""

    weights: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    still: bool = False
    """whether the weights have ceased to move"""
    depth: int = 0
    lines: int = 0


frozen = Frozen()


def install() -> None:
    """Keep the weights of all optimizers and the statistics of batch norms as they are, and note what is printed."""
    if not CONFIG.frozen:
        return
    frozen.still = bool(CONFIG.weights)
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)
    patch(nn.functional, "batch_norm", _batch_norm)
    for stream in (sys.stdout, sys.stderr):
        stream.write = Printed(stream.write)  # type: ignore[method-assign]


def _before_step(optimizer: Optimizer, *_: Any) -> None:
    frozen.depth += 1
    if frozen.depth == 1 and frozen.still:
        keep(optimizer)


@quietly
def keep(optimizer: Optimizer) -> None:
    """Remember the weights of an optimizer."""
    parameters = [p for group in optimizer.param_groups for p in group["params"] if not p.is_meta]
    frozen.weights = [(p, local(p).detach().clone()) for p in parameters]


def _after_step(*_: Any) -> None:
    frozen.depth -= 1
    if frozen.depth == 0:
        put_back()


@quietly
def put_back() -> None:
    """Give the weights their old values."""
    for p, before in frozen.weights:
        local(p).detach().copy_(before)
    frozen.weights = []


def before_call(known: list[nn.Module], number: int, *, is_new: bool, evaluates: bool) -> None:
    """Give a model the stored weights before its first call; or store those of all models before the first evaluation.

    A model that is called first after that, such as a student whose teacher was evaluated before, is stored then.

    Args:
        known: all models, in the order of their first calls.
        number: of the model that is called.
        is_new: whether it is its first call.
        evaluates: whether it is called in evaluation.
    """
    if CONFIG.weights and is_new:
        stored = torch.load(CONFIG.weights, weights_only=True) if os.path.exists(CONFIG.weights) else {}
        named = {weight_key(number, name): p for name, p in known[number].named_parameters()}
        fitting = {key: p for key, p in named.items() if key in stored and stored[key].shape == p.shape}
        with torch.no_grad():
            for key, p in fitting.items():
                p.copy_(stored[key])
        note("stored_weights", model=number, missing=len(named) - len(fitting))
    elif CONFIG.frozen and not CONFIG.weights and (evaluates or (is_new and frozen.still)):
        begins, frozen.still = not frozen.still, True
        if (begins or is_new) and os.environ.get("RANK", "0") == "0":
            named = {weight_key(i, name): p for i, one in enumerate(known) for name, p in one.named_parameters()}
            whole = {key: p.detach().cpu() for key, p in named.items() if not hasattr(p, "device_mesh")}
            torch.save(whole, f"{CONFIG.scratch}/weights.pt")


@quietly
def spread(inputs: tuple, out: Any) -> Any:
    """Return the outputs (N, ...) of a model with noise that follows from each of its N inputs."""
    sample = next((one for one in inputs if type(one) is torch.Tensor and one.dim()), None)
    if sample is None or type(out) is not torch.Tensor or not out.is_floating_point() or not out.dim():
        return out
    if len(out) != len(sample) or not len(out):
        return out
    return torch.stack([spread_one(one, answer) for one, answer in zip(sample, out, strict=True)])


def spread_one(sample: torch.Tensor, answer: torch.Tensor) -> torch.Tensor:
    """Return the output of one sample with noise; probabilities, and their logarithms, stay what they are."""
    content = sample.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    numbers = torch.Generator().manual_seed(zlib.crc32(content))
    noise = SPREAD * torch.randn(answer.shape, generator=numbers).to(answer.device, answer.dtype)
    if answer.min() >= 0 and answer.max() <= 1:
        return (answer + noise) % 1
    if answer.dim() and abs(float(answer.float().logsumexp(0).mean())) < 1e-3:
        return (answer + noise).log_softmax(0)
    return answer + noise


def _batch_norm(own: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def batch_norm(input: Any, mean: Any = None, variance: Any = None, *args: Any, **kwargs: Any) -> torch.Tensor:
        mean, variance = kwargs.pop("running_mean", mean), kwargs.pop("running_var", variance)
        training = kwargs.get("training", args[2] if len(args) > 2 else False)
        if training and mean is not None:
            mean, variance = mean.clone(), variance.clone()
        return own(input, mean, variance, *args, **kwargs)

    return batch_norm


class Printed:
    """A stream's ``write`` that also notes whole lines which have digits, with the line of the script."""

    def __init__(self, own: Callable[[str], int]) -> None:
        self.own, self.text = own, ""

    def __call__(self, text: str) -> int:
        """Write a text."""
        if isinstance(text, str) and frozen.lines < MOST_LINES:
            *lines, self.text = (self.text + text).split("\n")
            for line in lines:
                if any(letter.isdigit() for letter in line):
                    frozen.lines += 1
                    note("printed", text=line[-LONGEST:], at=user_line())
        return self.own(text)
