"""Do the all-reduces of DDP overlap with backward? It depends on which of torch's two NCCL backends carries them.

    python experiments/nccl_backends.py                  # two GPUs of this machine, one rank on each
    python experiments/nccl_backends.py --simulated      # or two ranks on simulated GPUs (tools/nullgpu)

From torch 2.15 on, the name "nccl" stands for a new backend; the workshop selects the former one. This traces a few
training steps with each. You should see during what share of the all-reduces' time other kernels of backward ran. Only
the last bucket of a step cannot overlap, because it is ready when backward has ended. With simulated GPUs, the code of
both backends really runs, and decides which stream waits for which; how long a kernel takes is simulated.
"""

import os
import tempfile
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import torch

from lab import results
from lab.flags import Parser
from lab.launching import train
from lab.simulated import simulate
from lab.timing import alternately, mean_std
from workshop.errors import UserError, run_reporting_user_errors
from workshop.profiling.chrome_trace import CPU_RANGE, Event, launched_within, read_events

LESSON = Path(__file__).resolve().parents[1]
RANKS = 2
BACKENDS = {"former": "0", "new": "1"}
"""values of TORCH_DIST_USE_NCCL2"""
COLUMNS = ("all-reduces", "backward", "both at once")
Intervals = list[tuple[float, float]]
"""start and end in milliseconds"""


def merged(events: Iterable[Event]) -> Intervals:
    """Return the times in which at least one of these events runs, as intervals in order that do not touch."""
    union: Intervals = []
    for start, length in sorted((event["ts"] / 1000, event["dur"] / 1000) for event in events):
        if union and start <= union[-1][1]:
            union[-1] = (union[-1][0], max(start + length, union[-1][1]))
        else:
            union.append((start, start + length))
    return union


def overlap(events: list[Event]) -> list[float]:
    """Return the milliseconds per step of all-reduces, of other kernels of backward, and of both at the same time.

    Raises:
        UserError: the trace has no kernels, or no all-reduces among those of backward.
    """
    steps = [event for event in events if event.get("cat") == CPU_RANGE and event["name"] == "backward"]
    work = [event for found in launched_within(events, steps) for event in found if event.get("cat") == "kernel"]
    reduces = merged(event for event in work if "AllReduce" in event["name"])
    others = merged(event for event in work if "AllReduce" not in event["name"])
    if not reduces or not others:
        raise UserError("the trace has no all-reduces beside other kernels: a profiler must be allowed to see the GPU")
    return [milliseconds / len(steps) for milliseconds in (length(reduces), length(others), common(reduces, others))]


def length(intervals: Intervals) -> float:
    """Return the sum of their lengths."""
    return sum(end - start for start, end in intervals)


def common(some: Intervals, others: Intervals) -> float:
    """Return how long both run at the same time."""
    return sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in some for b in others)


def trace(flags: tuple[object, ...], variable: str) -> tuple[str, list[float]]:
    """Trace two ranks with TORCH_DIST_USE_NCCL2 as ``variable``; return the class of the backend, and `overlap`.

    Of the two ranks the one counts whose all-reduces took less time: the other one waits in them for this one.
    """
    os.environ["TORCH_DIST_USE_NCCL2"] = variable
    with tempfile.TemporaryDirectory() as folder:
        summary = train(LESSON, *flags, ranks=RANKS, quiet=True, keep="rank*.json.gz", keep_in=Path(folder))
        return summary["backend_class"], min(overlap(read_events(file)) for file in Path(folder).iterdir())


def simulated(model: str) -> None:
    """Train two ranks on simulated T4s with each backend, and store how long a step takes and what overlapped."""
    flags = ("--config", "../configs/cifar10.yaml", "--model", model, "--loader", "device", "--epochs", 1)
    flags += ("--batch_size", 256, "--limit_train", 20 * RANKS * 256, "--limit_val", RANKS * 256)  # type: ignore[assignment]
    rows: list[list[results.Cell]] = []
    for name, value in BACKENDS.items():
        os.environ["TORCH_DIST_USE_NCCL2"] = value
        words = ("torchrun", "--standalone", "--nproc_per_node", RANKS, "train.py", *flags)
        found = simulate("t4", *words, folder=LESSON, gpus=RANKS)
        spans = [e for e in found.events if e["ph"] == "X" and e["pid"] == 0 and e["tid"] > 0]
        reduces = merged(e for e in spans if e["name"] == "AllReduce")
        both = common(reduces, merged(e for e in spans if e["name"] != "AllReduce" and "rank" not in e["name"]))
        rows.append([name, found.milliseconds, found.waits_for("communication"), both / length(reduces)])
    results.store(
        "nccl_backends_simulated",
        title="Two ranks on simulated T4s",
        columns=["backend", "ms per step", "waits for communication", "share of the all-reduces that overlaps"],
        rows=rows,
        formats={
            "ms per step": ".1f",
            "waits for communication": ".0%",
            "share of the all-reduces that overlaps": ".0%",
        },
        unit=f"{model} with images of 32x32, 256 for each of two ranks, rank 0",
        command="python experiments/nccl_backends.py --simulated",
    )


def main() -> None:
    """Trace both backends alternately; store what overlapped."""
    parser = Parser(__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="runs of each (default: %(default)s)")
    parser.add_argument("--model", default="resnet50", help="any classifier (default: %(default)s)")
    parser.add_argument("--simulated", action="store_true", help="on simulated GPUs")
    arguments = parser.parse_args()
    if arguments.simulated:
        return simulated(arguments.model)
    if (gpus := torch.cuda.device_count()) < RANKS:
        raise UserError(f"this compares two NCCL backends, which takes {RANKS} GPUs; this machine shows {gpus}")
    flags: tuple[object, ...]
    flags = ("--config", "../configs/cifar10.yaml", "--epochs", 1, "--loader", "memory", "--num_workers", 0)
    flags += ("--model", arguments.model, "--batch_size", 256, "--optimizer", "sgd")
    flags += ("--limit_train", 20 * RANKS * 256, "--limit_val", RANKS * 256, "--trace", "true")
    runs = alternately({name: partial(trace, flags, value) for name, value in BACKENDS.items()}, arguments.rounds)
    rows: list[list[results.Cell]] = []
    for name, found in runs.items():
        times = list(zip(*(milliseconds for _, milliseconds in found), strict=True))
        share = [both / reduces for reduces, _, both in zip(*times, strict=True)]
        rows.append([f"{name} ({found[0][0]})", *(mean_std(values) for values in times), mean_std(share)])
    results.store(
        "nccl_backends",
        title="Overlap of all-reduces and backward",
        columns=["backend", *COLUMNS, "share of the all-reduces"],
        rows=rows,
        formats=dict.fromkeys(COLUMNS, ".2f") | {"share of the all-reduces": ".0%"},
        unit="milliseconds per step",
        spread=f"mean ± standard deviation of {arguments.rounds} runs",
    )


if __name__ == "__main__":
    run_reporting_user_errors(main)
