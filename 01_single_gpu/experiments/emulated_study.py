"""Measure the figures of emulated_gpu.md: where the time of lesson 01 shows with an emulated GPU.

    python experiments/emulated_study.py                 # some ten minutes, most of which it sleeps

You should see the time of each line with few workers and with enough, and by how often the loss is read; the throughput
by number of workers; and a step without workers, which takes the longer of loading and computing, unless the loss is
read in every step. Flags that are not listed here go to emulated_gpu.py.
"""

import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from lab import results
from lab.emulated_gpu import WAIT
from lab.flags import Parser
from lab.launching import line_profile, train
from lab.timing import alternately, mean_std
from workshop.errors import UserError, run_reporting_user_errors
from workshop.profiling.chrome_trace import CPU_RANGE, launched_within, read_events

LESSON = Path(__file__).resolve().parent.parent
SCRIPT = "experiments/emulated_gpu.py"
FEW, ENOUGH = 2, 12
"""workers before and after the first change: the number in NERSC's baseline, and one with which loading is faster"""
WORKERS = (0, 1, 2, 4, 8, 12, 16)
SECONDS = 4
"""length of a trial: it begins when no batch is ready, which takes 0.18 s with any number of workers"""
PUBLISHED_FULL = {2: 86.5, 4: 163.2, 8: 274.2, 16: 253.5}
"""samples/s of the third epoch by number of workers: NERSC, https://github.com/NERSC/sc22-dl-tutorial, README, "Data
loading optimizations" """
SHORTEST = 0.01
"""share of a step below which a line is left out"""
COLORS = {
    "gets the next batch": "#E69F00",
    "launches forward and backward": "#D55E00",
    "waits for the GPU": "#BBBBBB",
    "forward": "#56B4E9",
    "backward": "#0072B2",
}
"""of what CPU and GPU do; also for people who are color-blind (Okabe and Ito)"""
Spans = list[tuple[float, float]]
"""start and length of each, in milliseconds"""


def store_lines(rounds: int, common: Sequence[str]) -> None:
    """Store the milliseconds per step of each line of the training function."""
    many = ("--num_workers", ENOUGH, "--limit_train", 3200)
    configurations: dict[str, tuple[object, ...]] = {
        f"{FEW} workers": ("--num_workers", FEW),
        f"{ENOUGH} workers": many,
        f"{ENOUGH} workers, `--log_interval 1`": (*many, "--log_interval", 1),
        f"{ENOUGH} workers, `--log_interval 100`": (*many, "--log_interval", 100),
    }

    def milliseconds(flags: Sequence[object]) -> dict[str, float]:
        _, lines = line_profile(LESSON, *flags, *common, script=SCRIPT, quiet=True)
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
        "emulated_gpu_lines",
        title="Line profile with an emulated GPU",
        columns=["line of `train_one_epoch`", *found],
        rows=[*rows, ["**all lines**", *map(mean_std, total.values())]],
        formats=dict.fromkeys(found, ",.1f"),
        unit="milliseconds per step of 8 samples, emulated GPU",
        spread=f"mean ± standard deviation of {rounds} runs; lines below 1 % in all columns are left out",
    )


def store_workers(rounds: int, common: Sequence[str]) -> None:
    """Store the throughputs by number of workers, and what NERSC published for a real A100."""

    def benchmark(workers: int) -> dict[str, list[float]]:
        trial = ("--benchmark", "true", "--benchmark_seconds", SECONDS)
        flags = ("--num_workers", workers, *trial, *common)
        found = train(LESSON, *flags, script=SCRIPT, quiet=True)
        return {kind: found[kind]["trials"] for kind in ("IO", "SYNTHETIC", "FULL")}

    measured = alternately({str(workers): partial(benchmark, workers) for workers in WORKERS}, rounds)
    rows: list[list[results.Cell]] = [
        [
            name,
            *(mean_std([value for trial in trials for value in trial[kind]]) for kind in trials[0]),
            PUBLISHED_FULL.get(int(name)),
        ]
        for name, trials in measured.items()
    ]
    kinds = ["IO", "SYNTHETIC", "FULL", "published FULL (NERSC, A100)"]
    results.store(
        "emulated_gpu_workers",
        title="Throughput by number of workers with an emulated GPU",
        columns=["`--num_workers`", *kinds],
        rows=rows,
        formats=dict.fromkeys(kinds, ",.1f"),
        unit="samples/s, emulated GPU",
        spread=f"mean ± standard deviation of {3 * rounds} trials",
    )


def read_timeline(trace: Path) -> dict[str, Spans]:
    """Return when CPU and GPU did what, in the traced steps; the time begins with the first of them."""
    events = read_events(trace)
    names = ("data", "forward", "backward")
    ranges = {name: [e for e in events if e.get("cat") == CPU_RANGE and e["name"] == name] for name in names}
    found = {
        "gets the next batch": ranges["data"],
        "launches forward and backward": ranges["forward"] + ranges["backward"],
        "waits for the GPU": [event for event in events if event.get("cat") == WAIT],
    }
    for name in ("forward", "backward"):
        found[name] = [event for work in launched_within(events, ranges[name]) for event in work]
    zero = ranges["data"][0]["ts"]
    return {name: [((event["ts"] - zero) / 1e3, event["dur"] / 1e3) for event in es] for name, es in found.items()}


def draw(axes: Axes, timeline: Mapping[str, Spans]) -> None:
    """Draw what the CPU does, below it what the GPU does, and the number of each step."""
    for name, spans in timeline.items():
        row = 0 if name in ("forward", "backward") else 1
        # A launch takes less than a millisecond: without a width of its own, its line would not be seen.
        width = 1.5 if name.startswith("launches") else 0
        axes.broken_barh(spans, (row - 0.35, 0.7), facecolor=COLORS[name], edgecolor=COLORS[name], linewidth=width)
    for number, (began, length) in enumerate(timeline["forward"], start=1):
        axes.text(began + length / 2, 0, str(number), ha="center", va="center", fontsize=9)
    axes.set(ylim=(-0.5, 1.5), yticks=(0, 1), yticklabels=("emulated GPU", "CPU"))


def timelines(
    title: str, configurations: Mapping[str, Sequence[object]], common: Sequence[str]
) -> tuple[Figure, list[list[results.Cell]]]:
    """Trace six steps of each configuration; return their plot, and the milliseconds that a step took on average."""
    figure = Figure(figsize=(10, 0.9 + 1.4 * len(configurations)), layout="constrained")
    figure.suptitle(title, fontsize=13, fontweight="bold")
    rows: list[list[results.Cell]] = []
    panels = figure.subplots(len(configurations), sharex=True, squeeze=False)[:, 0]
    for axes, (name, flags) in zip(panels, configurations.items(), strict=True):
        with tempfile.TemporaryDirectory() as folder:
            traced = ("--limit_train", 160, "--log_interval", 3, *flags, "--trace", "true", *common)
            train(LESSON, *traced, script=SCRIPT, keep="rank0*.json.gz", keep_in=Path(folder), quiet=True)
            timeline = read_timeline(next(Path(folder).iterdir()))
        draw(axes, timeline)
        axes.set_title(name, loc="left", fontsize=11)
        # The loss is read before the first and after the last of these steps, so no other work is in the queue. They
        # last from the start of the first data, which is at 0, to the end of the last work on the GPU.
        end = max(start + length for work in ("forward", "backward") for start, length in timeline[work])
        rows.append([name, end / len(timeline["forward"])])
    panels[-1].set(xlim=(0, None), xlabel="milliseconds")
    handles = [Patch(color=color, label=name) for name, color in COLORS.items()]
    figure.legend(handles=handles, ncols=5, loc="outside lower center", fontsize=9)
    return figure, rows


def store_timelines(common: Sequence[str]) -> None:
    """Store two plots: few workers and enough; and without workers, the loss read rarely and in every step."""
    optimized = ("--gpu", "a100_optimized", "--num_workers", 0)
    studies: dict[str, dict[str, tuple[object, ...]]] = {
        "emulated_workers": {f"{n} workers": ("--num_workers", n) for n in (FEW, ENOUGH)},
        "emulated_overlap": {
            "every 3 steps": optimized,
            "in every step": (*optimized, "--log_interval", 1),
        },
    }
    titles = {"emulated_workers": "with few workers and with enough", "emulated_overlap": "the loss is read ..."}
    for name, configurations in studies.items():
        figure, rows = timelines(f"Emulated GPU: {titles[name]}", configurations, common)
        results.store(
            name,
            title=f"A step with an emulated GPU, {titles[name]}",
            columns=["run", "a step, ms"],
            rows=rows,
            formats={"a step, ms": ".0f"},
            spread="mean of six steps of one run",
            figure=figure,
        )


def main() -> None:
    """Measure every part."""
    parser = Parser(__doc__)
    parser.add_argument("--rounds", type=int, default=2, help="how often all is measured (default: %(default)s)")
    arguments, common = parser.parse_known_args()
    if arguments.rounds < 2:
        raise UserError(f"--rounds must be at least 2, for a standard deviation; got {arguments.rounds}")
    store_lines(arguments.rounds, common)
    store_workers(arguments.rounds, common)
    store_timelines(common)


if __name__ == "__main__":
    run_reporting_user_errors(main)
