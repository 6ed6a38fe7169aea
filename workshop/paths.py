"""Where data sets and runs live unless a flag says otherwise, and how a file of results is written."""

import json
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


def write_json(file: Path, content: object, suffix: str = ".tmp") -> None:
    """Write a JSON file that is complete at every moment: a reader finds the former content or the new one.

    Args:
        file: to write.
        content: values that JSON does not know, such as paths, are written as text.
        suffix: of the temporary file beside it; processes that write the same file need different ones.
    """
    temporary = file.with_suffix(suffix)
    temporary.write_text(json.dumps(content, indent=2, default=str) + "\n")
    temporary.replace(file)
