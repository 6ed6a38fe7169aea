"""Model FLOPs utilization (MFU): the FLOP/s of the model as a share of the device's peak.

    MFU = model FLOPs of a step / (seconds of a step x FLOP/s at the peak)

The definition is from Appendix B of the PaLM paper (Chowdhery et al. 2022, https://arxiv.org/abs/2204.02311). The model
FLOPs are the floating-point operations that forward and backward need. The recomputation of activation checkpointing
does not count, nor does the optimizer. So a run cannot raise its MFU by computing more than it must, and runs with
different options can be compared.

The paper divides by the peak that the vendor states, which few devices reach in practice. Here the peak is, everywhere
in this workshop, the fastest product of large square matrices that this process measures on its device, in the number
format of the run, and on a CPU with the threads of the run. So 100% is what the device can do, and no table of devices
is needed.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from workshop.datasets import image_dataset, nbody

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""of the matrices, by precision; with fp32 and tf32 they are float32, and PyTorch's switch decides about TF32"""
SIZES = {"cuda": (4096, 8192), "cpu": (512, 1024, 2048)}
"""rows and columns of the matrices, by type of device; of other devices the sizes are those of a CPU"""
SECONDS_PER_SIZE = 0.2
"""seconds for which products of one size are repeated"""
LONGEST_PRODUCT = 0.25
"""seconds: a product that would take longer is not tried, as on CPUs that only emulate a number format"""


@dataclass(frozen=True)
class Utilization:
    """The FLOPs of one rank in a step, and the peak of its device."""

    flops_per_sample: int
    """floating-point operations of a forward and a backward pass for one sample"""
    batch_size: int
    """samples per step and rank"""
    peak_flops_per_second: float
    """of the device of this rank"""

    @property
    def model_flops_per_step(self) -> int:
        """Floating-point operations of a training step of this rank."""
        return self.flops_per_sample * self.batch_size

    def mfu(self, samples_per_second: float) -> float:
        """Return the utilization, from 0 to 1, of a rank that trains on this many samples per second."""
        return self.flops_per_sample * samples_per_second / self.peak_flops_per_second


def utilization(config: Any, flops_per_sample: int, device: torch.device) -> Utilization:  # noqa: ANN401
    """Measure the peak of ``device``, for a run whose model needs this many operations per sample.

    Args:
        config: the flags of the run: ``precision`` and ``batch_size``.
        flops_per_sample: of a forward and a backward pass, as from `model_flops`.
        device: that trains. Set the switch for TF32 before, as in the run.
    """
    return Utilization(flops_per_sample, config.batch_size, peak_flops_per_second(config.precision, device))


def sample_shape(config: Any) -> tuple[int, ...]:  # noqa: ANN401
    """Return the shape of an input, from the flags ``dataset`` and, for volumes, ``crop_size``."""
    if config.dataset == "nbody":
        return (nbody.INPUT_CHANNELS, *3 * [config.crop_size])
    return image_dataset(config.dataset).SAMPLE_SHAPE


def model_flops(make_model: Callable[[], nn.Module], sample_shape: tuple[int, ...]) -> int:
    """Return the floating-point operations of a forward and a backward pass for one sample.

    Matrix products, convolutions and attention count: a multiplication and an addition are two operations. What is
    computed element by element does not count, nor do gradients of the inputs, which training does not need.

    They are counted on the meta device, whose tensors have shapes but no numbers, so nothing is computed. There the
    attention consists of its two products. The kernels of other devices compute one of them twice in backward.

    Args:
        make_model: returns the model.
        sample_shape: of the inputs, without the batch.
    """
    samples = 2  # batch norm needs more than one value per channel in training
    from torch.utils.flop_counter import FlopCounterMode  # here: it takes a quarter of a second, and few runs need it

    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        make_model()(torch.empty(samples, *sample_shape)).sum().backward()
    return counter.get_total_flops() // samples


def peak_flops_per_second(precision: str, device: torch.device) -> float:
    """Return the floating-point operations per second of the fastest product of large square matrices.

    It takes about a second, and on a GPU up to 0.8 GB of its memory, which are free again afterwards.

    Args:
        precision: as ``--precision``. For fp32 and tf32 PyTorch's switch must have been set before.
        device: where to compute.
    """
    best = 0.0
    generator = torch.Generator(device)  # a generator of its own: the default one is the run's
    for size in SIZES.get(device.type, SIZES["cpu"]):
        operations = 2 * size**3
        if best and operations / best > LONGEST_PRODUCT:
            break
        dtype = DTYPES.get(precision, torch.float32)
        left, right = (torch.randn(size, size, device=device, generator=generator).to(dtype) for _ in range(2))
        best = max(best, operations / _seconds_per_product(left, right))
    if device.type == "cuda":
        del left, right
        torch.cuda.empty_cache()  # the run may need all of the memory
        torch.cuda.reset_peak_memory_stats(device)  # these matrices do not count in the run's peak
    return best


def _seconds_per_product(left: torch.Tensor, right: torch.Tensor) -> float:
    """Return the seconds of a product of two matrices, in the fastest of several blocks of products."""
    out = left @ right  # loads libraries, and chooses an algorithm
    products, fastest = 1, float("inf")
    until = time.perf_counter() + SECONDS_PER_SIZE
    while time.perf_counter() < until:
        started = time.perf_counter()
        for _ in range(products):
            torch.mm(left, right, out=out)
        if out.device.type != "cpu":
            torch.accelerator.synchronize()
        seconds = time.perf_counter() - started
        fastest = min(fastest, seconds / products)
        if seconds < SECONDS_PER_SIZE / 20:  # with few products the time to start them and to wait would count too
            products *= 2
    return fastest
