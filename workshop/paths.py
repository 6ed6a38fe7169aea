"""Where data sets and runs live unless a flag says otherwise."""

import os
import sys
from pathlib import Path

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
