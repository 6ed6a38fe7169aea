"""A run of several lives: each is a set of processes, ended by a fault or by itself, and the next one resumes."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import quick_python
from ranks import free_port

TIMEOUT = float(os.environ.get("FAULTS_TIMEOUT", 120))
"""seconds after which a life that should end counts as hung; more on a busy machine"""


@dataclass
class Tally:
    """How one kind of fault went."""

    fault: str
    times: int = 0
    handled: int = 0
    lost: int = 0
    remark: str = ""
    strange: list[str] = field(default_factory=list)

    def count(self, handled: bool, report: str) -> None:
        """Count a fault, and keep the ``report`` of one that did not end as it should."""
        self.times += 1
        self.handled += handled
        if not handled:
            self.strange.append(report)


class Life:
    """The processes of one life of a run, of which each writes to a log of its own."""

    def __init__(self, commands: Sequence[Sequence[object]], environments: Sequence[dict[str, str]], cwd: Path) -> None:
        self.folder = Path(environments[0]["WORKSHOP_RUNS"])
        self.folder.mkdir(parents=True, exist_ok=True)
        self.logs = [self.folder / f"rank{rank}.log" for rank in range(len(commands))]
        self.processes = []
        for command, environment, log in zip(commands, environments, self.logs, strict=True):
            with log.open("w") as output:
                process = subprocess.Popen(
                    list(map(str, command)), cwd=cwd, env=os.environ | environment, stdout=output, stderr=output
                )
            self.processes.append(process)

    def wait(self) -> list[int] | None:
        """Return the statuses, once all have ended; None if they hang: then their stacks are in the log."""
        end = time.monotonic() + TIMEOUT
        while any(process.poll() is None for process in self.processes):
            if time.monotonic() > end:
                with self.logs[0].open("a") as log:
                    log.write(stacks(self.folder))
                self.kill()
                return None
            time.sleep(0.02)
        return [process.returncode for process in self.processes]

    def kill(self) -> None:
        """End whatever is left of it."""
        for process in self.processes:
            process.kill()
            process.wait()

    def printed(self) -> str:
        """Return what all of them wrote."""
        return "".join(log.read_text(errors="replace") for log in self.logs)


def by_hand(script: Path, flags: Sequence[object], folder: Path, ranks: int, python: object = None) -> Life:
    """Start a lesson's script as that many ranks, without a launcher."""
    python = python or quick_python.commands() / "python"
    common = {"WORKSHOP_RUNS": str(folder), "OMP_NUM_THREADS": "1", "WORKSHOP_RENDEZVOUS_SECONDS": "30"}
    common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks)}
    environments = [common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
    return Life([[python, script.name, *flags]] * ranks, environments, script.parent)


def by_torchrun(script: Path, flags: Sequence[object], folder: Path, ranks: int, python: object = None) -> Life:
    """Start it with torchrun."""
    python = python or quick_python.commands() / "python"
    torchrun = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks]
    environment = {"WORKSHOP_RUNS": str(folder), "OMP_NUM_THREADS": "1", "PYTHON_EXEC": str(python)}
    return Life([[*torchrun, script.name, *flags]], [environment], script.parent)


def rank_processes(folder: Path) -> dict[int, int]:
    """Return the process of each rank of the run that keeps its files here, whoever started it."""
    found = {}
    for process in processes_of(folder):
        variables, parent = environment_of(process), environment_of(parent_of(process))
        rank = variables.get("RANK", variables.get("SLURM_PROCID"))
        own = rank is not None and rank != parent.get("RANK", parent.get("SLURM_PROCID"))
        if own and "train.py" in Path(f"/proc/{process}/cmdline").read_text():
            found[int(rank)] = process
    return found


def processes_of(folder: Path) -> Iterator[int]:
    """Give all processes whose environment says that the run's files are here."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and environment_of(int(entry.name)).get("WORKSHOP_RUNS") == str(folder):
            yield int(entry.name)


def environment_of(process: int) -> dict[str, str]:
    """Return the environment that a process was started with; {} if it has ended."""
    try:
        entries = Path(f"/proc/{process}/environ").read_text(errors="replace").split("\0")
    except OSError:
        return {}
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)


def parent_of(process: int) -> int:
    """Return the parent of a process; 0 if it has ended."""
    try:
        return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def stacks(folder: Path) -> str:
    """Return where each Python process of a run is, as py-spy sees it."""
    spy = Path(sys.executable).parent / "py-spy"
    if not spy.exists():
        return "\n(no stacks: pip install py-spy)\n"
    shown = []
    forks = subprocess.run(["pgrep", "-f", "quick_python.py"], capture_output=True, text=True).stdout.split()
    for process in [*processes_of(folder), *forks]:
        dump = subprocess.run([spy, "dump", "--pid", str(process)], capture_output=True, text=True)
        shown.append(f"\n--- {process}\n{dump.stdout}{dump.stderr}")
    return "".join(shown)


def weights_of(folder: Path) -> dict:
    """Return the weights and the optimizer's state of the checkpoint in a run's folder."""
    if (folder / "checkpoint.sharded").exists():
        with tempfile.TemporaryDirectory() as scratch:
            dcp_to_torch_save(folder / "checkpoint.sharded", Path(scratch) / "state.pt")
            return torch.load(Path(scratch) / "state.pt", weights_only=True)
    state = torch.load(folder / "checkpoint.pt", weights_only=True)
    return {name: state[name] for name in ("model", "optimizer")}


def equal(one: object, other: object) -> bool:
    """Whether two nested states are the same, bit for bit."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return one == other


def name_of(number: int) -> str:
    """Return the name of a signal."""
    return signal.Signals(number).name
