"""What an experiment is, and the session in which experiments are measured: on which machine, and into which file.

The experiments themselves are in experiments.py, and how each is measured is in experiment_functions.py.
"""

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from lab.lesson_runs import study_parts
from workshop.paths import default_data_dir

UNET = ("--config", "../configs/unet3d.yaml")
TINY_UNET = (*UNET, "--config", "../configs/unet3d_tiny.yaml")
TINIEST_UNET = (*TINY_UNET, "--crop_size", 8, "--unet_width", 4, "--limit_val", 16)
NEEDS = {"shards": "webdataset", "dali": "nvidia.dali"}
"""the package without which a loader cannot be measured"""

Figures = Generator[dict[str, Any], None, None]


@dataclass(frozen=True)
class Session:
    """Where the figures go, and what the experiments can use."""

    file: Path
    mode: Literal["cpu", "gpu", "rehearsal"] = "gpu"
    cpus: int = 1
    gpus: int = 0
    boxes: Path = field(default_factory=default_data_dir)
    """data folder with the N-body boxes"""

    @property
    def rehearsal(self) -> bool:
        """Whether this is a rehearsal on one CPU."""
        return self.mode == "rehearsal"

    @property
    def num_workers(self) -> int:
        """Loader processes: enough for a GPU, where two CPUs are left to the training process; else one."""
        return max(1, self.cpus - 2) if self.mode == "gpu" else 1

    def study_parts(self, lesson: Path, script: str, *flags: object, **how: Any) -> Figures:  # noqa: ANN401
        """Run an experiment; its plot lies beside the file."""
        return study_parts(lesson, script, *flags, machine=self.file.with_suffix(""), **how)

    def cells(self) -> int:
        """Return the number of cells along each edge of the N-body boxes."""
        from workshop.datasets import nbody

        return nbody.box(self.boxes, "train").cells

    def unet_flags(self, *flags: object) -> tuple[object, ...]:
        """Return the flags of a U-Net that is trained on the boxes of this session: full, or tiny in a rehearsal."""
        chosen = (*TINIEST_UNET, "--loader", "device", "--precision", "bf16") if self.rehearsal else flags
        return (*chosen, "--data_dir", self.boxes)


Flags = tuple[object, ...]
"""of a command line; a function among them is called with the session and returns the word"""


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """Something to measure; None for the flags of a mode: it is not measured there."""

    name: str
    """its figures have this name in the file"""
    title: str
    measure: Callable[..., Figures]
    """(session, *flags): yields all figures so far, and so again after each part"""
    cpu: Flags | None = None
    gpu: Flags | None = None
    rehearsal: Flags | None = None
    data: tuple[str, ...] = ()
    """the data sets it needs"""
    seconds: int = 0
    """rough need of its first part on one GPU, before it has been measured there"""
    gpus: int = 1
    """that it needs, if it is measured on GPUs"""
    package: str = ""
    """a package that it needs, and others do not"""

    def flags(self, session: Session) -> Flags | None:
        """Return the flags of the session's mode."""
        flags: Flags | None = getattr(self, session.mode)
        return flags and tuple(word(session) if callable(word) else word for word in flags)

    def run(self, session: Session) -> Figures:
        """Measure; yield all figures so far, and so again after each part."""
        return self.measure(session, *(self.flags(session) or ()))

    def lacks(self, session: Session) -> str:
        """Say what this machine lacks for it; nothing, if it lacks nothing."""
        if self.package and not installed(self.package):
            return f"{self.package} is not installed"
        if session.rehearsal and self.rehearsal is None:
            return f"needs {self.gpus} GPUs, even in a rehearsal"
        return ""


def installed(package: str) -> bool:
    """Return whether a package, such as "nvidia.dali", can be imported."""
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:  # "nvidia.dali", where there is no "nvidia"
        return False
