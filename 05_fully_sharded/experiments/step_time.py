"""Lower and upper bound of the time of a training step: its operations, and the bytes that the ranks send.

A collective is a ring over all ranks that take part. Within a node every GPU sends at the speed of NVLink. Between
nodes, NCCL runs one ring per network adapter, so a node sends at the sum of its adapters. The ring is as fast as the
slower of the two.
"""

from dataclasses import dataclass
from functools import cache

from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from memory_model import LESSON, Setup, build, private_tools, workload

TFLOPS = {"bf16": 989.0, "fp32": 67.0}
"""10^12 operations per second of one H100 SXM, by precision: NVIDIA's data sheet, dense, the one for float32 without
tensor cores. Matrix products reach some three quarters of such a figure, a whole model about half."""
GPUS_PER_NODE = 8
NODE_GB_PER_SECOND = 450.0
"""that a GPU sends within its node: half of the 900 GB/s, which NVIDIA's data sheet gives for both directions"""
ADAPTER_GB_PER_SECOND = 50.0
"""that a network adapter of 400 Gb/s sends; NVIDIA's DGX H100 has one for each GPU (its data sheet)"""
ALPHA_SECONDS = 6e-6
"""of a message, however small it is: the mean over a ring through several nodes, as in lesson 03's model of a network
(03_ddp/experiments/alpha_beta.py, from NCCL's src/graph/tuning.cc)"""


@dataclass(frozen=True)
class Ranks:
    """The ranks of a collective."""

    count: int
    per_node: int
    """how many of them are on the same node"""

    def half_ring(self, nbytes: float) -> float:
        """Return the seconds of an all-gather or a reduce-scatter of so many bytes: half of a ring all-reduce."""
        if self.count == 1:
            return 0.0
        speed = NODE_GB_PER_SECOND
        if self.count > self.per_node:  # each GPU on a node has an adapter of its own
            speed = min(speed, self.per_node * ADAPTER_GB_PER_SECOND)
        return (self.count - 1) * (ALPHA_SECONDS + nbytes / self.count / (1e9 * speed))


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


def communication_seconds(setup: Setup) -> float:
    """Return how long the collectives of a step take one after the other.

    Weights are sent in the format that the model computes in, gradients in float32.
    """
    inside, outside = parameter_counts(setup.model, setup.depth)
    blocks = (setup.depth or workload(setup.model).depth) or 1
    if setup.way == "ddp":
        return 2 * Ranks(setup.ranks, min(setup.ranks, GPUS_PER_NODE)).half_ring(4 * (inside + outside))
    count = setup.ranks // setup.replicas
    ranks = Ranks(count, min(count, GPUS_PER_NODE))
    width = 2 if setup.precision == "bf16" else 4

    def groups(bytes_each: int) -> float:
        """Return the seconds for one all-gather or reduce-scatter of each group of weights."""
        if setup.way == "root":
            return ranks.half_ring(bytes_each * (inside + outside))
        return blocks * ranks.half_ring(bytes_each * inside / blocks) + ranks.half_ring(bytes_each * outside)

    seconds = groups(width) + groups(4)
    if setup.way == "blocks":  # gathered once more in backward, but for the weights that are in no block
        seconds += groups(width) - ranks.half_ring(width * outside)
    if setup.replicas > 1:  # each rank's part of the gradients, summed over the groups: by all GPUs of a node at once
        same_part = max(1, GPUS_PER_NODE // count)  # ranks of a node that have the same part, and share its adapters
        between = Ranks(setup.replicas, min(setup.replicas, same_part))
        seconds += 2 * between.half_ring(4 * (inside + outside) / count)
    return seconds


def step_bounds(setup: Setup) -> tuple[float, float]:
    """Return the seconds of computing and of communication: a step takes from the longer of the two to their sum."""
    return flops_of_step(setup) / (1e12 * TFLOPS[setup.precision]), communication_seconds(setup)
