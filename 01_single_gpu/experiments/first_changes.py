"""Where does the time go before and after the first changes of the lesson, line by line?

    python experiments/first_changes.py

You should see that the `for` line, in which the loop waits for a batch, takes most of the time with one image at a time
(--loader map), and little of it with a whole batch at a time (--loader memory); and little of it with the digits too.
All configurations are measured alternately, under the line profiler. Flags that are not listed here go to train.py.
"""

from functools import partial
from pathlib import Path
from typing import Any

from lab import results
from lab.flags import Parser
from lab.launching import line_profile
from lab.timing import alternately, median_range, ratios
from workshop.errors import run_reporting_user_errors

LESSON = Path(__file__).resolve().parents[1]
CIFAR = ("--config", "../configs/cifar10.yaml", "--epochs", 1, "--limit_train", 3840, "--limit_val", 64)
RUNS = {
    "map": (*CIFAR, "--num_workers", 0),
    "memory": (*CIFAR, "--loader", "memory"),
    "digits": ("--limit_train", 1280, "--limit_val", 64, "--num_workers", 0),
}
TITLES = ("CIFAR-10, `--loader map --num_workers 0`", "CIFAR-10, `--loader memory`", "MNIST, `--num_workers 0`")
ROUNDS = 3
SHORTEST = 0.5
"""percent of the time below which a line is left out"""
Lines = list[dict[str, Any]]
"""of a profile"""


def share_of_for(lines: Lines) -> float:
    """Return the percentage of the time on the line that waits for a batch."""
    return next(line["percent"] for line in lines if line["text"].strip().startswith("for inputs"))


def main() -> None:
    """Measure all runs alternately; store their speeds, and the lines of the run with the median share."""
    common = Parser(__doc__).parse_known_args()[1]
    measure = {name: partial(line_profile, LESSON, *flags, *common) for name, flags in RUNS.items()}
    found = alternately(measure, ROUNDS)
    speeds = {name: [run["epochs"][0]["samples_per_second"] for run, _ in trials] for name, trials in found.items()}
    profiles = {name: [lines for _, lines in trials] for name, trials in found.items()}
    results.store(
        "first_changes",
        title="The first changes under the line profiler",
        columns=["run", "`for` line, %", "samples/s", "ratio"],
        rows=[
            [
                title,
                median_range([share_of_for(lines) for lines in profiles[name]]),
                median_range(speeds[name]),
                median_range(ratios(speeds["map"], speeds["memory"])) if name == "memory" else None,
            ]
            for name, title in zip(RUNS, TITLES, strict=True)
        ],
        formats={"`for` line, %": ".0f", "samples/s": ",.0f", "ratio": ".1f"},
        spread=f"median of {ROUNDS} trials, lowest and highest; each trial measured every row once, and the ratio is "
        "the median of the ratios within a trial",
    )
    median = {name: sorted(trials, key=share_of_for)[ROUNDS // 2] for name, trials in profiles.items()}
    shares = {
        name: {line["text"].partition("  #")[0].strip(): line["percent"] for line in lines}
        for name, lines in median.items()
    }
    results.store(
        "first_changes_lines",
        title="The lines that take the time",
        columns=["line of `train_one_epoch`", *RUNS],
        rows=[
            [f"`{text}`", *(of_lines.get(text) for of_lines in shares.values())]
            for text in shares["map"]
            if max(of_lines.get(text, 0) for of_lines in shares.values()) >= SHORTEST
        ],
        formats=dict.fromkeys(RUNS, ".1f"),
        unit="% of the time",
        spread=f"of {ROUNDS} trials that with the median share of the `for` line; lines of less than {SHORTEST} % "
        "everywhere are left out",
    )


if __name__ == "__main__":
    run_reporting_user_errors(main)
