"""Figures as a person reads them: aligned columns, sensible units."""

from collections.abc import Container, Sequence

from workshop.measuring.conclusions import fastest
from workshop.measuring.sweep import Row


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]], left: Container[int] = (0,)) -> str:
    """Align the columns of a table: those numbered in ``left`` to the left, the others to the right."""
    columns = []
    for number, column in enumerate(zip(header, *rows, strict=True)):
        width = max(map(len, column))
        columns.append([cell.ljust(width) if number in left else cell.rjust(width) for cell in column])
    return "\n".join("  ".join(line).rstrip() for line in zip(*columns, strict=True))


def format_seconds(seconds: float) -> str:
    """Return a duration to three digits, in the unit that suits it."""
    unit, value = next(
        (unit, seconds * per_second)
        for unit, per_second in (("s", 1), ("ms", 1e3), ("µs", 1e6), ("ns", 1e9))
        if seconds * per_second >= 1 or unit == "ns"
    )
    return f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2}f} {unit}"


def sweep_table(rows: list[Row]) -> str:
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
