"""When are weights gathered and gradients reduced? One training step of train.py on a time line of two ranks.

    python experiments/step_timeline.py

It starts train.py --trace true on two CPU ranks and plots the shortest of the traced steps. You should see that the
weights of each block are gathered in forward, that they are gathered again in backward, one block ahead, and that the
gradients of a block are reduced when backward is done with it. Over gloo, the training thread waits for each of them.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
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
from workshop.profiling.chrome_trace import CPU_RANGE, Event, read_events
from workshop.profiling.timeline import COLOURS

LESSON = Path(__file__).resolve().parent.parent
RANKS = 2
STEPS = 8
"""of the run: the first two are to warm up the profiler, the others are traced"""
PARTS = ("forward", "backward", "optimizer")
GATHER, REDUCE = "#E69F00", "#CC79A7"
"""colours of all-gathers and reduce-scatters, also for people who are colour-blind (Okabe and Ito)"""

Span = tuple[float, float]
"""start and end in milliseconds, on a clock that all ranks of a machine share"""


@dataclass
class Step:
    """What one rank did in a training step."""

    parts: dict[str, Span]
    """forward, backward, optimizer"""
    gathers: list[tuple[str, Span]]
    """the all-gathers, each with the name of what was gathered: the number of a block, or "rest" """
    reduces: list[tuple[str, Span]]
    """the reduce-scatters likewise"""
    in_fsdp: list[Span]
    """when the thread that trains worked or waited in FSDP2's own code"""

    @property
    def span(self) -> Span:
        """From the beginning of forward to the end of the optimizer's step."""
        return self.parts["forward"][0], self.parts["optimizer"][1]


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = Parser(__doc__)
    parser.add_argument("--vit_width", type=int, default=256, help="as in train.py (default: %(default)s)")
    parser.add_argument("--vit_depth", type=int, default=4, help="as in train.py (default: %(default)s)")
    parser.add_argument("--batch_size", type=int, default=32, help="images per rank (default: %(default)s)")
    parser.add_argument("--data_dir", help="as in train.py")
    parser.add_out("step_timeline.json and step_timeline.png")
    arguments = parser.parse_args()
    require_positive(arguments, "vit_width", "vit_depth", "batch_size")
    return arguments


def trace(arguments: argparse.Namespace, folder: Path) -> list[Path]:
    """Run train.py on CPU ranks; return the trace of each rank.

    Raises:
        UserError: it failed.
    """
    samples = RANKS * arguments.batch_size
    flags = ["--model", "vit", "--vit_width", arguments.vit_width, "--vit_depth", arguments.vit_depth]
    flags += ["--optimizer", "adamw", "--num_workers", 0, "--epochs", 1, "--batch_size", arguments.batch_size]
    flags += ["--limit_train", STEPS * samples, "--limit_val", samples, "--trace", "true", "--run_dir", folder]
    flags += ["--data_dir", arguments.data_dir] if arguments.data_dir else []
    words = [*torchrun(RANKS), "train.py", *map(str, flags)]
    result = subprocess.run(
        words, cwd=LESSON, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True
    )
    if result.returncode:
        raise UserError(reason(result.stderr))
    return [folder / f"rank{rank}.pt.trace.json.gz" for rank in range(RANKS)]


def span_of(event: Event) -> Span:
    """Return start and end of an event in milliseconds."""
    return event["ts"] / 1000, (event["ts"] + event["dur"]) / 1000


def within(inner: Span, outer: Span) -> bool:
    """Return whether a span begins within another one."""
    return outer[0] <= inner[0] <= outer[1]


def read_steps(file: Path) -> list[Step]:
    """Return the training steps of a trace.

    What is gathered or reduced is known where the thread that trains asks for it, and how long that takes is known from
    gloo's own threads, which work in the order in which they are asked.

    Raises:
        UserError: the trace does not have these events.
    """
    events = [event for event in read_events(file) if "dur" in event]
    ranges = [event for event in events if event.get("cat") == CPU_RANGE]
    spans = {name: [span_of(event) for event in ranges if event["name"] == name] for name in PARTS}
    in_fsdp = [span_of(event) for event in ranges if event["name"].startswith("FSDP::")]
    # PyTorch's gloo has no reduce-scatter of its own: it reduces the whole on every rank, and each keeps its part.
    work = {
        "gathers": ([span_of(e) for e in events if e["name"] == "gloo:all_gather"], "FSDP::all_gather"),
        "reduces": ([span_of(e) for e in events if e["name"] == "gloo:all_reduce"], "FSDP::post_backward_reduce"),
    }
    steps = []
    for forward, backward, optimizer in zip(*(spans[name] for name in PARTS), strict=True):
        found: dict[str, list[tuple[str, Span]]] = {}
        for key, (works, name) in work.items():
            asked = [event for event in ranges if event["name"].partition(" ")[0] == name]
            labels = [
                label_of(event["name"])
                for event in asked
                if within(span_of(event), forward) or within(span_of(event), backward)
            ]
            done = [span for span in works if within(span, forward) or within(span, backward)]
            if not done or len(done) != len(labels):
                raise UserError(
                    f"{file.name} has {len(done)} {key} of gloo for {len(labels)} of FSDP2: not readable here"
                )
            found[key] = list(zip(labels, done, strict=True))
        parts = dict(zip(PARTS, (forward, backward, optimizer), strict=True))
        inside = [span for span in in_fsdp if within(span, forward) or within(span, backward)]
        steps.append(Step(parts, found["gathers"], found["reduces"], merge(inside)))
    return steps


def label_of(name: str) -> str:
    """Return which block a range such as "FSDP::all_gather (blocks.2)" is about: "2"; "rest" if it is about none."""
    return name.partition("(blocks.")[2].rstrip(")") or "rest"


def merge(spans: list[Span]) -> list[Span]:
    """Return the spans without overlap: nested ones count once."""
    merged: list[Span] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def plot(steps: list[Step], file: Path) -> None:
    """Plot a step of all ranks, one below the other, on the same clock."""
    figure = Figure(figsize=(11, 1.2 + 1.7 * len(steps)), dpi=110, layout="constrained")
    panels = figure.subplots(len(steps), sharex=True, squeeze=False)[:, 0]
    first = min(step.span[0] for step in steps)
    last = max(step.span[1] for step in steps)

    def bars(axes: Any, row: int, spans: list[Span], colour: str, **more: Any) -> None:  # noqa: ANN401
        place = (row - 0.4, 0.8) if row == 0 else (row - 0.1, 0.5)
        axes.broken_barh([(start - first, end - start) for start, end in spans], place, color=colour, **more)

    for rank, (axes, step) in enumerate(zip(panels, steps, strict=True)):
        for name, span in step.parts.items():
            bars(axes, 0, [span], COLOURS[name], linewidth=0)
        bars(axes, 0, step.in_fsdp, "white", alpha=0.65, linewidth=0)
        for row, works, colour in ((1, step.gathers, GATHER), (2, step.reduces, REDUCE)):
            for label, (start, end) in works:
                bars(axes, row, [(start, end)], colour, edgecolor=colour, linewidth=0.8)
                if label != "rest":
                    axes.text((start + end) / 2 - first, row - 0.27, label, ha="center", va="center", fontsize=8)
        axes.set(ylim=(2.5, -0.5), xlim=(0, last - first), yticks=range(3))
        axes.set_yticklabels(["train.py", "all-gathers", "reduce-scatters"])
        axes.set_title(f"rank {rank}", loc="left", fontsize=11)
    panels[-1].set_xlabel("milliseconds; the numbers are those of the blocks, without a number: the rest of the model")
    handles = [Patch(color=COLOURS[name], label=name) for name in PARTS]
    handles.append(Patch(facecolor="#DDDDDD", edgecolor="grey", label="pale: in FSDP2, copying or waiting"))
    figure.legend(handles=handles, loc="outside upper right", ncols=4, fontsize=9, frameon=False)
    figure.savefig(file)


def figures_of(step: Step) -> dict[str, Any]:
    """Return the counts of a step and its milliseconds."""
    return {
        "all_gathers": len(step.gathers),
        "reduce_scatters": len(step.reduces),
        "milliseconds": {name: end - start for name, (start, end) in step.parts.items()},
        "milliseconds_in_fsdp": sum(end - start for start, end in step.in_fsdp),
    }


def main() -> None:
    """Trace, choose the shortest step, plot and save it."""
    arguments = parse_arguments()
    make_output_folder(arguments.out)
    with tempfile.TemporaryDirectory() as folder:
        of_rank = [read_steps(file) for file in trace(arguments, Path(folder))]
    steps = min(zip(*of_rank, strict=True), key=lambda step: step[0].span[1] - step[0].span[0])
    for rank, step in enumerate(steps):
        found = figures_of(step)
        times = ", ".join(f"{name} {value:.0f} ms" for name, value in found["milliseconds"].items())
        print(f"rank {rank}: {found['all_gathers']} all-gathers, {found['reduce_scatters']} reduce-scatters; {times}")
    plot(list(steps), arguments.out / "step_timeline.png")
    config = {name: value for name, value in vars(arguments).items() if name not in ("out", "data_dir")}
    figures = {"config": config, "rows": [figures_of(step) for step in steps]}
    write_results(arguments.out / "step_timeline.json", torch.device("cpu"), figures)
    print(f"written: {arguments.out / 'step_timeline.png'}", file=sys.stderr)


if __name__ == "__main__":
    run_reporting_user_errors(main)
