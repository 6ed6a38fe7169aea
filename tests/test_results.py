"""An experiment stores the table that it prints, with what is needed to trust and to repeat it."""

import json
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from lab import results

ROWS = [["`map`", [5402.1, 81.0], 0.69], ["`memory`, twice", [87748.0, 80000.0, 91000.0], None]]


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> tuple[Path, str]:
    """The folder of a stored table, and what was printed."""
    monkeypatch.setenv("WORKSHOP_RESULTS", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["experiments/speeds.py", "--rounds", "1"])
    results.store(
        "speeds",
        title="Speeds",
        columns=["`--loader`", "FULL", "of it"],
        rows=ROWS,
        formats={"FULL": ",.0f", "of it": ".0%"},
        unit="samples/s",
        spread="3 trials",
        figure=Figure(),
    )
    (folder,) = tmp_path.iterdir()
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    return folder, capsys.readouterr().out


def test_a_table_is_stored_with_what_is_needed_to_repeat_it(stored: tuple[Path, str]) -> None:
    folder, _ = stored
    assert sorted(file.name for file in folder.iterdir()) == ["speeds.json", "speeds.png"]
    found = json.loads((folder / "speeds.json").read_text())
    assert (found["title"], found["unit"], found["spread"]) == ("Speeds", "samples/s", "3 trials")
    assert found["rows"] == ROWS
    assert found["command"] == "python experiments/speeds.py --rounds 1"
    assert found["versions"]["torch"] == version("torch")
    assert folder.name == results.machine_name(found["machine"])


def test_what_is_stored_is_what_is_printed(stored: tuple[Path, str]) -> None:
    _, printed = stored
    assert "Speeds, in samples/s (3 trials)" in printed
    assert "map                           5,402 ± 81    69%" in printed
    assert "memory, twice  87,748 (80,000 to 91,000)" in printed


def test_a_single_figure_is_found_by_its_path(stored: tuple[Path, str]) -> None:
    machine = stored[0].name
    assert results.value(f"{machine}/speeds map.FULL") == 5402.1
    assert results.value(f"{machine}/speeds memory, twice.FULL") == 87748.0
    assert results.low(f"{machine}/speeds map.FULL") == pytest.approx(5321.1)
    assert results.high(f"{machine}/speeds memory, twice.FULL") == 91000.0


@pytest.mark.parametrize(
    "path", ["speeds map.IO", "speeds device.FULL", "speeds memory, twice.of it", "others map.FULL"]
)
def test_a_figure_that_is_not_there_is_an_error(path: str, stored: tuple[Path, str]) -> None:
    with pytest.raises(LookupError):
        results.value(f"{stored[0].name}/{path}")


def test_a_row_can_be_named_by_several_cells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    (tmp_path / "m").mkdir()
    table = {"columns": ["scaling", "ranks", "FULL"], "rows": [["weak", 2, 1.5], ["weak", 4, 2.5]], "formats": {}}
    (tmp_path / "m" / "t.json").write_text(json.dumps(table))
    assert results.value("m/t weak, 4.FULL") == 2.5
    with pytest.raises(LookupError, match="2 cells"):
        results.value("m/t weak.FULL")


def test_a_machine_is_named_by_what_decides_its_figures() -> None:
    cpu = {"cpu": "AMD EPYC", "cpu_instructions": "AVX512", "cpus_available": 2, "device": "cpu"}
    assert results.machine_name(cpu) == "amd_epyc_avx512_2cpu"
    assert results.machine_name(cpu | {"device_name": "NVIDIA H200", "gpus": 1}) == "nvidia_h200_1gpu"
