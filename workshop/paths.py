"""Where data sets and runs live unless a flag says otherwise, and how a file of results is written."""

import json
import os
import sys
from pathlib import Path
from typing import Any

from workshop.errors import UserError

REPOSITORY = Path(__file__).resolve().parent.parent


def default_data_dir() -> Path:
    """Root folder of the data sets: ``$WORKSHOP_DATA``, else ``data/`` of the repository."""
    return Path(os.environ.get("WORKSHOP_DATA") or REPOSITORY / "data")


def default_runs_dir() -> Path:
    """Root folder of all runs: ``$WORKSHOP_RUNS``, else ``runs/`` of the repository."""
    return Path(os.environ.get("WORKSHOP_RUNS") or REPOSITORY / "runs")


def lesson_name() -> str:
    """Return the name of the lesson whose script is running, be that its train.py or one of its experiments."""
    folder = Path(sys.argv[0]).resolve().parent
    return folder.parent.name if folder.name == "experiments" else folder.name


def write_json(file: Path, content: object) -> None:
    """Write a JSON file that is complete at every moment; values that JSON does not know are written as text."""
    temporary = file.with_name(f"{file.name}.{os.getpid()}.tmp")
    temporary.write_text(json.dumps(content, indent=2, default=str) + "\n")
    temporary.replace(file)


def read_json(file: Path) -> dict[str, Any]:
    """Return what is in a JSON file; an empty dictionary if it is not there or holds something else."""
    try:
        content = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


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
