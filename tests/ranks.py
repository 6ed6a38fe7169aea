"""Starts several ranks of a script on this machine, and collects what they print."""

import os
import subprocess
from pathlib import Path

import quick_python
from conftest import Result
from lab.launching import free_port as free_port


def torchrun(
    count: int, *command: object, cwd: Path, environment: dict[str, str] | None = None, timeout: float = 300
) -> Result:
    """Run a script on that many ranks, as a user does; return the output of all of them."""
    words = [quick_python.commands() / "torchrun", "--standalone", "--nproc-per-node", count, *command]
    done = subprocess.run(
        [*map(str, words)],
        cwd=cwd,
        env=(environment or dict(os.environ)) | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    return Result(done.returncode, done.stdout, done.stderr)


def start_ranks(
    count: int, *command: object, cwd: Path, environment: dict[str, str] | None = None, announced: int | None = None
) -> list[Result]:
    """Run ``python command`` as that many ranks without a launcher, one thread each; return what each of them printed.

    With ``announced`` their world size is another number.
    """
    common = {"WORLD_SIZE": announced or count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    common["PYTHONFAULTHANDLER"] = 1  # a rank that crashes says where
    processes = []
    for rank in range(count):
        variables = common | {"OMP_NUM_THREADS": 1, "RANK": rank, "LOCAL_RANK": rank}
        process = subprocess.Popen(
            [quick_python.commands() / "python", *map(str, command)],
            cwd=cwd,
            env=(environment or dict(os.environ)) | {name: str(value) for name, value in variables.items()},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
    try:
        outputs = [process.communicate(timeout=300) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [Result(process.returncode, *output) for process, output in zip(processes, outputs, strict=True)]
