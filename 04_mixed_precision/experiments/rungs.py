"""The rungs of the precision ladder: one model, trained with one set of options after the other."""

import copy
from collections.abc import Iterator
from itertools import count, islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from workshop.config import ComputeFlags
from workshop.loaders import Loader
from workshop.models import build_model
from workshop.step.graph import StepGraph
from workshop.step.optimizers import build_optimizer
from workshop.step.precision import AUTOCAST_DTYPES, choose_memory_format, set_switches

Batch = tuple[torch.Tensor, torch.Tensor]

FORMATS: dict[str, dict[str, Any]] = {name: {"precision": name} for name in ("fp32", "tf32", "fp16", "bf16")}
MORE: dict[str, dict[str, Any]] = {
    "channels_last": {"channels_last": True},
    "cudnn_benchmark": {"cudnn_benchmark": True},
    "fused": {"fused": True},
    "compile": {"compile": "default"},
    "cuda_graph": {"cuda_graph": True},
}
"""each of these is added to the ones before it that the device has, on top of bf16"""


def loss_function(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean loss that lesson 04 trains with: absolute error for volumes, cross-entropy for classes."""
    return F.l1_loss(outputs, targets) if targets.is_floating_point() else F.cross_entropy(outputs, targets)


class Rung:
    """A model with the weights of ``model``, trained as ``config`` says, in this process alone.

    Dropout is off: it would make rows differ that should not. Other rungs may have run in between, so every method sets
    torch's switches anew.
    """

    def __init__(self, config: ComputeFlags, model: nn.Module, loader: Loader, device: torch.device) -> None:
        self.config = config
        self.device = device
        set_switches(config)
        self.model = copy.deepcopy(model).to(device, memory_format=choose_memory_format(config)).train()
        for module in self.model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        off = config.compile == "off"
        self.outer = self.model if off else torch.compile(self.model, mode=config.compile, dynamic=False)
        self.optimizer = build_optimizer(config, self.model, capturable=config.cuda_graph)
        self.scaler = torch.amp.GradScaler(device.type, enabled=config.precision == "fp16")
        self.graph = StepGraph(config.cuda_graph, loader.sampler)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the outputs of a batch, computed with this rung's precision."""
        precision = self.config.precision
        with torch.autocast(self.device.type, AUTOCAST_DTYPES.get(precision), precision in AUTOCAST_DTYPES):
            return self.outer(inputs)

    def train(self, batches: Iterator[Batch]) -> None:
        """Make a step on each batch."""
        set_switches(self.config)

        def step(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            self.optimizer.zero_grad()
            loss = loss_function(self.forward(inputs), targets)
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            return loss.detach()

        for inputs, targets in batches:
            self.graph(step, inputs.to(self.device), targets.to(self.device))

    @torch.no_grad()
    def validate(self, loader: Loader) -> float:
        """Return the mean loss over the validation samples."""
        set_switches(self.config)
        total = torch.zeros((), device=self.device)
        with torch.autocast(
            self.device.type, AUTOCAST_DTYPES.get(self.config.precision), self.config.precision in AUTOCAST_DTYPES
        ):
            for inputs, targets in loader:
                outputs = self.model(inputs.to(self.device))
                total += loss_function(outputs, targets.to(self.device)) * len(targets)
        return total.item() / loader.sampler.samples

    def outputs_and_gradients(self, inputs: torch.Tensor, targets: torch.Tensor) -> Batch:
        """Return the outputs of a batch and the gradients of all weights, as one long vector each, in float64."""
        set_switches(self.config)
        while True:
            self.optimizer.zero_grad()
            outputs = self.forward(inputs)
            self.scaler.scale(loss_function(outputs, targets)).backward()
            scale = self.scaler.get_scale()
            gradients = torch.cat([weights.grad.double().flatten() / scale for weights in self.model.parameters()])
            self.optimizer.zero_grad()
            if gradients.isfinite().all() or not self.scaler.is_enabled():
                return outputs.detach().double().flatten(), gradients
            self.scaler.update(scale / 2)  # as it would in training, where it leaves out a step that overflows


def reference(model: nn.Module, loader: Loader, inputs: torch.Tensor, targets: torch.Tensor) -> Batch:
    """Return what `Rung.outputs_and_gradients` would, were all computed in float64."""
    rung = Rung(ComputeFlags(), copy.deepcopy(model).double(), loader, inputs.device)
    targets = targets.double() if targets.is_floating_point() else targets
    return rung.outputs_and_gradients(inputs.double(), targets)


def errors_of(rung: Rung, batch: Batch, truth: Batch) -> tuple[float, float]:
    """Return the relative errors of a rung's outputs and gradients: norm of the difference over norm of the truth."""
    found = rung.outputs_and_gradients(*batch)
    outputs, gradients = (float((mine - true).norm() / true.norm()) for mine, true in zip(found, truth, strict=True))
    return outputs, gradients


def batches_of(loader: Loader, steps: int) -> Iterator[Batch]:
    """Return an iterator over so many whole batches, epoch after epoch; always the same ones."""
    return islice(_whole_batches(loader), steps)


def _whole_batches(loader: Loader) -> Iterator[Batch]:
    for epoch in count(1):
        loader.sampler.set_epoch(epoch)
        for inputs, targets in loader:
            if len(targets) == loader.sampler.global_batch_size:
                yield inputs, targets


def flops_per_sample(config: ComputeFlags, batch: Batch) -> float:
    """Return the floating-point operations of a forward and backward pass, as torch's flop counter counts them.

    It counts matrix products and convolutions, two operations for a multiplication and addition. Nothing is computed:
    the model is built on the meta device.
    """
    with torch.device("meta"):
        model = build_model(config)
    inputs, targets = (tensor.to("meta") for tensor in batch)
    with FlopCounterMode(display=False) as counter:
        loss_function(model(inputs), targets).backward()
    return counter.get_total_flops() / len(targets)
