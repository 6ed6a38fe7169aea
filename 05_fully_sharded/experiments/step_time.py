"""How long does a training step take? Its operations at a stated share of the peak, and the bytes that the ranks send.

A collective is a ring over all ranks that take part. Within a node every GPU sends at the speed of NVLink. Between
nodes, NCCL runs one ring for each network adapter, so a node sends at the sum of its adapters, and the rings that run
at the same time share them. A ring is as fast as the slower of the two, and each of its messages takes some
microseconds.
"""

from dataclasses import dataclass
from functools import cache

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from mean_loss import mean_loss
from memory_model import Setup, build, workload

PEAK_TFLOPS = {"bf16": 989.0, "fp32": 67.0}
"""10^12 operations per second of one H100 SXM, by precision: NVIDIA's data sheet, dense, the one for float32 without
tensor cores"""
SHARE_OF_PEAK = 0.4
"""that the operations of a whole model reach, an assumption: torchtitan states 33 to 39 % for Llama 3.1 8B in bf16 on
H100 (benchmarks/llama3_h100_202412_torchtitan.md), without what it computes a second time"""
GPUS_PER_NODE = 8
NVLINK_GB_PER_SECOND = 450.0
"""that a GPU sends within its node: half of the 900 GB/s, which NVIDIA's data sheet gives for both directions"""
HOP_WITHIN, HOP_BETWEEN = 3.4e-6, 14e-6
"""seconds of a message within a node and between two, however small it is: NCCL's src/graph/tuning.cc, as in lesson 03
(03_ddp/experiments/alpha_beta.py)"""


@dataclass(frozen=True)
class Network:
    """The network adapters of a node."""

    adapters: int = 8
    gb_per_second: float = 50.0
    """of each: 400 Gb/s; NVIDIA's DGX H100 has 8 of them (its data sheet)"""

    def half_ring(self, nbytes: float, ranks: int, per_node: int) -> float:
        """Return the seconds of an all-gather or a reduce-scatter of so many bytes: half of a ring all-reduce.

        Args:
            nbytes: of the whole tensor.
            ranks: that take part.
            per_node: how many of these are on the same node. The other GPUs of the node are in such rings as well.
        """
        if ranks == 1:
            return 0.0
        nodes = -(-ranks // per_node)
        speed = NVLINK_GB_PER_SECOND
        if nodes > 1:
            speed = min(speed, self.adapters * self.gb_per_second * per_node / GPUS_PER_NODE)
        latency = (ranks - nodes) * HOP_WITHIN + (nodes - 1) * HOP_BETWEEN
        return latency + nbytes * (ranks - 1) / ranks / (1e9 * speed)


@cache
def flops(setup: Setup) -> int:
    """Return the floating-point operations of a training step on one sample, as PyTorch's counter counts them.

    It counts matrix products, two operations for a multiplication and an addition; with activation checkpointing also
    those that are computed again. Attention counts as if it were not causal. Nothing is computed: a tensor on the meta
    device has a shape and no content.
    """
    with torch.device("meta"), sdpa_kernel(SDPBackend.MATH):  # attention as matrix products
        network = build(setup)
        inputs, targets = workload(setup.model).batch(1)
        with FlopCounterMode(display=False) as counter:
            mean_loss(network(inputs), targets).backward()
    return counter.get_total_flops()


def flops_of_step(setup: Setup) -> int:
    """Return the operations of a step of one rank; those of a deep model follow from two shallow ones exactly."""
    depth = setup.depth or workload(setup.model).size.depth
    one, two = (
        flops(Setup(model=setup.model, depth=blocks, checkpointing=setup.checkpointing, selective=setup.selective))
        for blocks in (1, 2)
    )
    return setup.batch_size * (one + (two - one) * (depth - 1))


@cache
def parameter_counts(model: str, depth: int) -> tuple[int, int]:
    """Return the parameters that are in blocks, and the others."""
    with torch.device("meta"):
        made = build(Setup(model=model, depth=depth))
        inside = sum(weight.numel() for weight in made.blocks.parameters())
        return inside, sum(weight.numel() for weight in made.parameters()) - inside


def compute_seconds(setup: Setup) -> float:
    """Return how long the operations of a step take."""
    return flops_of_step(setup) / (1e12 * SHARE_OF_PEAK * PEAK_TFLOPS[setup.precision])


def communication_seconds(setup: Setup, network: Network) -> float:
    """Return how long the collectives of a step take one after the other.

    Weights are sent in the format that the model computes in, for each part of a batch; gradients in float32, once.
    """
    inside, outside = parameter_counts(setup.model, setup.depth)
    blocks = setup.depth or workload(setup.model).size.depth
    if setup.way == "ddp":
        return 2 * network.half_ring(4 * (inside + outside), setup.ranks, min(setup.ranks, GPUS_PER_NODE))
    group = setup.ranks // setup.replicas
    width = 2 if setup.precision == "bf16" else 4

    def half_ring(nbytes: float) -> float:
        return network.half_ring(nbytes, group, min(group, GPUS_PER_NODE))

    def groups(bytes_each: int) -> float:
        """Return the seconds for one all-gather or reduce-scatter of each group of weights."""
        if setup.way == "root":
            return half_ring(bytes_each * (inside + outside))
        return blocks * half_ring(bytes_each * inside / blocks) + half_ring(bytes_each * outside)

    gathers = groups(width)
    if setup.way == "blocks":  # gathered once more in backward, but for the weights that are in no block
        gathers += groups(width) - half_ring(width * outside)
    seconds = setup.parts * gathers + groups(4)
    if setup.replicas > 1:  # each rank's part of the gradients, summed over the groups
        same_part = max(1, GPUS_PER_NODE // group)  # ranks of a node that have the same part
        part_bytes = 4 * (inside + outside) / group
        seconds += 2 * network.half_ring(part_bytes, setup.replicas, min(setup.replicas, same_part))
    return seconds
