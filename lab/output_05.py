"""Run commands of lesson 05's page and keep what they print, for the page to show: `python lab/output_05.py NAME ...`.

The files are results/example_output/05_fully_sharded_NAME.txt: the command after "$ ", and below it what it printed.
"""

import os
import subprocess
import sys

from lab.example_output import FOLDER, OF_THIS_MACHINE, TORCHRUN
from workshop.paths import REPOSITORY

LESSON = REPOSITORY / "05_fully_sharded"
SHORT = "--limit_train 1280 --limit_val 320"
HALF = "--limit_train 640 --limit_val 320 --global_batch_size 64"
PARTS = f"{HALF} --run_dir ../runs/parts --checkpoint_form sharded"
COMMANDS = {
    "two_ranks": f"{TORCHRUN} train.py {SHORT} --run_dir ../runs/sharded",
    "one_rank": f"python train.py {SHORT}",
    "ddp": f"{TORCHRUN} ../04_mixed_precision/train.py --model vit {SHORT}",
    "saved_whole": f"{TORCHRUN} train.py {HALF} --run_dir ../runs/one_file",
    "resumed_whole": f"python train.py {HALF} --run_dir ../runs/one_file --epochs 2 --resume true",
    "saved_sharded": f"{TORCHRUN} train.py {PARTS}",
    "resumed_sharded": f"python train.py {PARTS} --epochs 2 --resume true",
}
"""what is typed in the lesson's folder, in this order, by the name of the file"""


def printed_by(command: str) -> str:
    """Return what a command prints to stdout.

    Raises:
        subprocess.CalledProcessError: it failed.
    """
    environment = os.environ | {"COLUMNS": "120", "PYTHONPATH": str(REPOSITORY)}
    result = subprocess.run(command.split(), cwd=LESSON, env=environment, text=True, check=True, stdout=subprocess.PIPE)
    text = result.stdout
    for pattern, instead in OF_THIS_MACHINE:
        text = pattern.sub(instead, text)
    return text.strip("\n")


def main() -> None:
    """Run the commands that are named on the command line, and write their files."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name in sys.argv[1:]:
        text = f"$ {COMMANDS[name]}\n{printed_by(COMMANDS[name])}\n"
        (FOLDER / f"{LESSON.name}_{name}.txt").write_text(text)
        print(text)


if __name__ == "__main__":
    main()
