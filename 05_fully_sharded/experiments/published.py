"""What others have measured, beside what will_it_fit.py forecasts for the same model, GPUs and batch."""

from dataclasses import dataclass

from lab import results
from memory_model import Setup, predict, workload
from step_time import PEAK_TFLOPS, SHARE_OF_PEAK, Network, communication_seconds, compute_seconds

GIB = 2**30


@dataclass(frozen=True)
class Measured:
    """A published figure. Their activations are recomputed in part; the forecast has all or none of them."""

    name: str
    model: str
    batch_size: int
    ranks: int
    tokens_per_second: float
    """per GPU"""
    memory_gib: float


TORCHTITAN = (
    Measured("Llama 3.1 8B on 8 H100", "llama3_8b", 2, 8, 5762, 82.4),
    Measured("Llama 3.1 8B on 128 H100", "llama3_8b", 2, 128, 5605, 67.0),
)
"""torchtitan, benchmarks/llama3_h100_202412_torchtitan.md, tables 1 and 3, rows without torch.compile. Sequences of
8,192 tokens, bf16, selective activation checkpointing; H100 of 96 GB with a power limit of 500 W; memory as reserved by
the allocator. https://github.com/pytorch/torchtitan"""


def compare() -> None:
    """Store the forecast beside the published memory and throughput."""
    rows: list[list[results.Cell]] = []
    for one in TORCHTITAN:
        for recomputed in (False, True):
            setup = Setup(
                model=one.model,
                batch_size=one.batch_size,
                ranks=one.ranks,
                way="blocks",
                precision="bf16",
                checkpointing=recomputed,
            )
            computing, sending = compute_seconds(setup), communication_seconds(setup, Network())
            tokens = one.batch_size * workload(one.model).sequence_length
            overlap = [tokens / (computing + sending), tokens / max(computing, sending)]
            name = f"{one.name}, {'all' if recomputed else 'nothing'} recomputed"
            rows.append([name, predict(setup).peak / GIB, *overlap])
        rows.append([f"{one.name}, **published**", one.memory_gib, one.tokens_per_second, one.tokens_per_second])
    results.store(
        "published_forecast",
        title="Forecast, and published",
        columns=["", "memory, GiB per GPU", "tokens/s per GPU, no overlap", "full overlap"],
        rows=rows,
        formats={"memory, GiB per GPU": ",.1f", "tokens/s per GPU, no overlap": ",.0f", "full overlap": ",.0f"},
        spread=f"computed with {SHARE_OF_PEAK:.0%} of {PEAK_TFLOPS['bf16']:.0f} TFLOP/s and 8 x 50 GB/s per node; "
        "published by torchtitan",
    )
