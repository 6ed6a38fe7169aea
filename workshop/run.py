"""The folder of a run: its lock, the files of earlier runs, and summary.json."""

import dataclasses
import fcntl
import os
import platform
import shlex
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any, Self, TextIO

import torch.distributed as dist

from workshop.config import LessonFlags, settings
from workshop.errors import UserError, warn
from workshop.explain import backend_class, let_threads_finish_before_forks
from workshop.hardware import available_cpus, describe_hardware, describe_versions, peak_memory_bytes
from workshop.jsonfile import read_json, write_json
from workshop.paths import default_runs_dir, lesson_name
from workshop.ranks import Ranks

WRITTEN = (
    *("summary.json", "throughput.json", "events.out.tfevents.*", "rank*.pt.trace.json.gz", "trace.png"),
    *("checkpoint.pt", "checkpoint.previous.pt", "checkpoint.tmp", "checkpoint.damaged", "checkpoint.previous.damaged"),
    "checkpoints/epoch[0-9]*_step[0-9]*",
)
"""names of the files and folders that a run writes into its folder"""


def run_directory(config: LessonFlags) -> Path:
    """Return ``--run_dir``, otherwise lesson and run name under the runs folder.

    A job that Slurm requeues must find its checkpoint again. So the run name is the job id, never a date; outside Slurm
    it is the name of the data set.
    """
    return config.run_dir or default_runs_dir() / lesson_name() / os.environ.get("SLURM_JOB_ID", config.dataset)


class RunFolder(AbstractContextManager):
    """The folder of one run. While its context lasts, no other run can write there.

    A new run moves what an earlier one has left into ``earlier/NUMBER``. Only rank 0 writes.

    Args:
        config: of the lesson; ``batch_size`` is the batch size of a rank.
        ranks: this process among all.

    Raises:
        UserError: another run writes into the folder.
        OSError: the folder cannot be written.
    """

    def __init__(self, config: LessonFlags, ranks: Ranks) -> None:
        self.config, self.ranks = config, ranks
        self.path = run_directory(config)
        self.global_batch_size = config.batch_size * ranks.world_size
        self.settings = settings(config, self.global_batch_size)
        """the flags that must not change on resume, for the checkpoint"""
        self.epochs: list[dict[str, Any]] = []
        """the results of the finished epochs"""
        self.facts: dict[str, Any] = {}
        """further entries of the summary"""
        self.monitor: Callable[[], dict[str, Any]] | None = None
        """returns what the monitor has seen"""
        self._opened = ExitStack()

    def __enter__(self) -> Self:
        let_threads_finish_before_forks()
        if self.ranks.rank == 0:
            self._open()
            if self.config.num_workers > (cpus := available_cpus()):
                warn(f"--num_workers {self.config.num_workers} is more than the {cpus} CPUs of this process")
        return self

    def __exit__(self, *exception: object) -> None:
        self._opened.close()

    def _open(self) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        self._opened.enter_context(_locked(self.path))
        if self.config.resume:
            self.epochs = read_json(self.path / "summary.json").get("epochs", [])
        elif not self.config.benchmark:
            number = next(n for n in range(1, 1_000_000) if not (self.path / f"earlier/{n}").exists())
            for file in [file for pattern in WRITTEN for file in self.path.glob(pattern)]:
                place = self.path / f"earlier/{number}" / file.relative_to(self.path)
                place.parent.mkdir(parents=True, exist_ok=True)
                file.rename(place)

    def write_summary(self) -> None:
        """Write summary.json, on rank 0."""
        if self.ranks.rank != 0:
            return
        joined = dist.is_available() and dist.is_initialized()
        device = self.ranks.device
        summary = {
            "lesson": lesson_name(),
            "config": dataclasses.asdict(self.config),
            "command": shlex.join(["python", *sys.argv]),
            "node": platform.node(),  # the first one of several
            "hardware": describe_hardware(device),
            "versions": describe_versions(),
            "world_size": self.ranks.world_size,
            "backend": dist.get_backend() if joined else None,
            "backend_class": backend_class(device) if joined else None,
            "global_batch_size": self.global_batch_size,
            "epochs": self.epochs,
            **self.facts,
            "peak_memory_bytes": peak_memory_bytes(device),
            "monitor": self.monitor() if self.monitor else None,
        }
        write_json(self.path / "summary.json", summary)


def _locked(folder: Path) -> TextIO:
    """Return a file that keeps other runs out of the folder until it is closed or the process ends."""
    lock = (folder / "workshop_run.lock").open("a")
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # unlike flock's, this lock is not inherited by workers
    except BlockingIOError:
        raise UserError(f"another run writes to {folder}; choose another --run_dir") from None
    except OSError:  # a file system without locks
        pass
    return lock
