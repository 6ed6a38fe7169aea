"""Run commands of the pages and keep what they print, for the pages to show: `python lab/example_output.py NAME ...`.

The files are in results/example_output: the command after "$ ", and below it what it printed.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

from workshop.paths import REPOSITORY

FOLDER = REPOSITORY / "results" / "example_output"
TORCHRUN = "torchrun --standalone --nproc-per-node 2"
COMMANDS = {
    "one_rank": "python train.py --limit_train 3200 --log_interval 10",
    "two_ranks": f"{TORCHRUN} train.py --limit_train 3200 --log_interval 10",
    "two_nodes": "sbatch -N 2 job.slurm --limit_train 3200 --log_interval 10",
    "benchmark": f"{TORCHRUN} train.py --benchmark true --benchmark_seconds 0.3 --loader memory",
    "unused": f"{TORCHRUN} experiments/unused_parameters.py",
    "found_unused": f"{TORCHRUN} experiments/unused_parameters.py --find_unused_parameters true",
    "flight_recorder": f"{TORCHRUN} experiments/flight_recorder.py",
}
"""what is typed in lesson 03's folder, by the name of the file"""
LESSON = REPOSITORY / "03_ddp"
FEW = "--limit_train 640 --limit_val 320 --loader memory --run_dir ../runs"
OF_OTHER_LESSONS = {
    "04_mixed_precision_two_formats": [
        f"python train.py {FEW}/plain",
        f"python train.py {FEW}/bf16 --precision bf16 --channels_last true",
    ],
}
"""what is typed in the folder of another lesson, by the name of the file, which begins with that of the lesson: output
of which the losses matter and not the speeds, for a class without computers"""
OF_THIS_MACHINE = [
    (re.compile(r"\S+/bin/python\b"), "/path/to/your/python"),
    (re.compile(re.escape(str(REPOSITORY)) + "/"), ""),
    (re.compile(re.escape(str(REPOSITORY.parent)) + r"/\w+/"), ""),
]
"""paths that are replaced"""


def lesson_of(name: str) -> Path:
    """Return the folder of the lesson whose commands are in the file ``name``."""
    (lesson,) = [folder for folder in REPOSITORY.glob("0*_*") if name.startswith(f"{folder.name}_")]
    return lesson


def printed_by(command: str, lesson: Path = LESSON) -> str:
    """Return what a command that is typed in a lesson's folder prints to stdout; of a job, its log.

    Raises:
        subprocess.CalledProcessError: it failed.
    """
    environment = os.environ | {"COLUMNS": "120", "PYTHONPATH": str(REPOSITORY)}
    if command.startswith("sbatch "):
        words = command.replace("sbatch ", "sbatch --parsable --wait ", 1)
        started = subprocess.run(words.split(), cwd=lesson, env=environment, text=True, check=True, capture_output=True)
        log = lesson / f"{started.stdout.split()[0]}.log"
        text = log.read_text()
        log.unlink()
    else:
        result = subprocess.run(
            command.split(), cwd=lesson, env=environment, text=True, check=True, capture_output=True
        )
        text = result.stdout
    for pattern, instead in OF_THIS_MACHINE:
        text = pattern.sub(instead, text)
    return text.strip("\n")


def main() -> None:
    """Run the commands that are named on the command line, and write their files."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name in sys.argv[1:]:
        if name in COMMANDS:
            text = f"$ {COMMANDS[name]}\n{printed_by(COMMANDS[name])}\n"
            Path(FOLDER, f"03_ddp_{name}.txt").write_text(text)
        else:
            parts = [f"$ {line}\n{printed_by(line, lesson_of(name))}\n" for line in OF_OTHER_LESSONS[name]]
            text = "\n".join(parts)
            Path(FOLDER, f"{name}.txt").write_text(text)
        print(text)


if __name__ == "__main__":
    main()
