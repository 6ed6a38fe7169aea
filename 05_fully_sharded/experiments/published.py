"""What others have measured, beside what will_it_fit.py forecasts for the same model, GPUs and batch."""

from dataclasses import dataclass
from typing import Any

from lab import results
from memory_model import Setup, predict, workload
from step_time import PEAK_TFLOPS, SHARE_OF_PEAK, Network, communication_seconds, compute_seconds

GIB = 2**30


@dataclass(frozen=True)
class Measured:
    """A published figure."""

    name: str
    model: str
    batch_size: int
    ranks: int
    tokens_per_second: float
    """per GPU"""
    memory_gib: float
    """reserved by the allocator"""


TORCHTITAN = (
    Measured("Llama 3.1 8B on 8 H100", "llama3_8b", 2, 8, 5762, 82.4),
    Measured("Llama 3.1 8B on 128 H100", "llama3_8b", 2, 128, 5605, 67.0),
)
"""torchtitan, benchmarks/llama3_h100_202412_torchtitan.md, tables 1 and 3, rows without torch.compile. Sequences of
8,192 tokens, bf16, selective activation checkpointing; H100 of 96 GB with a power limit of 500 W. The memory is the
allocator's ``reserved_bytes.all.peak`` (torchtitan/metrics.py at that time). https://github.com/pytorch/torchtitan"""
RECOMPUTED: dict[str, dict[str, Any]] = {
    "nothing recomputed": {},
    "half of the products recomputed": {"checkpointing": True, "selective": True},
    "all recomputed": {"checkpointing": True},
}
"""rows of the forecast; the second one is what torchtitan does"""


def setup_of(one: Measured, recomputed: str) -> Setup:
    """Return the same training step; ``recomputed``: one of `RECOMPUTED`."""
    same: dict[str, Any] = {
        "model": one.model,
        "batch_size": one.batch_size,
        "ranks": one.ranks,
        "way": "blocks",
        "precision": "bf16",
    }
    return Setup(**same, **RECOMPUTED[recomputed])


def compare() -> None:
    """Store the forecast beside the published memory and throughput."""
    memory = ["allocated, GiB per GPU", "reserved"]
    speed = ["tokens/s per GPU, no overlap", "full overlap"]
    rows: list[list[results.Cell]] = []
    predict(*(setup_of(one, recomputed) for one in TORCHTITAN for recomputed in RECOMPUTED))  # all in one process
    for one in TORCHTITAN:
        for recomputed in RECOMPUTED:
            setup = setup_of(one, recomputed)
            (found,) = predict(setup)
            computing, sending = compute_seconds(setup), communication_seconds(setup, Network())
            tokens = one.batch_size * workload(one.model).sequence_length
            overlap = [tokens / (computing + sending), tokens / max(computing, sending)]
            rows.append([f"{one.name}, {recomputed}", found.peak / GIB, found.reserved / GIB, *overlap])
        rows.append([f"{one.name}, **published**", None, one.memory_gib, *2 * [one.tokens_per_second]])
    results.store(
        "published_forecast",
        title="Forecast, and published",
        columns=["", *memory, *speed],
        rows=rows,
        formats=dict.fromkeys(memory, ",.1f") | dict.fromkeys(speed, ",.0f"),
        spread=f"computed with {SHARE_OF_PEAK:.0%} of {PEAK_TFLOPS['bf16']:.0f} TFLOP/s and 8 x 50 GB/s per node; "
        "published by torchtitan",
    )
