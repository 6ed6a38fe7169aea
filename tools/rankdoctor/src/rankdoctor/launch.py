"""Start a script as ranks on this machine, watch over them, and end them with all their children."""

import contextlib
import ctypes
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from .aftermath import changed, snapshot, undo_folders
from .runs import Launch, write_launch
from .settings import PACKAGE, Settings, is_own

HOOK = Path(PACKAGE, "hook")
GRACE = 20.0
"""seconds for the other ranks to end after one has ended"""
IDLE = 15.0
"""seconds without an event and without computing, after which a run counts as hanging"""
PARALLEL = (
    r"init_process_group|torch\.distributed|torchrun|\bspawn\(|accelerate|lightning|ignite|deepspeed|horovod|RANK"
)
"""names of which a script for several ranks contains at least one"""
LAUNCHERS = ("torchrun", "srun", "both", "spawn", "single")
"""as by torchrun, as by srun, with the variables of both, by the script itself, or one process"""


INTERRUPTED = threading.Event()
"""set if the user has interrupted the doctor, so that runs in other threads end"""


@dataclass
class Plan:
    """What is run, and how."""

    script: Path
    args: list[str]
    module: str = ""
    """name of the script as a module, as for ``python -m``; "": it is started by its file"""
    launcher: str = "torchrun"
    ranks: int = 2
    nodes: int = 1
    local_rank_flag: bool = False
    gpus_per_task: int = 0
    """GPUs that each rank sees, as with srun --gpus-per-task; 0: all of its node"""
    seconds: float = 180.0
    gpus: str = "standin"
    """standin, null (PyTorch's own CUDA code, on GPUs that compute nothing), real, or none"""
    name: str = ""
    provocation: str = ""
    compared: str = ""
    settings: dict = field(default_factory=dict)
    """further fields of `Settings`"""

    @property
    def root(self) -> Path:
        """The folder of the user's files: the folder of the script, or the parent of its package."""
        return self.script.parents[self.module.count(".") + (self.script.name == "__main__.py")]


def file_of_module(name: str) -> Path | None:
    """Return the file that ``python -m name`` would run from this folder; nothing is imported."""
    for folder in (os.getcwd(), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)), *sys.path):
        base = Path(folder, *name.split("."))
        for file in (base.with_name(f"{base.name}.py"), base / "__main__.py"):
            if file.is_file():
                return file.resolve()
    return None


STARTS = r"torchrun|torch\.distributed\.(?:run|launch)|accelerate launch|deepspeed|srun|python3?"
"""how a line of a shell script may start a training"""


def started_by(text: str) -> str:
    """Return the training script that a shell script, or another text, starts last, with its arguments; "" if none."""
    text = re.sub(r"\\\n\s*", " ", text)  # lines that are continued
    found = re.findall(rf"(?:{STARTS})[^\n#]*?([^\s\"']+\.py\b[^\n#|;&>]*)", text)
    return found[-1].strip(" \t\"'[](),") if found else ""


def likely_launchers(script: Path) -> list[tuple[str, bool]]:
    """Return how a script may be meant to be started, from its text, the likeliest first.

    Each way is the name of a launcher, and whether the script wants the flag ``--local_rank``.
    """
    text = script.read_text(errors="replace")
    all_text = "".join(file.read_text(errors="replace") for file in nearby(script))
    if not re.search(PARALLEL, all_text):
        return [("single", False)]
    if not re.search(r"""["'](LOCAL_)?RANK["']|SLURM_|\bspawn\(""", text):
        text = all_text
    starts_itself = re.search(r"\bspawn\(|start_processes\(", text)
    sets_rank = re.search(r"""["']RANK["']\]\s*=[^=]|setdefault\(["']RANK["']""", text)
    reads_rank = re.search(r"""["'](LOCAL_)?RANK["']""", text) and not sets_rank
    reads_slurm = re.search(r"SLURM_(PROCID|LOCALID)", text)
    has_flag = re.search(r"""["']--local[_-]rank["']""", text)
    likely = [("torchrun", bool(has_flag and "LOCAL_RANK" not in text))]
    likely += [("srun", False)] if reads_slurm else []
    likely += [("both", False)] if "SLURM_" in text and re.search(r"""["'](LOCAL_)?RANK["']""", text) else []
    likely += [("spawn", False)] if starts_itself else []
    likely += [("torchrun", True)] if has_flag else []
    if starts_itself and not reads_rank:
        likely.insert(0, ("spawn", False))
    elif reads_slurm and not reads_rank:
        likely.insert(0, ("srun", False))
    return list(dict.fromkeys(likely))


def nearby(script: Path) -> list[Path]:
    """Return the script, and the files beside it that it names in its imports."""
    text = script.read_text(errors="replace")
    names = set(re.findall(r"^\s*(?:from|import)\s+\.?(\w+)", text, flags=re.MULTILINE))
    files = [script.parent / f"{name}.py" for name in sorted(names)]
    files += [file for name in sorted(names) for file in sorted((script.parent / name).glob("*.py"))[:50]]
    return [script, *(file for file in files if file.is_file() and file != script)]


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as it:
        it.bind(("127.0.0.1", 0))
        return it.getsockname()[1]


PLACE = re.compile(
    r"(GROUP_|ROLE_|LOCAL_|NODE_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)|TORCHELASTIC_\w+|SLURM_(PROCID|LOCALID|NODEID|"
    r"NTASKS|NPROCS|NNODES|JOB_NUM_NODES|JOB_?ID|GPUS_ON_NODE|NTASKS_PER_NODE|CPUS_PER_TASK|SUBMIT_HOST|JOB_NODELIST|"
    r"NODELIST|GTIDS|STEP_\w+|TASK\w*|SRUN_\w+)"
)
"""variables with the place of a process in a job, which the doctor sets or takes away; all others are the user's"""


def environment(plan: Plan, rank: int, settings: Settings) -> dict[str, str]:
    """Return the variables of a rank, as its launcher would set them."""
    world, per_node = plan.ranks, plan.ranks // plan.nodes
    local = {"rank": rank % per_node, "node": rank // per_node}
    env = {key: value for key, value in os.environ.items() if not PLACE.fullmatch(key)}
    env |= {
        "RANKDOCTOR_SETTINGS": settings.dump(),
        "PYTHONUNBUFFERED": "1",
        "WANDB_MODE": "disabled",  # this run is no experiment of the user's
        "PYTHONDONTWRITEBYTECODE": "1",  # in the folders of the user
        "TMPDIR": f"{settings.scratch}/tmp",
        "OMP_NUM_THREADS": env.get("OMP_NUM_THREADS", "1"),
        "PYTHONBREAKPOINT": "0",  # nobody could answer the debugger
        # Python gives each process another order of sets and of hash(); here it is another one for sure
        "PYTHONHASHSEED": env.get("PYTHONHASHSEED", str(1 + rank)),
    }
    bound = ",".join(str(local["rank"] * plan.gpus_per_task + n) for n in range(plan.gpus_per_task))
    if plan.provocation == "two_nodes" and local["node"] % 2:
        env["RANKDOCTOR_REVERSED"] = "1"  # the order of files in a folder is that of the file system of a node
    if plan.gpus == "null":
        env = with_null_gpus(env, per_node * max(1, plan.gpus_per_task)) | {
            "NCCL_HOSTID": f"node {local['node']}"
        }  # one GPU 0 on each of them
        env |= {"CUDA_VISIBLE_DEVICES": bound} if bound else {}
    elif plan.gpus == "real" and bound:
        env["CUDA_VISIBLE_DEVICES"] = bound
    elif plan.gpus != "real":
        env["CUDA_VISIBLE_DEVICES"] = ""
    # before the hook of the null GPU, which this one calls
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(HOOK), env.get("PYTHONPATH"))))
    if plan.launcher in ("torchrun", "srun", "both"):
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(settings.port), "WORLD_SIZE": str(world)}
    if plan.launcher in ("torchrun", "both"):
        env |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(local["rank"]),
            "LOCAL_WORLD_SIZE": str(per_node),
            "GROUP_RANK": str(local["node"]),
            "GROUP_WORLD_SIZE": str(plan.nodes),
            "ROLE_RANK": str(rank),
            "ROLE_WORLD_SIZE": str(world),
            "TORCHELASTIC_RUN_ID": "rankdoctor",
            "NODE_RANK": str(local["node"]),
        }
    if plan.launcher in ("srun", "both"):
        env |= {
            "SLURM_PROCID": str(rank),
            "SLURM_LOCALID": str(local["rank"]),
            "SLURM_NODEID": str(local["node"]),
            "SLURM_NTASKS": str(world),
            "SLURM_NPROCS": str(world),
            "SLURM_STEP_NUM_TASKS": str(world),
            "SLURM_NNODES": str(plan.nodes),
            "SLURM_JOB_NUM_NODES": str(plan.nodes),
            "SLURM_JOB_ID": "1",
            "SLURM_JOBID": "1",
            "SLURM_GPUS_ON_NODE": str(per_node),
            "SLURM_NTASKS_PER_NODE": str(per_node),
            "SLURM_CPUS_PER_TASK": "1",
            "SLURM_SUBMIT_HOST": "localhost",
            "SLURM_JOB_NODELIST": "localhost",
            "SLURM_NODELIST": "localhost",
        }
    return env


class NoNullGPU(Exception):
    """There can be no null GPU here; the message says why."""


NEEDS_NULLGPU = (
    "--null_gpu needs the package nullgpu, which stands beside this one: pip install ./tools/nullgpu, or leave out "
    "--null_gpu"
)


def with_null_gpus(env: dict[str, str], gpus: int) -> dict[str, str]:
    """Return the environment of a process that sees null GPUs, whose values the CPU computes. Raises NoNullGPU."""
    try:
        from nullgpu import NotPossible
        from nullgpu import environment as environment_of_nullgpu
    except ImportError:
        raise NoNullGPU(NEEDS_NULLGPU) from None
    base = {name: value for name, value in env.items() if name != "CUDA_VISIBLE_DEVICES"}  # it means real GPUs
    try:
        return environment_of_nullgpu(base, gpus=gpus, values=True)
    except NotPossible as error:
        raise NoNullGPU(f"--null_gpu: {error}") from None


def end_with_parent() -> None:
    """In a new process: let the kernel end it if the doctor is killed (on Linux)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


class Ranks:
    """The processes of a run."""

    def __init__(self, plan: Plan, settings: Settings) -> None:
        self.logs = Path(settings.logs)
        self.expected = 1 if plan.launcher == "single" else plan.ranks
        self.processes: list[subprocess.Popen] = []
        for rank in range(1 if plan.launcher in ("spawn", "single") else plan.ranks):
            args = [f"--local_rank={rank % (plan.ranks // plan.nodes)}"] if plan.local_rank_flag else []
            node = rank // (plan.ranks // plan.nodes)
            args += [arg.replace("{rank}", str(rank)).replace("{node}", str(node)) for arg in plan.args]
            with open(settings.scratch + f"/rank{rank}.out", "wb") as out:
                command = [sys.executable, *(["-m", plan.module] if plan.module else [str(plan.script)]), *args]
                self.processes.append(
                    subprocess.Popen(
                        command,
                        env=environment(plan, rank, settings),
                        stdout=out,
                        stderr=subprocess.STDOUT,
                        stdin=subprocess.DEVNULL,
                        start_new_session=True,
                        preexec_fn=end_with_parent,
                    )
                )

    def alive(self) -> list[int]:
        """Return the numbers of the processes that are running."""
        return [number for number, process in enumerate(self.processes) if process.poll() is None]

    def waiting(self) -> list[Path]:
        """Return the marks of ranks that wait for the end."""
        return list(self.logs.glob("*.waits"))

    def activity(self) -> tuple[int, int]:
        """Return the size of all events so far, and the CPU time of all processes (on Linux).

        A process that could compute, but has to wait for a CPU or a disk, counts as active.
        """
        size = sum(file.stat().st_size for file in self.logs.glob("*.jsonl"))
        ticks, sessions = 0, {str(process.pid) for process in self.processes}
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError, IndexError):
                fields = stat.read_text().rpartition(")")[2].split()
                if fields[3] in sessions:
                    ticks += int(fields[11]) + int(fields[12])
                    size += int(time.monotonic()) if fields[0] in "RD" else 0
        return size, ticks // 20

    def stacks(self) -> dict[int, str]:
        """Return where the processes stand: of each, the lines of its stack, innermost first."""
        for file in self.logs.glob("*.stack"):  # the processes in which faulthandler waits for this signal
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(int(file.stem), signal.SIGQUIT)
        time.sleep(0.7)
        return {int(file.stem): file.read_text(errors="replace") for file in self.logs.glob("*.stack")}

    def kill(self) -> list[int | None]:
        """End all processes and their children; return the exit statuses, None for those that this ended."""
        statuses = [process.poll() for process in self.processes]
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        for pid in self.strays():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in self.processes:
            process.wait()
        return statuses

    def strays(self) -> list[int]:
        """Return processes that a rank has started in a session of their own (on Linux)."""
        mark, found = f"{self.logs.parent}/tmp".encode(), []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if mark in (folder / "environ").read_bytes() and int(folder.name) != os.getpid():
                    found.append(int(folder.name))
        return found


def run(plan: Plan, scratch: Path, progress: Callable[[str], None] = lambda _: None) -> Launch:
    """Run a script to its end, or to the limits, and leave its events in ``scratch``."""
    for name in ("logs", "tmp"):
        if name != "tmp" or plan.compared != "resumed":  # a script may have its checkpoints there
            shutil.rmtree(scratch / name, ignore_errors=True)
        (scratch / name).mkdir(parents=True, exist_ok=True)
    settings = Settings(
        scratch=str(scratch),
        root=str(plan.root),
        gpus=plan.gpus_per_task or plan.ranks // plan.nodes,
        started=plan.ranks // plan.nodes if plan.launcher in ("torchrun", "srun", "both") else 1,
        port=free_port(),
        standin=plan.gpus == "standin",
        null=plan.gpus == "null",
        **plan.settings,
    )
    launch = Launch(
        script=str(plan.script),
        root=str(plan.root),
        name=plan.name,
        provocation=plan.provocation,
        world_size=plan.ranks,
        nodes=plan.nodes,
        gpus=plan.gpus,
        launcher=plan.launcher,
        gpus_per_task=plan.gpus_per_task,
        compared=plan.compared,
        asked=[name for name in ("influence", "reference") if plan.settings.get(name)],
    )
    folders = (os.getcwd(), settings.root)
    before = snapshot(folders, scratch) if settings.redirect else {}
    began = time.monotonic()
    ranks = Ranks(plan, settings)
    try:
        launch.ended = watch(ranks, plan.seconds, progress)
        if launch.ended in ("time", "lost", "hang"):
            launch.stuck = {pid: place for pid, stack in ranks.stacks().items() if (place := standing(stack))}
    finally:
        launch.statuses = ranks.kill()
        launch.seconds = round(time.monotonic() - began, 1)
        launch.moved = undo_folders(scratch)
    launch.written = changed(before, snapshot(folders, scratch)) if settings.redirect else []
    write_launch(launch, scratch)
    return launch


def watch(ranks: Ranks, seconds: float, progress: Callable[[str], None]) -> str:
    """Wait until a run has ended, or must be ended; return why."""
    began = moved = time.monotonic()
    first_end = first_wait = 0.0
    activity = ranks.activity()
    can_see_idle = Path("/proc/self/stat").exists()
    while True:
        time.sleep(0.2)
        now = time.monotonic()
        steps = updates_so_far(ranks.logs)
        progress(f"{now - began:.0f} s, {steps} updates")
        alive, waiting = ranks.alive(), ranks.waiting()
        if not alive:
            return "end"
        if waiting:
            first_wait = first_wait or now
            if now - first_wait > (1.0 if len(waiting) >= ranks.expected else 8.0):
                return waiting[0].read_text() or "enough"
        if len(alive) < len(ranks.processes):
            first_end = first_end or now
            if now - first_end > GRACE:
                return "lost"
        if now - began > seconds or INTERRUPTED.is_set():
            return "time"
        if activity != (activity := ranks.activity()):
            moved = now
        elif can_see_idle and not waiting and now - moved > (IDLE if steps else 3 * IDLE):  # it may download at first
            return "hang"


def updates_so_far(logs: Path) -> int:
    """Return the number of updates, from the last line of any rank."""
    steps = [0]
    for file in logs.glob("*.jsonl"):
        with file.open("rb") as events, contextlib.suppress(ValueError, OSError, IndexError, KeyError):
            events.seek(max(0, file.stat().st_size - 100_000))
            steps.append(json.loads(events.read().splitlines()[-1])["step"])
    return max(steps)


def standing(stack: str) -> str:
    """Return from faulthandler's text of a stack: the user's innermost line, and the innermost function."""
    frames = re.findall(r'File "(.*)", line (\d+) in (\S+)', stack)
    users = [
        f"{file}:{line}"
        for file, line, _ in frames
        if "site-packages" not in file and "/lib/python" not in file and not file.startswith("<") and not is_own(file)
    ]
    return f"{users[0]} in {frames[0][2]}" if users else ""
