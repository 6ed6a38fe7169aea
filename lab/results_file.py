"""The results file of a machine: the figures of each experiment; the file is complete at every moment."""

import json
import re
from datetime import date
from pathlib import Path
from typing import Any

from lab.machine_facts import this_machine
from workshop.errors import UserError
from workshop.paths import write_json

ABOUT = {"date", "command", "hardware", "versions"}
"""what the results of each experiment contain besides its figures"""


def machine_name() -> str:
    """Return a file name for this machine: its GPUs and their number, else its processor, what it can and its CPUs.

    Hardware and versions are asked for in a process of their own, so that this one holds no CUDA context.
    """
    hardware = this_machine()["hardware"]
    names = "{device_name} {gpus}gpu" if "gpus" in hardware else "{cpu} {cpu_instructions} {cpus_available}cpu"
    return re.sub(r"\W+", "_", names.format(**hardware).lower()).strip("_")


def read_results(file: Path) -> dict[str, dict[str, Any]]:
    """Return the results by experiment; none if there is no file.

    Raises:
        UserError: the file holds something else.
    """
    try:
        all_results = json.loads(file.read_text()) if file.exists() else {}
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read the results in {file}: {error}; move it away") from None
    found = all_results.values() if isinstance(all_results, dict) else [None]
    if not all(isinstance(results, dict) and results.keys() >= ABOUT for results in found):
        raise UserError(f"{file} holds no results of this script; move it away, or name another --machine")
    return all_results


def save_results(file: Path, experiment: str, figures: dict[str, Any], command: str) -> None:
    """Put an experiment's figures into the file, with what is needed to trust or to repeat them.

    Hardware and versions in the figures replace those of this process: another one, with other devices, may have
    measured them.
    """
    all_results = read_results(file)
    here = {key: this_machine()[key] for key in ("hardware", "versions")}
    all_results[experiment] = here | figures | {"date": date.today().isoformat(), "command": command}
    write_json(file, all_results)
