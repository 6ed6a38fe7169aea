"""What the rows say, in one line: who is fastest at which size. Nothing here knows the answer beforehand."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from lab.tables import format_seconds, format_table
from sweep import Measurement

CLEARLY_FASTER = 0.9
"""a challenger takes the lead when it needs less than this share of the leader's time; a smaller gain may be noise"""


@dataclass(frozen=True)
class Lead:
    """From this size on, until the next lead begins, ``label`` is the fastest."""

    label: str
    size: int


def measured_sweeps(rows: Iterable[Measurement]) -> dict[str, list[Measurement]]:
    """Return the rows that hold a time, by sweep."""
    sweeps: dict[str, list[Measurement]] = {}
    for row in rows:
        if row.seconds is not None:
            sweeps.setdefault(row.sweep, []).append(row)
    return sweeps


def fastest(rows: list[Measurement]) -> dict[int, Measurement]:
    """Return the fastest row of each size, sizes ascending."""
    sizes = sorted({row.size for row in rows})
    return {size: min((row for row in rows if row.size == size), key=lambda row: row.seconds) for size in sizes}


def leads(rows: list[Measurement]) -> list[Lead]:
    """Return who is fastest from which size on; a lead of under 10 % changes nothing.

    Among those that are about as fast as the fastest the first of the rows counts: it needs the fewest threads.
    """
    found: list[Lead] = []
    for size, best in fastest(rows).items():
        times = {row.label: row.seconds for row in rows if row.size == size}
        limit = times.get(found[-1].label, math.inf) if found else math.inf  # what a challenger has to beat
        if best.seconds < CLEARLY_FASTER * limit:
            challengers = [label for label, seconds in times.items() if seconds < CLEARLY_FASTER * limit]
            label = next(label for label in challengers if best.seconds >= CLEARLY_FASTER * times[label])
            found.append(Lead(label, size))
    return found


def conclude(rows: list[Measurement]) -> str:
    """Return the conclusion of one experiment: each of its sweeps, and what writing the computation anew gained."""
    sweeps = measured_sweeps(rows)
    titled = len(sweeps) > 1
    parts = [
        f"{title}: {conclude_sweep(found)}" if titled else conclude_sweep(found) for title, found in sweeps.items()
    ]
    return "; ".join(parts + gain_of_rewriting(sweeps))


def conclude_sweep(rows: list[Measurement]) -> str:
    """Return who is fastest at which size, by how much at the largest, and what copying to the device changes."""
    resident = [row for row in rows if not row.copied]
    text = describe_leads(resident) + describe_margin(resident)
    if any(row.copied for row in rows):
        last = leads([row for row in rows if row.copied or not row.on_accelerator])[-1]
        pays = any(row.copied for row in rows if row.label == last.label)
        text += f"; copying pays from {last.size:,}" if pays else "; copying the data there first does not pay"
    return text


def describe_leads(rows: list[Measurement]) -> str:
    """Return who is fastest, from the smallest size to the largest."""
    first, *later = leads(rows)
    if not later:
        return f"{first.label} is fastest at every size"
    below = max(row.size for row in rows if row.size < later[0].size)
    unit = rows[0].unit.removesuffix("s") if below == 1 else rows[0].unit
    text = f"{first.label} is fastest up to {below:,} {unit}"
    return text + "".join(f", {lead.label} from {lead.size:,}" for lead in later)


def describe_margin(rows: list[Measurement]) -> str:
    """Return how many times as fast as its rivals the last leader is, at the largest size."""
    size, label = max(row.size for row in rows), leads(rows)[-1].label
    leader = next(row for row in rows if (row.label, row.size) == (label, size))
    rival = min(rivals_of(leader, rows), key=lambda row: row.seconds, default=None)
    if rival is None or leader.seconds > CLEARLY_FASTER * rival.seconds:
        return ""
    return f", {rival.seconds / leader.seconds:,.1f} times as fast as {rival.label} at {size:,}"


def rivals_of(leader: Measurement, rows: list[Measurement]) -> list[Measurement]:
    """Return whom to compare with: an accelerator with CPUs, several threads with one, one with other libraries."""
    rows = [row for row in rows if row.size == leader.size]
    if leader.on_accelerator:
        return [row for row in rows if not row.on_accelerator]
    if (leader.threads or 1) > 1:
        return [row for row in rows if row.threads == 1]
    return [row for row in rows if row.backend != leader.backend]


def gain_of_rewriting(sweeps: dict[str, list[Measurement]]) -> list[str]:
    """Compare two sweeps over the same things: the second is the first computation, written another way."""
    if len(sweeps) != 2:
        return []
    (old, before), (new, after) = sweeps.items()
    common = fastest(before).keys() & fastest(after).keys()
    if before[0].unit != after[0].unit or not common:
        return []
    size = max(common)
    ratio = fastest(before)[size].seconds / fastest(after)[size].seconds
    return [f"at {size:,} {before[0].unit} '{new}' is {ratio:,.0f} times as fast as '{old}'"]


def sweep_table(rows: list[Measurement]) -> str:
    """Return one sweep as a table: a line for each backend, a column for each size, the fastest of a size starred.

    Times are medians; behind the ± is half the interquartile range, in percent of the median.
    """
    best = fastest(rows)
    cells: dict[str, dict[int, str]] = {}
    for row in rows:
        star = "*" if row is best[row.size] else " "
        text = f"{format_seconds(row.seconds)} ±{row.spread / row.seconds / 2:>3.0%}{star}"
        cells.setdefault(row.label, {})[row.size] = text
    lines = [[label, *(found.get(size, "- ") for size in best)] for label, found in cells.items()]
    return format_table([rows[0].unit, *(f"{size:,} " for size in best)], lines)
