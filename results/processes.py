"""Running other programs so that none of them outlives the measurement that needs it."""

import os
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO

from workshop.measuring.launching import reason

PROC = Path("/proc")


def descendants(pid: int) -> list[int]:
    """Return the process ids of all processes that process ``pid`` has started, and that those have started.

    It is empty where the operating system has no /proc.
    """
    children: dict[int, list[int]] = {}
    for folder in PROC.glob("[0-9]*"):
        with suppress(OSError):  # a process may end at any moment
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(folder.name))
    found = list(children.get(pid, []))
    for child in found:  # the list grows while it is read
        found += children.get(child, [])
    return found


@contextmanager
def started(
    command: Sequence[object], folder: Path, stderr: IO | None = None, environment: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen]:
    """Start a process; when the block is left early, kill it together with all processes that it has started.

    An experiment starts further processes (ranks, workers, other configurations). If only the experiment were killed,
    they would go on, keep GPU memory and CPUs, and distort what is measured next.

    Args:
        command: the words.
        folder: where to run it.
        stderr: file for its standard error (default: that of this process).
        environment: its environment variables (default: those of this process).
    """
    process = subprocess.Popen([str(word) for word in command], cwd=folder, stderr=stderr, env=environment)
    try:
        yield process
    finally:
        if process.poll() is None:
            family = [process.pid, *descendants(process.pid)]
            for pid in family:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait()


def run_together(commands: Mapping[str, Sequence[object]], folder: Path) -> dict[str, str]:
    """Run several programs at the same time and wait for all; return by name why each of those that failed did."""
    failures = {}
    with ExitStack() as stack:
        running = {}
        for name, command in commands.items():
            print("$", shlex.join(map(str, command)), flush=True)
            stderr = stack.enter_context(tempfile.TemporaryFile("w+"))
            running[name] = (stack.enter_context(started(command, folder, stderr)), stderr)
        for name, (process, stderr) in running.items():
            status = process.wait()
            text = show(stderr)
            if status:
                failures[name] = reason(text) or f"exit status {status}"
    return failures


def show(stderr: IO[str]) -> str:
    """Copy what a program wrote to its standard error to that of this process; return it."""
    stderr.seek(0)
    text = stderr.read()
    sys.stderr.write(text)
    sys.stderr.flush()
    return text
