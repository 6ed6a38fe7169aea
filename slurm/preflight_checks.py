"""The checks of preflight.py: what a lesson needs of a machine, and what to do where it is missing.

Each check returns one result or a list of them, and raises nothing. Nothing here is imported from torch or the workshop
before `packages` and `package` have seen that they are there.
"""

from __future__ import annotations  # so that a Python that is too old can still run this and report it

import importlib
import importlib.util
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
LESSONS = {number: next(REPOSITORY.glob(f"{number}_*")) for number in ("01", "02", "03", "04", "05")}
ALL = tuple(LESSONS)
SEVERAL_RANKS = ("03", "04", "05")
OLDEST_DRIVER = {"13": 580, "12": 525, "11": 450}
"""the oldest NVIDIA driver for each major version of CUDA, says NVIDIA's table of compatibility"""
WRITTEN_MB = 100


class CheckResult:
    """What a check found: ``ok``, ``warning`` (works, but not all of it or not well) or ``fail``, and what to do."""

    def __init__(
        self, check: str, status: str, found: str, remedy: str = "", lessons: tuple[str, ...] = ALL, node: str = ""
    ) -> None:
        self.check, self.status, self.found, self.remedy, self.lessons = check, status, found, remedy, lessons
        self.node = node or this_node()


def this_node() -> str:
    """Return the name of this node, as Slurm has it where it started this process."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def python() -> CheckResult:
    """See that Python is new enough."""
    oldest = re.search(r'requires-python = ">=([\d.]+)"', (REPOSITORY / "pyproject.toml").read_text()).group(1)
    found = f"{'.'.join(map(str, sys.version_info[:3]))}, {sys.executable}"
    if sys.version_info[:2] < tuple(int(part) for part in oldest.split(".")):
        remedy = f"Python {oldest} or newer: `make setup PYTHON=python{oldest}`, a module, or conda (environment.yml)"
        return CheckResult("Python", "fail", found, remedy)
    return CheckResult("Python", "ok", found)


def packages() -> list[CheckResult]:
    """See that all dependencies are installed, and which versions are not the tested ones."""
    import tomllib

    needed = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["dependencies"]
    tested = dict(re.findall(r"^([\w.-]+)==(\S+)", (REPOSITORY / "constraints.txt").read_text(), re.MULTILINE))
    tested = {name.lower().replace("_", "-"): number for name, number in tested.items()}
    missing, old, other = [], [], []
    for requirement in needed:
        name = re.split(r"[\[<>=; ]", requirement)[0].replace("_", "-")
        if "dali" in name:
            continue  # has a check of its own
        try:
            number = version(name).partition("+")[0]
        except PackageNotFoundError:
            missing.append(name)
            continue
        least = re.search(r">=([\d.]+)", requirement)
        if least and _numbers(number) < _numbers(least.group(1)):
            old.append(f"{name} {number} ({least.group(1)} or newer)")
        elif number != tested.get(name):
            other.append(f"{name} {number} ({tested.get(name)})")
    install = f"`make setup` in {REPOSITORY}, or `pip install --constraint constraints.txt --editable '.[dev]'`"
    if missing or old:
        return [CheckResult("packages", "fail", f"missing or too old: {', '.join(missing + old)}", install)]
    if other:
        return [CheckResult("packages", "warning", f"not the tested versions: {', '.join(other)}", install)]
    return [CheckResult("packages", "ok", f"all {len(needed) - 1} at the tested versions, torch {version('torch')}")]


def package() -> CheckResult:
    """See that ``import workshop`` gives the package of this clone."""
    found = importlib.util.find_spec("workshop")
    remedy = f"`make setup` in {REPOSITORY} and use its .venv, or `export PYTHONPATH={REPOSITORY}`"
    if found is None:
        return CheckResult("package", "fail", "`import workshop` finds nothing", remedy)
    folder = Path(found.origin).parent
    if not folder.samefile(REPOSITORY / "workshop"):
        return CheckResult("package", "fail", f"`import workshop` gives that of another clone, {folder}", remedy)
    return CheckResult("package", "ok", f"{folder}, of this clone")


def driver() -> CheckResult:
    """See that the NVIDIA driver, if there is one, is new enough for the CUDA that torch was built for."""
    import torch

    from workshop import hardware

    number, cuda = hardware.driver_version(), torch.version.cuda
    if number is None:
        return CheckResult("driver", "ok", "no NVIDIA driver, so no NVIDIA GPU, on this node")
    if cuda is None:
        remedy = "install a torch built for CUDA: on Linux, `make setup` does"
        return CheckResult(
            "driver", "fail", f"NVIDIA driver {number}, but torch {torch.__version__} knows no CUDA", remedy
        )
    needed = OLDEST_DRIVER.get(cuda.partition(".")[0], 0)
    if int(number.partition(".")[0]) < needed:
        remedy = f"ask for driver R{needed} or newer, or install a torch built for an older CUDA (pytorch.org)"
        return CheckResult("driver", "fail", f"driver {number} is too old for torch's CUDA {cuda}", remedy)
    return CheckResult("driver", "ok", f"{number}, torch built for CUDA {cuda}")


def device(local_rank: int = 0) -> CheckResult:
    """See which device this process computes on, and that it does compute."""
    import torch

    from workshop.errors import UserError
    from workshop.hardware import emulates, pick_device

    try:
        found = pick_device()
    except UserError as error:
        fact, _, remedy = str(error).partition(": CUDA 13 needs")
        return CheckResult("device", "fail", fact, f"CUDA 13 needs{remedy}")
    if found.type != "cuda":
        kind = "fake GPUs" if "WORKSHOP_FAKE_GPUS" in os.environ else "no GPU"
        emulation = " It emulates bf16, slowly." if emulates(found, "bf16") else ""
        remedy = (
            "all lessons run on CPUs; for lesson 02 to show anything, and for tf32 and CUDA graphs, take a GPU node"
        )
        return CheckResult("device", "warning", f"{kind}: computes on {found.type}.{emulation}", remedy)
    count = torch.cuda.device_count()
    properties = torch.cuda.get_device_properties(local_rank % count)
    major, minor = properties.major, properties.minor
    found = f"{count} x {properties.name}, {properties.total_memory / 1e9:.0f} GB, compute capability {major}.{minor}"
    try:
        image = torch.ones(1, 1, 8, 8, device=torch.device("cuda", local_rank % count))
        torch.nn.functional.conv2d(image, image[..., :3, :3]).sum().item()
    except RuntimeError as error:
        remedy = f"this torch has kernels for {', '.join(torch.cuda.get_arch_list())}; install one built for this GPU"
        return CheckResult("device", "fail", f"{found}, does not compute: {str(error).splitlines()[0]}", remedy)
    if major < 8:
        remedy = "no bf16 and no TF32 before 8.0: use fp16 in lessons 04 and 05"
        return CheckResult("device", "warning", found, remedy, ("04", "05"))
    return CheckResult("device", "ok", found)


def gpus_for_lesson_02() -> list[CheckResult]:
    """Say that one GPU is not enough for one lesson."""
    import torch

    if int(os.environ.get("SLURM_GPUS_ON_NODE") or torch.cuda.device_count()) != 1:  # a task may see one of several
        return []
    return [
        CheckResult(
            "GPUs", "warning", "one GPU: DataParallel does nothing with it", "ask for two: --gres=gpu:2", ("02",)
        )
    ]


def dali() -> CheckResult:
    """See that NVIDIA DALI can be imported."""
    try:
        importlib.import_module("nvidia.dali.plugin.pytorch")
        return CheckResult("DALI", "ok", version("nvidia-dali-cuda120"))
    except Exception as error:  # an ImportError, or whatever its libraries raise
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        remedy = "`pip install nvidia-dali-cuda120` (Linux only); without it, leave out --loader dali"
        return CheckResult("DALI", "warning", f"cannot be imported: {reason}", remedy, ("01", "04"))


def processors() -> CheckResult:
    """See that there are a CPU to train and one to load."""
    import torch

    from workshop.hardware import available_cpus

    cpus, memory = available_cpus(), os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    found = f"{cpus} for this process, {memory:.0f} GB of memory, torch {torch.__version__}"
    if cpus < 2:
        return CheckResult("CPUs", "warning", found, "loading and training share one: --cpus-per-task=2 or more")
    return CheckResult("CPUs", "ok", found)


def data() -> list[CheckResult]:
    """See that each data set is there and whole."""
    from workshop.datasets import IMAGES, files, image_dataset, nbody
    from workshop.errors import UserError
    from workshop.paths import default_data_dir

    sys.path.append(str(REPOSITORY / "data"))
    from filling import find_damage

    needs = {"mnist": ("fail", ALL), "cifar10": ("warning", ("01", "03")), "nbody": ("fail", ("04",))}
    results, where = [], default_data_dir()
    for name, (status, lessons) in needs.items():
        module = image_dataset(name) if name in IMAGES else nbody
        check = f"data: {name}"
        folder = module.folder(where)
        try:
            module.check(where)
            size = sum(file.stat().st_size for file in folder.iterdir())
            damage = find_damage(folder, lambda _: None) if size < 1e9 else None  # reading more would take minutes
        except UserError as error:
            found, _, prepare = str(error).partition("; to prepare")
            results.append(CheckResult(check, status, found, f"to prepare{prepare}", lessons))
            continue
        kind = (files.read_origin(folder) or {}).get("origin", "your own")
        if damage:
            again = files.prepare_command(name, where, *(["--synthetic"] if kind == "generated" else []))
            results.append(
                CheckResult(check, status, str(damage), f"run `{again}`, which replaces the damaged files", lessons)
            )
        else:
            read = "every byte as it was prepared" if size < 1e9 else "only lengths and shapes were checked"
            results.append(
                CheckResult(check, "ok", f"{kind}, {size / 1e6:,.0f} MB, {read}, in {folder}", lessons=lessons)
            )
    return results


def runs_folder() -> list[CheckResult]:
    """See that the runs folder can be written, and that there is space; a write also shows quotas."""
    from workshop.paths import default_runs_dir

    folder = default_runs_dir()
    elsewhere = "`export WORKSHOP_RUNS=` a folder of yours with free space, on a file system that the compute nodes see"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            started = time.monotonic()
            for _ in range(WRITTEN_MB):
                file.write(bytes(1_000_000))
            file.flush()
            os.fsync(file.fileno())
            seconds = time.monotonic() - started
        free = shutil.disk_usage(folder).free / 1e9
    except OSError as error:
        return [CheckResult("runs folder", "fail", f"cannot write to {folder}: {error.strerror}", elsewhere)]
    found = f"{folder}: {free:,.0f} GB free, {WRITTEN_MB} MB written in {seconds:.1f} s"
    results = [CheckResult("runs folder", "ok" if free > 2 else "warning", found, "" if free > 2 else elsewhere)]
    for lesson in LESSONS.values():
        if not os.access(lesson, os.W_OK):
            remedy = "clone the repository to a folder of your own: jobs write logs and profiles beside train.py"
            results.append(CheckResult("clone", "fail", f"cannot write to {lesson}", remedy, (lesson.name[:2],)))
    if shutil.which("quota"):
        asked = _output("quota")
        if asked.returncode == 1 and asked.stdout:
            over = f"over quota: {' '.join(asked.stdout.split())}"
            results.append(CheckResult("quota", "warning", over, f"free some space, or {elsewhere}"))
    return results


def shared_memory() -> CheckResult:
    """See that loader workers can hand over their batches."""
    if not os.path.isdir("/dev/shm"):
        return CheckResult("shared memory", "ok", "not by /dev/shm on this system")
    free = shutil.disk_usage("/dev/shm").free / 1e6
    if free < 100:
        remedy = "docker run --shm-size=1g (or --ipc=host); else --num_workers 0"
        return CheckResult("shared memory", "warning", f"{free:,.0f} MB free in /dev/shm", remedy)
    return CheckResult("shared memory", "ok", f"{free:,.0f} MB free in /dev/shm")


def names(nodes: list[str]) -> CheckResult:
    """See that the names of all nodes resolve, to an address that others can reach."""
    unknown = []
    for node in nodes:
        try:
            socket.getaddrinfo(node, None)
        except OSError:
            unknown.append(node)
    remedy = "ask the administrators for DNS or /etc/hosts entries; or set MASTER_ADDR to an address in job.slurm"
    if unknown:
        return CheckResult("host names", "fail", f"do not resolve: {', '.join(unknown)}", remedy, SEVERAL_RANKS)
    return CheckResult("host names", "ok", f"resolve: {', '.join(nodes)}", lessons=SEVERAL_RANKS)


def slurm() -> list[CheckResult]:
    """See that there are partitions with what the jobs ask for, and that Slurm would take each job."""
    if not shutil.which("sbatch"):
        remedy = "leave sbatch out and run the commands below it; or make one: `slurm/local_cluster.sh up`"
        return [CheckResult("Slurm", "warning", "no sbatch here", remedy)]
    listed = _output("sinfo", "--noheader", "--format=%P|%a|%l|%D|%G|%c|%m")
    if listed.returncode:
        remedy = 'ask the administrators; for a cluster of your own, `eval "$(slurm/local_cluster.sh up)"`'
        status = "warning" if "configuration source" in listed.stderr else "fail"  # the commands alone are no cluster
        return [CheckResult("Slurm", status, _last_line(listed), remedy)]
    lines = [line.split("|") for line in listed.stdout.split()]
    mine = os.environ.get("SBATCH_PARTITION")
    chosen = [line for line in lines if (line[0].rstrip("*") == mine if mine else line[0].endswith("*"))]
    return [*_partition(chosen or lines, mine), *(_would_start(lesson) for lesson in LESSONS.values())]


def _partition(lines: list[list[str]], asked: str | None) -> list[CheckResult]:
    site = "set SBATCH_PARTITION in slurm/site.sh and source it (`sinfo` lists them)"
    up = [line for line in lines if line[1] == "up"]
    if not up or (asked and up[0][0].rstrip("*") != asked):
        return [CheckResult("partition", "fail", f"{asked or 'none'} is not among those that are up", site)]
    gpus = max(int(number) for line in up for number in ["0", *re.findall(r"gpu[:\w.-]*?:(\d+)", line[4])])
    nodes, (name, _, limit, _, _, cpus, memory) = sum(int(line[3]) for line in up), up[0]
    found = f"{name.rstrip('*')}: {nodes} nodes, up to {gpus} GPUs, {cpus} CPUs and {memory} MB each"
    results = [CheckResult("partition", "ok", found)]
    if gpus < 2:
        remedy = f"{site}; or `sbatch --gres=gpu:1 --ntasks-per-node=1`, or without GPUs `--gres=none`"
        results = [
            CheckResult("partition", "fail", f"{found}; the jobs of lessons 02 to 05 ask for 2", remedy, ALL[1:])
        ]
    elif nodes < 2:
        results = [
            CheckResult("partition", "warning", found, "one node: leave out what asks for two (-N 2)", SEVERAL_RANKS)
        ]
    minutes = _minutes(limit)
    for lesson, folder in LESSONS.items():
        asks = _minutes(re.search(r"--time=(\S+)", (folder / "job.slurm").read_text()).group(1))
        if minutes is not None and minutes < asks:
            remedy = f"`sbatch --time={limit}`, or another partition: {site}"
            found = f"{limit}, but the job asks for {asks:.0f} minutes"
            results.append(CheckResult("time limit", "fail", found, remedy, (lesson,)))
    return results if results[-1].check == "time limit" else [*results, CheckResult("time limit", "ok", limit)]


def _would_start(lesson: Path) -> CheckResult:
    """Ask Slurm whether it would take a lesson's job; nothing is submitted."""
    asked = _output("sbatch", "--test-only", "job.slurm", cwd=lesson)
    number = (lesson.name[:2],)
    if asked.returncode:
        remedy = "set SBATCH_ACCOUNT, SBATCH_PARTITION and the like in slurm/site.sh and source it; or ask for less"
        return CheckResult(f"job of {lesson.name[:2]}", "fail", _last_line(asked), remedy, number)
    start = re.search(r"start at (\S+)", asked.stderr + asked.stdout)
    return CheckResult(
        f"job of {lesson.name[:2]}", "ok", f"would start at {start.group(1) if start else '?'}", lessons=number
    )


def _output(*command: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command as outside any job; its own variables would change what Slurm answers."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("SLURM_") or k == "SLURM_CONF"}
    try:
        return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=20)
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 124, "", f"no answer from `{shlex.join(command)}` in 20 s")


def _last_line(result: subprocess.CompletedProcess[str]) -> str:
    return (result.stderr.strip() or result.stdout.strip() or f"status {result.returncode}").splitlines()[-1]


def _minutes(limit: str) -> float | None:
    """Return the minutes of a Slurm time such as 1-12:00:00, 20:00 or 90; None if there is no limit."""
    days, _, rest = limit.rpartition("-")
    if not re.fullmatch(r"[\d:]+", rest):
        return None
    parts = [int(part) for part in rest.split(":")]
    if days or len(parts) == 3:  # hours first
        hours, minutes, seconds = (*parts, 0, 0)[:3]
    else:
        hours, minutes, seconds = 0, *(*parts, 0)[:2]
    return int(days or 0) * 1440 + hours * 60 + minutes + seconds / 60


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text)[:3])
