"""Tables of measured figures: an experiment stores the table that it prints, and pages show it (`lab/pages.py`).

    results.store(
        "loaders",
        title="CIFAR-10 with each loader",
        columns=["--loader", "IO", "FULL"],
        rows=[["map", [5402.1, 81.0], [2117.3, 33.2]], ["memory", [87748.0, 6560.0], [8942.0, 270.0]]],
        formats={"IO": ",.0f", "FULL": ",.0f"},
        unit="samples/s",
        spread="mean ± standard deviation of 3 trials",
        figure=figure,
    )

A cell is a text, a number, None for nothing, or a number with its spread: [mean, deviation], or [median, lowest,
highest]. The table is written to results/<machine>/loaders.json with the hardware, the versions, the date and the
command, and the plot to loaders.png beside it. `value("amd_epyc_avx512_2cpu/loaders memory.FULL")` is 8942.0.
"""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workshop.jsonfile import write_json
from workshop.paths import REPOSITORY

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RESULTS = REPOSITORY / "results"
Cell = str | float | list[float] | None


def store(
    name: str,
    *,
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[Cell]],
    formats: Mapping[str, str] | None = None,
    unit: str = "",
    spread: str = "",
    figure: "Figure | None" = None,
    command: str | None = None,
    finished: bool = True,
) -> None:
    """Print a table, and write it and its plot into the folder of this machine, below $WORKSHOP_RESULTS or results/.

    Args:
        name: of the files.
        title: what was measured.
        columns: the header; the first column (or the first few together) names the rows.
        rows: a cell for each column.
        formats: format specifications of columns of numbers, such as ",.0f" or ".1%".
        unit: of the numbers, if they have one in common.
        spread: what ± or the range means, and of how many trials.
        figure: a plot of the same figures.
        command: what measures this again; by default what was typed.
        finished: False if the caller will store this table again, with more rows.
    """
    assert all(len(row) == len(columns) for row in rows), f"{name}: a row has another number of cells than the header"
    table = {
        "title": title,
        "columns": list(columns),
        "rows": [list(row) for row in rows],
        "formats": dict(formats or {}),
        "unit": unit,
        "spread": spread,
        **provenance(),
        "command": command or _typed(),
    } | ({} if finished else {"unfinished": True})
    print(f"\n{title}{f', in {unit}' if unit else ''}{f' ({spread})' if spread else ''}\n{as_text(table)}")
    if figure is not None:
        store_plot(name, figure)
    write_json(_folder() / f"{name}.json", table)


def provenance() -> dict[str, Any]:
    """Return what a stored table says of where it comes from: machine, versions, date, commit."""
    from workshop.hardware import describe_hardware, describe_versions, pick_device

    return {
        "machine": describe_hardware(pick_device()),
        "versions": describe_versions(),
        "date": date.today().isoformat(),
        "commit": _commit(),
    }


def unfinished_rows(name: str) -> list[list[Any]]:
    """Return the rows that the same command stored here earlier today, before it was stopped; none if it finished."""
    file = _folder() / f"{name}.json"
    table = json.loads(file.read_text()) if file.is_file() else {}
    same = table.get("date") == date.today().isoformat() and table.get("command") == _typed()
    return table["rows"] if same and table.get("unfinished") else []


def _commit() -> str | None:
    """Return the newest commit of this repository; None outside of one, for example in an unpacked archive."""
    command = ["git", "-C", str(REPOSITORY), "rev-parse", "--short=9", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def _typed() -> str:
    by_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
    start = f"torchrun --standalone --nproc-per-node {os.environ['LOCAL_WORLD_SIZE']}" if by_torchrun else "python"
    return shlex.join([*start.split(), os.path.relpath(sys.argv[0]), *sys.argv[1:]])


def store_plot(name: str, figure: "Figure") -> None:
    """Write a plot into the folder of this machine."""
    temporary = _folder() / f"{name}.{os.getpid()}.png"
    figure.savefig(temporary, dpi=120)
    temporary.replace(_folder() / f"{name}.png")


def _folder() -> Path:
    from workshop.hardware import describe_hardware, pick_device

    folder = Path(os.environ.get("WORKSHOP_RESULTS") or RESULTS) / machine_name(describe_hardware(pick_device()))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def machine_name(hardware: Mapping[str, Any]) -> str:
    """Return a folder name for a machine: its GPUs and their number, else its processor, instructions and CPUs."""
    names = "{device_name} {gpus}gpu" if "gpus" in hardware else "{cpu} {cpu_instructions} {cpus_available}cpu"
    return re.sub(r"\W+", "_", names.format(**hardware).lower()).strip("_")


def load(machine: str, name: str) -> dict[str, Any]:
    """Return a stored table.

    Raises:
        LookupError: there is none of this name.
    """
    file = RESULTS / machine / f"{name}.json"
    if not file.is_file():
        raise LookupError(f"no stored table {machine}/{name}")
    return json.loads(file.read_text())


def cell(path: str) -> Cell:
    """Return the cell of a stored table that has the path "machine/table row.column".

    A row is named by its first cell, or by its first cells joined with ", ". Backticks and asterisks do not count.

    Raises:
        LookupError: there is no such table, or not exactly one cell of this name.
    """
    table_name, _, cell_name = path.strip().partition(" ")
    table = load(*table_name.split("/", 1))
    wanted, found = plain(cell_name), []
    for row in table["rows"]:
        labels = [", ".join(plain(part) for part in row[:count]) for count in range(1, len(row) + 1)]
        for column, content in zip(table["columns"], row, strict=True):
            if wanted in {f"{label}.{plain(column)}" for label in labels}:
                found.append(content)
    if len(found) != 1:
        raise LookupError(f"{table_name} has {len(found)} cells {cell_name!r}")
    return found[0]


def value(path: str) -> float:
    """Return the number in a cell, without its spread."""
    return _numbers(path)[0]


def low(path: str) -> float:
    """Return the lower end of a number with its spread: the mean minus the deviation, or the lowest."""
    first, *spread = _numbers(path)
    return first - spread[0] if len(spread) == 1 else spread[0]


def high(path: str) -> float:
    """Return the upper end of a number with its spread: the mean plus the deviation, or the highest."""
    first, *spread = _numbers(path)
    return first + spread[0] if len(spread) == 1 else spread[1]


def _numbers(path: str) -> list[float]:
    content = cell(path)
    if content is None or isinstance(content, str):
        raise LookupError(f"{path} is no number: {content!r}")
    return content if isinstance(content, list) else [content]


def plain(cell: Cell) -> str:
    """Return the text of a cell without backticks and asterisks, and with ^ in place of a raised exponent."""
    return re.sub(r"[`*]|</sup>", "", str(cell).replace("<sup>", "^")).strip()


def cell_text(cell: Cell, form: str = "") -> str:
    """Return what a table shows for a cell, its number in the format of its column; a range only if there is one."""
    if cell is None or isinstance(cell, str):
        return cell or ""
    if isinstance(cell, list):
        if len(cell) == 3 and cell[1] == cell[2]:
            return cell_text(cell[0], form)
        center, *others = (cell_text(number, form) for number in cell)
        return f"{center} ± {others[0]}" if len(others) == 1 else f"{center} ({' to '.join(others)})"
    return format(cell, form or ("," if abs(cell) >= 1000 else ""))


def cell_texts(table: Mapping[str, Any]) -> list[list[str]]:
    """Return the rows of a table as it is shown."""
    forms = [table["formats"].get(column, "") for column in table["columns"]]
    return [[cell_text(cell, form) for cell, form in zip(row, forms, strict=True)] for row in table["rows"]]


def as_text(table: Mapping[str, Any]) -> str:
    """Return a table for a terminal: the first column aligned to the left, the others to the right."""
    lines = [[plain(text) for text in line] for line in (table["columns"], *cell_texts(table))]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    aligned = [[text.rjust(width) for text, width in zip(line, widths, strict=True)] for line in lines]
    for line, (first, *_) in zip(aligned, lines, strict=True):
        line[0] = first.ljust(widths[0])
    return "\n".join("  ".join(line).rstrip() for line in aligned)
