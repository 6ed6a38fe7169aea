"""Runs on a simulated GPU: the null GPU with its clock (tools/nullgpu/docs/clock.md)."""

import json
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workshop.errors import UserError

REPOSITORY = Path(__file__).resolve().parents[1]
NULLGPU = REPOSITORY / "nullgpu"


@dataclass(frozen=True)
class Simulated:
    """What the clock reports of a run."""

    milliseconds: float
    """of an update"""
    busy: float
    """share of the time in which the GPU computes"""
    waits: str
    """what it waits for, for example "data 88%, the host 2%" """
    minute: float
    """seconds that a simulated minute took"""
    events: list[dict[str, Any]]
    """of the time line, in the format of Chrome's tracing"""

    def waits_for(self, what: str) -> float:
        """Return the share of the time in which the GPU waits for "data", "the host", "communication" or "copies".

        ``what`` is a regular expression: "rank .*?" is any other rank.
        """
        return sum(int(share) for share in re.findall(rf"{what} (\d+)%", self.waits)) / 100


def start(gpu: str, *, gpus: int = 1, world: int = 0, host: float = 1) -> list[str]:
    """Return the words before a command that is to run on a simulated GPU.

    With ``world``, it is rank 0 of so many ranks, on nodes with ``gpus`` GPUs. The host counts as ``host`` times as
    fast as this one. A variable that hides GPUs would hide this one too.
    """
    without = ["env", "-u", "CUDA_VISIBLE_DEVICES", sys.executable, str(NULLGPU), "--beside_gpu"]
    return [*without, "--clock", gpu, "--gpus", str(gpus), "--world", str(world), "--host", str(host)]


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
        trace = Path(scratch, "trace.json")
        command = [
            *start(gpu, gpus=gpus, world=world, host=host),
            "--skip",
            str(skip),
            "--trace",
            str(trace),
            *map(str, words),
        ]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=seconds)
        found = re.search(r"([\d.]+) ms each, GPU busy (\d+)%", done.stdout)
        if not found:
            raise UserError(f"{' '.join(map(str, words))}: {done.stdout[-1500:]}{done.stderr[-1500:]}")
        waits = re.search(r"it waits for (.*)", done.stdout)
        minute = re.search(r"simulated minute took (\d+) s", done.stdout)
        assert minute, done.stdout
        events = json.loads(trace.read_text())["traceEvents"]
    return Simulated(float(found[1]), int(found[2]) / 100, waits[1] if waits else "", float(minute[1]), events)
