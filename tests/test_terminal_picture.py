"""The picture of a terminal has the last state of each line, its colors, and nothing from another site."""

import subprocess
import sys
from pathlib import Path

from conftest import REPOSITORY


def test_a_picture_of_what_a_command_prints(tmp_path: Path) -> None:
    out = tmp_path / "it.svg"
    script = r"print('\r\033[K1 s', end=''); print('\r\033[K\033[1;31mFAULT\033[0m  train.py:7')"
    command = [sys.executable, "-m", "lab.terminal_picture", str(out), sys.executable, "-c", script]
    subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True, timeout=60)
    svg = out.read_text()
    assert "FAULT" in svg
    assert "1&#160;s<" not in svg
    assert "https://cdnjs" not in svg
