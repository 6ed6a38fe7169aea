"""Run commands of the pages again, and keep what they print for the pages to show: `python -m lab.outputs [NAME ...]`.

Each file in results/example_output is an output: its first line is "$ " and the command, which is typed in the folder
of the lesson that the file is named after, and below it is what the command printed. A new output is a new file with
nothing but the first line. Speeds, which differ from run to run, become "...", unless the name ends with _speeds.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

from lab.results import RESULTS
from workshop.errors import UserError, run_reporting_user_errors
from workshop.paths import REPOSITORY

FOLDER = RESULTS / "example_output"
REPLACED = {
    r"\S+/bin/python\b": "/path/to/your/python",
    re.escape(f"{REPOSITORY}/"): "",
    re.escape(f"{REPOSITORY.parent}/") + r"\w+/": "",
}
"""paths of this machine"""
SPEEDS = (
    r"  [\d,]+ \w+/s(?: \([\d,]+ per rank\))?  load .* ms$",
    r"  [\d.]+ s  [\d,]+ \w+/s(?: \(.*)?(?:  peak .*)?(?:  validation .*)?$",
)


def printed_by(command: str, lesson: Path) -> str:
    """Return what a command that is typed in a lesson's folder prints to stdout; of a job, its log.

    Raises:
        UserError: it failed.
    """
    environment = os.environ | {"COLUMNS": "120", "PYTHONPATH": str(REPOSITORY)}
    words = command.replace("sbatch ", "sbatch --parsable --wait ", 1).split()
    result = subprocess.run(words, cwd=lesson, env=environment, text=True, capture_output=True)
    if result.returncode:
        raise UserError(f"exit status {result.returncode} from {command}: {result.stderr}")
    text = result.stdout
    if words[0] == "sbatch":
        log = lesson / f"{text.split()[0]}.log"
        text = log.read_text()
        log.unlink()
    for pattern, instead in REPLACED.items():
        text = re.sub(pattern, instead, text)
    return text.strip("\n")


def main() -> None:
    """Run the commands of the files named on the command line, or of all."""
    for name in sys.argv[1:] or sorted(file.stem for file in FOLDER.glob("*.txt")):
        file = FOLDER / f"{name}.txt"
        command = file.read_text().partition("\n")[0].removeprefix("$ ")
        (lesson,) = (folder for folder in REPOSITORY.glob("0*_*") if name.startswith(folder.name))
        text = printed_by(command, lesson)
        for pattern in () if name.endswith("_speeds") else SPEEDS:
            text = re.sub(pattern, "  ...", text, flags=re.MULTILINE)
        file.write_text(f"$ {command}\n{text}\n")
        print(text)


if __name__ == "__main__":
    run_reporting_user_errors(main)
