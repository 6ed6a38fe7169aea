"""Start a lesson's script as one process or as many ranks, wait for it, and tell in one line why it failed."""

import importlib.util
import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from workshop.commandline import load_config
from workshop.errors import UserError


def in_slurm() -> bool:
    """Whether this is a Slurm job, so that srun starts the ranks, on all of its nodes."""
    return "SLURM_JOB_ID" in os.environ and shutil.which("srun") is not None


def launcher(ranks: int) -> list[str]:
    """Return the words that start ``ranks`` Python processes: srun in a Slurm job, torchrun on one machine."""
    if not in_slurm():
        return torchrun(ranks)
    per_node = slurm_tasks() // int(os.environ.get("SLURM_NNODES", 1))
    nodes = math.ceil(ranks / per_node)
    layout = [f"--nodes={nodes}", f"--ntasks={ranks}", f"--ntasks-per-node={min(ranks, per_node)}"]
    # From the first node on, because the ranks meet there; if one fails, all end.
    return ["srun", "--relative=0", *layout, "--kill-on-bad-exit=1", sys.executable]


def torchrun(ranks: int) -> list[str]:
    """Return the words that start ``ranks`` Python processes on this machine, whatever else meets there."""
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]


def slurm_tasks() -> int:
    """Return how many tasks this Slurm job has."""
    return max(int(os.environ.get("SLURM_NTASKS", 1)), int(os.environ.get("SLURM_NNODES", 1)))


def measure(start: list[str], script: list[object], folder: Path, out: Path, threads: int) -> dict[str, Any]:
    """Run a script whose last word is the flag for its output folder; return the JSON record it leaves there.

    Args:
        start: the words that start Python, as often as there are ranks.
        script: its name and flags.
        folder: where to run it.
        out: where it may write for a while.
        threads: CPU threads of each process.

    Raises:
        UserError: it failed.
    """
    with tempfile.TemporaryDirectory(dir=out) as written:
        command = [*start, *map(str, script), written]
        environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
        result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        if result.returncode:
            raise UserError(reason(result.stderr) or f"status {result.returncode} from: {shlex.join(command[:-2])}")
        (record,) = Path(written).glob("*.json")
        return json.loads(record.read_text())


def benchmark(start: list[str], lesson: Path, flags: list[object], out: Path, threads: int) -> dict[str, list[float]]:
    """Run ``train.py --benchmark true`` of a lesson; return the trials of IO, SYNTHETIC, FULL, ... in samples/s.

    Raises:
        UserError: it failed.
    """
    record = measure(start, ["train.py", "--benchmark", "true", *flags, "--run_dir"], lesson, out, threads)
    return {kind: found["trials"] for kind, found in record.items() if kind != "verdict"}


def check_flags(lesson: Path, flags: list[str]) -> Any:  # noqa: ANN401
    """Return the configuration that a lesson's ``train.py`` makes of these flags, before it is started with them.

    Raises:
        UserError: it would not understand them.
    """
    for own in ("run_dir", "benchmark", "batch_size", "global_batch_size", "sync_gradients"):
        if any(re.match(rf"--{own}\b", flag) for flag in flags):
            raise UserError(f"--{own} is set by this script itself; see --help")
    spec = importlib.util.spec_from_file_location(lesson.name, lesson / "train.py")
    sys.modules[lesson.name] = module = importlib.util.module_from_spec(spec)  # where its flags' types are looked up
    spec.loader.exec_module(module)
    return load_config(module.Config, flags)


def reason(stderr: str) -> str:
    """Return the line that says why a launch failed: a user's mistake, else an exception, else the last; or nothing."""
    for pattern in (
        r"^error: (.*)",
        r"^(?:\[rank\d+\]: *)?((?:[\w.]+\.)?\w*(?:Error|Exception)\b.*)",
        r"(.*\S.*)\s*\Z",
    ):
        if found := re.search(pattern, stderr, re.MULTILINE):
            return found.group(1)
    return ""
