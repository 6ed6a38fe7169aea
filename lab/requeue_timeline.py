"""Measure what happens to a job that is asked to stop and goes back into the queue: `python lab/requeue_timeline.py`.

It needs a Slurm, such as that of slurm/local_cluster.sh. It submits lesson 03's job, sends it SIGUSR1 as Slurm does
before the time limit, and notes when the job changes its state and what its log says. The results are in
results/requeue.json.
"""

import re
import shutil
import subprocess
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

from lab.machine_facts import this_machine
from workshop.entry import run_reporting_user_errors
from workshop.errors import UserError
from workshop.paths import REPOSITORY, write_json

LESSON = REPOSITORY / "03_ddp"
FLAGS = ("--limit_train", "6400", "--limit_val", "640", "--epochs", "2", "--log_interval", "10")
LIMIT_SECONDS = 900
LINES = {
    "first step logged": r"epoch 1 +step +10/",
    "checkpoint saved": r"stopped by SIGUSR1",
    "starts again": r"restart 1",
    "done": r"epoch 2 +train loss",
}
"""what is looked for in the log, by what it means"""


def output_of(*words: str) -> str:
    """Return what a command prints, without line ends around it; nothing if it fails or is not there."""
    if not shutil.which(words[0]):
        return ""
    return subprocess.run(words, cwd=LESSON, capture_output=True, text=True).stdout.strip()


def watch(folder: Path) -> dict[str, Any]:
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
    return {"states": states, "events": events}


def main() -> None:
    """Watch one job, and write what was seen."""
    with tempfile.TemporaryDirectory() as folder:
        seen = watch(Path(folder))
    machine = this_machine()
    about = {
        "date": date.today().isoformat(),
        "command": "python lab/requeue_timeline.py",
        "hardware": machine["hardware"],
        "versions": machine["versions"],
    }
    file = REPOSITORY / "results" / "requeue.json"
    write_json(file, about | {"flags": FLAGS} | seen)
    print(f"written: {file}")


if __name__ == "__main__":
    run_reporting_user_errors(main)
