"""Start a script as one process or as many ranks, read the JSON file that it writes, say in one line why it failed."""

import importlib.util
import json
import os
import re
import secrets
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from workshop.commandline import load_config
from workshop.errors import UserError


def free_port() -> int:
    """Return a port that nobody listens on, below those that the system gives to outgoing connections."""
    while True:
        port = secrets.choice(range(12000, 20000))
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def torchrun(ranks: int) -> list[str]:
    """Return the words that start ``ranks`` Python processes on this machine, whatever other jobs run there."""
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]


def run_and_read(
    command: Sequence[object],
    folder: Path,
    *,
    flag: str = "--out",
    threads: int | None = None,
    show: bool = False,
    out: Path | None = None,
    plots: Path | None = None,
) -> dict[str, Any]:
    """Run a script that writes one JSON file into an output folder; return what is in it.

    Args:
        command: the words that start Python, the script and its flags, but for the output folder.
        folder: where to run it.
        flag: the script's flag for its output folder.
        threads: CPU threads of each process; None leaves that to the script.
        show: let the user see what the script prints.
        out: where it may write for a while (default: where temporary files go).
        plots: folder to copy its plots to.

    Raises UserError: it failed.
    """
    with tempfile.TemporaryDirectory(dir=out) as written:
        words = [*map(str, command), flag, written]
        environment = os.environ | ({"OMP_NUM_THREADS": str(threads)} if threads else {})
        if show:
            print("$", shlex.join(words), flush=True)
        result = subprocess.run(words, cwd=folder, env=environment, capture_output=not show, text=True)
        if result.returncode:
            mistake = reason(result.stderr or "")
            raise UserError(mistake or f"status {result.returncode} from: {shlex.join(words[:-2])}")
        if plots:
            for plot in Path(written).glob("*.png"):
                shutil.copy(plot, plots)
        (results_file,) = Path(written).glob("*.json")
        return json.loads(results_file.read_text())


def benchmark(
    start: Sequence[str], lesson: Path, flags: Sequence[object], out: Path, threads: int
) -> dict[str, list[float]]:
    """Run ``train.py --benchmark true`` of a lesson; return the trials of IO, SYNTHETIC, FULL, ... in samples/s.

    Raises UserError: it failed.
    """
    command = [*start, "train.py", "--benchmark", "true", *flags]
    results = run_and_read(command, lesson, flag="--run_dir", out=out, threads=threads)
    return {kind: found["trials"] for kind, found in results.items() if isinstance(found, dict) and "trials" in found}


def load_script(lesson: Path) -> ModuleType:
    """Return the ``train.py`` of a lesson as a module, so that an experiment runs the code that the lesson shows.

    As when Python runs the script, it imports modules from its own folder. Modules of the same names that another
    lesson has left in `sys.modules` are removed there first.
    """
    for name in (file.stem for file in lesson.glob("*.py")):
        other = getattr(sys.modules.get(name), "__file__", None)
        if other and Path(other).resolve().parent != lesson.resolve():
            del sys.modules[name]
    spec = importlib.util.spec_from_file_location(lesson.name, lesson / "train.py")
    assert spec is not None and spec.loader is not None
    sys.modules[lesson.name] = module = importlib.util.module_from_spec(spec)  # where its flags' types are looked up
    sys.path.insert(0, str(lesson))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(lesson))
    return module


def check_flags(lesson: Path, flags: list[str]) -> Any:  # noqa: ANN401
    """Return the configuration that a lesson makes of these flags, before it is started; `UserError` if it cannot."""
    for own in ("run_dir", "benchmark", "batch_size", "global_batch_size", "sync_gradients"):
        if any(re.match(rf"--{own}\b", flag) for flag in flags):
            raise UserError(f"--{own} is set by this script itself; see --help")
    return load_config(load_script(lesson).Config, flags)


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
