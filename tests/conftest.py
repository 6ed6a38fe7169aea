"""What the tests share: a small generated data set, and a way to run a lesson as its user would."""

import os
import runpy
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from slow_work import clock as clock
from slurm_cluster import slurm as slurm
from sources import generate
from workshop.datasets import IMAGES

REPOSITORY = Path(__file__).resolve().parent.parent

# The tests are a user outside any job, whatever they themselves run in.
for name in [name for name in os.environ if name.startswith(("SLURM", "WORKSHOP"))]:
    del os.environ[name]


# The tests are those of a machine without GPUs, wherever they run.
os.environ["CUDA_VISIBLE_DEVICES"] = ""

# Several processes share the cores, and threads that wait for work by spinning would take them from the others.
os.environ["OMP_WAIT_POLICY"] = "passive"


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Iterator[None]:
    """Mark what needs Slurm; then, when -m and -k have chosen, let each process begin with what takes longest.

    pytest-xdist gives each process a stretch of the list, and whoever is done takes tests from the others' ends. A test
    of two minutes at an end would run while all other processes wait.
    """
    for item in items:
        if "slurm" in item.fixturenames:
            item.add_marker("slurm")
    yield
    pages = [item for item in items if item.name.startswith("test_commands_run")]
    pages.sort(key=lambda item: len(item.module.commands_of(item.callspec.params["readme"])), reverse=True)
    others = [item for item in items if item not in pages]
    processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    stretch = len(items) // processes
    items.clear()
    for number in range(processes):
        items += pages[number::processes]
        taken = max(stretch * (number + 1) - len(items), 0)
        items += others[:taken]
        del others[:taken]
    items += others


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder with 2,000 + 500 generated images of each data set, and boxes of 32^3 cells."""
    folder = tmp_path_factory.mktemp("data")
    for name in IMAGES:
        generate(name, folder, train_samples=2000, val_samples=500)
    generate("nbody", folder, cells=32)
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


Script = Callable[..., Result]


def run_as_script(script: str | Path, patch: pytest.MonkeyPatch) -> None:
    """Run a file as Python runs a script: what it imports is looked for beside it first.

    It gets the modules beside it that a test has imported already, so that a test can patch them. Modules of the same
    names from other folders, such as another lesson's, are removed while it runs, and its own afterwards.
    """
    folder = Path(script).resolve().parent
    beside = {file.stem for file in folder.glob("*.py")} | {file.parent.name for file in folder.glob("*/__init__.py")}

    def named_as_beside() -> list[str]:
        return [name for name in sys.modules if name.partition(".")[0] in beside]

    patch.syspath_prepend(folder)
    for name in named_as_beside():
        if folder not in Path(getattr(sys.modules[name], "__file__", None) or "").resolve().parents:
            patch.delitem(sys.modules, name)
    before = set(named_as_beside())
    try:
        runpy.run_path(str(script), run_name="__main__")
    finally:
        for name in set(named_as_beside()) - before:
            del sys.modules[name]


@pytest.fixture
def run_script(
    user_environment: dict[str, str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> Script:
    """Runs a script from its lesson's folder, or its own; in this process, as importing torch anew takes seconds."""

    def run(script: str, *arguments: object, **environment: str) -> Result:
        with monkeypatch.context() as patch:
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
            return Result(status, *capfd.readouterr())

    return run
