"""Before a class: can this machine, or this cluster, run each lesson? If not, what is to be done?

    make preflight                     # this machine; on a login node, also whether Slurm would accept each job
    sbatch slurm/preflight.slurm       # from the top of the repository: two nodes, and whether their ranks connect

You should see, within a minute, a line for each check (ok, warning or fail; what was found; under it what to do), then
a line for each lesson; as a job, once for each node. The exit status is 0 if every lesson can run, else 1. A warning is
about something that a lesson can do without.
"""

from __future__ import annotations  # so that a Python that is too old can still run this and report it

import importlib.util
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
LESSONS = sorted(script.parent.name for script in REPOSITORY.glob("0*/train.py"))
RANKS_JOIN_IN_SECONDS = 60


@dataclass
class Result:
    """What a check found: ``ok``, ``warning`` (works, but not all of it or not well) or ``fail``, and what to do."""

    check: str
    status: str
    found: str
    remedy: str = ""
    lessons: list[str] = field(default_factory=lambda: LESSONS)


def lessons_with(file: str, words: str) -> list[str]:
    """Return the lessons in whose ``file`` these words occur."""
    return [name for name in LESSONS if words in (REPOSITORY / name / file).read_text()]


def check_python() -> Result:
    """See that Python is new enough."""
    line = re.search(r'requires-python = ">=([\d.]+)"', (REPOSITORY / "pyproject.toml").read_text())
    assert line is not None
    oldest = line.group(1)
    found = f"{'.'.join(map(str, sys.version_info[:3]))}, {sys.executable}"
    if sys.version_info[:2] < tuple(int(part) for part in oldest.split(".")):
        return Result("Python", "fail", found, f"Python {oldest} or newer, see docs/installing.md")
    return Result("Python", "ok", found)


def check_packages() -> Result:
    """See that all dependencies are installed, and that none is older than it may be."""
    import tomllib

    try:
        from packaging.requirements import Requirement
    except ImportError:
        return Result("packages", "fail", "nothing is installed here", "see docs/installing.md")
    wrong = []
    for line in tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["dependencies"]:
        needed = Requirement(line)
        if "dali" in needed.name:
            continue  # has a check of its own
        try:
            if not needed.specifier.contains(version(needed.name), prereleases=True):
                wrong.append(f"{needed.name} is {version(needed.name)}, not {needed.specifier}")
        except PackageNotFoundError:
            wrong.append(f"{needed.name} is missing")
    if wrong:
        return Result("packages", "fail", ", ".join(wrong), "install them, see docs/installing.md")
    return Result("packages", "ok", f"all there, torch {version('torch')}")


def check_package() -> Result:
    """See that ``import workshop`` gives the package of this clone."""
    remedy = f"`source slurm/site.sh` in {REPOSITORY}, or `export PYTHONPATH={REPOSITORY}`"
    found = importlib.util.find_spec("workshop")
    if found is None or found.origin is None:  # no origin: only folders of this name, without a package in them
        return Result("workshop", "fail", "`import workshop` finds nothing", remedy)
    folder = Path(found.origin).parent
    if not folder.samefile(REPOSITORY / "workshop"):
        return Result("workshop", "fail", f"`import workshop` gives that of another clone, {folder}", remedy)
    return Result("workshop", "ok", f"{folder}, of this clone")


def check_device() -> Result:
    """See which device this process computes on, and that it does compute."""
    import torch

    from workshop.errors import UserError
    from workshop.hardware import pick_device

    which = "see `Which GPU and which driver` in docs/installing.md"
    try:
        device = pick_device()
    except UserError as error:
        return Result("device", "fail", str(error), which)
    if device.type != "cuda":
        driver = run("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1") or "WORKSHOP_FAKE_GPUS" in os.environ
        if not driver.returncode and not hidden:
            built = f"torch {torch.__version__} (built for CUDA: {torch.version.cuda or 'no'})"
            return Result("device", "fail", f"driver {driver.stdout.split()[0]}, but {built} finds no GPU", which)
        remedy = "all lessons run on the CPU; for GPUs, ask for a GPU node"
        return Result("device", "warning", f"no GPU: computes on {device.type}", remedy)
    properties = torch.cuda.get_device_properties(0)
    capability = f"compute capability {properties.major}.{properties.minor}"
    found = f"{torch.cuda.device_count()} x {properties.name}, {properties.total_memory / 1e9:.0f} GB, {capability}"
    try:
        image = torch.ones(1, 1, 8, 8, device=device)
        torch.nn.functional.conv2d(image, image[..., :3, :3]).sum().item()
    except RuntimeError as error:
        return Result("device", "fail", f"{found}, does not compute: {str(error).splitlines()[0]}", which)
    return Result("device", "ok", found)


def check_cpus() -> Result:
    """See that there are a CPU to train and one to load, and shared memory through which workers pass batches."""
    from workshop.hardware import available_cpus

    cpus = available_cpus()
    if cpus < 2:
        return Result("CPUs", "warning", f"{cpus} for this process", "loading and training share it: --cpus-per-task=2")
    if os.path.isdir("/dev/shm") and shutil.disk_usage("/dev/shm").free < 100e6:
        remedy = "more than 100 MB are needed: docker run --shm-size=2g; or else --num_workers 0"
        return Result("CPUs", "warning", "little space in /dev/shm, through which workers pass batches", remedy)
    return Result("CPUs", "ok", f"{cpus} for this process")


def check_dali() -> Result:
    """See that NVIDIA DALI can be imported; no lesson depends on it."""
    try:
        importlib.import_module("nvidia.dali.plugin.pytorch")
    except Exception as error:  # an ImportError, or whatever its libraries raise
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        remedy = "`pip install nvidia-dali-cuda120` (Linux only); without it, leave out --loader dali"
        return Result("DALI", "warning", f"cannot be imported: {reason}", remedy, lessons=[])
    return Result("DALI", "ok", version("nvidia-dali-cuda120"))


def check_data() -> list[Result]:
    """See that each data set is there and whole; a lesson needs those that its page has you prepare."""
    from workshop.datasets import IMAGES, image_dataset, nbody, text
    from workshop.errors import UserError
    from workshop.paths import default_data_dir

    results = []
    for name, module in {**{name: image_dataset(name) for name in IMAGES}, "nbody": nbody, "text": text}.items():
        lessons = lessons_with("README.md", f"prepare.py {name}")
        try:
            module.check(default_data_dir())
            results.append(Result(f"data: {name}", "ok", f"in {module.folder(default_data_dir())}", lessons=lessons))
        except UserError as error:
            found, _, prepare = str(error).partition("; to prepare")
            results.append(Result(f"data: {name}", "fail", found, f"to prepare{prepare}", lessons))
    return results


def check_folders() -> Result:
    """See that runs can be written, with some space, and what jobs write beside train.py."""
    from workshop.paths import default_runs_dir

    folder = default_runs_dir()
    elsewhere = "`export WORKSHOP_RUNS=` a folder of yours with free space, on a file system that the compute nodes see"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(10_000_000))
            file.flush()
            os.fsync(file.fileno())  # only now does a quota show
    except OSError as error:
        return Result("folders", "fail", f"cannot write to {folder}: {error.strerror}", elsewhere)
    for lesson in LESSONS:
        if not os.access(REPOSITORY / lesson, os.W_OK):
            remedy = "clone the repository to a folder of your own: jobs write logs and profiles beside train.py"
            return Result("folders", "fail", f"cannot write to {REPOSITORY / lesson}", remedy)
    if shutil.disk_usage(folder).free < 2e9:
        return Result("folders", "warning", f"less than 2 GB are free in {folder}", elsewhere)
    return Result("folders", "ok", f"runs go to {folder}")


def check_slurm() -> list[Result]:
    """Ask Slurm whether it would accept the job of each lesson; nothing is submitted."""
    if not shutil.which("sbatch"):
        remedy = "leave sbatch out and run the other commands; or start a Slurm of your own: slurm/local_cluster.sh up"
        return [Result("Slurm", "warning", "no sbatch here", remedy)]
    listed = run("sinfo", "--noheader")
    if listed.returncode:
        remedy = 'ask the administrators; for a cluster of your own, `eval "$(slurm/local_cluster.sh up)"`'
        status = "warning" if "configuration source" in listed.stderr else "fail"  # the commands alone are no cluster
        return [Result("Slurm", status, last_line(listed), remedy)]
    results = []
    for name in LESSONS:
        asked = run("sbatch", "--test-only", "job.slurm", cwd=REPOSITORY / name)
        remedy = "set SBATCH_ACCOUNT, SBATCH_PARTITION and the like in slurm/site.sh and source it; or ask for less"
        results.append(
            Result(f"job of {name[:2]}", "fail" if asked.returncode else "ok", last_line(asked), remedy, [name])
        )
    return results


def run(*command: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command as outside any job; the job's own variables would change what Slurm answers."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("SLURM_") or k == "SLURM_CONF"}
    try:
        return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess(command, 124, "", str(error))


def last_line(ended: subprocess.CompletedProcess[str]) -> str:
    """Return the last line that a command printed, which is where most of them give the reason."""
    return (ended.stderr.strip() or ended.stdout.strip() or f"status {ended.returncode}").splitlines()[-1]


def this_machine() -> list[Result]:
    """Check this node: the device, the CPUs, the data, and the folders to write to."""
    return [check_device(), check_cpus(), check_dali(), *check_data(), check_folders()]


def join_ranks() -> Result:
    """Join the other ranks as lesson 03 does, and add up a tensor with them."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    rank = int(os.environ.get("RANK") or os.environ["SLURM_PROCID"])
    ranks = int(os.environ.get("WORLD_SIZE") or os.environ["SLURM_NTASKS"])
    lessons = lessons_with("job.slurm", "--ntasks-per-node=2")
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", local_rank() % torch.cuda.device_count())
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    timeout = timedelta(seconds=RANKS_JOIN_IN_SECONDS)
    os.environ.setdefault("TORCH_DIST_USE_NCCL2", "0")  # the backend of the lessons; 03_ddp/train.py says why
    try:
        dist.init_process_group(backend, rank=rank, world_size=ranks, timeout=timeout)
        total = torch.tensor(rank + 1.0, device=device)
        dist.all_reduce(total)
        if total.item() != ranks * (ranks + 1) / 2:
            raise RuntimeError(f"an all-reduce gave {total.item()}, not the sum")
        dist.destroy_process_group()
    except RuntimeError as error:
        remedy = "see `When it does not start` in 03_ddp/experiments/hangs.md: firewall, network, NCCL_SOCKET_IFNAME"
        return Result("ranks", "fail", f"rank {rank} of {ranks}: {error}".splitlines()[0], remedy, lessons)
    return Result("ranks", "ok", f"{ranks} joined over {backend} and added up correctly", lessons=lessons)


def local_rank() -> int:
    """Return the number of this process on its node."""
    return int(os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or 0)


def two_ranks_here() -> Result:
    """Start two ranks on this machine with torchrun, on two GPUs or on the CPU, and return what they found."""
    import torch

    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if torch.cuda.device_count() < 2:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", __file__, "--ranks"]
    try:
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
        return Result(**json.loads(ended.stdout.splitlines()[-1]))
    except (subprocess.TimeoutExpired, IndexError, ValueError):
        remedy = "`torchrun --standalone --nproc-per-node 2 train.py` in 03_ddp prints why; does `localhost` resolve?"
        lessons = lessons_with("job.slurm", "--ntasks-per-node=2")
        return Result("ranks", "fail", "torchrun could not start two on this machine", remedy, lessons)


def show(results: list[Result]) -> int:
    """Print which lessons can run, the results, an answer for each lesson, and what to type next; return the status."""
    answers, missing = [], []
    for lesson in LESSONS:
        concerned = [result for result in results if lesson in result.lessons]
        fails, warnings = (
            ", ".join(dict.fromkeys(result.check for result in concerned if result.status == status))
            for status in ("fail", "warning")
        )
        answer = f"cannot run: {fails}" if fails else f"can run{warnings and f', with warnings: {warnings}'}"
        answers.append(f"lesson {lesson}: {answer}")
        missing += [lesson[:2]] if fails else []
    where = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    named = f"lesson{'s' if len(missing) > 1 else ''} {', '.join(missing)}"
    lines = [f"on {where}: " + (f"{named} cannot run yet" if missing else "all lessons can run"), ""]
    for result in results:
        lines.append(f"{result.status:8} {result.check:14} {result.found}")
        if result.remedy and result.status != "ok":
            lines.append(f"{'':8} -> {result.remedy}")
    remedy = next((result.remedy for result in results if result.status == "fail"), "")
    begin = f"cd {LESSONS[0]}, and follow its README.md"
    print("\n".join([*lines, "", *answers, "", f"next: {remedy or begin}"]), flush=True)
    return 1 if missing else 0


def main() -> int:
    """Check everything that can be checked from here."""
    os.chdir(REPOSITORY)  # where the commands of the remedies are to be typed
    base = [check_python()]
    if base[0].status == "ok":
        base += [check_packages(), check_package()]
    if any(result.status == "fail" for result in base):  # nothing else can be imported
        return show(base) if local_rank() == 0 else 1
    if "TORCHELASTIC_RUN_ID" in os.environ:  # started by two_ranks_here
        result = join_ranks()
        if local_rank() == 0:
            print(json.dumps(asdict(result)), flush=True)
        return 0
    if "--ranks" not in sys.argv:
        return show([*base, *this_machine(), two_ranks_here(), *check_slurm()])
    results = [*base, *this_machine()] if local_rank() == 0 else []
    results.append(join_ranks())
    if os.environ["SLURM_PROCID"] == "0":
        results += check_slurm()
    return show(results) if local_rank() == 0 else 0  # once for each node


if __name__ == "__main__":
    sys.exit(main())
