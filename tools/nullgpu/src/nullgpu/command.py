"""Run a command as on a machine with GPUs that compute nothing.

    python nullgpu/run.py python train.py                     on one GPU of 80 GB; all values are zeros
    python nullgpu/run.py --gpus 2 torchrun --standalone --nproc-per-node 2 train.py
    python nullgpu/run.py --values python train.py            the CPU computes the values
    python nullgpu/run.py --report python train.py            and at the end: launches, waits, what holds the memory
    python nullgpu/run.py --world 64 python train.py          rank 0 of 64; the other ranks do not exist

The exit status is the command's; 2 if there can be no null GPU here.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from . import build, clock_figures, timeline

HOOK = Path(__file__).resolve().parent / "hook"
GPU_FILES = ("/dev/nvidiactl", "/proc/driver/nvidia/version")
"""are there where NVIDIA's driver is"""


def parser() -> argparse.ArgumentParser:
    """Return the parser of the arguments; those after the command are the command's own."""
    it = argparse.ArgumentParser(
        prog="nullgpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="python nullgpu/run.py [options] COMMAND...",
    )
    add = it.add_argument
    add("command", metavar="COMMAND", nargs=argparse.REMAINDER, help="python, torchrun, kernprof, srun, sbatch, ...")
    add("--gpus", type=int, default=1, help="number of GPUs of the machine, at most 64 (default: 1)")
    add("--gb", type=float, default=80, help="memory of each GPU in GiB (default: 80)")
    add("--sm", type=int, default=90, help="compute capability times 10: 75, 80, 86, 89, 90, 100, 120 (default: 90)")
    add("--values", action="store_true", help="compute the values on the CPU; otherwise all are zeros")
    add("--report", action="store_true", help="report at the end: launches, waits, copies, memory, with their lines")
    add("--snapshot", type=Path, default=Path("memory.pickle"), help="file for the memory's history (with --report)")
    add("--world", type=int, default=0, metavar="N", help="run as rank 0 of N, without the other ranks")
    add("--clock", metavar="GPU", help="let operations take the time of this GPU: a100, h100, t4, l4, or a YAML file")
    add("--host", type=float, default=1, help="how many times as fast the host is as this one (with --clock)")
    add("--skip", type=int, default=3, help="first updates that the clock does not count (default: 3)")
    add("--trace", type=Path, metavar="FILE", help="write the time line for ui.perfetto.dev (with --clock)")
    add("--timeout", type=float, default=600, help="seconds a rank waits for others in a collective (default: 600)")
    add("--beside_gpu", action="store_true", help="run although this machine has a GPU")
    return it


def environment(options: argparse.Namespace, library: Path) -> dict[str, str]:
    """Return the environment variables of the command."""
    env = dict(os.environ)
    env["LD_PRELOAD"] = " ".join(filter(None, (str(library), env.get("LD_PRELOAD"))))
    env["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, (str(library.parent), env.get("LD_LIBRARY_PATH"))))
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(HOOK), env.get("PYTHONPATH"))))
    env |= {
        "NULLGPU_LIBRARY": str(library),
        "NULLGPU_GPUS": str(options.gpus),
        "NULLGPU_GB": str(options.gb),
        "NULLGPU_SM": str(options.sm),
        "NULLGPU_VALUES": str(int(options.values)),
        "NULLGPU_WORLD": str(options.world),
        "NULLGPU_TIMEOUT": str(options.timeout),
    }
    if options.world:
        names = {
            "RANK": 0,
            "LOCAL_RANK": 0,
            "WORLD_SIZE": options.world,
            "LOCAL_WORLD_SIZE": min(options.world, options.gpus),
        }
        env |= {name: str(value) for name, value in names.items()}
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}  # required by init_process_group, but never used
        env["TORCH_NCCL_RANKS_PER_ROOT"] = "1000000"  # otherwise, from 128 ranks on, others send addresses too
    return env


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return its exit status."""
    it = parser()
    options = it.parse_args(arguments)
    if not options.command:
        it.print_usage(sys.stderr)
        return fail("no command: python nullgpu/run.py python train.py, for example")
    if not 1 <= options.gpus <= 64 or options.gb <= 0 or options.world < 0:
        return fail("--gpus is from 1 to 64, --gb above 0, and --world 0 (no emulation of other ranks) or more")
    if options.world and options.values:
        return fail("--world has no other ranks whose values could be computed: leave out --values")
    if options.clock and options.values:
        return fail("--clock does without --values: computing them would take time that a GPU's host does not need")
    if (options.trace or options.host != 1) and not options.clock:
        return fail("--trace and --host need --clock")
    try:
        figures = clock_figures.read(options.clock) if options.clock else None
    except clock_figures.Unknown as error:
        return fail(str(error))
    if figures:
        options.sm, options.gb = int(figures["sm"]), float(figures["gb"])
    if any(map(os.path.exists, GPU_FILES)) and not options.beside_gpu:
        return fail("this machine has a GPU, which the command would not see: leave out nullgpu, or add --beside_gpu")
    if os.environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1"):
        return fail("CUDA_VISIBLE_DEVICES is empty, which hides the null GPUs too: unset CUDA_VISIBLE_DEVICES")
    words = resolved(options.command)
    if shutil.which(words[0]) is None:
        return fail(f"no command {words[0]}")
    try:
        library = build.library()
        if not build.is_tried():
            print(f"nullgpu: note: not tried with torch {build.version()} yet", file=sys.stderr)
    except build.NotPossible as error:
        return fail(str(error))
    env = environment(options, library) | (clock_figures.environment(figures, options.host) if figures else {})
    if not options.report and not options.clock:
        return run(words, env)
    with tempfile.TemporaryDirectory(prefix="nullgpu") as folder:
        env["NULLGPU_REPORT"] = folder
        status = run(words, env)
        if figures:
            timeline.show(Path(folder), figures, options.trace, options.skip)
        if options.report:
            from .report import show

            show(Path(folder), options)
    return status


def resolved(command: list[str]) -> list[str]:
    """Return the command with this Python, whatever the PATH says, and with torchrun of its environment."""
    first, *rest = command
    if first.endswith(".py"):  # a script alone
        return [sys.executable, first, *rest]
    beside = Path(sys.executable).parent / first
    if first == "python" or (shutil.which(first) is None and beside.exists()):
        first = sys.executable if first == "python" else str(beside)
    return [first, *rest]


def run(words: list[str], env: dict[str, str]) -> int:
    """Run a command to its end; signals that end this process reach it too."""
    process = subprocess.Popen(words, env=env)
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, lambda sent, frame: process.send_signal(sent))
    while True:
        try:
            status = process.wait()
            break
        except KeyboardInterrupt:  # the terminal has sent it to the command too
            continue
    return status if status >= 0 else 128 - status


def fail(message: str) -> int:
    """Say in one line what is wrong; return the exit status of a user's mistake."""
    print(f"nullgpu: error: {message}", file=sys.stderr)
    return 2
