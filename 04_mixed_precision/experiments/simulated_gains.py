"""What do formats, compilation and CUDA graphs gain on an A100? Lesson 04's train.py, unchanged, on a simulated one.

    python ../data/prepare.py nbody --synthetic --cells 128; python ../data/prepare.py mnist --synthetic
    python experiments/simulated_gains.py                # some minutes, on a machine that does nothing else

You should see that the full U-Net gains from each format and hardly from the rest, because its GPU is always busy;
and that a small network gains from a graph and not from a format, because its GPU waits for the host. It needs what the
null GPU needs (tools/nullgpu/README.md).
"""

from functools import partial
from pathlib import Path

from lab import results
from lab.flags import Parser
from lab.launching import train
from lab.simulated import start
from lab.timing import alternately, mean_std
from workshop.errors import run_reporting_user_errors

LESSON = Path(__file__).resolve().parents[1]
GPU, BATCH = "a100", 64
WORKLOADS: dict[str, tuple[object, ...]] = {
    "the full U-Net": ("--config", "../configs/unet3d.yaml", "--train_crops", 640, "--val_crops", 64),
    "a small network": ("--config", "../configs/mnist.yaml", "--limit_train", 1920, "--limit_val", 64),
}
OPTIONS: dict[str, tuple[object, ...]] = {
    "fp32": ("--precision", "fp32"),
    "tf32": ("--precision", "tf32"),
    "bf16": ("--precision", "bf16"),
    "bf16, fused optimizer": ("--precision", "bf16", "--fused", "true"),
    "bf16, compiled": ("--precision", "bf16", "--fused", "true", "--compile", "default"),
    "bf16, CUDA graph": ("--precision", "bf16", "--fused", "true", "--cuda_graph", "true"),
}


def milliseconds(workload: str, option: str, seconds: float) -> float:
    """Return the milliseconds of a step with data that are on the GPU."""
    benchmark = ("--loader", "device", "--benchmark", "true", "--benchmark_seconds", seconds)
    found = train(LESSON, *WORKLOADS[workload], *OPTIONS[option], *benchmark, start=(*start(GPU), "python"), quiet=True)
    return 1e3 * BATCH / mean_std(found["SYNTHETIC"]["trials"])[0]


def main() -> None:
    """Measure all of them alternately; store the table."""
    parser = Parser(__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="how often all is measured (default: %(default)s)")
    parser.add_argument("--benchmark_seconds", type=float, default=0.5, help="of a trial (default: %(default)s)")
    parser.add_argument("--workload", choices=WORKLOADS, action="append", help="one of them only (default: all)")
    arguments = parser.parse_args()
    workloads = arguments.workload or list(WORKLOADS)
    trials = {
        (workload, option): partial(milliseconds, workload, option, arguments.benchmark_seconds)
        for workload in workloads
        for option in OPTIONS
    }
    # The host's time is real, so the fastest round is the least disturbed one.
    best = {key: min(found) for key, found in alternately(trials, arguments.rounds).items()}
    rows: list[list[results.Cell]] = []
    for option in OPTIONS:
        row: list[results.Cell] = [option]
        for workload in workloads:
            row += [best[workload, option], best[workload, "fp32"] / best[workload, option]]
        rows.append(row)
    columns = ["", *(f"{workload}, {what}" for workload in workloads for what in ("ms", "gain over fp32"))]
    results.store(
        "simulated_gains",
        title="Formats and graphs on a simulated A100",
        columns=columns,
        rows=rows,
        formats={name: ".1f" if name.endswith("ms") else ".2f" for name in columns[1:]},
        unit="a step on a simulated A100: 64 cubes of 64x64x64 cells, or 64 digits, which are on the GPU",
        spread=f"the fastest of {arguments.rounds} rounds",
    )


if __name__ == "__main__":
    run_reporting_user_errors(main)
