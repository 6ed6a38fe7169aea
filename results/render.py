"""Turn the figures on record into the tables of the READMEs; cog calls these functions (`make docs`)."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

MACHINE = "amd_epyc_2cpu"
"""the machine whose figures the pages show where they need one that everybody can compare with"""


def load(experiment: str, machine: str = MACHINE) -> dict[str, Any] | None:
    """Return the record of an experiment on a machine, or None if it was not measured there."""
    file = Path(__file__).parent / f"{machine}.json"
    return json.loads(file.read_text()).get(experiment) if file.exists() else None


def machine(record: dict[str, Any]) -> str:
    """Say where and with what a record was measured."""
    hardware, versions = record["hardware"], record["versions"]
    where = hardware.get("device_name") or f"{hardware['cpus_available']} CPUs of an {hardware['cpu']}"
    return f"{where}, torch {versions['torch']}, Python {versions['python']}, {record['date']}"


def source(record: dict[str, Any]) -> str:
    """Return the caption under a table: where it was measured and the command that measures it again."""
    return f"*Measured on {machine(record)}, with `{record['command']}`.*"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table, all columns but the first aligned to the right."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def line_profile() -> str:
    """Render the line profile of lesson 01's baseline: the lines that took at least 0.1 % of the time."""
    record = load("baseline")
    lines = [f"{'Line':>4} {'Hits':>6} {'Seconds':>8} {'% Time':>7}  Line contents"]
    for line in record["lines"]:
        if line["percent"] >= 0.1:
            figures = f"{line['line']:>4} {line['hits']:>6} {line['seconds']:>8.2f} {line['percent']:>7.1f}"
            lines.append(f"{figures}  {line['text']}")
    return "\n".join(["```text", *lines, "```", "", source(record)])


def baseline_epoch() -> str:
    """Render one sentence on what one epoch of lesson 01 gives and costs."""
    record = load("baseline")
    epoch = record["epoch"]
    return (
        f"On {machine(record)}: **{epoch['val_accuracy']:.2%}** accuracy on the validation digits after one epoch of "
        f"{epoch['seconds']:.0f} s, {epoch['samples_per_second']:,.0f} samples/s."
    )


def workers() -> str:
    """Render the throughput of lesson 01 by the number of worker processes."""
    record = load("workers")
    rows = record["rows"]
    first = rows[0]["samples_per_second"]
    cells = [
        (str(r["num_workers"]), f"{r['samples_per_second']:,.0f}", f"{r['samples_per_second'] / first:.2f}x")
        for r in rows
    ]
    return "\n".join([table(["`--num_workers`", "samples/s", "against 0"], cells), "", source(record)])
