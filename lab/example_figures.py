"""Run commands of the pages and keep what they made, for the pages to show: `python lab/example_figures.py [NAME ...]`.

    job     the log of lesson 01's job file; it needs a Slurm, such as that of slurm/local_cluster.sh
    trace   the plot trace.png that --trace true leaves, of lesson 01 with two workers

The plot is in results, the log in results/example_output, and in results/example_figures.json is how they were made.
"""

import datetime
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lab.example_output import FOLDER, printed_by
from workshop.paths import REPOSITORY

RESULTS = REPOSITORY / "results"
ABOUT = RESULTS / "example_figures.json"
JOB_LOG = FOLDER / "01_single_gpu_job.txt"
TRACE = RESULTS / "example_trace.png"
COMMANDS = {
    "job": ("01_single_gpu", "sbatch job.slurm --limit_train 12800 --limit_val 2000"),
    "trace": (
        "01_single_gpu",
        "python train.py --config ../configs/cifar10.yaml --epochs 1 --limit_train 3200 --limit_val 128 "
        "--num_workers 2 --trace true",
    ),
}
"""in which folder what is typed; --run_dir is added to the last one"""


def train(name: str, run_dir: Path) -> dict[str, Any]:
    """Run a command and return its summary.json."""
    lesson, command = COMMANDS[name]
    words = [sys.executable, *command.split()[1:], "--run_dir", str(run_dir)]
    subprocess.run(words, cwd=REPOSITORY / lesson, check=True)
    return json.loads((run_dir / "summary.json").read_text())


def keep_job(_: Path) -> dict[str, Any]:
    """Keep the log of a job."""
    lesson, command = COMMANDS["job"]
    JOB_LOG.write_text(f"$ {command}\n{printed_by(command, REPOSITORY / lesson)}\n")
    return {}


def keep_trace(run_dir: Path) -> dict[str, Any]:
    """Keep the plot of a traced run."""
    train("trace", run_dir)
    shutil.copy(run_dir / "trace.png", TRACE)
    return {}


MAKERS: dict[str, Callable[[Path], dict[str, Any]]] = {"job": keep_job, "trace": keep_trace}


def main() -> None:
    """Make what is named on the command line, or all, and note how."""
    from lab.machine_facts import this_machine  # here, because it imports torch, and rendering the pages needs none

    for name in sys.argv[1:] or MAKERS:
        with tempfile.TemporaryDirectory() as folder:
            found = MAKERS[name](Path(folder, "run"))
        about = {
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "command": f"python lab/example_figures.py {name}",
            "hardware": this_machine()["hardware"],
            "versions": this_machine()["versions"],
        }
        known = json.loads(ABOUT.read_text()) if ABOUT.exists() else {}
        ABOUT.write_text(json.dumps(known | {name: about | found}, indent=2) + "\n")


if __name__ == "__main__":
    main()
