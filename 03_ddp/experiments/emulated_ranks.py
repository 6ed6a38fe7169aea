"""One measurement of emulated_scaling.py: ranks with emulated GPUs that really add up their gradients.

    torchrun --standalone --nproc-per-node 2 experiments/emulated_ranks.py

You should see how long a training step takes without communication, with one bucket, and with a bucket per layer. Each
rank has an emulated GPU, which takes time but no CPU. DistributedDataParallel, the gradients and the all-reduces are
real.
"""

import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from allreduce import measure as measure_all_reduce
from lab.emulated_gpu import FORWARD_SHARE, PUBLISHED, EmulatedGPU
from lab.flags import default_folder, make_output_folder
from lab.process_group import process_group
from lab.results import write_results
from lab.tables import format_seconds, format_table
from workshop.commandline import run_with_config
from workshop.config import require_positive
from workshop.profiling.throughput import max_over_ranks

KINDS = ("no_sync", "one_bucket", "many_buckets")
TITLES = {
    "no_sync": "without communication",
    "one_bucket": "one bucket",
    "many_buckets": "a bucket per layer",
}


@dataclass(frozen=True, kw_only=True)
class Config:
    """The flags."""

    batch_size: int = 64
    """samples per step and rank"""
    milliseconds: float = 1e3 * PUBLISHED["a100_optimized"].gpu
    """time that the emulated GPU needs for one sample (default: that of a 3D U-Net on an A100, published by NERSC)"""
    layers: int = 8
    """equal parts of the model, each with gradients of its own"""
    gradient_mb: float = 4.8
    """size of all gradients together in 1e6 bytes (default: that of lesson 01's model)"""
    trials: int = 3
    """measurements of each kind, alternately"""
    steps: int = 10
    """training steps of each"""
    out: Path = field(default_factory=default_folder)
    """folder for emulated_ranks.json"""

    def __post_init__(self) -> None:
        require_positive(self, "batch_size", "milliseconds", "layers", "gradient_mb", "trials", "steps")

    @property
    def step_seconds(self) -> float:
        """What the emulated GPU needs for a step."""
        return self.batch_size * self.milliseconds / 1e3

    @property
    def weights_per_layer(self) -> int:
        """Weights of a layer; each has a gradient of 4 bytes."""
        return max(1, round(self.gradient_mb * 1e6 / 4 / self.layers))


class BackwardPass:
    """The work of backward in one step on the emulated GPU.

    On a GPU the CPU runs ahead: it has queued all of backward long before the first gradient is there. So all of it is
    queued here when backward begins. A gradient is there when the work of its own layer is done.
    """

    def __init__(self, gpu: EmulatedGPU, layers: int, seconds_per_layer: float) -> None:
        self.gpu = gpu
        self.layers = layers
        self.seconds_per_layer = seconds_per_layer
        self._pieces: list[Any] = []

    def wait_for(self, layer: int) -> None:
        """Return when the gradients of this layer are there; the last layer's are the first."""
        if not self._pieces:
            self._pieces = [self.gpu.launch("backward", self.seconds_per_layer) for _ in range(self.layers)]
        self.gpu.wait_for(self._pieces[self.layers - 1 - layer], "a gradient is read")


class _Layer(torch.autograd.Function):
    """Multiply by the mean of the weights, which costs the CPU next to nothing; the gradients are true."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        inputs: torch.Tensor,
        weights: torch.Tensor,
        layer: int,
        backward_pass: BackwardPass,
    ) -> torch.Tensor:
        ctx.save_for_backward(inputs, weights)
        ctx.layer, ctx.backward_pass = layer, backward_pass
        return inputs * weights.mean()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None]:  # noqa: ANN401
        (gradient,) = gradients
        inputs, weights = ctx.saved_tensors
        of_weight = torch.full_like(weights, (gradient * inputs).sum().item() / weights.numel())
        ctx.backward_pass.wait_for(ctx.layer)  # gloo reads the gradient from the memory of the CPU, so it must be there
        return gradient * weights.mean(), of_weight, None, None


class EmulatedNetwork(nn.Module):
    """Equal layers with real weights; each takes its share of the time of a step on an emulated GPU.

    Args:
        layers: their number.
        weights_per_layer: as many gradients of 4 bytes are sent for each.
        step_seconds: forward and backward of all layers.
        gpu: of this rank.
    """

    def __init__(self, layers: int, weights_per_layer: int, step_seconds: float, gpu: EmulatedGPU) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.ones(weights_per_layer) for _ in range(layers))
        self.seconds_per_layer = step_seconds / layers
        self.gpu = gpu

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Map inputs (N,) to outputs (N,)."""
        backward_pass = BackwardPass(self.gpu, len(self.weights), (1 - FORWARD_SHARE) * self.seconds_per_layer)
        for layer, weights in enumerate(self.weights):
            self.gpu.launch("forward", FORWARD_SHARE * self.seconds_per_layer)
            inputs = _Layer.apply(inputs, weights, layer, backward_pass)
        return inputs


def wrap(config: Config, buckets: int, gpu: EmulatedGPU) -> DistributedDataParallel:
    """Return a model whose gradients DDP sends in one bucket, or in one for each layer."""
    network = EmulatedNetwork(config.layers, config.weights_per_layer, config.step_seconds, gpu)
    of_layer = 4 * config.weights_per_layer / 2**20
    # A bucket is complete when it has at least this size: one layer fills the small one, no layer the large one.
    return DistributedDataParallel(network, bucket_cap_mb=of_layer / 2 if buckets > 1 else 2 * config.layers * of_layer)


def train(model: DistributedDataParallel, steps: int, context: AbstractContextManager) -> None:
    """Take training steps, without an optimizer: its time is in the published figure."""
    inputs = torch.ones(8)
    with context:
        for _ in range(steps):
            model.zero_grad()
            model(inputs).sum().backward()


def measure_steps(config: Config, device: torch.device) -> dict[str, list[float]]:
    """Return the seconds per step of the slowest rank, in each trial, by kind."""
    gpu = EmulatedGPU(depth=4 * config.layers)
    one, many = wrap(config, 1, gpu), wrap(config, config.layers, gpu)
    works: dict[str, tuple[DistributedDataParallel, Any]] = {
        "no_sync": (many, many.no_sync),
        "one_bucket": (one, nullcontext),
        "many_buckets": (many, nullcontext),
    }
    for model, context in reversed(works.values()):
        train(model, 2, context())  # DDP arranges its buckets after the first step
    found: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for _ in range(config.trials):
        for kind, (model, context) in works.items():
            dist.barrier()
            started = time.perf_counter()
            train(model, config.steps, context())
            found[kind].append(max_over_ranks(time.perf_counter() - started, device) / config.steps)
    return found


def all_reduce_sizes(config: Config) -> list[int]:
    """Return the message sizes in bytes: a small one, that of one layer, and that of the whole model."""
    layer = 4 * config.weights_per_layer
    return sorted({4096, layer, layer * config.layers})


def main(config: Config) -> None:
    """Measure together with the other ranks; rank 0 prints and writes the results."""
    with process_group() as (rank, world_size, device):
        if rank == 0:
            make_output_folder(config.out)
        steps = measure_steps(config, device)
        sizes = all_reduce_sizes(config) if world_size > 1 else []
        messages = [measure_all_reduce(nbytes, 0.2, world_size, device) for nbytes in sizes]
        if rank == 0:
            rows = [[TITLES[kind], *map(format_seconds, seconds)] for kind, seconds in steps.items()]
            print(f"emulated GPU, real communication: {world_size} rank(s), a step in each trial\n")
            print(format_table(["", *(f"trial {number + 1}" for number in range(config.trials))], rows))
            figures = {"world_size": world_size, "step_seconds": steps, "all_reduce": messages}
            write_results(config.out / "emulated_ranks.json", device, figures)


if __name__ == "__main__":
    run_with_config(main, Config, __doc__)
