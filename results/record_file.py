"""The file of a machine's figures: a record for each experiment, whole at every moment."""

import json
import re
from datetime import date
from pathlib import Path
from typing import Any

from machine_facts import this_machine
from workshop.errors import UserError

ABOUT = {"date", "command", "hardware", "versions"}
"""what each record says of itself"""


def machine_name() -> str:
    """Return a file name for this machine: its GPUs and their number, else its processor, what it can and its CPUs.

    Hardware and versions are asked for in a process of their own, so that this one holds no CUDA context.
    """
    hardware = this_machine()["hardware"]
    names = "{device_name} {gpus}gpu" if "gpus" in hardware else "{cpu} {cpu_instructions} {cpus_available}cpu"
    return re.sub(r"\W+", "_", names.format(**hardware).lower()).strip("_")


def read_records(file: Path) -> dict[str, dict[str, Any]]:
    """Return the records by experiment; none if there is no file.

    Raises:
        UserError: the file holds something else.
    """
    try:
        records = json.loads(file.read_text()) if file.exists() else {}
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read the records in {file}: {error}; move it away") from None
    found = records.values() if isinstance(records, dict) else [None]
    if not all(isinstance(record, dict) and record.keys() >= ABOUT for record in found):
        raise UserError(f"{file} holds no records of this script; move it away, or name another --machine")
    return records


def put_record(file: Path, experiment: str, figures: dict[str, Any], command: str) -> None:
    """Put an experiment's figures into the file, with what is needed to trust or to repeat them.

    Hardware and versions that the figures tell win: another process, with other devices, may have measured them.
    """
    records = read_records(file)
    here = {key: this_machine()[key] for key in ("hardware", "versions")}
    records[experiment] = here | figures | {"date": date.today().isoformat(), "command": command}
    temporary = file.with_suffix(".tmp")
    temporary.write_text(json.dumps(records, indent=2) + "\n")
    temporary.replace(file)
