"""Lesson 03's train.py, unchanged, as rank 0 of up to 64 simulated T4s: what do weak and strong scaling cost?

    python ../data/prepare.py cifar10 --synthetic
    python experiments/simulated_scaling.py              # some minutes, on a machine that does nothing else

You should see the milliseconds of a step with and without communication, in one bucket and in DDP's buckets, and the
efficiency. The other ranks do not exist: they count as equally fast, so no rank waits for a slower one. It needs what
the null GPU needs (tools/nullgpu/README.md).
"""

import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from alpha_beta import GB_PER_SECOND, PUBLISHED
from lab import results
from lab.flags import Parser
from lab.launching import train
from lab.plots import COLORS, panels
from lab.simulated import start
from lab.timing import alternately, mean_std
from workshop.errors import run_reporting_user_errors

LESSON = Path(__file__).resolve().parents[1]
LESSON_04 = LESSON.parent / "04_mixed_precision"
GPU, ON_A_NODE = "t4", 8
FLAGS = ("--config", "../configs/cifar10.yaml", "--model", "resnet18", "--loader", "device", "--limit_val", 128)
BATCH = 512
"""samples per step: of each GPU in weak scaling, of all in strong scaling"""
BUCKETS = {"one bucket": 1000, "DDP's buckets": 25}
"""--bucket_cap_mb: all gradients in one all-reduce, or PyTorch's default"""
SMALLEST = 16
"""samples of a GPU, below which strong scaling ends"""
AS_NERSC = ("--precision", "bf16", "--cudnn_benchmark", "true")
UNET = ("--config", "../configs/unet3d.yaml", *AS_NERSC, "--loader", "device", "--val_crops", 128)


def step(ranks: int, batch: int, megabytes: int, seconds: float) -> dict[str, float]:
    """Return the milliseconds of a step with and without communication."""
    benchmark = ("--benchmark", "true", "--benchmark_seconds", seconds)
    flags = (*FLAGS, "--batch_size", batch, "--bucket_cap_mb", megabytes, *benchmark)
    found = train(LESSON, *flags, start=(*start(GPU, gpus=ON_A_NODE, world=ranks), "python"), quiet=True)
    return {kind: 1e3 * ranks * batch / mean_std(found[kind]["trials"])[0] for kind in ("SYNTHETIC", "COMPUTE")}


def store_published(seconds: float) -> None:
    """Store the throughput of the U-Net beside the published one, both relative to the same GPUs without communication.

    The network is the one of `alpha_beta`: two adapters of 100 Gb/s for the four GPUs of a node.
    """
    rows: list[list[results.Cell]] = []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "a100_slingshot10.toml")
        file.write_text(f'like = "a100"\n\n[clock.between]\nbandwidth = {1e9 * GB_PER_SECOND}  # bytes/s\n')

        def per_gpu(ranks: int, batch: int) -> float:
            """Return the samples/s of each of ``ranks`` GPUs."""
            crops = ("--train_crops", 4 * ranks * batch, "--global_batch_size", ranks * batch)
            benchmark = ("--benchmark", "true", "--benchmark_seconds", seconds)
            begin = (*start(str(file), gpus=4, world=ranks), "python")
            found = train(LESSON_04, *UNET, *crops, *benchmark, start=begin, quiet=True)
            return mean_std(found["SYNTHETIC"]["trials"])[0] / ranks

        alone = {batch: per_gpu(1, batch) for batch in sorted({batch for _, batch in PUBLISHED})}
        for (ranks, batch), published in PUBLISHED.items():
            rows.append([ranks, batch, published, per_gpu(ranks, batch) / alone[batch]])
            print(*rows[-1], sep=" | ", flush=True)
    results.store(
        "simulated_scaling_published",
        title="The U-Net on simulated A100s beside published figures",
        columns=["GPUs", "batch per GPU", "published", "simulated"],
        rows=rows,
        formats={"published": ".0%", "simulated": ".0%"},
        unit="throughput with synthetic data, relative to the same GPUs without communication",
    )


def plot(rows: Sequence[Sequence[results.Cell]]) -> Figure:
    """Return a plot of the efficiency by number of GPUs, for both kinds of scaling."""
    figure, axes = panels(2, (11, 4.2))
    for axis, scaling in zip(axes, ("weak", "strong"), strict=True):
        chosen = [row for row in rows if row[0] in (scaling, "both")]
        for column, (name, color) in enumerate(zip(BUCKETS, COLORS, strict=False), start=6):
            found = [float(row[column]) for row in chosen]  # type: ignore[arg-type]
            axis.plot([str(row[1]) for row in chosen], found, "o-", color=color, label=name)
        axis.set(title=f"{scaling.capitalize()} scaling", xlabel="GPUs, eight on a node", ylim=(0, 1.05))
        axis.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes[0].set_ylabel("efficiency")
    axes[0].legend()
    return figure


def main() -> None:
    """Measure all configurations; store the table and the plot."""
    parser = Parser(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64], help="numbers of GPUs")
    parser.add_argument("--rounds", type=int, default=3, help="how often all is measured (default: %(default)s)")
    parser.add_argument("--benchmark_seconds", type=float, default=0.5, help="of a trial (default: %(default)s)")
    parser.add_argument("--published", action="store_true", help="only lesson 04's U-Net beside published figures")
    arguments = parser.parse_args()
    if arguments.published:
        store_published(arguments.benchmark_seconds)
        return
    weak = [("weak" if ranks > 1 else "both", ranks, BATCH) for ranks in arguments.ranks]
    strong = [("strong", n, BATCH // n) for n in arguments.ranks if n > 1 and BATCH // n >= SMALLEST]
    trials = {
        f"{scaling} {ranks} {name}": partial(step, ranks, batch, megabytes, arguments.benchmark_seconds)
        for scaling, ranks, batch in (*weak, *strong)
        for name, megabytes in BUCKETS.items()
    }
    found = alternately(trials, arguments.rounds)
    one = min(trial["COMPUTE"] for name in BUCKETS for trial in found[f"both 1 {name}"])
    rows: list[list[results.Cell]] = []
    for scaling, ranks, batch in (*weak, *strong):
        ideal = one * (1 if scaling != "strong" else 1 / ranks)
        # The host's time is real, so the fastest round is the least disturbed one.
        compute = min(trial["COMPUTE"] for name in BUCKETS for trial in found[f"{scaling} {ranks} {name}"])
        steps = [min(trial["SYNTHETIC"] for trial in found[f"{scaling} {ranks} {name}"]) for name in BUCKETS]
        rows.append([scaling, ranks, batch, compute, *steps, *(ideal / milliseconds for milliseconds in steps)])
    columns = ["scaling", "GPUs", "batch per GPU", "computing, ms"]
    columns += [f"a step, {name}, ms" for name in BUCKETS] + [f"efficiency, {name}" for name in BUCKETS]
    results.store(
        "simulated_scaling",
        title="Scaling over simulated T4s",
        columns=columns,
        rows=rows,
        formats=dict.fromkeys(columns[3:6], ".1f") | dict.fromkeys(columns[6:], ".0%"),
        unit="ResNet-18 with images of 32x32, fp32, 47 MB of gradients; eight simulated T4s on a node, over PCIe",
        spread=f"the fastest of {arguments.rounds} rounds",
        figure=plot(rows),
    )


if __name__ == "__main__":
    run_reporting_user_errors(main)
