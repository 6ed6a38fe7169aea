"""Where data sets and runs live unless a flag says otherwise."""

import os
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent


def default_data_dir() -> Path:
    """Root folder of the data sets: ``$WORKSHOP_DATA``, else ``data/`` of the repository."""
    return Path(os.environ.get("WORKSHOP_DATA") or REPOSITORY / "data")


def default_runs_dir() -> Path:
    """Root folder of all runs: ``$WORKSHOP_RUNS``, else ``runs/`` of the repository."""
    return Path(os.environ.get("WORKSHOP_RUNS") or REPOSITORY / "runs")
