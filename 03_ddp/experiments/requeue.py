"""What happens to a job that is asked to stop and goes back into the queue: `python experiments/requeue.py`.

It needs a Slurm, such as that of slurm/local_cluster.sh. It submits lesson 03's job, sends it SIGUSR1 as Slurm does
before the time limit, and notes when the job changes its state and what its log says.
"""

import re
import shutil
import subprocess
import tempfile
import time
from itertools import pairwise
from pathlib import Path

from matplotlib.figure import Figure

from lab import results
from lab.flags import Parser
from workshop.errors import UserError, run_reporting_user_errors

LESSON = Path(__file__).resolve().parents[1]
FLAGS = ("--limit_train", "6400", "--limit_val", "640", "--epochs", "2", "--log_interval", "10")
LIMIT_SECONDS = 900
LINES = {
    "first step logged": r"epoch 1 +step +10/",
    "checkpoint saved": r"stopped by SIGUSR1|saved .*step",
    "starts again": r"restart 1",
    "done": r"epoch 2 +train loss",
}
"""what is looked for in the log, by what it means"""
STATES = {
    "PD": ("waits in the queue", "#E69F00"),
    "R": ("runs", "#56B4E9"),
    "CG": ("ends", "#999999"),
    "CF": ("starts", "#009E73"),
}
"""Slurm's short names of a job's states, what they mean, and a colour"""
SHOWN = ("SIGUSR1", "checkpoint saved", "starts again")
"""the events in the plot; it begins and ends half a minute before and after them"""


def output_of(*words: str) -> str:
    """Return what a command prints, without line ends around it; nothing if it fails or is not there."""
    if not shutil.which(words[0]):
        return ""
    return subprocess.run(words, cwd=LESSON, capture_output=True, text=True).stdout.strip()


def watch(folder: Path) -> tuple[list[tuple[float, str]], dict[str, float]]:
    """Submit the job, signal it once it trains, and return its states and events with their times in seconds.

    Raises:
        UserError: Slurm does not take the job, or the job does not do all that is looked for.
    """
    job = output_of("sbatch", "--parsable", "job.slurm", *FLAGS, "--run_dir", str(folder / "run"))
    if not job:
        raise UserError("Slurm did not take the job: type `sbatch job.slurm` in 03_ddp to see why")
    log = LESSON / f"{job}.log"
    started = time.monotonic()
    states: list[tuple[float, str]] = []
    events: dict[str, float] = {}
    try:
        while time.monotonic() < started + LIMIT_SECONDS:
            now = time.monotonic() - started
            state = output_of("squeue", "--noheader", "--jobs", job, "--format=%t") or "ended"
            if not states or states[-1][1] != state:
                states.append((now, state))
            text = log.read_text() if log.exists() else ""
            for name, pattern in LINES.items():
                if name not in events and re.search(pattern, text):
                    events[name] = now
            if "first step logged" in events and "SIGUSR1" not in events:
                events["SIGUSR1"] = now
                output_of("scancel", "--signal=USR1", job)
            if state in ("ended", "CD"):
                break
            time.sleep(0.1)
    finally:
        output_of("scancel", job)  # if it has not ended; otherwise this does nothing
        print(log.read_text() if log.exists() else "")
        log.unlink(missing_ok=True)
    if missing := [name for name in LINES if name not in events]:
        raise UserError(f"the log of job {job}, which is above, does not say: {', '.join(missing)}")
    return states, events


def plot(states: list[tuple[float, str]], events: dict[str, float]) -> Figure:
    """Return a plot of the job's states around the signal as bars, and above them what happened."""
    figure = Figure(figsize=(9, 2.6), layout="constrained")
    axis = figure.subplots()
    first, last = events[SHOWN[0]] - 30, events[SHOWN[-1]] + 30
    for (start, name), (stop, _) in pairwise(states):
        label, color = STATES.get(name, (name, "black"))
        known = axis.get_legend_handles_labels()[1]
        axis.broken_barh([(start, stop - start)], (0, 1), color=color, label=None if label in known else label)
    for number, name in enumerate(SHOWN):
        height = 1.4 + 0.5 * number
        axis.plot([events[name]] * 2, [0, height], color="black", linewidth=1)
        axis.text(events[name], height, f" {name} ", ha="left" if number else "right", va="top", fontsize=10)
    axis.set(xlim=(first, last), ylim=(0, 3.1), yticks=(), xlabel="seconds since sbatch")
    axis.spines[["top", "right", "left"]].set_visible(False)
    figure.legend(loc="outside upper right", ncols=3, frameon=False, fontsize=9.5)
    return figure


def main() -> None:
    """Watch one job, and store when it did what."""
    Parser(__doc__).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        states, events = watch(Path(folder))
    results.store(
        "requeue",
        title="A job that is asked to stop",
        columns=["event", "seconds since sbatch"],
        rows=[[name, at] for name, at in sorted(events.items(), key=lambda event: event[1])],
        formats={"seconds since sbatch": ".1f"},
        spread="one job",
        figure=plot(states, events),
    )


if __name__ == "__main__":
    run_reporting_user_errors(main)
