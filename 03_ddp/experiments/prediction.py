"""What the alpha-beta model says of a published scaling study, and of the study measured here."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from alpha_beta import Network, Step, beta_for, equal_buckets, weak_efficiency
from scaling_study import full_over_compute

GPUS_PUBLISHED = 128


@dataclass(frozen=True)
class Published:
    """A weak-scaling result: ``GPUS_PUBLISHED`` GPUs on 32 nodes, with so many samples per GPU and step."""

    batch_size: int
    efficiency: float
    communication_overhead: float


PUBLISHED = (Published(64, 0.78, 0.25), Published(128, 0.89, 0.12))
"""3D U-Net on Perlmutter, 4 A100 per node; source: https://github.com/NERSC/sc22-dl-tutorial, README, section "Weak and
Strong Throughput Scaling" """

SAMPLES_PER_SECOND = 540
"""of one of these GPUs that trains alone with batch 64 and all optimizations; same source"""
PARAMETERS = 117e6
"""of that U-Net, counted from its layers (networks/UNet.py there)"""
BUCKETS = 8
"""NCCL calls per step; same source"""
GB_PER_SECOND = 25
"""out of a node: two Slingshot-10 NICs of 100 Gb/s, in the first phase of the machine (NERSC's page on its interconnect
at that time); the runs are of November 2021. A peak: what NCCL got of it is not known."""
ALPHA_US = 6
"""mean over a ring of 32 nodes with 4 GPUs, of the 3.4 us (NVLink) and 14 us (network) in NCCL's src/graph/tuning.cc"""

OVERLAPS = {"no overlap": False, "full overlap": True}


def curve(step: Step, network: Network, counts: list[int]) -> dict[int, tuple[float, float]]:
    """Return the efficiency by number of ranks: (without overlap, with overlap)."""
    return {
        ranks: tuple(weak_efficiency(step, network, ranks, overlap) for overlap in OVERLAPS.values())
        for ranks in counts
    }


def published_steps(
    samples_per_second: float = SAMPLES_PER_SECOND, parameters: float = PARAMETERS, buckets: int = BUCKETS
) -> dict[int, Step]:
    """Return the training steps of the published study by batch size; gradients have 4 bytes per parameter.

    A GPU is taken to be as fast with 128 samples per step as with 64, and the buckets to have equal sizes: neither is
    published.
    """
    bucket_bytes = equal_buckets(4 * parameters, buckets)
    return {p.batch_size: Step(p.batch_size / samples_per_second, bucket_bytes) for p in PUBLISHED}


def ddp_buckets(weights: Iterable[nn.Parameter]) -> tuple[int, ...]:
    """Return the bytes of the buckets that DDP makes by default, in the order in which backward fills them.

    It goes from the last parameter of the model to the first, and closes a bucket as soon as it has 1 MiB (the first
    one) or 25 MiB (the others).
    """
    buckets = [0]
    limit = 2**20
    for weight in reversed(list(weights)):
        if buckets[-1] >= limit:
            buckets.append(0)
            limit = 25 * 2**20
        buckets[-1] += weight.nbytes
    return tuple(buckets)


def against_published(steps: dict[int, Step], network: Network) -> list[dict[str, Any]]:
    """Return a row for each published batch size and each assumption on overlap.

    ``predicted`` comes from the network alone, nothing being fitted. ``calibrated`` takes the bandwidth at which the
    model gives the first published figure, so it tests the model only on the others.

    Args:
        steps: by batch size.
        network: what the nodes are said to have.
    """
    found = []
    first = PUBLISHED[0]
    for name, overlap in OVERLAPS.items():
        beta = beta_for(first.efficiency, steps[first.batch_size], network.alpha, GPUS_PUBLISHED, overlap)
        for published in PUBLISHED:
            step = steps[published.batch_size]
            predicted = weak_efficiency(step, network, GPUS_PUBLISHED, overlap)
            calibrated = weak_efficiency(step, Network(network.alpha, beta), GPUS_PUBLISHED, overlap) if beta else None
            found.append(
                {
                    "batch_size": published.batch_size,
                    "overlap": name,
                    "published": published.efficiency,
                    "predicted": predicted,
                    "off_by": predicted - published.efficiency,
                    "published_overhead": published.communication_overhead,
                    "predicted_overhead": 1 - predicted,
                    "calibrated_gb_per_second": 1e-9 / beta if beta else None,
                    "calibrated": calibrated,
                    "calibrated_off_by": calibrated - published.efficiency if calibrated else None,
                }
            )
    return found


def published_header() -> list[str]:
    """Return the heads of the columns of `published_cells`."""
    return ["overlap", "batch", "published", "predicted", "off by"]


def published_cells(row: dict[str, Any]) -> list[str]:
    """Return the prediction of a row of `against_published` as text; the difference is in percentage points."""
    found = [row["overlap"], str(row["batch_size"]), f"{row['published']:.0%}", f"{row['predicted']:.0%}"]
    return [*found, f"{100 * row['off_by']:+.0f}"]


def calibrated_header() -> list[str]:
    """Return the heads of the columns of `calibrated_cells`."""
    return ["overlap", "batch", "published", "with the fitted bandwidth", "off by", "fitted GB/s"]


def calibrated_cells(row: dict[str, Any]) -> list[str]:
    """Return what a row of `against_published` says with the bandwidth that fits the first published figure."""
    found = [row["overlap"], str(row["batch_size"]), f"{row['published']:.0%}"]
    if row["calibrated"] is None:
        return [*found, "-", "-", "-"]
    calibrated = [f"{row['calibrated']:.0%}", f"{100 * row['calibrated_off_by']:+.0f}"]
    return [*found, *calibrated, f"{row['calibrated_gb_per_second']:.1f}"]


def against_measured(scaling: dict[str, Any], allreduce: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a row for each weak-scaling run with several ranks: speed with communication over that without it.

    Args:
        scaling: the results that scaling.py wrote; COMPUTE gives the time of a step, ``bucket_bytes`` what DDP sends.
        allreduce: the results that allreduce.py wrote on the same machine.
    """
    network = Network(allreduce["alpha"], allreduce["beta"])
    found = []
    for row in scaling["rows"]:
        if row["scaling"] == "weak" and row["ranks"] > 1:
            compute_seconds = row["ranks"] * row["batch_size"] / row["COMPUTE"]["mean"]
            step = Step(compute_seconds, tuple(scaling["bucket_bytes"]))
            none, full = curve(step, network, [row["ranks"]])[row["ranks"]]
            found.append(
                {
                    "ranks": row["ranks"],
                    "compute_seconds": compute_seconds,
                    "all_reduce_seconds": sum(network.all_reduce_seconds(b, row["ranks"]) for b in step.bucket_bytes),
                    "no overlap": none,
                    "full overlap": full,
                    "measured": full_over_compute(row),
                }
            )
    return found
