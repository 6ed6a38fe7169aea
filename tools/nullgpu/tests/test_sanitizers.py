"""The library itself: compiled without a warning, without races between threads, without errors of addresses."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from nullgpu import build, environment

pytestmark = pytest.mark.thorough
HERE = Path(__file__).resolve().parent


@pytest.mark.parametrize("sanitizer", ["address", "thread"])
def test_threads_and_ranks_under_a_sanitizer(sanitizer: str, tmp_path: Path) -> None:
    library = build.library(sanitizer)
    folders = build.headers(build.torch_folder())
    program = tmp_path / "threads"
    command = [os.environ.get("CXX", "g++"), "-std=c++17", "-g", "-O1", *build.SANITIZERS[sanitizer]]
    command += ["-include", str(build.SOURCES / "without_formats.h"), *(f"-isystem{folder}" for folder in folders)]
    command += [str(HERE / "native/threads.cpp"), str(library), f"-Wl,-rpath,{library.parent}", "-pthread"]
    subprocess.run([*command, "-o", str(program)], check=True)
    settings = environment({}, gpus=2, values=True)["NULLGPU_SETTINGS"]
    with_clock = environment({}, gpus=2, clock="a100", host=100)["NULLGPU_SETTINGS"].replace('"gb":80', '"gb":4')
    for told in (settings, with_clock.replace('"values":false', '"values":true')):
        env = {"PATH": os.environ["PATH"], "NULLGPU_SETTINGS": told, "ASAN_OPTIONS": "detect_leaks=0"}
        done = subprocess.run([str(program)], env=env, capture_output=True, text=True, timeout=300)
        assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr[:6000]
        assert "Sanitizer" not in done.stderr, done.stderr[:6000]


@pytest.mark.skipif(os.environ.get("CXX", "g++") != "g++", reason="the warnings are those of g++")
def test_the_sources_compile_without_a_warning(tmp_path: Path) -> None:
    env = os.environ | {"NULLGPU_VERBOSE": "1", "NULLGPU_CACHE": str(tmp_path)}
    script = "from nullgpu import build; build.library()"
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True)
    assert "nullgpu: compiling" in done.stderr
    assert "warning" not in done.stderr, done.stderr[:6000]
