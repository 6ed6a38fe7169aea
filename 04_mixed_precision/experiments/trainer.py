"""A model trained with one set of lesson 04's options after the other, by the lesson's own training step."""

import copy
import math
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count, islice

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from workload import LESSON, WorkloadConfig
from workshop.config import ComputeFlags
from workshop.loaders import Loader
from workshop.models import build_model
from workshop.step.graph import StepGraph
from workshop.step.optimizers import build_optimizer
from workshop.step.precision import AUTOCAST_DTYPES, choose_memory_format, set_switches

Batch = tuple[torch.Tensor, torch.Tensor]


class Trainer:
    """A model with the weights of ``model``, trained as ``config`` says, in this process alone.

    Dropout is off: it would make configurations differ that should not. Other trainers may have run in between, so
    every method sets torch's switches anew. With ``scale``, the loss is always multiplied by that, and the gradients
    divided by it; without, GradScaler finds the factor where the precision is fp16. ``set_switches`` sets them.
    """

    def __init__(
        self,
        config: WorkloadConfig,
        model: nn.Module,
        loader: Loader,
        device: torch.device,
        scale: float | None = None,
        set_switches: Callable[[ComputeFlags], None] = set_switches,
    ) -> None:
        self.config = config
        self.device = device
        self.set_switches = partial(set_switches, config)
        self.set_switches()
        memory_format = choose_memory_format(config.channels_last, volumes=config.dataset == "nbody")
        self.model = copy.deepcopy(model).to(device, memory_format=memory_format).train()
        for module in self.model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        self.compiled = self.model
        if config.compile != "off":
            self.compiled = torch.compile(self.model, mode=config.compile, dynamic=False)
        self.optimizer = build_optimizer(config, self.model, fused=config.fused, capturable=config.cuda_graph)
        constant = {"init_scale": scale, "growth_interval": 2**31 - 1} if scale else {}
        self.scaler = torch.amp.GradScaler(device.type, enabled=bool(scale) or config.precision == "fp16", **constant)
        graph = StepGraph(config.cuda_graph, loader.sampler)
        self.step = graph.around(partial(LESSON.train_step, config, self.compiled, self.optimizer, self.scaler))

    def autocast(self) -> torch.autocast:
        """Return the context in which the model computes in the number format of ``config``."""
        dtype = AUTOCAST_DTYPES.get(self.config.precision)
        return torch.autocast(self.device.type, dtype, enabled=dtype is not None)

    def train(self, batches: Iterator[Batch]) -> None:
        """Make a step on each batch."""
        self.set_switches()
        for inputs, targets in batches:
            self.step(inputs.to(self.device), targets.to(self.device))

    @torch.no_grad()
    def validate(self, loader: Loader) -> float:
        """Return the mean loss over the validation samples."""
        self.set_switches()
        total = torch.zeros((), device=self.device)
        with self.autocast():
            for inputs, targets in loader:
                outputs = self.model(inputs.to(self.device))
                total += LESSON.loss_function(outputs, targets.to(self.device)) * len(targets)
        return total.item() / loader.sampler.samples

    def outputs_and_gradients(self, inputs: torch.Tensor, targets: torch.Tensor) -> Batch:
        """Return the outputs of a batch and the gradients of all weights, as one long vector each, in float64.

        Raises:
            FloatingPointError: in fp16 the gradients are not finite, however small the factor of the loss.
        """
        self.set_switches()
        while True:
            self.optimizer.zero_grad()
            with self.autocast():
                outputs = self.compiled(inputs)
            self.scaler.scale(LESSON.loss_function(outputs, targets)).backward()
            scale = self.scaler.get_scale()
            gradients = torch.cat([weights.grad.double().flatten() / scale for weights in self.model.parameters()])
            self.optimizer.zero_grad()
            if gradients.isfinite().all() or not self.scaler.is_enabled():
                return outputs.detach().double().flatten(), gradients
            if scale / 2 < 1:  # not the gradients are too large, but the activations, which no factor changes
                raise FloatingPointError(f"overflows in {self.config.precision}, even with the loss times {scale:g}")
            self.scaler.update(scale / 2)  # as it would in training, where it leaves out a step that overflows


def few_samples(batch: Batch) -> Batch:
    """Return a batch of the same size that repeats its first few samples: four, or fewer if four do not divide it.

    The mean loss of the repeated samples and its gradients are those of the few samples alone, so float64 needs to
    compute no more than those. The kernels, which are chosen and compiled by shape, remain those of the whole batch.
    """
    samples = len(batch[0])
    few = _few(samples)
    inputs, targets = (part[:few].repeat(samples // few, *[1] * (part.dim() - 1)) for part in batch)
    return inputs, targets


def _few(samples: int) -> int:
    return math.gcd(samples, 4)


def reference(model: nn.Module, loader: Loader, inputs: torch.Tensor, targets: torch.Tensor) -> Batch:
    """Return what `Trainer.outputs_and_gradients` would for the first few samples if all were computed in float64.

    How many they are, says `few_samples`.
    """
    few = _few(len(inputs))
    trainer = Trainer(WorkloadConfig(), copy.deepcopy(model).double(), loader, inputs.device)
    inputs, targets = inputs[:few].double(), targets[:few]
    targets = targets.double() if targets.is_floating_point() else targets
    try:
        return trainer.outputs_and_gradients(inputs, targets)
    except RuntimeError:  # cuDNN does not have every convolution in float64; PyTorch's own kernels are slower, but do
        enabled = torch.backends.cudnn.enabled
        torch.backends.cudnn.enabled = False
        try:
            return trainer.outputs_and_gradients(inputs, targets)
        finally:
            torch.backends.cudnn.enabled = enabled


def errors_of(trainer: Trainer, batch: Batch, truth: Batch) -> tuple[float, float]:
    """Return the relative errors of outputs and gradients: norm of the difference over norm of the truth.

    Args:
        trainer: whose errors.
        batch: any; only its first samples are used, see `few_samples`.
        truth: of the same batch, as `reference` returns it.
    """
    found = trainer.outputs_and_gradients(*few_samples(batch))
    truth = truth[0].repeat(len(found[0]) // len(truth[0])), truth[1]
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


def flops_per_sample(config: WorkloadConfig, batch: Batch) -> float:
    """Return the floating-point operations of a forward and backward pass, as torch's flop counter counts them.

    It counts matrix products and convolutions, two operations for a multiplication and addition. Nothing is computed:
    the model is built on the meta device.
    """
    with torch.device("meta"):
        model = build_model(config)
    inputs, targets = (tensor.to("meta") for tensor in batch)
    with FlopCounterMode(display=False) as counter:
        LESSON.loss_function(model(inputs), targets).backward()
    return counter.get_total_flops() / len(targets)
