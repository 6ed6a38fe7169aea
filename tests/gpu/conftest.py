"""What needs a GPU: `make test-gpu`, or python -m pytest tests/gpu. With --device cpu they are tried without one.

These tests do not need the network, and not DALI: tests of a library that is missing are skipped. Most of their time is
the start of processes and the compiler, so use several workers: python -m pytest tests/gpu -n 7. If there are fewer
GPUs than ranks, the ranks share the first GPU (03_ddp/experiments/share_gpu.py).
"""

import fcntl
import hashlib
import itertools
import json
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
# Set before torch is imported: each worker would otherwise compute with as many threads as there are CPUs.
os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // WORKERS)))
for name in [name for name in os.environ if name.startswith(("SLURM", "WORKSHOP"))]:
    del os.environ[name]

import pytest  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from lab.launching import torchrun  # noqa: E402
from sources import collect, generate, pack  # noqa: E402
from workshop.log import Log  # noqa: E402

REPOSITORY = Path(__file__).resolve().parent.parent.parent
SHARE_GPU = REPOSITORY / "03_ddp/experiments/share_gpu.py"
LONGEST = 300
"""seconds that several ranks may take, if the test gives no other limit"""
FIRST = ("compiled", "timeout", "ranks", "join")
"""words in the names of the slowest tests: they begin first, so that no worker begins one of them at the end"""


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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: not any(word in item.name for word in FIRST))


@contextmanager
def once(folder: Path) -> Iterator[bool]:
    """Give whether the content of this folder has to be made; the other workers of pytest-xdist wait until it is."""
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        made = folder.with_suffix(".made")
        yield not made.exists()
        made.touch()


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of all workers of pytest-xdist."""
    own = tmp_path_factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


@pytest.fixture(scope="session")
def data_dir(shared_folder: Path) -> Path:
    """Few digits and color images, with shards, and boxes of 32^3 cells."""
    folder = shared_folder / "data"
    with once(folder) as needed:
        if needed:
            folder.mkdir()
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


def possible(flags: Sequence[object], device: torch.device) -> list[str]:
    """Return the flags as words; on the CPU, which has no CUDA graphs, without the flag for them."""
    words = [str(flag) for flag in flags]
    if device.type == "cpu" and "--cuda_graph" in words:
        del words[words.index("--cuda_graph") : words.index("--cuda_graph") + 2]
    return words


@pytest.fixture
def train(
    data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture, device: torch.device
) -> Train:
    """Runs a lesson's train.py in this process, into a folder named ``run``; before step ``stop`` SIGUSR1 is sent."""

    def run(lesson: str, *flags: object, run: str = "run", stop: int | None = None) -> Trained:
        words = possible(flags, device)
        steps = itertools.count(1)
        start_step = Log.start_step

        def counted(log: Log) -> None:
            if next(steps) == stop:
                os.kill(os.getpid(), signal.SIGUSR1)
            start_step(log)

        capfd.readouterr()
        with monkeypatch.context() as patch:
            patch.chdir(REPOSITORY / lesson)
            patch.setattr(Log, "start_step", counted)
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
def on_cpu(start: Train, shared_folder: Path) -> Train:
    """Runs a lesson's train.py where no GPU is seen; only once, if several tests compare with the same run."""

    def run(lesson: str, *flags: object) -> Trained:
        words = f"{lesson} {' '.join(map(str, flags))}"
        folder = shared_folder / f"on_cpu_{hashlib.sha256(words.encode()).hexdigest()[:16]}"
        with once(folder) as needed:
            if needed:
                done = start(lesson, *flags, run=str(folder), CUDA_VISIBLE_DEVICES="")
                assert done.status == 0, done.stderr
        return Trained(folder, 0, "", "")

    return run


def run_to_end(words: Sequence[object], folder: Path, seconds: float, **environment: str) -> tuple[int, str, str]:
    """Run a command that starts ranks; return its status and output. After ``seconds``, end it and fail."""
    process = subprocess.Popen(
        [*map(str, words)],
        cwd=folder,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        stdout, stderr = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.terminate()  # and the launcher ends the ranks
        stdout, stderr = process.communicate()
        pytest.fail(f"not ended after {seconds:.0f} s:\n{stdout[-2000:]}\n{stderr[-3000:]}")
    return process.returncode, stdout, stderr


@pytest.fixture
def train_ranks(data_dir: Path, tmp_path: Path, device: torch.device) -> Train:
    """Runs a lesson's train.py as several ranks, each on its own GPU; on one GPU if there are too few, or to ``share``.

    ``fault`` is what tests/with_fault.py lets happen: the rank (or "all"), the step, and the signal.
    """

    def run(
        ranks: int,
        lesson: str,
        *flags: object,
        run: str = "ranks",
        share: bool = False,
        fault: tuple[object, int, str] | None = None,
        seconds: float = LONGEST,
        **environment: str,
    ) -> Trained:
        script: list[object] = ["train.py"]
        if fault:
            rank, step, what = fault
            script = [
                REPOSITORY / "tests/with_fault.py",
                rank,
                "workshop.log.Log.start_step",
                step,
                what,
                "train.py",
            ]
        share = share or (device.type == "cuda" and torch.cuda.device_count() < ranks)
        launcher = [sys.executable, SHARE_GPU, "--ranks", ranks] if share else torchrun(ranks)
        folders = ["--data_dir", data_dir, "--run_dir", tmp_path / run]
        words = [*launcher, *script, *possible(flags, device), *folders]
        return Trained(tmp_path / run, *run_to_end(words, REPOSITORY / lesson, seconds, **environment))

    return run


@pytest.fixture(autouse=True)
def compiled_anew() -> None:
    """What an earlier test has compiled is forgotten, as in a new process."""
    torch.compiler.reset()
