"""`lab/measure.py gpu` runs from beginning to end on null GPUs, and after a cut goes on at the next row."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from cases import REPOSITORY, environment, null_gpu

pytest_plugins = ["null_fixtures"]
pytestmark = [pytest.mark.usefixtures("null_gpus"), pytest.mark.thorough, pytest.mark.rehearsal]

FOLDER = "null_gpu_sm_90_2gpu"
"""of two null GPUs; a real GPU has another name"""


def command(out: Path, *more: str) -> list[str]:
    words = [sys.executable, "lab/measure.py", "gpu", "--tiny", "true", "--minutes", "60", "--out", str(out), *more]
    return null_gpu("--gpus", "2", "--values", *words)


def test_all_rows_are_measured_and_a_cut_one_is_continued(tmp_path: Path) -> None:
    out, peers = tmp_path / "out", tmp_path / "peers"
    peers.mkdir()
    (peers / "other.sh").write_text("echo this is of others\n")
    env = environment(WORKSHOP_DATA=str(tmp_path / "data"), PYTHONPATH=str(REPOSITORY))
    (tmp_path / "data").mkdir()
    words = command(out, "--peers", str(peers))
    first = subprocess.Popen(words, cwd=REPOSITORY, env=env, stdout=subprocess.PIPE, text=True)
    assert first.stdout is not None
    for line in first.stdout:
        if line.startswith("operations"):  # the third row; the fourth runs now
            break
    first.send_signal(signal.SIGTERM)
    assert first.wait(60) != 0
    rows = out / FOLDER / "rows.json"
    before = json.loads(rows.read_text())
    assert [row["status"] for row in before.values()][:3] == 3 * ["complete"]
    operations = (out / FOLDER / "operations.json").read_text()

    done = subprocess.run(words, cwd=REPOSITORY, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "operations                       complete before" in done.stdout
    assert "times of nothing" in done.stdout
    after = json.loads(rows.read_text())
    assert {row["status"] for row in after.values()} == {"complete"}
    assert all(after[name] == row for name, row in before.items() if row["status"] == "complete")
    assert (out / FOLDER / "operations.json").read_text() == operations
    assert [file.name for file in out.iterdir() if file.is_dir()] == [FOLDER], "under no other machine's name"
    table = json.loads((out / FOLDER / "null_gpu_and_null_gpu_sm_90.json").read_text())
    columns = dict(zip(table["columns"], table["rows"][0], strict=True))
    for figure in ("waits", "copies", "replays"):
        assert columns[f"{figure}: null GPU"] == columns[f"{figure}: null GPU (sm_90)"], figure


def test_times_of_nothing_do_not_get_into_results(tmp_path: Path) -> None:
    words = null_gpu(sys.executable, "lab/measure.py", "gpu")
    env = environment(PYTHONPATH=str(REPOSITORY))
    done = subprocess.run(words, cwd=REPOSITORY, env=env, capture_output=True, text=True)
    assert done.returncode == 2 and "name another folder with --out" in done.stderr
