"""Where data sets and runs live unless a flag says otherwise."""

import os
import sys
from pathlib import Path

from workshop.errors import UserError

REPOSITORY = Path(__file__).resolve().parent.parent


def default_data_dir() -> Path:
    """Root folder of the data sets: ``$WORKSHOP_DATA``, else ``data/`` of the repository."""
    return Path(os.environ.get("WORKSHOP_DATA") or REPOSITORY / "data")


def default_runs_dir() -> Path:
    """Root folder of all runs: ``$WORKSHOP_RUNS``, else ``runs/`` of the repository, or beside a script elsewhere."""
    folder = Path(sys.argv[0]).resolve().parent
    root = REPOSITORY if folder.is_relative_to(REPOSITORY) else folder
    return Path(os.environ.get("WORKSHOP_RUNS") or root / "runs")


def lesson_name() -> str:
    """Return the name of the lesson whose script is running, be that its train.py or one of its experiments.

    A script outside the repository, such as a copy, is called by the name of its file, if that says more than "train".
    """
    script = Path(sys.argv[0]).resolve()
    folder = script.parent
    if folder.is_relative_to(REPOSITORY):
        return folder.parent.name if folder.name == "experiments" else folder.name
    return folder.name if script.stem == "train" else script.stem


def check_clone(script: Path) -> None:
    """Raise `UserError` if ``script`` is of one clone of the repository, but imports the package of another one.

    An editable install makes every clone import the package of the clone that it was installed from.
    """
    for clone in script.resolve().parents[:3]:
        if (clone / "workshop/errors.py").is_file() and not (REPOSITORY / "workshop").samefile(clone / "workshop"):
            raise UserError(
                f"{script} got the package of another clone, {REPOSITORY}: run `make setup` in {clone} and use its "
                f".venv, or `export PYTHONPATH={clone}`"
            )
