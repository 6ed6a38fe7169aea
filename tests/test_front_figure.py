"""The figure of the front page is plotted from the figures of the results files."""

from pathlib import Path

import pytest

from conftest import REPOSITORY
from lab.render import load
from lab.render_first import step_milliseconds
from lab.render_front import FIGURE, PANELS, draw, gain


def test_the_bars_are_the_figures_of_the_results_files(tmp_path: Path) -> None:
    images = load("loaders")["loaders"]
    digits = {row["num_workers"]: row for row in load("worker_counts")["rows"]}
    for case, data_set, batch_size, row in (
        ("map, 0 workers", "cifar10", 128, images["map, 0 workers"]),
        ("memory", "cifar10", 128, images["memory"]),
        ("2 workers", "mnist", 64, digits[2]),
    ):
        for kind, milliseconds in zip(("IO", "SYNTHETIC", "FULL"), step_milliseconds(case, data_set), strict=True):
            assert milliseconds / 1000 * row[kind]["mean"] == pytest.approx(batch_size)
    draw(tmp_path / "front.png")
    assert (tmp_path / "front.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_the_gain_is_the_ratio_of_the_throughputs() -> None:
    images = load("loaders")["loaders"]
    ratio = images["memory"]["FULL"]["mean"] / images["map, 0 workers"]["FULL"]["mean"]
    assert gain(next(iter(PANELS))) == pytest.approx(ratio)


def test_the_front_page_shows_it() -> None:
    assert FIGURE.exists()
    assert f"]({FIGURE.relative_to(REPOSITORY)})" in (REPOSITORY / "README.md").read_text()
