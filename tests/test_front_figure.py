"""The figure of the front page is plotted from the figures of the results files."""

import statistics
from pathlib import Path

from conftest import REPOSITORY
from lab.render import load
from lab.render_front import FIGURE, STEPS, draw, seconds_to_target


def test_the_bars_are_the_figures_of_the_results_files(tmp_path: Path) -> None:
    fast = load("success_rate")
    runs = {row["name"]: row["runs"] for row in fast["rows"]}
    seconds = seconds_to_target(fast)
    assert list(seconds) == list(STEPS)
    for step, value in seconds.items():
        assert value == statistics.median(run["process_seconds"] for run in runs[step])
    draw(load("loaders"), fast, tmp_path / "front.png")
    assert (tmp_path / "front.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_the_front_page_shows_it() -> None:
    assert FIGURE.exists()
    assert f"]({FIGURE.relative_to(REPOSITORY)})" in (REPOSITORY / "README.md").read_text()
