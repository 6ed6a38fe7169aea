"""What happens in a step of DDP? One training step of train.py on a time line of two ranks.

    python experiments/ddp_step.py

It starts train.py --trace true on two CPU ranks, and plots the shortest of the traced steps. You should see that the
all-reduces of the first buckets begin while backward is still running, and that each of them ends at the same time on
both ranks.
"""

import argparse
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from lab.flags import Parser, make_output_folder, require_positive
from lab.launching import reason, torchrun
from lab.results import write_results
from workshop.entry import run_reporting_user_errors
from workshop.errors import UserError
from workshop.profiling.chrome_trace import CPU_RANGE, read_events
from workshop.profiling.timeline import COLOURS

LESSON = Path(__file__).resolve().parent.parent
RANKS = 2
STEPS = 16
"""of the run: the first ones are to warm up the profiler, the last ones are traced"""
PARTS = ("forward", "backward", "optimizer")

Span = tuple[float, float]
"""start and end in milliseconds, on a clock that all ranks of a machine share"""
Step = dict[str, list[Span]]
"""one span of forward, backward and optimizer each, and the spans of the all-reduces"""


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = Parser(__doc__)
    parser.add_argument("--batch_size", type=int, default=16, help="images per rank (default: %(default)s)")
    parser.add_argument("--model", default="resnet18", help="any classifier (default: %(default)s)")
    parser.add_argument("--data_dir", help="as in train.py")
    parser.add_out("ddp_step.json and ddp_step.png")
    arguments = parser.parse_args()
    require_positive(arguments, "batch_size")
    return arguments


def trace(arguments: argparse.Namespace, folder: Path) -> list[Path]:
    """Run train.py on CPU ranks; return the trace of each rank.

    Raises:
        UserError: it failed.
    """
    samples = RANKS * arguments.batch_size
    flags = ["--config", "../configs/cifar10.yaml", "--loader", "memory", "--num_workers", 0, "--epochs", 1]
    flags += ["--model", arguments.model, "--optimizer", "sgd", "--batch_size", arguments.batch_size]
    flags += ["--limit_train", STEPS * samples, "--limit_val", samples, "--trace", "true", "--run_dir", folder]
    flags += ["--data_dir", arguments.data_dir] if arguments.data_dir else []
    words = [*torchrun(RANKS), "train.py", *map(str, flags)]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run(words, cwd=LESSON, env=environment, capture_output=True, text=True)
    if result.returncode:
        raise UserError(reason(result.stderr))
    return [folder / f"rank{rank}.pt.trace.json.gz" for rank in range(RANKS)]


def read_steps(file: Path) -> list[Step]:
    """Return the training steps of a trace."""
    spans: dict[str, list[Span]] = {name: [] for name in (*PARTS, "all-reduces")}
    for event in read_events(file):
        span = event["ts"] / 1000, (event["ts"] + event["dur"]) / 1000
        if event.get("cat") == CPU_RANGE and event["name"] in PARTS:
            spans[event["name"]].append(span)
        elif event["name"] == "gloo:all_reduce":
            spans["all-reduces"].append(span)
    steps = []
    for parts in zip(*(spans[name] for name in PARTS), strict=True):
        start, end = parts[1]  # the ranks reduce other values too, but not during backward
        inside = [span for span in spans["all-reduces"] if start <= span[0] <= end]
        steps.append({name: [span] for name, span in zip(PARTS, parts, strict=True)} | {"all-reduces": inside})
    return steps


def plot(ranks: list[Step], file: Path) -> None:
    """Plot a step of all ranks, one below the other, on the same clock."""
    figure = Figure(figsize=(10, 0.8 + 1.5 * len(ranks)), dpi=110, layout="constrained")
    panels = figure.subplots(len(ranks), sharex=True, squeeze=False)[:, 0]
    last = max(step["optimizer"][0][1] for step in ranks)
    for rank, (axes, step) in enumerate(zip(panels, ranks, strict=True)):
        for name in PARTS:
            axes.broken_barh([(start, end - start) for start, end in step[name]], (-0.4, 0.8), color=COLOURS[name])
        for number, (start, end) in enumerate(step["all-reduces"], start=1):
            axes.broken_barh([(start, end - start)], (0.6, 0.8), color=COLOURS["all-reduces"], edgecolor="white")
            axes.text((start + end) / 2, 1, str(number), ha="center", va="center", fontsize=9, color="white")
        axes.set(ylim=(1.6, -0.6), xlim=(0, last), yticks=(0, 1), yticklabels=("train.py", "all-reduces"))
        axes.set_title(f"rank {rank}", loc="left", fontsize=11)
    panels[-1].set_xlabel("milliseconds; the numbers are those of the buckets, in the order in which they are ready")
    handles = [Patch(color=COLOURS[name], label=name) for name in PARTS]
    figure.legend(handles=handles, loc="outside upper right", ncols=3, fontsize=9, frameon=False)
    figure.savefig(file)


def main() -> None:
    """Trace, choose the shortest step, plot and save it."""
    arguments = parse_arguments()
    make_output_folder(arguments.out)
    with tempfile.TemporaryDirectory() as folder:
        of_rank = [read_steps(file) for file in trace(arguments, Path(folder))]
    steps = list(zip(*of_rank, strict=True))
    shortest = min(steps, key=lambda ranks: ranks[0]["optimizer"][0][1] - ranks[0]["forward"][0][0])
    first = min(step["forward"][0][0] for step in shortest)
    shifted = [
        {name: [(start - first, end - first) for start, end in spans] for name, spans in step.items()}
        for step in shortest
    ]
    for rank, step in enumerate(shifted):
        lengths = ", ".join(f"{name} {end - start:.0f} ms" for name in PARTS for start, end in step[name])
        early = sum(end <= step["all-reduces"][-1][0] for _, end in step["all-reduces"][:-1])
        buckets = len(step["all-reduces"])
        print(f"rank {rank}: {lengths}; {buckets} buckets, {early} of them reduced before the last one is sent")
    figures: dict[str, Any] = {
        "model": arguments.model,
        "batch_size": arguments.batch_size,
        "steps": len(steps),
        "buckets": len(shifted[0]["all-reduces"]),
        "ranks": shifted,
    }
    plot(shifted, arguments.out / "ddp_step.png")
    write_results(arguments.out / "ddp_step.json", torch.device("cpu"), figures)
    print(f"written: {arguments.out / 'ddp_step.json'}, {arguments.out / 'ddp_step.png'}")


if __name__ == "__main__":
    run_reporting_user_errors(main)
