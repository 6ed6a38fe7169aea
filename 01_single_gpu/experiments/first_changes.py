"""Where does the time go before and after the first changes of the lesson, and what does the profiler itself cost?

    python experiments/first_changes.py

You should see that loading takes most of a step with one image at a time (--loader map), and little of it with a whole
batch at a time (--loader memory) and with the digits. The `for` line of the profile has a larger share than loading has
without the profiler. All configurations are measured alternately, without and with the line profiler. Flags that are
not listed here go to train.py.
"""

import re
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from lab import results
from lab.flags import Parser
from lab.launching import PYTHON, line_profile, run
from lab.timing import alternately, median_range, ratios
from workshop.errors import UserError, run_reporting_user_errors
from workshop.hardware import SHORTEST_LOOK, OtherWork

T = TypeVar("T")
LESSON = Path(__file__).resolve().parents[1]
CIFAR = ("--config", "../configs/cifar10.yaml", "--epochs", 1, "--limit_train", 6400, "--log_interval", 25)
RUNS = {
    "map": (*CIFAR, "--num_workers", 0),
    "memory": (*CIFAR, "--loader", "memory"),
    "digits": ("--limit_train", 1280, "--num_workers", 0, "--log_interval", 10),
}
TITLES = ("CIFAR-10, `--loader map --num_workers 0`", "CIFAR-10, `--loader memory`", "MNIST, `--num_workers 0`")
QUICK = ("--limit_val", 64)
ROUNDS = 3
SHORTEST = 0.5
"""percent of the time below which a line is left out"""
OTHERS = 0.15
"""CPUs that other programs may use during a trial; otherwise it is repeated"""
TRIES = 200
Lines = list[dict[str, Any]]
"""of a profile"""


def undisturbed(measure_once: Callable[[], T]) -> T:
    """Measure again until other programs left the CPUs alone meanwhile.

    Raises:
        UserError: they never did.
    """
    for _ in range(TRIES):
        other_work = OtherWork()
        time.sleep(SHORTEST_LOOK)
        if (other_work.cpus() or 0) <= OTHERS:
            other_work = OtherWork()
            found = measure_once()
            if (other_work.cpus() or 0) <= OTHERS:
                return found
    raise UserError("other programs use the CPUs all the time")


def plain_run(lesson: Path, *flags: object) -> tuple[float, float]:
    """Run train.py without the profiler; return *load* and *compute* of the log's last step line, in ms."""
    with tempfile.TemporaryDirectory() as folder:
        printed = run([PYTHON, "train.py", *flags, "--run_dir", folder], lesson)
    load, compute = re.findall(r"load ([\d.]+) ms  compute ([\d.]+) ms", printed)[-1]
    return float(load), float(compute)


def step_under_profiler(lines: Lines) -> float:
    """Return the milliseconds of a step in the profile."""
    loop = next(line for line in lines if line["text"].strip().startswith("for inputs"))
    return 1000 * sum(line["seconds"] for line in lines) / loop["hits"]


def share_of_for(lines: Lines) -> float:
    """Return the percentage of the time on the line that waits for a batch."""
    return next(line["percent"] for line in lines if line["text"].strip().startswith("for inputs"))


def main() -> None:
    """Measure all runs alternately; store their speeds, and the lines of the run with the median share."""
    common = Parser(__doc__).parse_known_args()[1]
    measure = {
        (name, how): partial(undisturbed, partial(function, LESSON, *flags, *QUICK, *common))
        for name, flags in RUNS.items()
        for how, function in (("plain", plain_run), ("profiled", line_profile))
    }
    found: dict[tuple[str, str], list[Any]] = alternately(measure, ROUNDS)
    times = {name: found[name, "plain"] for name in RUNS}
    steps = {name: [load + compute for load, compute in trials] for name, trials in times.items()}
    profiles = {name: [lines for _, lines in found[name, "profiled"]] for name in RUNS}
    results.store(
        "first_changes",
        title="The first changes, without and with the line profiler",
        columns=[
            "run",
            "load, ms",
            "compute, ms",
            "1 + load / compute",
            "load, % of the step",
            "times as fast",
            "`for` line in the profile, %",
            "a step under the profiler takes",
        ],
        rows=[
            [
                title,
                median_range([load for load, _ in times[name]]),
                median_range([compute for _, compute in times[name]]),
                median_range([1 + load / compute for load, compute in times[name]]),
                median_range([100 * load / (load + compute) for load, compute in times[name]]),
                median_range(ratios(steps["memory"], steps["map"])) if name == "memory" else None,
                median_range([share_of_for(lines) for lines in profiles[name]]),
                median_range(ratios(steps[name], [step_under_profiler(lines) for lines in profiles[name]])),
            ]
            for name, title in zip(RUNS, TITLES, strict=True)
        ],
        formats={
            "load, ms": ".1f",
            "compute, ms": ".1f",
            "1 + load / compute": ".2f",
            "load, % of the step": ".0f",
            "times as fast": ".1f",
            "`for` line in the profile, %": ".0f",
            "a step under the profiler takes": ".2f",
        },
        unit="load and compute: of the log's last step line, without the profiler",
        spread=f"median of {ROUNDS} trials, lowest and highest; each trial measured every row without and with the "
        "profiler, and was repeated if other programs used the CPUs meanwhile; a ratio is the median of the ratios "
        "within a trial",
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
