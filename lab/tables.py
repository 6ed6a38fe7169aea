"""Figures in a form that is easy to read: aligned columns, suitable units."""

from collections.abc import Container, Sequence


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
