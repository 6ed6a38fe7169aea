"""What needs a GPU: `make test-gpu`, or python -m pytest tests/gpu. With --device cpu they are tried without one.

These tests need neither the network nor WebDataset nor DALI: those of a library that is missing are skipped.
"""

import contextlib
import json
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from sources import generate, pack
from workshop.run.position import Position

REPOSITORY = Path(__file__).resolve().parent.parent.parent

for name in [name for name in os.environ if name.startswith(("SLURM", "WORKSHOP"))]:
    del os.environ[name]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: try them without a GPU")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--device") == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    elif not torch.cuda.is_available():
        pytest.exit("this machine has no NVIDIA GPU that torch finds: nothing tested", returncode=2)


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> torch.device:
    """What the tests are about; the first GPU."""
    return torch.device(request.config.getoption("--device"))


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Few digits and colour images, and boxes of 32^3 cells; shards too, if WebDataset is installed."""
    folder = tmp_path_factory.mktemp("data")
    for name in ("mnist", "cifar10"):
        generate(name, folder, train_samples=1280, val_samples=256)
        if find_spec("webdataset"):
            pack(name, folder)
    generate("nbody", folder, cells=32)
    return folder


@dataclass
class Trained:
    """What a run leaves: its folder, exit status and output."""

    folder: Path
    status: int
    stdout: str
    stderr: str

    @property
    def summary(self) -> dict:
        return json.loads((self.folder / "summary.json").read_text())

    @property
    def losses(self) -> list[float]:
        return [epoch[name] for epoch in self.summary["epochs"] for name in ("train_loss", "val_loss")]

    @property
    def checkpoint(self) -> dict:
        return torch.load(self.folder / "checkpoint.pt", map_location="cpu")


Train = Callable[..., Trained]


@pytest.fixture
def train(
    data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture, device: torch.device
) -> Train:
    """Runs a lesson's train.py in this process, into a folder of the name ``run``; in step ``stop`` it is sent SIGTERM.

    On the CPU, which has no CUDA graphs, the flags for them are left out.
    """

    def run(lesson: str, *flags: object, run: str = "run", stop: int = 0) -> Trained:
        words = [str(flag) for flag in flags]
        if device.type == "cpu" and "--cuda_graph" in words:
            place = words.index("--cuda_graph")
            words[place : place + 2] = []
        capfd.readouterr()
        with monkeypatch.context() as patch:
            patch.chdir(REPOSITORY / lesson)
            folder = tmp_path / run
            patch.setattr(sys, "argv", ["train.py", *words, "--data_dir", str(data_dir), "--run_dir", str(folder)])
            if stop:
                patch.setattr(Position, "count_step", stopping(stop))
            status = 0
            for file in (REPOSITORY / lesson).glob("*.py"):  # another lesson may have a module of the same name
                patch.delitem(sys.modules, file.stem, raising=False)
            try:
                patch.syspath_prepend(REPOSITORY / lesson)  # as for a script: what it imports is looked for beside it
                runpy.run_path("train.py", run_name="__main__")
            except SystemExit as end:
                status = int(end.code or 0)
        return Trained(folder, status, *capfd.readouterr())

    return run


def stopping(at: int) -> Callable:
    """`Position.count_step`, which in its step ``at`` sends SIGTERM to this process."""
    count_step = Position.count_step

    def counted(position: Position, loss: torch.Tensor) -> None:
        count_step(position, loss)
        if position.finished_steps + position.step == at:
            os.kill(os.getpid(), signal.SIGTERM)

    return counted


@pytest.fixture
def start(data_dir: Path, tmp_path: Path) -> Train:
    """Runs a lesson's train.py as a process of its own, as rank 0 of one, with more environment."""

    def run(lesson: str, *flags: object, run: str = "started", **environment: str) -> Trained:
        folder = tmp_path / run
        words = [sys.executable, "train.py", *map(str, flags), "--data_dir", str(data_dir), "--run_dir", str(folder)]
        done = subprocess.run(
            words, cwd=REPOSITORY / lesson, env=os.environ | environment, capture_output=True, text=True, timeout=200
        )
        return Trained(folder, done.returncode, done.stdout, done.stderr)

    return run


@pytest.fixture
def on_cpu(start: Train) -> Train:
    """Runs a lesson's train.py where no GPU is seen."""
    return lambda *arguments: start(*arguments, run="on the CPU", CUDA_VISIBLE_DEVICES="")


@pytest.fixture(autouse=True)
def compiled_anew() -> None:
    """What an earlier test has compiled is forgotten, as in a new process."""
    with contextlib.suppress(ImportError):
        torch.compiler.reset()
