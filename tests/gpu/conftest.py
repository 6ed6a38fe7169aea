"""What needs a GPU: `make test-gpu`, or python -m pytest tests/gpu. With --device cpu they are tried without one.

These tests do not need the network, and not DALI: tests of a library that is missing are skipped.
"""

import itertools
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
from typing import Any

import pytest
import torch
import torch.distributed as dist

from sources import collect, generate, pack
from workshop import seeds

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
    """Few digits and color images, with shards, and boxes of 32^3 cells."""
    folder = tmp_path_factory.mktemp("data")
    for name in ("mnist", "cifar10"):
        generate(name, folder, train_samples=1280, val_samples=256)
        pack(name, folder)
    generate("nbody", folder, cells=32)
    collect(folder, REPOSITORY / "workshop")
    return folder


def needs_library(loader: str) -> None:
    """Skip a test of a loader whose library is not installed."""
    if loader == "dali" and not find_spec("nvidia.dali"):
        pytest.skip("needs NVIDIA DALI")


@dataclass
class Trained:
    """What a run leaves: its folder, exit status and output."""

    folder: Path
    status: int
    stdout: str
    stderr: str

    @property
    def summary(self) -> dict[str, Any]:
        return json.loads((self.folder / "summary.json").read_text())

    @property
    def losses(self) -> list[float]:
        assert self.status == 0, self.stderr
        return [epoch[name] for epoch in self.summary["epochs"] for name in ("train_loss", "val_loss")]


Train = Callable[..., Trained]


@pytest.fixture
def train(
    data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture, device: torch.device
) -> Train:
    """Runs a lesson's train.py in this process, into a folder named ``run``; before step ``stop`` SIGUSR1 is sent.

    On the CPU, which has no CUDA graphs, the flags for them are left out.
    """

    def run(lesson: str, *flags: object, run: str = "run", stop: int | None = None) -> Trained:
        words = [str(flag) for flag in flags]
        if device.type == "cpu" and "--cuda_graph" in words:
            del words[words.index("--cuda_graph") : words.index("--cuda_graph") + 2]
        steps = itertools.count(1)
        seed_generators = seeds.seed_generators

        def counted(*arguments: Any) -> None:  # noqa: ANN401
            if next(steps) == stop:
                os.kill(os.getpid(), signal.SIGUSR1)
            seed_generators(*arguments)

        capfd.readouterr()
        with monkeypatch.context() as patch:
            patch.chdir(REPOSITORY / lesson)
            patch.setattr(seeds, "seed_generators", counted)
            folders = ["--data_dir", str(data_dir), "--run_dir", str(tmp_path / run)]
            patch.setattr(sys, "argv", ["train.py", *words, *folders])
            status = 0
            try:
                runpy.run_path("train.py", run_name="__main__")
            except SystemExit as end:
                status = int(end.code or 0)
            finally:
                if dist.is_initialized():  # a run that has failed ends its process, not its process group
                    dist.destroy_process_group()
        return Trained(tmp_path / run, status, *capfd.readouterr())

    return run


@pytest.fixture
def start(data_dir: Path, tmp_path: Path) -> Train:
    """Runs a lesson's train.py as a process of its own, with more environment."""

    def run(lesson: str, *flags: object, run: str = "started", **environment: str) -> Trained:
        folders = ["--data_dir", data_dir, "--run_dir", tmp_path / run]
        done = subprocess.run(
            [sys.executable, "train.py", *map(str, [*flags, *folders])],
            cwd=REPOSITORY / lesson,
            env=os.environ | environment,
            capture_output=True,
            text=True,
        )
        return Trained(tmp_path / run, done.returncode, done.stdout, done.stderr)

    return run


@pytest.fixture
def on_cpu(start: Train) -> Train:
    """Runs a lesson's train.py where no GPU is seen."""
    return lambda *arguments: start(*arguments, run="on the CPU", CUDA_VISIBLE_DEVICES="")


@pytest.fixture(autouse=True)
def compiled_anew() -> None:
    """What an earlier test has compiled is forgotten, as in a new process."""
    torch.compiler.reset()
