"""The plans of plan.py beside what others have measured, and beside one another.

Used by plan.py, whose flags --published and --cases start it.
"""

import argparse
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from lab import results
from plan_trials import GIB, LESSON, Model, Trials, Way, gpus_of, say
from workshop.models.gpt import GPTSize, gpt_size


@dataclass(frozen=True)
class Measured:
    """A published speed."""

    name: str
    size: GPTSize
    gpu: str
    gb: int
    gpus: int
    part: int
    """sequences of 2,048 tokens that a GPU computes at once"""
    recomputed: bool
    share_of_peak: float


def mpt(width: int, depth: int) -> GPTSize:
    """Return the size of one of MosaicML's models. Its blocks have 12 x width² weights, as those of this lesson."""
    return GPTSize(width=width, depth=depth, vocabulary=50_432, head_dimension=128)


PUBLISHED = (
    Measured("125M", mpt(768, 12), "a100", 80, 8, 32, False, 0.4445),
    Measured("1.3B", mpt(2048, 24), "a100", 80, 8, 14, False, 0.5986),
    Measured("2.7B", mpt(2560, 32), "a100", 80, 8, 10, False, 0.6211),
    Measured("6.7B", mpt(4096, 32), "a100", 80, 8, 6, False, 0.6423),
    Measured("6.7B", mpt(4096, 32), "a100", 40, 64, 18, True, 0.5073),
    Measured("13B", mpt(5120, 40), "a100", 40, 16, 10, True, 0.5250),
    Measured("1.3B", mpt(2048, 24), "h100", 80, 64, 20, False, 0.4085),
    Measured("2.7B", mpt(2560, 32), "h100", 80, 64, 6, False, 0.4080),
    Measured("6.7B", mpt(4096, 32), "h100", 80, 8, 6, False, 0.4644),
    Measured("13B", mpt(5120, 40), "h100", 80, 64, 2, False, 0.3986),
)
"""MosaicML's llm-foundry, scripts/train/benchmarking/README.md, rows of 2,048 tokens in bf16, fully sharded. Their
models have 4 x width in the MLP without a gate, LayerNorm and ALiBi, so the same weights and nearly the same products;
on A100 (PURE) also gradients and optimizer state are in 16 bits. https://github.com/mosaicml/llm-foundry"""


def compare() -> None:
    """Store the plan's answers beside published speeds, and the parts that fit beside those that were used."""
    rows: list[list[results.Cell]] = results.unfinished_rows("plan_published")
    for one in PUBLISHED[len(rows) :]:
        size = one.size
        base = {64: "gpt_1b", 128: "gpt_7b"}[size.head_dimension]
        flags = ("--model", base, "--width", str(size.width), "--depth", str(size.depth))
        model = Model(flags, gpt_size(base, size.width, size.depth), 2048)
        options = argparse.Namespace(gpu=one.gpu, gb=one.gb, nodes=max(1, one.gpus // 8), gpus_per_node=8)
        gpus = gpus_of(options)
        say(f"{one.name} on {gpus.name} ...")
        with tempfile.TemporaryDirectory() as folder:
            trials = Trials(LESSON / "train.py", model, gpus, [], Path(folder))
            way = Way("blocks", recomputed=one.recomputed)
            needed = trials.memory(way, one.part, 1).needed / GIB
            seconds, busy, _ = trials.time(way, one.part, 1)
        flops = model.size.flops_per_token(2048) * one.part * 2048
        share = flops / seconds / gpus.peak
        recomputed = ", recomputed" if one.recomputed else ""
        name = f"{one.name}, {one.gpus} {one.gpu.upper()} of {one.gb} GB, {one.part} x 2,048 tokens{recomputed}"
        rows.append([name, needed, one.share_of_peak, share, share / one.share_of_peak, busy])
        store(rows)


def store(rows: list[list[results.Cell]]) -> None:
    """Store the table; after each row, because all of them take half an hour."""
    factors = [max(row[4], 1 / row[4]) for row in rows if isinstance(row[4], float)]
    results.store(
        "plan_published",
        title=f"Published speeds beside the plan's (wrong by a factor of {median(factors):.2f} in the median, "
        f"{max(factors):.2f} at most)",
        columns=["training", "GiB needed", "of the peak: published", "simulated", "ratio", "GPU busy"],
        rows=rows,
        formats={
            "GiB needed": ".1f",
            "of the peak: published": ".1%",
            "simulated": ".1%",
            "ratio": ".2f",
            "GPU busy": ".0%",
        },
        spread="published: MosaicML, llm-foundry, scripts/train/benchmarking/README.md",
        finished=len(rows) == len(PUBLISHED),
    )
