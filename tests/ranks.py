"""Starts several ranks of a script on this machine, as a launcher would, and collects what each of them prints."""

import os
import signal
import subprocess
from pathlib import Path

import quick_python
from conftest import Result
from lab.launching import free_port as free_port


def start_ranks(
    count: int,
    *command: object,
    cwd: Path,
    environment: dict[str, str] | None = None,
    announced: int | None = None,
    woken: int | None = None,
) -> list[Result]:
    """Run ``python command`` as that many ranks, one thread each; return what each did.

    With ``announced`` their world size is another number. The rank ``woken``, which stops itself, is continued when the
    others have ended.
    """
    world_size = announced or count
    common = {"WORLD_SIZE": world_size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "OMP_NUM_THREADS": 1}
    processes = []
    for rank in range(count):
        variables = {name: str(value) for name, value in (common | {"RANK": rank, "LOCAL_RANK": rank}).items()}
        process = subprocess.Popen(
            [quick_python.commands() / "python", *map(str, command)],
            cwd=cwd,
            env=(environment or dict(os.environ)) | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
    try:
        outputs: list = [None] * count
        for rank in sorted(range(count), key=lambda rank: rank == woken):
            if rank == woken:
                processes[rank].send_signal(signal.SIGCONT)
            outputs[rank] = processes[rank].communicate(timeout=300)
    finally:
        for process in processes:
            process.kill()
    return [Result(process.returncode, *output) for process, output in zip(processes, outputs, strict=True)]
