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
UNET = "--config ../configs/unet3d.yaml --config ../configs/unet3d_tiny.yaml"
FEW = "--limit_train 640 --limit_val 320 --loader memory --log_interval 5"
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
COMMANDS_04 = {
    "fp32": f"python train.py {FEW}",
    "bf16": f"python train.py {FEW} --precision bf16 --run_dir ../runs/bf16",
    "number_formats": "python experiments/number_formats.py",
    "unet": f"python train.py {UNET} --limit_train 160 --epochs 1",
    "mfu": "python train.py --model vit --limit_train 640 --limit_val 320 --log_interval 5 --mfu true "
    "--run_dir ../runs/mfu",
}
"""the same for lesson 04"""
LESSONS = {"03_ddp": COMMANDS, "04_mixed_precision": COMMANDS_04}
"""the commands by the name of the lesson"""
OF_THIS_MACHINE = [
    (re.compile(r"\S+/bin/python\b"), "/path/to/your/python"),
    (re.compile(re.escape(str(REPOSITORY)) + "/"), ""),
    (re.compile(re.escape(str(REPOSITORY.parent)) + r"/\w+/"), ""),
]
"""paths that are replaced"""


def printed_by(command: str, lesson: Path) -> str:
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
    for lesson, commands in LESSONS.items():
        for name in commands.keys() & set(sys.argv[1:]):
            text = f"$ {commands[name]}\n{printed_by(commands[name], REPOSITORY / lesson)}\n"
            Path(FOLDER, f"{lesson}_{name}.txt").write_text(text)
            print(text)


if __name__ == "__main__":
    main()
