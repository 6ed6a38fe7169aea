"""Draw the five lessons as one ladder, what each change gained, into docs/ladder.svg: `python -m lab.ladder_picture`.

Each bar is one change: how many times as fast a training is after it, or how many times less memory it needs. All
figures are computed from tables in results/, and below each bar stands the table. With ``--check`` nothing is written,
and the status is 1 if the picture is not what the tables say.
"""

import argparse
import math
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape

from lab.pages import Page, evaluate
from workshop.paths import REPOSITORY

FILE = REPOSITORY / "docs/ladder.svg"
H200, CPUS, COMPUTED = "one H200", "two CPU cores", "computed, on a GPU that computes nothing"
COLORS = {H200: "#009E73", CPUS: "#0072B2", COMPUTED: "#E69F00"}
TWO_CPUS = ["intel_r_xeon_r_processor_avx512_2cpu", "amd_epyc_avx512_2cpu"]
MACHINES = {H200: ["nvidia_h200_1gpu"], CPUS: TWO_CPUS, COMPUTED: TWO_CPUS}
"""the folders of results/ in which the tables of a bar are looked up"""
LESSONS = {
    "01": "01  One GPU: find the bottleneck",
    "02": "02  DataParallel",
    "03": "03  DistributedDataParallel: a process for each GPU",
    "04": "04  Mixed precision, compiled code, CUDA graphs",
    "05": "05  Fully sharded: a model that does not fit",
}


@dataclass(frozen=True)
class Change:
    """One change of a training."""

    lesson: str
    what: str
    training: str
    """of which the change was measured; or why it was not measured"""
    where: str = ""
    """a key of `MACHINES`; "" if it was not measured"""
    factor: str = ""
    """what it gained: an expression over stored figures, as in `lab.pages`"""
    noise: str = ""
    """an expression that is true if the difference is within the spread of the trials"""
    unit: str = "as fast"


UNET_STEP = '1000 * 64 / value("unet3d_throughput all options.SYNTHETIC")'
"""milliseconds for 64 cubes"""
CHANGES = (
    Change(
        *("01", "load a whole batch at a time", "small CNN, color images", CPUS),
        'value("first_changes CIFAR-10, --loader memory.times as fast")',
    ),
    Change(
        *("01", "two workers that load, in place of none", "digits; loading was not the bottleneck", CPUS),
        'value("worker_counts 2.FULL") / value("worker_counts 0.FULL")',
        'low("worker_counts 2.FULL") < high("worker_counts 0.FULL")',
    ),
    Change(
        *("01", "eight workers that load, in place of one", "digits, with the line profiler", H200),
        'value("line_profile train_one_epoch.1 worker: ms") / value("line_profile train_one_epoch.8 workers: ms")',
    ),
    Change(
        *("01", "pinned memory, copies that do not block", "seven convolutions, batches of 512", H200),
        'value("trainings pageable memory.ms per update")'
        ' / value("trainings pinned memory, non_blocking copies.ms per update")',
    ),
    Change(
        *("01", "loss.item() not in each step", "the same network", H200),
        'value("trainings loss.item() in each step.ms per update")'
        ' / value("trainings pinned memory, non_blocking copies.ms per update")',
    ),
    Change("02", "DataParallel", "not measured: needs two GPUs"),
    Change(
        *("03", "two ranks, in place of one", "digits; twice the batch for all ranks together", CPUS),
        'value("scaling weak, 2, 64.FULL") / value("scaling weak, 1, 64.FULL")',
    ),
    Change("03", "several GPUs", "not measured: the machine had one"),
    Change(
        *("04", "bf16", "reduced 3-D U-Net, AMD EPYC", CPUS),
        'value("precision_ladder bf16.samples/s") / value("precision_ladder fp32.samples/s")',
    ),
    Change(
        *("04", "TF32, in place of fp32", "3-D U-Net", H200),
        'value("trainings U-Net 3-D, fp32, 64 cubes.ms per update")'
        ' / value("trainings U-Net 3-D, TF32, 64 cubes.ms per update")',
    ),
    Change(
        *("04", "then bf16 and all options (compile, ...)", "3-D U-Net", H200),
        f'value("trainings U-Net 3-D, TF32, 64 cubes.ms per update") / ({UNET_STEP})',
    ),
    Change(
        *("04", "a CUDA graph", "seven convolutions, batches of 64", H200),
        'value("trainings a batch of 64.ms per update")'
        ' / value("trainings a batch of 64 and a CUDA graph.ms per update")',
    ),
    Change(
        *("04", "lesson 01 to mnist_fast, whole process", "digits to 98 %; most of the time is the start", H200),
        'value("beside_others MNIST, one epoch: lesson 01, whole process.measured")'
        ' / value("beside_others MNIST to 98 %: mnist_fast, whole process.measured")',
    ),
    Change(
        *("05", "shard over 8 GPUs", "6.6 billion weights, one sequence", COMPUTED),
        'value("what_helps gpt_7b, batch 1, bf16.peak")'
        ' / value("what_helps gpt_7b, batch 1, bf16.sharded over 8 ranks")',
        unit="less memory",
    ),
    Change(
        *("05", "compute a batch in four parts", "GPT-2 124M, 16 sequences", COMPUTED),
        'value("what_helps gpt2_124m, batch 16, fp32.peak") / value("what_helps gpt2_124m, batch 16, fp32.in 4 parts")',
        unit="less memory",
    ),
    Change(
        *("05", "recompute activations", "eight small blocks", CPUS),
        'value("recompute no checkpointing.MB at most") / value("recompute each block.MB at most")',
        unit="less memory",
    ),
    Change(
        *("05", "the price: --shard blocks on one rank", "a million weights", CPUS),
        'value("beside_nanogpt --shard blocks.tokens/s") / value("beside_nanogpt --shard none.tokens/s")',
    ),
)

WIDTH, ROW, HEAD = 1000, 40, 34
LEFT, RIGHT = 400, 780
"""of the bars, in pixels, from 0.7 to 10 times"""
FONT = "font-family='Helvetica, Arial, sans-serif'"


def x_of(factor: float) -> float:
    """Return the place of a factor on the logarithmic axis, in pixels."""
    return LEFT + (RIGHT - LEFT) * math.log(factor / 0.7) / math.log(10 / 0.7)


def sources(change: Change) -> list[str]:
    """Return the files of the figures of a change."""
    page = Page(FILE, MACHINES[change.where])
    tables = dict.fromkeys(re.findall(r'value\("(\w+) ', change.factor))
    return [f"{page.machine_with(f'{table}.json')}/{table}.json" for table in tables]


def gain(change: Change) -> tuple[float, str]:
    """Return the factor of a change, and how the picture says it."""
    page = Page(FILE, MACHINES[change.where])
    factor = float(evaluate(change.factor, page))
    if change.noise and evaluate(change.noise, page):
        return factor, f"{factor:.2f} times {change.unit}: noise"
    return factor, f"{factor:.{1 if factor >= 1.95 else 2}f} times {change.unit}"


def text(x: float, y: float, content: str, size: int = 14, more: str = "") -> str:
    """Return a line of text."""
    return f"<text x='{x:.0f}' y='{y:.0f}' font-size='{size}' fill='#222222' {more}>{escape(content)}</text>"


def rows_of(change: Change, y: float) -> Iterator[str]:
    """Yield what the picture shows of a change, in a row that begins at ``y``."""
    yield text(24, y + 16, change.what)
    yield text(24, y + 31, change.training, 11, "fill-opacity='0.75'")
    if not change.where:
        return
    factor, label = gain(change)
    begin, end = sorted((x_of(1), x_of(factor)))
    yield f"<rect x='{begin:.1f}' y='{y + 3:.0f}' width='{end - begin:.1f}' height='17' fill='{COLORS[change.where]}'/>"
    yield text(max(end, x_of(1)) + 8, y + 17, label, 14, "font-weight='bold'")
    yield text(x_of(1) + 4, y + 32, ", ".join(sources(change)), 10, "fill-opacity='0.75'")


def picture() -> str:
    """Return the SVG."""
    drawn, y = [], 82.0
    for lesson, title in LESSONS.items():
        drawn.append(f"<line x1='16' x2='{WIDTH - 16}' y1='{y + 4:.0f}' y2='{y + 4:.0f}' stroke='#bbbbbb'/>")
        drawn.append(text(16, y + 25, title, 15, "font-weight='bold'"))
        y += HEAD
        for change in (change for change in CHANGES if change.lesson == lesson):
            drawn += rows_of(change, y)
            y += ROW
    height = y + 42
    axis = []
    for factor in (1, 2, 5, 10):
        x, stroke = x_of(factor), "#222222" if factor == 1 else "#dddddd"
        axis.append(f"<line x1='{x:.1f}' x2='{x:.1f}' y1='78' y2='{y:.0f}' stroke='{stroke}'/>")
        axis.append(text(x, 74, f"{factor} x", 12, "text-anchor='middle'"))
    legend, x = [], 16.0
    for where, color in COLORS.items():
        legend.append(f"<rect x='{x:.0f}' y='36' width='14' height='14' fill='{color}'/>")
        legend.append(text(x + 20, 48, where, 12))
        x += 46 + 6.2 * len(where)
    foot = (
        "Each bar is one change of one training, so the factors do not multiply. Left of 1 x: slower. Files: results/."
    )
    return "\n".join(
        [
            f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {height:.0f}' {FONT}>",
            f"<rect width='{WIDTH}' height='{height:.0f}' fill='#ffffff'/>",
            text(16, 24, "What each change gained", 18, "font-weight='bold'"),
            *(legend + axis + drawn),
            text(16, y + 26, foot, 12),
            "</svg>\n",
        ]
    )


def main() -> None:
    """Write the picture, or check it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; status 1 if the picture is out of date")
    check, new = parser.parse_args().check, picture()
    if check and (not FILE.exists() or FILE.read_text() != new):
        sys.exit(f"{FILE.relative_to(REPOSITORY)} is not up to date: run `make docs`")
    if not check:
        FILE.write_text(new)


if __name__ == "__main__":
    main()
