"""Lower and upper bound of the time of a training step: its operations, and the bytes that the ranks send."""

import sys
from dataclasses import replace
from functools import cache

from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from memory_model import LESSON, Setup, build, private_tools, workload
from workshop.paths import REPOSITORY

sys.path.append(str(REPOSITORY / "03_ddp" / "experiments"))
from alpha_beta import Network  # lesson 03's model of a network

TFLOPS = {"bf16": 989.0, "fp32": 67.0}
"""10^12 operations per second of one H100 SXM, by precision: NVIDIA's data sheet, dense, the one for float32 without
tensor cores. Matrix products reach some three quarters of such a figure, a whole model about half."""
GB_PER_SECOND = 50.0
"""from each rank into the network: one adapter of 400 Gb/s per GPU, as in NVIDIA's DGX H100 (its data sheet)"""
ALPHA_US = 14.0
"""microseconds that a message takes however small it is: that of a network in NCCL's src/graph/tuning.cc"""


@cache
def flops(model: str, depth: int, checkpointing: bool) -> int:
    """Return the floating-point operations of a training step on one sample, as PyTorch's counter counts them.

    It counts matrix products and convolutions, two operations for a multiplication and an addition; with activation
    checkpointing also those that are computed again.
    """
    setup = Setup(model=model, depth=depth, checkpointing=checkpointing)
    with private_tools().FakeTensorMode(), sdpa_kernel(SDPBackend.MATH):  # attention as matrix products
        network = build(setup)
        inputs, targets = workload(model).batch(1)
        with FlopCounterMode(display=False) as counter:
            LESSON.loss_function(network(inputs), targets).backward()
    return counter.get_total_flops()


def flops_of_step(setup: Setup) -> int:
    """Return the operations of a step of one rank; those of a deep model follow from two shallow ones exactly."""
    depth = setup.depth or workload(setup.model).depth
    if not depth:
        return setup.batch_size * flops(setup.model, 0, setup.checkpointing)
    one, two = (flops(setup.model, blocks, setup.checkpointing) for blocks in (1, 2))
    return setup.batch_size * (one + (two - one) * (depth - 1))


@cache
def parameter_counts(model: str, depth: int) -> tuple[int, int]:
    """Return the parameters that are in blocks, and the others."""
    with private_tools().FakeTensorMode():
        made = build(Setup(model=model, depth=depth))
        inside = sum(weight.numel() for block in LESSON.blocks_of(made) for weight in block.parameters())
        return inside, sum(weight.numel() for weight in made.parameters()) - inside


def communication_seconds(setup: Setup, network: Network) -> float:
    """Return how long the collectives of a step take one after the other, by lesson 03's model of ring algorithms.

    A ring all-gather and a ring reduce-scatter are the two halves of a ring all-reduce. Weights are sent in the format
    that the model computes in, gradients in float32.
    """
    inside, outside = parameter_counts(setup.model, setup.depth)
    blocks = (setup.depth or workload(setup.model).depth) or 1
    if setup.way == "ddp":
        return network.all_reduce_seconds(4 * (inside + outside), setup.ranks)
    ranks = setup.ranks // setup.replicas
    width = 2 if setup.precision == "bf16" else 4

    def groups(bytes_each: int) -> float:
        """Return the seconds for one all-gather or reduce-scatter of each group of weights."""
        if setup.way == "root":
            return network.all_reduce_seconds(bytes_each * (inside + outside), ranks) / 2
        each = network.all_reduce_seconds(bytes_each * inside / blocks, ranks) / 2
        return blocks * each + network.all_reduce_seconds(bytes_each * outside, ranks) / 2

    seconds = groups(width) + groups(4)
    if setup.way == "blocks":  # gathered once more in backward, but for the weights that are in no block
        seconds += groups(width) - network.all_reduce_seconds(width * outside, ranks) / 2
    if setup.replicas > 1:  # each rank's part of the gradients, summed over the groups
        seconds += network.all_reduce_seconds(4 * (inside + outside) / ranks, setup.replicas)
    return seconds


def step_bounds(setup: Setup, tflops: float, network: Network) -> dict[str, float]:
    """Return seconds: of computing, of communication, and of a step with full overlap and with none."""
    compute = flops_of_step(replace(setup, ranks=1, replicas=1, way="alone")) / (1e12 * tflops)
    sent = communication_seconds(setup, network)
    return {"compute": compute, "communication": sent, "full overlap": max(compute, sent), "no overlap": compute + sent}
