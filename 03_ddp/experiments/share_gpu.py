"""Several ranks on the one GPU of this machine, over the real NCCL.

    python experiments/share_gpu.py --ranks 2 train.py --limit_train 3200
    python ../03_ddp/experiments/share_gpu.py --ranks 4 train.py --replicas 2        # in the folder of lesson 05
    nullgpu --values python experiments/share_gpu.py --ranks 2 train.py              # without a GPU

NCCL refuses two ranks on one GPU of a node. It accepts ranks on the first GPUs of two nodes. So each rank gets another
name for its node (NCCL_HOSTID), and NCCL connects the ranks over TCP. DDP, FSDP2 and NCCL then run as on several GPUs:
use it for correctness, for hangs, and to see error messages. It is not for speed, because the ranks take turns on the
GPU. They share its memory, too. A GPU in the compute mode EXCLUSIVE_PROCESS accepts only one rank.

The script can be any script that torchrun can start. Rank 0 writes to the terminal. The output of the other ranks goes
to stderr, with "rank 1: " before each line. SIGINT (Ctrl-C), SIGTERM and SIGUSR1 are passed on to all ranks. When a
rank fails, the others are ended, and the exit status is the status of the rank that failed first.
"""

import argparse
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from lab.flags import Parser
from lab.launching import PYTHON, free_port
from workshop.errors import UserError, run_reporting_user_errors
from workshop.hardware import available_cpus

PATIENCE = 10
"""seconds that a rank has to end after SIGINT or SIGTERM; then SIGKILL ends it"""
SAME_MISTAKE = 0.5
"""seconds that the other ranks have to report a mistake of the user, before they are ended"""


def environment_of(rank: int, ranks: int, port: int) -> dict[str, str]:
    """Return what torchrun sets for the only rank on a node with one GPU, and the name of this node."""
    variables: dict[str, object] = {"RANK": rank, "LOCAL_RANK": 0, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": 1}
    variables |= {"GROUP_RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    variables |= {"NCCL_HOSTID": f"node{rank}", "NCCL_IB_DISABLE": 1}
    variables |= {"NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo"}
    variables |= {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]}
    variables |= {"PYTHONUNBUFFERED": 1}  # else the last lines of a rank that hangs would be missing
    variables |= {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or max(1, available_cpus() // ranks)}
    return os.environ | {name: str(value) for name, value in variables.items()}


class Rank:
    """A process of the job."""

    def __init__(self, number: int, command: Sequence[str], environment: dict[str, str]) -> None:
        self.number = number
        self.mistakes: list[str] = []
        """lines that begin with "error: "; all ranks often find the same mistake of the user"""
        # In a session of its own: Ctrl-C signals all processes of a terminal's session, and each rank needs it once.
        self.process = subprocess.Popen(
            command,
            env=environment,
            stdout=subprocess.PIPE if number else None,
            stderr=subprocess.STDOUT if number else None,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self.reader = threading.Thread(target=self.show, daemon=True)
        self.reader.start()

    def show(self) -> None:
        """Print what a rank other than rank 0 writes, with its number; keep back what it says of a mistake."""
        for line in self.process.stdout or ():
            if line.startswith("error: "):
                self.mistakes.append(line)
            else:
                print(f"rank {self.number}: {line}", end="", file=sys.stderr, flush=True)

    def send(self, number: int) -> None:
        """Send a signal to the process, if it has not ended; SIGKILL also to all that it has started."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, number) if number == signal.SIGKILL else self.process.send_signal(number)


class Job:
    """Several ranks of a command on one GPU."""

    def __init__(self, command: Sequence[str], ranks: int) -> None:
        port = free_port()
        self.ranks = [Rank(number, command, environment_of(number, ranks, port)) for number in range(ranks)]
        self.killed_at = float("inf")
        self.stopped_by_user = False

    def send(self, number: int) -> None:
        """Send a signal to all ranks; SIGUSR1, which lets a lesson save and stop, leaves them any time for it."""
        for rank in self.ranks:
            rank.send(number)
        if number != signal.SIGUSR1:
            self.killed_at = min(self.killed_at, time.monotonic() + PATIENCE)

    def on_signal(self, number: int, _: object) -> None:
        """Pass on a signal that this process has received."""
        self.stopped_by_user |= number != signal.SIGUSR1
        self.send(number)

    def wait(self) -> Rank | None:
        """Wait until all ranks have ended; when one fails, end the others, and return it. None: all ended well."""
        first: Rank | None = None
        running = True
        while running:
            running = any([rank.process.poll() is None for rank in self.ranks])
            failed = [rank for rank in self.ranks if rank.process.returncode]
            if failed and first is None:
                first = min(failed, key=lambda rank: rank.process.returncode)  # a signal (< 0) is a cause
                time.sleep(SAME_MISTAKE)
                if self.ranks[0].process.poll() == first.process.returncode:  # rank 0 has reported the same
                    first.mistakes.clear()
                self.send(signal.SIGTERM)
            if time.monotonic() > self.killed_at:
                self.send(signal.SIGKILL)
            time.sleep(0.05)
        for rank in self.ranks:
            rank.reader.join(timeout=5)  # a process that the rank has started may still hold the pipe
        return first


def run_ranks(command: Sequence[str], ranks: int) -> int:
    """Run a command as several ranks on one GPU; return the exit status of the rank that failed first, or 0."""
    job = Job(command, ranks)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, job.on_signal)
    first = job.wait()
    if first is None:
        return 0
    status = first.process.returncode
    print("".join(first.mistakes), end="", file=sys.stderr)
    if status < 0 and not job.stopped_by_user:
        print(f"error: rank {first.number} was ended by {signal.Signals(-status).name}", file=sys.stderr)
    elif status > 2 or status == 1:
        print(f"error: rank {first.number} ended with exit status {status}; its messages are above", file=sys.stderr)
    return status if status > 0 else 128 - status  # as a shell says it


def number_of_ranks(text: str) -> int:
    """Return the value of --ranks."""
    if not text.isdecimal() or int(text) < 2:
        raise argparse.ArgumentTypeError(f"{text} is not a number of ranks: give 2 or more")
    return int(text)


def main() -> None:
    """Read the command line, and run the script."""
    parser = Parser(__doc__)
    parser.add_argument("--ranks", type=number_of_ranks, default=2, help="number of ranks (default: 2)")
    parser.add_argument("script", help="script to run, for example train.py")
    parser.add_argument("flags", nargs=argparse.REMAINDER, help="flags of the script").required = False
    arguments = parser.parse_args()
    if not Path(arguments.script).is_file():
        raise UserError(f"{arguments.script}: there is no such script; flags of the script stand behind its name")
    if not torch.cuda.is_available():
        raise UserError(
            "PyTorch finds no GPU here. Run the ranks on the CPUs: CUDA_VISIBLE_DEVICES= torchrun --standalone "
            f"--nproc-per-node {arguments.ranks} {arguments.script} ..., or on a null GPU: nullgpu --values "
            f"python {sys.argv[0]} --ranks {arguments.ranks} ..."
        )
    sys.exit(run_ranks([PYTHON, arguments.script, *arguments.flags], arguments.ranks))


if __name__ == "__main__":
    run_reporting_user_errors(main)
