"""What does it gain to prepare the batches of --loader device with few launches, and on a stream of their own?

    python experiments/loader_overlap.py                     # on a GPU
    python experiments/loader_overlap.py --simulated h200    # without one: on a null GPU with a clock (tools/nullgpu)

The U-Net trains with all options but torch.compile, with three ways of cutting the same cubes from the box on the GPU:
one cube after the other, a whole batch at once, and a whole batch at once while the step before computes. You should
see the same batches from all three, and no gain from the last way: these kernels fill the GPU, so they take turns with
those of the step.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from lab import results
from lab.flags import Parser
from lab.plots import COLORS, panels
from lab.simulated import null_gpu
from lab.timing import mean_std, median_range
from workload import FOLDER, LESSON, read_workload
from workshop.errors import UserError, run_reporting_user_errors
from workshop.jsonfile import read_json, write_json
from workshop.loaders.volumes import VolumeLoader

FLAGS = "--config ../configs/unet3d.yaml --config ../configs/unet3d_opt.yaml --compile off --benchmark true"
KINDS = ("IO", "SYNTHETIC", "FULL")
BATCHES: dict[str, Callable[[VolumeLoader], Iterator[Any]]] = {
    "one cube after the other": VolumeLoader.cut_one_by_one,
    "a batch at once": VolumeLoader.cut_at_once,
    "a batch at once, one step ahead": VolumeLoader.batches,
}
"""what makes the batches; the last one is what the lesson does"""
SHOWN = 240.0
"""milliseconds of the time lines"""
CUTTING = ("copy to the GPU", "copy_")
"""operations with which the cutting of a batch begins"""
SHORTEST = 0.5
"""milliseconds; what is shorter is something else, such as the copy of a number"""
TRAINING = ("convolution", "convolution_backward", "leaky_relu")
"""and those with which the training goes on"""

Event = dict[str, Any]


def measure(names: list[str], more: list[str], out: Path) -> None:
    """Benchmark the lesson's script with batches that are made in these ways; write what it measured of each."""
    ranks, found = LESSON.join_ranks(timeout_minutes=10), {}
    for name in names:
        with tempfile.TemporaryDirectory() as folder, patch.object(VolumeLoader, "batches", BATCHES[name]):
            LESSON.train(read_workload([*FLAGS.split(), *more, "--run_dir", folder]), ranks)
            found[name] = read_json(Path(folder, "throughput.json"))
    torch.distributed.destroy_process_group()
    write_json(out, found)


def measured(names: list[str], gpu: str | None, more: list[str]) -> dict[str, tuple[list[float], list[Event]]]:
    """Call this script for some ways; return of each the mean of each of `KINDS`, and the time line of a simulated GPU.

    Raises:
        UserError: it failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        out, trace = Path(folder, "found.json"), Path(folder, "trace.json")
        before = null_gpu("--clock", gpu, "--gb", 140, "--trace", trace) if gpu else []
        words = [*before, sys.executable, __file__, "--way", *names, "--out", out, *more]
        done = subprocess.run([str(word) for word in words], cwd=FOLDER, text=True, capture_output=True)
        if done.returncode:
            raise UserError(f"{names}: {done.stdout[-500:]}{done.stderr[-1500:]}")
        events = json.loads(trace.read_text())["traceEvents"] if gpu else []
        return {
            name: ([mean_std(way[kind]["trials"])[0] for kind in KINDS], events) for name, way in read_json(out).items()
        }


def spans_of(events: list[Event]) -> dict[str, list[tuple[float, float]]]:
    """Return beginning and length, in milliseconds before the end, of what cuts batches and of what trains."""
    spans = [event for event in events if event["ph"] == "X" and event["tid"] > 0 and event["pid"] == 0]
    end = max(event["ts"] + event["dur"] for event in spans)
    trains = {event["tid"] for event in spans if event["name"] == "convolution"}
    found: dict[str, list[tuple[float, float]]] = {"training": [], "cutting": []}
    group: list[tuple[float, float]] = []  # of what began as the cutting of a batch on the stream of the training
    for event in sorted(spans, key=lambda event: event["ts"]):
        if event["ts"] < end - 1e3 * SHOWN:
            continue
        span = (event["ts"] - end) / 1e3 + SHOWN, event["dur"] / 1e3
        if event["tid"] not in trains:
            found["cutting"].append(span)
        elif event["name"] not in TRAINING and (group or event["name"] in CUTTING):
            group.append(span)
        else:
            found["cutting" if sum(length for _, length in group) > SHORTEST else "training"] += group
            found["training"].append(span)
            group = []
    return found


def draw(lines: dict[str, list[Event]], gpu: str) -> None:
    """Plot what the GPU does in the last steps, for each way."""
    figure, (axes,) = panels(1, (9, 1 + 0.9 * len(lines)))
    for row, events in enumerate(lines.values()):
        for place, (kind, spans) in enumerate(spans_of(events).items()):
            axes.broken_barh(spans, (-row - 0.38 * place, 0.34), color=COLORS[place], label=kind if row == 0 else None)
    axes.set_yticks([-row for row in range(len(lines))], list(lines))
    axes.set_xlim(0, SHOWN)
    axes.set_xlabel(f"milliseconds, on a simulated {gpu.upper()}")
    figure.legend(loc="outside upper right", ncols=2, frameon=False)
    results.store_plot("loader_overlap", figure)


def main() -> None:
    """Measure all ways in turns; store the table after each round and, of a simulated GPU, the time lines."""
    parser = Parser(__doc__)
    parser.add_argument("--simulated", metavar="GPU", help="on a null GPU with the clock of this GPU")
    parser.add_argument("--rounds", type=int, default=3, help="(default: %(default)s)")
    parser.add_argument("--way", choices=BATCHES, nargs="+", help="measure these only, in this process")
    parser.add_argument("--out", type=Path, help="with --way: the file for what was measured")
    arguments, more = parser.parse_known_args()
    if arguments.way:
        return measure(arguments.way, more, arguments.out)
    gpu = arguments.simulated
    found: dict[str, list[tuple[list[float], list[Event]]]] = {name: [] for name in BATCHES}
    if gpu:  # the clock notes 400,000 pieces of work: the time line would not have the end of a longer trial
        more = ["--benchmark_seconds", "0.3", *more]
    # A time line is that of a process; without one, all ways share a process, because its start takes the longest.
    processes = [[name] for name in BATCHES] if gpu else [list(BATCHES)]
    for done in range(1, arguments.rounds + 1):
        for name, way in (one for names in processes for one in measured(names, gpu, more).items()):
            found[name].append(way)
            print(name, *(f"{kind} {speed:,.0f}" for kind, speed in zip(KINDS, way[0], strict=True)), flush=True)
        store(found, gpu, done, arguments.rounds)
    if gpu:  # the round that other work on this machine disturbed least
        draw({name: max(rounds, key=lambda one: one[0][-1])[1] for name, rounds in found.items()}, gpu)


def store(found: dict[str, list[tuple[list[float], list[Event]]]], gpu: str | None, done: int, rounds: int) -> None:
    """Store the table of the rounds that are done."""
    rows: list[list[results.Cell]] = []
    for name, each in found.items():
        speeds = [speeds for speeds, _ in each]
        columns = [*zip(*speeds, strict=True), [full / synthetic for _, synthetic, full in speeds]]
        rows.append([name, *(median_range(column) for column in columns)])
    results.store(
        "loader_overlap" + ("_simulated" if gpu else ""),
        title="The U-Net with three ways of cutting its batches" + (f", on a simulated {gpu.upper()}" if gpu else ""),
        columns=["the loader cuts", *KINDS, "FULL/SYNTHETIC"],
        rows=rows,
        formats=dict.fromkeys(KINDS, ",.0f") | {"FULL/SYNTHETIC": ".2f"},
        unit="samples/s",
        spread=f"median (lowest to highest) of {done} rounds" if done > 1 else "one round",
        command="python experiments/loader_overlap.py" + (f" --simulated {gpu}" if gpu else ""),
        finished=done == rounds,
    )


if __name__ == "__main__":
    run_reporting_user_errors(main)
