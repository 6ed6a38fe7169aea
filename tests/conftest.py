"""What the tests share: small generated data, and a way to run a script as its user would."""

import contextlib
import os
import runpy
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

# The tests are a user outside any job, on a machine without GPUs, whatever they themselves run in. One thread for each
# process, because several processes share the cores. Set before torch is imported.
for name in [name for name in os.environ if name.startswith(("SLURM", "WORKSHOP"))]:
    del os.environ[name]
os.environ |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}

import pytest  # noqa: E402
import torch.distributed as dist  # noqa: E402

from slow_work import clock as clock  # noqa: E402
from slurm_cluster import slurm as slurm  # noqa: E402
from sources import collect, generate  # noqa: E402
from workshop.datasets import IMAGES  # noqa: E402

REPOSITORY = Path(__file__).resolve().parent.parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what needs a Slurm, and the studies, which no lesson's main path needs (but for those marked as slow)."""
    for item in items:
        if item.path.name.startswith("test_experiments_") and item.get_closest_marker("slow") is None:
            item.add_marker("thorough")
        if "slurm" in item.fixturenames:
            item.add_marker("slurm")


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder with 2,000 + 500 generated images of each data set, boxes of 32^3 cells, and a text of 200 kB."""
    folder = tmp_path_factory.mktemp("data")
    for name in IMAGES:
        generate(name, folder, train_samples=2000, val_samples=500)
    generate("nbody", folder, cells=32)
    sources = tmp_path_factory.mktemp("sources")
    for number in range(10):
        (sources / f"{number}.py").write_text("".join(f"x{i} = {i * i * (number + 3)}\n" for i in range(1300)))
    collect(folder, sources)
    return folder


@pytest.fixture
def user_environment(data_dir: Path, tmp_path: Path) -> dict[str, str]:
    """The environment of a user whose data and runs lie in temporary folders."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return os.environ | {"PATH": path, "WORKSHOP_DATA": str(data_dir), "WORKSHOP_RUNS": str(tmp_path / "runs")}


@dataclass
class Result:
    """What a user sees of a run."""

    status: int
    stdout: str
    stderr: str

    @property
    def error(self) -> str:
        """The one line of a user's mistake."""
        assert self.status == 2, f"{self.stdout[-2000:]}\n{self.stderr[-3000:]}"
        (line,) = self.stderr.splitlines()
        assert line.startswith("error: ")
        return line.removeprefix("error: ")


Script = Callable[..., Result]


def run_as_script(script: str | Path, patch: pytest.MonkeyPatch) -> None:
    """Run a file as Python runs a script: what it imports is looked for beside it first.

    It gets the modules beside it that a test has imported already, so that a test can patch them. Modules of the same
    names from other folders, such as another lesson's, are removed while it runs, and its own afterwards.
    """
    folder = Path(script).resolve().parent
    beside = {file.stem for file in folder.glob("*.py")}
    patch.syspath_prepend(folder)
    for name in beside & sys.modules.keys():
        if Path(getattr(sys.modules[name], "__file__", None) or "").resolve().parent != folder:
            patch.delitem(sys.modules, name)
    before = set(sys.modules)
    try:
        runpy.run_path(str(script), run_name="__main__")
    finally:
        for name in beside & (set(sys.modules) - before):
            del sys.modules[name]


@contextlib.contextmanager
def variables_restored() -> Iterator[None]:
    """Restore the environment that a script in this process may change, such as the backend of NCCL."""
    before = dict(os.environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@pytest.fixture
def run_script(
    user_environment: dict[str, str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> Script:
    """Runs a script from its lesson's folder, or its own; in this process, as importing torch anew takes seconds."""

    def run(script: str, *arguments: object, **environment: str) -> Result:
        on_signal = signal.getsignal(signal.SIGUSR1)
        with monkeypatch.context() as patch, variables_restored():
            for name, value in (user_environment | environment).items():
                patch.setenv(name, value)
            folder = (REPOSITORY / script).parent
            folder = folder.parent if folder.name == "experiments" else folder
            file = (REPOSITORY / script).relative_to(folder)
            patch.chdir(folder)
            patch.setattr(sys, "argv", [str(file), *map(str, arguments)])
            capfd.readouterr()
            try:
                run_as_script(file, patch)
                status = 0
            except SystemExit as stop:
                status = int(stop.code or 0)
            finally:
                signal.signal(signal.SIGUSR1, on_signal)
                if dist.is_initialized():  # a run that has failed ends its process, not its process group
                    dist.destroy_process_group()
            return Result(status, *capfd.readouterr())

    return run
