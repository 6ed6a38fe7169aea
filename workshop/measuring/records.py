"""The JSON record of an experiment: its figures, and what is needed to trust or to repeat them."""

import json
import os
import shlex
import sys
from datetime import date
from pathlib import Path
from typing import Any

import torch

from workshop.hardware import describe_hardware, describe_versions


def write_record(file: Path, device: torch.device, figures: dict[str, Any]) -> None:
    """Write the figures as JSON, after the date, the command, the hardware and the versions they were measured with.

    Entries of the figures win, such as the hardware of a run that ended earlier. Whoever reads the file while it is
    written anew finds the former one, whole.
    """
    about = {
        "date": date.today().isoformat(),
        "command": shlex.join(["python", Path(sys.argv[0]).name, *sys.argv[1:]]),
        "hardware": describe_hardware(device),
        "versions": describe_versions(),
    }
    unfinished = file.with_name(f"{file.name}.part")
    unfinished.write_text(json.dumps(about | figures, indent=2, default=str) + "\n")
    os.replace(unfinished, file)
