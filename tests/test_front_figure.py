"""The figure of the front page is plotted from the figures of the results files."""

from pathlib import Path

import pytest

from conftest import REPOSITORY
from lab.render import load
from lab.render_front import FIGURE, PANELS, draw, gain, milliseconds


def test_the_bars_are_the_figures_of_the_results_files(tmp_path: Path) -> None:
    results = load("first_changes")
    for _, batch_size, cases in PANELS.values():
        for case in cases:
            row = results["rows"][case]
            for (waits, trains), trial in zip(milliseconds(row, batch_size), row["trials"], strict=True):
                assert 1000 * batch_size / (waits + trains) == pytest.approx(trial["samples_per_second"])
                assert waits / (waits + trains) == pytest.approx(trial["for_percent"] / 100)
    draw(results, tmp_path / "front.png")
    assert (tmp_path / "front.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_the_gain_is_that_of_the_last_bar_over_the_first() -> None:
    def row(*speeds: float) -> dict:
        return {"trials": [{"samples_per_second": speed, "for_percent": 50.0} for speed in speeds]}

    rows = {"CIFAR-10, map": row(1, 2, 3), "CIFAR-10, memory": row(2, 6, 12)}
    assert gain("Change the loader", {"rows": rows}) == 3


def test_the_front_page_shows_it() -> None:
    assert FIGURE.exists()
    assert f"]({FIGURE.relative_to(REPOSITORY)})" in (REPOSITORY / "README.md").read_text()
