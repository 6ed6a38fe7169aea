"""Run a lesson's scripts as one process or as ranks, and read what they measured.

LESSON = Path(__file__).resolve().parents[1]
summary = train(LESSON, "--limit_train", 6400, "--lr", 0.01, ranks=2, on_cpu=True)
summary["epochs"][-1]["val_loss"]
throughput = train(LESSON, "--benchmark", "true", "--loader", "memory")
mean_std(throughput["FULL"]["trials"])                             # lab/timing.py
"""

import importlib.util
import json
import linecache
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

from workshop.errors import UserError

PYTHON = os.path.abspath(sys.executable)


def free_port() -> int:
    """Return a port that nobody listens on, below those that the system gives to outgoing connections."""
    while True:
        port = secrets.choice(range(12000, 20000))
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def torchrun(ranks: int) -> list[str]:
    """Return the words that start ``ranks`` Python processes on this machine, whatever other jobs run there."""
    return [PYTHON, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]


def run(
    words: Sequence[object], folder: Path, *, on_cpu: bool = False, threads: int | None = None, quiet: bool = False
) -> str:
    """Run a command in a folder; return what it printed.

    Args:
        words: the command.
        folder: where it is run.
        on_cpu: hide the GPUs from it.
        threads: CPU threads of each process; None leaves that to the command.
        quiet: do not show the command and what it prints.

    Raises:
        UserError: it failed; says why.
    """
    command = [str(word) for word in words]
    environment = os.environ | ({"CUDA_VISIBLE_DEVICES": ""} if on_cpu else {})
    environment |= {"OMP_NUM_THREADS": str(threads)} if threads else {}
    if not quiet:
        print("$", shlex.join(["python" if word == PYTHON else word for word in command]), flush=True)
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if not quiet:
        print(result.stdout, end="", flush=True)
    if result.returncode:
        if not re.search("^error: ", result.stderr, re.MULTILINE):
            sys.stderr.write(result.stderr)  # a traceback; a user's mistake is one line
        raise UserError(reason(result.stderr) or f"exit status {result.returncode} from: {shlex.join(command)}")
    return result.stdout


def train(
    lesson: Path,
    *flags: object,
    ranks: int | None = None,
    start: Sequence[object] = (PYTHON,),
    script: str = "train.py",
    keep: str = "",
    keep_in: Path | None = None,
    **how: Any,  # noqa: ANN401
) -> dict[str, Any]:
    """Run a train script in a new folder; return its summary.json, or with ``--benchmark true`` its throughput.json.

    Args:
        lesson: its folder.
        flags: of the script.
        ranks: number of ranks to start with torchrun; None starts one process with ``start``.
        start: the words before the script.
        script: ``train.py``, or an experiment that takes the same flags.
        keep: pattern of files to copy from the run's folder to ``keep_in``.
        keep_in: a folder.
        how: as in `run`.

    Raises:
        UserError: it failed; says why.
    """
    with tempfile.TemporaryDirectory() as folder:
        run([*(torchrun(ranks) if ranks else start), script, *flags, "--run_dir", folder], lesson, **how)
        for file in Path(folder).glob(keep) if keep and keep_in else ():
            shutil.copy(file, keep_in / file.name)  # type: ignore[operator]
        file = next(file for name in ("throughput.json", "summary.json") if (file := Path(folder, name)).exists())
        return json.loads(file.read_text())


def line_profile(
    lesson: Path,
    *flags: object,
    before: Sequence[object] = (),
    **how: Any,  # noqa: ANN401
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Run a train script under the line profiler; return its summary and the lines of its first profiled function.

    Each line is a dictionary with ``line``, ``hits``, ``seconds``, ``percent`` and ``text``. ``before`` are words
    before Python, for example of the null GPU.
    """
    import line_profiler  # not every machine has it

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "train.lprof")
        kernprof = (*before, PYTHON, "-m", "kernprof", "-l", "-o", file)
        summary = train(lesson, *flags, start=kernprof, **how)
        stats = line_profiler.load_stats(str(file))
    (source, _, _), timings = next(item for item in stats.timings.items() if item[1])
    total = sum(time for _, _, time in timings)
    return summary, [
        {
            "line": line,
            "hits": hits,
            "seconds": time * stats.unit,
            "percent": 100 * time / total,
            "text": linecache.getline(str(lesson / source), line).rstrip(),
        }
        for line, hits, time in timings
    ]


def load_script(lesson: Path) -> ModuleType:
    """Return the ``train.py`` of a lesson as a module, so that an experiment runs the code that the lesson shows."""
    spec = importlib.util.spec_from_file_location(lesson.name, lesson / "train.py")
    assert spec is not None and spec.loader is not None
    sys.modules[lesson.name] = module = importlib.util.module_from_spec(spec)  # where its flags' types are looked up
    spec.loader.exec_module(module)
    return module


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
