"""Small JSON files."""

import json
import os
from pathlib import Path
from typing import Any


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
