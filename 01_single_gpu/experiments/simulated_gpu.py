"""Where does the time of a GPU show? Lesson 01's train.py, unchanged, on a simulated T4.

    python ../data/prepare.py cifar10 --synthetic
    python experiments/simulated_gpu.py                  # a minute or two, on a machine that does nothing else

You should see, with a loader that is too slow, most of the time on the `for` line, and the GPU idle. With data that are
on the GPU, the wait is where the loss is read; if it is read rarely, it is on the lines that launch. Without workers,
reading the loss in each step takes away that loading and computing overlap. It needs what the null GPU needs
(tools/nullgpu/README.md). Flags that are not listed here go to train.py.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from lab import results
from lab.flags import Parser
from lab.launching import line_profile
from lab.simulated import simulate, start
from lab.timing import alternately, mean_std
from workshop.errors import UserError, run_reporting_user_errors

LESSON = Path(__file__).resolve().parent.parent
GPU = "t4"
FLAGS = (
    "--config",
    "../configs/cifar10.yaml",
    "--model",
    "resnet18",
    "--batch_size",
    512,
    "--limit_train",
    25600,
    "--limit_val",
    128,
)
SLOW = ("--epochs", 1, "--loader", "map", "--num_workers", 1)
FAST = ("--epochs", 1, "--loader", "device")
SHORTEST = 0.02
"""share of a step below which a line is left out"""
WIDTH = 400
"""milliseconds of a time line that are drawn"""
COLORS = {"waits for a batch": "#E69F00", "waits for the GPU": "#BBBBBB", "computes": "#0072B2", "copies": "#D55E00"}
"""of what CPU and GPU do; also for people who are color-blind (Okabe and Ito)"""


def store_lines(rounds: int, common: Sequence[object]) -> None:
    """Store the milliseconds per step of each line of the training function."""
    configurations: dict[str, tuple[object, ...]] = {
        "one worker": (*SLOW, "--log_interval", 3),
        "data on the GPU": (*FAST, "--log_interval", 3),
        "data on the GPU, `--log_interval 1`": (*FAST, "--log_interval", 1),
        "data on the GPU, `--log_interval 100`": (*FAST, "--log_interval", 100),
    }

    def milliseconds(flags: Sequence[object]) -> dict[str, float]:
        _, lines = line_profile(LESSON, *FLAGS, *common, *flags, before=start(GPU), quiet=True)
        steps = next(line["hits"] for line in lines if "zero_grad" in line["text"])
        return {line["text"].partition("#")[0].strip(): 1e3 * line["seconds"] / steps for line in lines}

    found = alternately({name: partial(milliseconds, flags) for name, flags in configurations.items()}, rounds)
    total = {name: [sum(lines.values()) for lines in trials] for name, trials in found.items()}
    rows: list[list[results.Cell]] = [
        [f"`{text}`", *(mean_std([lines.get(text, 0.0) for lines in trials]) for trials in found.values())]
        for text in next(iter(found.values()))[0]
        if any(trials[0].get(text, 0.0) > SHORTEST * total[name][0] for name, trials in found.items())
    ]
    results.store(
        "simulated_lines",
        title="Line profile on a simulated T4",
        columns=["line of `train_one_epoch`", *found],
        rows=[*rows, ["**all lines**", *map(mean_std, total.values())]],
        formats=dict.fromkeys(found, ",.1f"),
        unit="milliseconds per step of 512 images, simulated T4",
        spread=f"mean ± standard deviation of {rounds} runs; lines below 2 % in all columns are left out",
    )


def draw(axes: Axes, events: list[dict[str, Any]]) -> None:
    """Draw when the CPU waits, and below it when the GPU computes, from a batch in the middle of the run."""
    spans = [event for event in events if event["ph"] == "X"]
    kernels = sorted(event["ts"] for event in spans if event["tid"])
    middle = kernels[len(kernels) // 2]
    copies = sorted(event["ts"] for event in spans if "copy to" in event["name"])
    begin = next((ts for ts in copies if middle < ts < middle + 1e3 * WIDTH), middle)
    drawn: dict[str, list[tuple[float, float]]] = {name: [] for name in COLORS}
    for event in spans:
        start, length = (event["ts"] - begin) / 1e3, event["dur"] / 1e3
        if start + length < 0 or start > WIDTH:
            continue
        if event["tid"] == 0:
            name = "waits for a batch" if "batch" in event["name"] else "waits for the GPU"
        else:
            name = "copies" if "copy to" in event["name"] else "computes"
        drawn[name].append((max(start, 0.0), start + length - max(start, 0.0)))
    for name, parts in drawn.items():
        row = 1 if name.startswith("waits") else 0
        axes.broken_barh(parts, (row - 0.35, 0.7), facecolor=COLORS[name])
    axes.set(ylim=(-0.5, 1.5), yticks=(0, 1), yticklabels=("GPU", "CPU"), xlim=(0, WIDTH))


def store_timelines(
    name: str, title: str, configurations: Mapping[str, Sequence[object]], common: Sequence[object]
) -> None:
    """Store a plot with the time line of each configuration, and a table of their steps."""
    figure = Figure(figsize=(10, 0.9 + 1.4 * len(configurations)), layout="constrained")
    figure.suptitle(title, fontsize=13, fontweight="bold")
    panels = figure.subplots(len(configurations), sharex=True, squeeze=False)[:, 0]
    rows: list[list[results.Cell]] = []
    for axes, (what, flags) in zip(panels, configurations.items(), strict=True):
        found = simulate(GPU, "python", "train.py", *FLAGS, *common, *flags, folder=LESSON)
        draw(axes, found.events)
        axes.set_title(f"{what}: {found.milliseconds:.0f} ms for a step", loc="left", fontsize=11)
        rows.append([what, found.milliseconds, found.busy, found.waits_in_words])
    panels[-1].set_xlabel("milliseconds of simulated time")
    handles = [Patch(color=color, label=name) for name, color in COLORS.items()]
    figure.legend(handles=handles, ncols=4, loc="outside lower center", fontsize=9)
    results.store(
        name,
        title=title,
        columns=["run", "a step, ms", "GPU busy", "it waits for"],
        rows=rows,
        formats={"a step, ms": ".0f", "GPU busy": ".0%"},
        unit="simulated T4",
        figure=figure,
    )


def main() -> None:
    """Measure every part."""
    parser = Parser(__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="how often the lines are measured (default: %(default)s)")
    arguments, common = parser.parse_known_args()
    rounds = arguments.rounds
    if rounds < 2:
        raise UserError(f"--rounds must be at least 2, for a standard deviation; got {rounds}")
    store_lines(rounds, common)
    loaders = {"one worker": (*SLOW, "--log_interval", 3), "data on the GPU": (*FAST, "--log_interval", 3)}
    store_timelines("simulated_loaders", "Simulated T4: with a slow loader and with a fast one", loaders, common)
    without = ("--epochs", 1, "--loader", "map", "--num_workers", 0)
    reading = {
        "read every 3 steps": (*without, "--log_interval", 3),
        "in every step": (*without, "--log_interval", 1),
    }
    store_timelines("simulated_overlap", "Simulated T4, no workers: the loss is read ...", reading, common)


if __name__ == "__main__":
    run_reporting_user_errors(main)
