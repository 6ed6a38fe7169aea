"""Runs on null GPUs (tools/nullgpu), and on simulated GPUs, which are null GPUs with a clock."""

import importlib.util
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workshop.errors import UserError

REPOSITORY = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Simulated:
    """What the clock reports of a run."""

    milliseconds: float
    """of an update"""
    busy: float
    """share of the time in which the GPU computes"""
    waits: dict[str, float]
    """share of the time in which it waits for "data", "the host", "communication", "copies", "rank 1" and so on"""
    minute: float
    """seconds that a simulated minute took"""
    events: list[dict[str, Any]]
    """of the time line, in the format of Chrome's tracing"""

    def waits_for(self, what: str) -> float:
        """Return the share of the time in which the GPU waits for this; "ranks" are all other ranks together."""
        if what == "ranks":
            return sum(share for cause, share in self.waits.items() if cause.startswith("rank "))
        return self.waits.get(what, 0.0)

    @property
    def waits_in_words(self) -> str:
        """What it waits for, for example "data 88%, the host 2%"."""
        return ", ".join(f"{what} {share:.0%}" for what, share in self.waits.items() if share > 0.005)


def null_gpu(*options: object) -> list[str]:
    """Return the words before a command that is to run on null GPUs with these options.

    A variable that hides GPUs would hide these too.

    Raises:
        UserError: they are not installed in this environment.
    """
    if importlib.util.find_spec("nullgpu") is None:
        raise UserError(f"{sys.executable} has no null GPU: pip install --no-deps -e tools/nullgpu, in the repository")
    without_variable = ["/usr/bin/env", "-u", "CUDA_VISIBLE_DEVICES"]
    return [*without_variable, sys.executable, "-m", "nullgpu", "--beside_gpu", *map(str, options)]


def start(gpu: str, *, gpus: int = 1, world: int = 0, host: float = 1) -> list[str]:
    """Return the words before a command that is to run on a simulated GPU.

    With ``world``, it is rank 0 of so many ranks, on nodes with ``gpus`` GPUs. The host counts as ``host`` times as
    fast as this one.
    """
    return null_gpu("--clock", gpu, "--gpus", gpus, "--world", world, "--host", host)


def simulate(
    gpu: str,
    *words: object,
    folder: Path = REPOSITORY,
    gpus: int = 1,
    world: int = 0,
    host: float = 1,
    skip: int = 3,
    seconds: float = 1500,
) -> Simulated:
    """Run a command on a simulated GPU, as rank 0 of ``world`` ranks if that is not 0.

    Raises:
        UserError: it failed, or made too few updates.
    """
    with tempfile.TemporaryDirectory() as scratch:
        trace, figures = Path(scratch, "trace.json"), Path(scratch, "figures.json")
        files = ["--skip", str(skip), "--trace", str(trace), "--json", str(figures)]
        command = [*start(gpu, gpus=gpus, world=world, host=host), *files, *map(str, words)]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=seconds)
        ranks = json.loads(figures.read_text())["clock"]["ranks"] if figures.exists() else []
        if not ranks or "seconds" not in ranks[0]:
            raise UserError(f"{' '.join(map(str, words))}: {done.stdout[-1500:]}{done.stderr[-1500:]}")
        events = json.loads(trace.read_text())["traceEvents"]
    first = ranks[0]
    minute = 60 * first["real"] / first["simulated"]
    return Simulated(1e3 * first["seconds"], first["busy"], first["waits"], minute, events)
