"""The JSON file of an experiment: its figures, and what is needed to trust or to repeat them."""

import shlex
import sys
from datetime import date
from pathlib import Path
from typing import Any

import torch

from workshop.hardware import describe_hardware, describe_versions
from workshop.paths import write_json


def write_results(file: Path, device: torch.device, figures: dict[str, Any]) -> None:
    """Write the figures as JSON, after the date, the command, the hardware and the versions they were measured with.

    Entries of the figures replace these, such as the hardware of a run that ended earlier. The file is complete at
    every moment, also while it is replaced.
    """
    about = {
        "date": date.today().isoformat(),
        "command": shlex.join(["python", Path(sys.argv[0]).name, *sys.argv[1:]]),
        "hardware": describe_hardware(device),
        "versions": describe_versions(),
    }
    write_json(file, about | figures)
