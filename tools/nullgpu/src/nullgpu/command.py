"""Run a command as on a machine with GPUs that compute nothing.

    nullgpu python train.py                     on one GPU of 80 GB; all values are zeros
    nullgpu --gpus 2 torchrun --standalone --nproc-per-node 2 train.py
    nullgpu --values python train.py            the CPU computes the values
    nullgpu --report python train.py            and at the end: launches, waits, what holds the memory
    nullgpu --clock a100 python train.py        and at the end: how long it would have taken, and what the GPU waits for
    nullgpu --world 64 python train.py          rank 0 of 64; the other ranks do not exist
    nullgpu measure --out my_gpu.toml           on a real GPU: a file for --clock

The exit status is the command's; 2 if there can be no null GPU here.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from . import build, calibration, clocked, gpus, report
from .interface import MOST_GPUS, SKIPPED
from .variables import environment

GPU_FILES = ("/dev/nvidiactl", "/proc/driver/nvidia/version")
"""are there where NVIDIA's driver is"""


def parser() -> argparse.ArgumentParser:
    """Return the parser of the arguments; those after the command are the command's own."""
    it = argparse.ArgumentParser(
        prog="nullgpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="nullgpu [options] COMMAND...",
    )
    add = it.add_argument
    add("command", metavar="COMMAND", nargs=argparse.REMAINDER, help="python, torchrun, kernprof, srun, sbatch, ...")
    add("--gpus", type=int, default=1, help="number of GPUs of the machine, at most 64 (default: 1)")
    add("--gb", type=float, help="memory of each GPU in GiB (default: 80, or that of --clock's GPU)")
    add("--sm", type=int, default=90, help="compute capability times 10: 75, 80, 86, 89, 90, 100, 120 (default: 90)")
    add("--values", action="store_true", help="compute the values on the CPU; otherwise all are zeros")
    add("--report", action="store_true", help="report at the end: launches, waits, copies, memory, with their lines")
    add("--snapshot", type=Path, default=Path("memory.pickle"), help="file for the memory's history (with --report)")
    add("--world", type=int, default=0, metavar="N", help="run as rank 0 of N, without the other ranks")
    add("--clock", metavar="GPU", help="let operations take the time of this GPU: a100, h100, t4, l4, or a TOML file")
    add(
        "--calibrate",
        metavar="TRACE",
        help="trace of torch.profiler from this GPU, whose durations come first (with --clock)",
    )
    add("--host", type=float, default=1, help="how many times as fast the host is as this one (with --clock)")
    add("--skip", type=int, default=SKIPPED, help=f"first updates that the clock does not count (default: {SKIPPED})")
    add("--trace", type=Path, metavar="FILE", help="file for the time line, for ui.perfetto.dev (with --clock)")
    add("--json", type=Path, metavar="FILE", help="file for the figures of the reports (with --report or --clock)")
    add("--timeout", type=float, default=600, help="seconds a rank waits for others in a collective (default: 600)")
    add("--beside_gpu", action="store_true", help="run although this machine has a GPU")
    return it


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return its exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["measure"]:
        from . import measure  # imports torch

        return measure.main(arguments[1:])
    it = parser()
    options = it.parse_args(arguments)
    if not options.command:
        it.print_usage(sys.stderr)
        return fail("no command: nullgpu python train.py, for example")
    if wrong := mistake(options):
        return fail(wrong)
    words = resolved(options.command)
    if shutil.which(words[0]) is None:
        return fail(f"no command {words[0]}")
    try:
        env = environment(
            gpus=options.gpus,
            gb=options.gb or 0,
            sm=options.sm,
            values=options.values,
            world=options.world,
            timeout=options.timeout,
            clock=options.clock or "",
            host=options.host,
            calibrate=options.calibrate or "",
        )
        if not build.is_tried():
            print(f"nullgpu: note: not tried with torch {build.version()} yet", file=sys.stderr)
    except (build.NotPossible, gpus.Unknown, calibration.Unusable) as error:
        return fail(str(error))
    if not options.report and not options.clock:
        status = run(words, env)
        if options.world:
            print("nullgpu: nothing was computed: speeds that the command printed are no GPU's", file=sys.stderr)
        return status
    with tempfile.TemporaryDirectory(prefix="nullgpu") as folder:
        # Apart, because what the report records, the stack of each allocation, takes time of the host.
        asked = {"NULLGPU_REPORT": options.report, "NULLGPU_CLOCK": options.clock}
        status = run(words, env | {name: folder for name, it in asked.items() if it})
        show(Path(folder), options, json.loads(env["NULLGPU_SETTINGS"]))
    return status


def mistake(options: argparse.Namespace) -> str:
    """Return what is wrong with the options; "" if nothing."""
    if (
        not 1 <= options.gpus <= MOST_GPUS
        or (options.gb is not None and options.gb <= 0)
        or options.world < 0
        or options.host <= 0
    ):
        return f"--gpus is from 1 to {MOST_GPUS}, --gb and --host above 0, --world 0 (no other ranks) or more"
    if options.world and options.values:
        return "--world has no other ranks whose values could be computed: leave out --values"
    if options.clock and options.values:
        return "--clock does without --values: computing them would take time that a GPU's host does not need"
    if (options.trace or options.calibrate or options.host != 1) and not options.clock:
        return "--trace, --calibrate and --host need --clock"
    if options.json and not (options.report or options.clock):
        return "--json writes the figures of a report: it needs --report, --clock, or both"
    if any(map(os.path.exists, GPU_FILES)) and not options.beside_gpu:
        return "this machine has a GPU, which the command would not see: leave out nullgpu, or add --beside_gpu"
    if os.environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1"):
        return "CUDA_VISIBLE_DEVICES is empty, which hides the null GPUs too: unset CUDA_VISIBLE_DEVICES"
    return ""


def show(folder: Path, options: argparse.Namespace, settings: dict[str, Any]) -> None:
    """Print the reports of what the processes of a command have left in a folder, and write them as JSON."""
    figures: dict[str, Any] = {"settings": settings}
    if options.clock:
        figures["clock"] = clocked.show(folder, gpus.read(options.clock), options.trace, options.skip)
    if options.report:
        figures["report"] = report.show(folder, options.snapshot)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


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
