"""The picture of what each change gained is what the stored tables say, and names the table of each bar."""

import json
import shutil
from pathlib import Path
from xml.etree import ElementTree

import pytest

from conftest import REPOSITORY
from lab import ladder_picture, results


def texts(svg: str) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]


def test_the_stored_picture_is_up_to_date() -> None:
    assert ladder_picture.FILE.read_text() == ladder_picture.picture(), "run `make docs`"


def test_every_bar_has_its_factor_and_its_file() -> None:
    shown = texts(ladder_picture.picture())
    for change in ladder_picture.CHANGES:
        place = shown.index(change.what)
        if not change.where:
            assert shown[place + 1].startswith("not measured: ")
            continue
        _, training, gain, sources = shown[place : place + 4]
        assert training == change.training
        assert gain == ladder_picture.gain(change)[1]
        assert all((REPOSITORY / "results" / file).is_file() for file in sources.split(", "))


def test_a_new_figure_changes_the_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(results.RESULTS, tmp_path / "results", ignore=shutil.ignore_patterns("*.png", "*.txt", "*.gz"))
    monkeypatch.setattr(results, "RESULTS", tmp_path / "results")
    before = ladder_picture.picture()
    file = next((tmp_path / "results").glob("intel*/scaling.json"))
    table = json.loads(file.read_text())
    two_ranks, full = table["rows"][1], table["columns"].index("FULL")
    two_ranks[full] = [3 * number for number in two_ranks[full]]
    file.write_text(json.dumps(table))
    after = ladder_picture.picture()
    ((old, new),) = [both for both in zip(texts(before), texts(after), strict=True) if both[0] != both[1]]
    factors = [float(gain.removesuffix(" times as fast")) for gain in (old, new)]
    assert factors[1] == pytest.approx(3 * factors[0], rel=0.05)
