"""Measure what the pages show, on an idle machine: each experiment stores its tables in results/<machine>/.

    python lab/measure.py                               # everything that is measured on CPUs: hours
    python lab/measure.py loaders compare               # some of it
    python lab/measure.py null_half --out DIR           # before a GPU is there: the null GPU's half of a comparison
    python lab/measure.py gpu --minutes 13 --out DIR    # on a machine with GPUs: the most important first
    python lab/measure.py gpu --list true               # its rows and their seconds

What is measured on CPUs does not see the GPUs. With `gpu`, each row is cut at its own limit and stored at once in
DIR/<machine>/, so that a later call with the same DIR goes on at the next row. No failure ends the rest: the last lines
say what was not measured, and why. Then `make docs` renders the pages. It needs no network and no installation:
PYTHONPATH=REPOSITORY:REPOSITORY/tools/nullgpu/src is enough. The whole of it can be tried on null GPUs, which measure
the time of nothing:

    nullgpu --gpus 2 --values python lab/measure.py gpu --tiny true --minutes 30 --out /tmp/DIR
"""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from lab.flags import Parser
from lab.launching import reason
from lab.results import RESULTS
from workshop.errors import UserError, nearest, run_reporting_user_errors
from workshop.jsonfile import read_json, write_json
from workshop.paths import REPOSITORY

STARTED = time.monotonic()
PYTHON = os.path.abspath(sys.executable)
TORCHRUN = "torchrun --standalone --nproc-per-node"
WILL_IT_FIT = "python experiments/will_it_fit.py"
SLOW_NETWORK = (
    "--name slow_network --model gpt_7b --ranks 64,8x8 --ways blocks --checkpointing false --batch_size 8 "
    "--accumulate 8 --adapters 1 --adapter_gb_per_second 25"
)
DEEPER = "--model gpt_70b --ranks 64 --ways blocks --checkpointing true"
MNIST, CIFAR = ("mnist --synthetic --shards",), ("cifar10 --synthetic --shards",)
BOXES = ("nbody --synthetic --cells 64",)
LARGE_BOXES = ("nbody --synthetic --cells 128",)
TEXT = ("text",)
TINY_DATA = {
    "mnist": "mnist --synthetic --shards --train_samples 640 --val_samples 128",
    "cifar10": "cifar10 --synthetic --shards --train_samples 640 --val_samples 128",
    "nbody": "nbody --synthetic --cells 32",
    "text": "text",
}
ROWS = "rows.json"
"""the file in the folder of a machine that says which rows are complete"""
SHORTEST = 20.0
"""seconds that must be left to start a row that goes on where it was cut"""
RESERVE = 10.0
"""seconds before the time limit in which the last row must have ended"""
OF_PEER = 60.0
"""seconds after which a script of --peers is cut"""


@dataclass(frozen=True)
class Measurement:
    """A command that measures something and stores it."""

    name: str
    command: str
    """as it is typed in the folder of its lesson; {folder} is the folder of the machine, {null_half} a file"""
    lesson: str
    data: tuple[str, ...] = ()
    """what `data/prepare.py` is called with before"""
    gpus: int = 0
    """that it needs; with 0 it sees none"""
    seconds: float = 0
    """that it takes on a GPU, estimated"""
    measured: str = ""
    """what of it an H200 took, where it was measured"""
    parts: bool = True
    """whether it stores each part at once and, when it is called again, does the other parts only"""
    at_most: float = 0
    """seconds after which it is cut; 0: a minute, or twice what it takes"""
    tiny: str = ""
    """more words for --tiny true"""
    not_on_null: str = ""
    """why null GPUs cannot run it"""

    @property
    def limit(self) -> float:
        """Seconds after which it is cut."""
        return self.at_most or max(60.0, 2 * self.seconds)

    @property
    def expected(self) -> str:
        """Its seconds, and what is known of them."""
        known = f"; an H200: {self.measured}" if self.measured else ""
        return f"{self.seconds:.0f} s estimated{known}"


ONE, TWO, THREE = "01_single_gpu", "02_dataparallel", "03_ddp"
FOUR, FIVE = "04_mixed_precision", "05_fully_sharded"
MNIST_LADDER = "--name precision_ladder_mnist --config ../configs/mnist.yaml --loader device --limit_train 59968"
SMALL_UNET = (
    "--config ../configs/unet3d.yaml --config ../configs/unet3d_tiny.yaml "
    "--unet_width 4 --crop_size 8 --train_crops 32 --val_crops 4 --global_batch_size 4"
)
SHORT_LADDER = "--configurations fp32,bf16 --seconds 0.01"
GPU = (
    Measurement(
        "tests",
        "python lab/gpu_tests.py --folder {folder}",
        ".",
        gpus=1,
        seconds=200,
        measured="135 s for 31 of 57 tests, 7 at a time",
        tiny="--only overflows_leaves",
    ),
    Measurement(
        "lessons_beside_null_gpus",
        "python lab/studies/gpu_cases.py gpu --folder {folder} --null_half {null_half}",
        ".",
        gpus=1,
        seconds=100,
        measured="less than 135 s for 16 cases, 4 at a time",
        tiny="--only '04, short'",
    ),
    Measurement(
        "operations",
        "python lab/studies/gpu_operations.py --folder {folder}",
        ".",
        gpus=1,
        seconds=40,
        measured="24 s for 363 of the operations",
        tiny="--tiny true",
    ),
    Measurement(
        "trainings",
        "python lab/studies/gpu_trainings.py --folder {folder}",
        ".",
        gpus=1,
        seconds=90,
        measured="31 s for 11 of the 17, without the start",
        tiny="--tiny true",
    ),
    Measurement(
        "large_lessons_beside_null_gpus",
        "python lab/studies/gpu_cases.py gpu --large true --folder {folder} --null_half {null_half}",
        ".",
        CIFAR + LARGE_BOXES + TEXT,
        1,
        90,
        tiny="--only none",
    ),
)
"""what a GPU says beside the tables of the pages, in the order of its importance"""
TABLES = (
    Measurement(
        "unet3d_throughput",
        "python experiments/unet3d_throughput.py",
        FOUR,
        LARGE_BOXES,
        1,
        70,
        measured="75 s a row when each row was a process of its own",
        tiny="--tiny true --seconds 0.01",
    ),
    Measurement(
        "precision_ladder",
        "python experiments/ladder.py --seconds 0.3",
        FOUR,
        LARGE_BOXES,
        1,
        200,
        tiny=f"{SHORT_LADDER} {SMALL_UNET}",
    ),
    Measurement(
        "loaders",
        "python experiments/throughput.py loaders --rounds 1 --seconds 0.3",
        ONE,
        CIFAR,
        1,
        100,
        tiny="--seconds 0.01 --batch_size 16 --num_workers 0",
    ),
    Measurement(
        "sharded_throughput",
        "python experiments/sharded_throughput.py --seconds 0.3",
        FIVE,
        gpus=1,
        seconds=90,
        tiny="--tiny true --seconds 0.01",
    ),
    Measurement(
        "mnist_loaders",
        "python experiments/throughput.py mnist_loaders --rounds 1 --seconds 0.3",
        ONE,
        MNIST,
        1,
        90,
        tiny="--seconds 0.01 --batch_size 16 --num_workers 0",
    ),
    Measurement(
        "bandwidth",
        "python experiments/bandwidth.py --quick true",
        ONE,
        gpus=1,
        seconds=30,
        parts=False,
    ),
    Measurement(
        "precision_ladder_mnist",
        f"python experiments/ladder.py --seconds 0.3 {MNIST_LADDER}",
        FOUR,
        MNIST,
        1,
        120,
        tiny=f"{SHORT_LADDER} --limit_train 64 --batch_size 8",
    ),
    Measurement(
        "format_errors",
        "python experiments/format_errors.py",
        FOUR,
        LARGE_BOXES,
        1,
        30,
        parts=False,
        tiny=f"--limit_val 2 {SMALL_UNET}",
    ),
    Measurement(
        "underflow",
        "python experiments/underflow.py --steps 30",
        FOUR,
        LARGE_BOXES,
        1,
        60,
        parts=False,
        tiny=f"--steps 2 {SMALL_UNET}",
    ),
    Measurement(
        "tensor_cores",
        "python experiments/tensor_cores.py",
        FOUR,
        gpus=1,
        seconds=30,
        parts=False,
        not_on_null="with values, its products take many minutes of a CPU",
    ),
    Measurement(
        "cpu_or_gpu",
        "python experiments/cpu_or_gpu.py --quick true",
        ONE,
        gpus=1,
        seconds=60,
        parts=False,
        tiny="--problem line",
    ),
    Measurement(
        "compare",
        "python experiments/compare.py",
        TWO,
        CIFAR,
        2,
        90,
        parts=False,
        tiny="--rounds 1 --benchmark_seconds 0.01",
    ),
    Measurement(
        "nccl_backends",
        "python experiments/nccl_backends.py",
        THREE,
        CIFAR,
        2,
        60,
        parts=False,
        not_on_null="its traces need kernels",
    ),
    Measurement(
        "allreduce",
        f"{TORCHRUN} gpu experiments/allreduce.py --max_mib 512",
        THREE,
        gpus=2,
        seconds=30,
        parts=False,
        tiny="--max_mib 1 --seconds 0.01",
    ),
    Measurement(
        "scaling",
        "python experiments/scaling.py",
        THREE,
        CIFAR,
        2,
        180,
        parts=False,
        tiny="--rounds 1 --batch_size 16 --benchmark_seconds 0.01",
    ),
)
"""the tables of the pages, in the order of their importance"""
CPU = (
    Measurement("loaders", "python experiments/throughput.py loaders --seconds 3", ONE, CIFAR),
    Measurement("worker_counts", "python experiments/throughput.py worker_counts", ONE, MNIST),
    Measurement("models", "python experiments/throughput.py models", ONE, CIFAR),
    Measurement("first_changes", "python experiments/first_changes.py", ONE, MNIST + CIFAR),
    Measurement("loading_timelines", "python experiments/loading_timelines.py", ONE, MNIST),
    Measurement("sequential_reads", "python experiments/sequential_reads.py", ONE, MNIST),
    Measurement("bandwidth", "python experiments/bandwidth.py", ONE),
    Measurement("cpu_or_gpu", "python experiments/cpu_or_gpu.py", ONE),
    Measurement("simulated_gpu", "python experiments/simulated_gpu.py", ONE, CIFAR),
    Measurement("compare", "python experiments/compare.py", TWO, MNIST),
    Measurement("scaling", "python experiments/scaling.py", THREE, MNIST),
    Measurement("allreduce", f"{TORCHRUN} 2 experiments/allreduce.py --seconds 1", THREE),
    Measurement("ddp_options", "python experiments/ddp_options.py", THREE, CIFAR),
    Measurement("ddp_step", "python experiments/ddp_step.py", THREE, CIFAR),
    Measurement("bucket_timelines", "python experiments/bucket_timelines.py", THREE, CIFAR),
    Measurement("batches", "python experiments/large_batches.py batches", THREE, CIFAR),
    Measurement("higher_rate", "python experiments/large_batches.py higher_rate", THREE, CIFAR),
    Measurement("simulated_scaling", "python experiments/simulated_scaling.py", THREE, CIFAR),
    Measurement("unet3d", "python experiments/unet3d.py", FOUR, BOXES),
    Measurement("precision_ladder", "python experiments/ladder.py --rounds 5", FOUR, BOXES),
    Measurement("underflow", "python experiments/underflow.py", FOUR, BOXES),
    Measurement("format_errors", "python experiments/format_errors.py", FOUR, BOXES),
    Measurement("tensor_cores", "python experiments/tensor_cores.py", FOUR),
    Measurement("simulated_gains", "python experiments/simulated_gains.py", FOUR, LARGE_BOXES + MNIST),
    Measurement("success_rate", "python experiments/success_rate.py", FOUR, MNIST),
    Measurement("same_losses", "python experiments/same_losses.py", FIVE),
    Measurement("save_and_reshard", "python experiments/save_and_reshard.py", FIVE, TEXT),
    Measurement("one_step", f"{TORCHRUN} 2 experiments/one_step.py", FIVE),
    Measurement("accumulation", f"{TORCHRUN} 2 experiments/accumulation.py", FIVE),
    Measurement("small_updates", f"{TORCHRUN} 2 experiments/small_updates.py", FIVE),
    Measurement("recompute", "python experiments/recompute.py", FIVE),
    Measurement("what_fills_memory", "python experiments/what_fills_memory.py", FIVE),
    Measurement("will_it_fit_check", f"{WILL_IT_FIT} --check true", FIVE),
    Measurement("published_forecast", f"{WILL_IT_FIT} --published true", FIVE),
    Measurement("will_it_fit_gpt_7b", f"{WILL_IT_FIT} --model gpt_7b --ranks 8,64,1024,8x8 --ways ddp,blocks", FIVE),
    Measurement("will_it_fit_slow_network", f"{WILL_IT_FIT} {SLOW_NETWORK}", FIVE),
    Measurement("will_it_fit_gpt_70b", f"{WILL_IT_FIT} {DEEPER}", FIVE),
    Measurement("checkpoint_cost", "python experiments/checkpoint_cost.py", FIVE),
    Measurement("tensor_parallel_2_ranks", f"{TORCHRUN} 2 experiments/tensor_parallel.py", FIVE),
    Measurement("tensor_parallel_4_ranks", f"{TORCHRUN} 4 experiments/tensor_parallel.py", FIVE),
)


def run(
    words: Sequence[str],
    folder: Path,
    environment: dict[str, str],
    seconds: float | None = None,
    log: Path | None = None,
) -> None:
    """Run a command; end it and all that it has started if it takes longer than ``seconds``.

    Args:
        words: the command.
        folder: where it runs.
        environment: of it.
        seconds: time limit.
        log: file for what it prints; None leaves that to the terminal.

    Raises:
        UserError: it failed, or took longer.
    """
    if log is None:
        process = subprocess.Popen(words, cwd=folder, env=environment, start_new_session=True)
    else:
        with log.open("w") as out:
            process = subprocess.Popen(
                words, cwd=folder, env=environment, start_new_session=True, stdout=out, stderr=subprocess.STDOUT
            )
    try:
        status = process.wait(seconds)
    except BaseException as error:  # also Ctrl-C
        end(process)
        if isinstance(error, subprocess.TimeoutExpired):
            raise Cut(f"cut off after {seconds:.0f} s; what it has stored by then is kept") from None
        raise
    if status:
        why = reason(log.read_text(errors="replace")) if log else "the lines above say why"
        raise UserError(f"exit status {status}: {why}" if log else f"exit status {status}; {why}")


class Cut(UserError):
    """A command was ended before it was done."""


def end(process: subprocess.Popen) -> None:
    """End a process and all that it has started in its session."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)  # on which torchrun ends its ranks
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def environment_of(one: Measurement, out: Path) -> dict[str, str]:
    """Return the environment of a measurement that stores its tables below ``out``."""
    path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"WORKSHOP_RESULTS": str(out), "PYTHONPATH": path}
    return environment | ({"CUDA_VISIBLE_DEVICES": ""} if one.gpus == 0 else {})


def words_of(one: Measurement, gpus: int, **places: Path) -> list[str]:
    """Return the command of a measurement on a machine with so many GPUs."""
    filled = one.command.replace(f"{TORCHRUN} gpu", f"{TORCHRUN} {gpus}")
    words = [word.format(**places) for word in shlex.split(filled)]
    python = {"python": [PYTHON], "torchrun": [PYTHON, "-m", "torch.distributed.run"]}
    return [*python.get(words[0], words[:1]), *words[1:]]


# On CPUs.


def measure_all(chosen: list[Measurement], out: Path) -> None:
    """Measure one after the other, with the data that each needs; say at the end what was not measured.

    Raises:
        UserError: something was not measured.
    """
    prepared, missing = set[str](), []
    for one in chosen:
        environment = environment_of(one, out)
        try:
            for data in one.data:
                if data not in prepared:
                    run([PYTHON, "data/prepare.py", *data.split()], REPOSITORY, environment)
                    prepared.add(data)
            print(f"\n== {one.name}: {one.command}", flush=True)
            run(words_of(one, 0), REPOSITORY / one.lesson, environment)
        except (UserError, OSError) as error:
            missing.append(f"{one.name}: not measured: {error}")
            print(missing[-1], file=sys.stderr, flush=True)
    print("", *missing, sep="\n")
    if missing:
        raise UserError(f"{len(missing)} of {len(chosen)} not measured; the lines above say why")


# On GPUs.


@dataclass(frozen=True)
class Machine:
    """The GPUs of this machine."""

    name: str
    """of a GPU, for example "NVIDIA H200" or "null GPU (sm_90)"."""
    gpus: int
    folder: str
    """of its stored tables"""

    @property
    def is_null(self) -> bool:
        """Whether its GPUs are null GPUs, on which nothing takes time."""
        return self.name.startswith("null GPU")


ASK = """
import json, torch
from lab.results import machine_name
from workshop.hardware import describe_hardware, pick_device
gpus = torch.cuda.device_count()
name = torch.cuda.get_device_name() if gpus else ""
print("\\n" + json.dumps([name, gpus, machine_name(describe_hardware(pick_device())) if gpus else ""]))
"""


def this_machine(out: Path) -> Machine:
    """Return the GPUs of this machine; another process asks, because asking takes memory of the first GPU.

    Raises:
        UserError: there is none.
    """
    environment = environment_of(GPU[0], out)
    asked = subprocess.run([PYTHON, "-c", ASK], cwd=REPOSITORY, env=environment, capture_output=True, text=True)
    if asked.returncode:
        raise UserError(f"the GPUs of this machine cannot be asked for: {reason(asked.stderr)}")
    name, gpus, folder = json.loads(asked.stdout.splitlines()[-1])
    if gpus == 0:
        raise UserError("this machine has no NVIDIA GPU; without gpu, the measurements on CPUs are made")
    return Machine(name, gpus, folder)


def is_measured(one: Measurement, folder: Path) -> bool:
    """Return whether a row is complete: by the list of rows in the folder of the machine, or by its stored table."""
    if read_json(folder / ROWS).get(one.name, {}).get("status") == "complete":
        return True
    table = read_json(folder / f"{one.name}.json")
    return "rows" in table and "unfinished" not in table


def note_row(folder: Path, one: Measurement, status: str, seconds: float, why: str = "") -> None:
    """Store what became of a row, beside the other rows."""
    found = read_json(folder / ROWS)
    before = found.get(one.name, {}).get("seconds", 0.0)
    found[one.name] = {"status": status, "seconds": before + seconds, "command": one.command}
    found[one.name] |= {"why": why} if why else {}
    write_json(folder / ROWS, found)


class Preparation:
    """Data sets that are generated in other processes, beside rows that are not timed."""

    def __init__(self, chosen: Sequence[Measurement], environment: dict[str, str], log: Path) -> None:
        wanted = dict.fromkeys(data for one in chosen for data in one.data)
        self.log = log
        with log.open("w") as out:
            self.running = {
                data: subprocess.Popen(
                    [PYTHON, "data/prepare.py", *data.split()],
                    cwd=REPOSITORY,
                    env=environment,
                    start_new_session=True,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                )
                for data in wanted
            }

    def wait(self, seconds: float) -> None:
        """Wait until all is there: beside a row that is timed, nothing else runs.

        Raises:
            UserError: it takes longer.
        """
        until = time.monotonic() + seconds
        for data, process in self.running.items():
            try:
                process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise UserError(f"its data are not there in time: data/prepare.py {data}") from None

    def check(self, one: Measurement) -> None:
        """Raise `UserError` if data that this row needs could not be prepared."""
        for data in one.data:
            if self.running[data].returncode:
                raise UserError(f"data/prepare.py {data}: {reason(self.log.read_text(errors='replace'))}")

    def end(self) -> None:
        """End what still runs; a data set is either complete or not there."""
        for process in self.running.values():
            end(process)


def measure_on_gpus(
    chosen: Sequence[Measurement], out: Path, machine: Machine, deadline: float, null_half: Path | None = None
) -> None:
    """Measure row by row until the deadline, with one line for each; say at the end what was not measured.

    Args:
        chosen: the rows, the most important first.
        out: folder for the folder of the machine.
        machine: this one.
        deadline: on the clock `time.monotonic`.
        null_half: file with the null GPU's half of the comparison.

    Raises:
        UserError: something was not measured.
    """
    folder = out / machine.folder
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    impossible = [one for one in chosen if machine.is_null and one.not_on_null]
    chosen = [one for one in chosen if one not in impossible]
    there = [one for one in chosen if is_measured(one, folder)]
    todo = [one for one in chosen if one not in there]
    places = {"folder": folder, "null_half": (null_half or out / NULL_HALF).resolve()}
    missing, notes = [], [f"{one.name}: not on null GPUs: {one.not_on_null}" for one in impossible]
    preparation = Preparation(todo, environment_of(GPU[0], out), folder / "logs/data.txt")
    try:
        for one in chosen:
            if one in there:
                print(f"{one.name:32} complete before", flush=True)
                continue
            began, log = time.monotonic(), folder / "logs" / f"{one.name}.txt"
            status, why = "complete", ""
            try:
                if one.name not in UNTIMED:
                    preparation.wait(deadline - time.monotonic())
                preparation.check(one)
                began = time.monotonic()
                left = deadline - began
                if left < (SHORTEST if one.parts else max(SHORTEST, one.seconds)):
                    raise UserError(f"it takes {one.expected}, and {max(left, 0):.0f} s are left")
                words = words_of(one, machine.gpus, **places)
                run(words, REPOSITORY / one.lesson, environment_of(one, out), min(left, one.limit), log)
            except (UserError, OSError) as error:
                status, why = "cut" if isinstance(error, Cut) else "not measured", str(error)
                missing.append(f"{one.name}: {status}: {error}")
            except BaseException:
                note_row(folder, one, "cut", time.monotonic() - began, "this command was ended")
                raise
            seconds = time.monotonic() - began
            note_row(folder, one, status, seconds, why)
            if log.exists():
                notes += [
                    f"{one.name}: {line[6:]}"
                    for line in log.read_text(errors="replace").splitlines()
                    if line.startswith("note: ")
                ]
            print(f"{one.name:32} {status:12} {seconds:6.1f} s   ({one.expected})", flush=True)
    finally:
        preparation.end()
    print("", *notes, *missing, sep="\n")
    if machine.is_null:
        print(f"These are null GPUs: the times are times of nothing. They are in {folder}, and belong on no page.")
    if missing:
        raise UserError(f"{len(missing)} of {len(chosen)} rows not measured; the lines above say why")


NULL_HALF = "null_half.json"
UNTIMED = ("tests", "lessons_beside_null_gpus")
"""rows beside which data sets may be generated"""


def rows_for(machine: Machine, tiny: bool, peers: Path | None) -> list[Measurement]:
    """Return the rows that this machine can measure, the most important first."""
    scripts = [] if peers is None else sorted(file for file in peers.iterdir() if file.suffix in (".py", ".sh"))
    others = [
        Measurement(
            f"peer_{file.stem}",
            f"{'python' if file.suffix == '.py' else 'bash'} {shlex.quote(str(file.resolve()))}",
            ".",
            gpus=1,
            seconds=OF_PEER / 2,
        )
        for file in scripts
    ]
    chosen = [one for one in (*GPU, *others, *TABLES) if one.gpus <= machine.gpus]
    return [made_tiny(one) for one in chosen] if tiny else chosen


def made_tiny(one: Measurement) -> Measurement:
    """Return a row with as little work as possible, for a test of this command."""
    data = dict.fromkeys(TINY_DATA[words.split()[0]] for words in one.data)
    return replace(
        one, command=f"{one.command} {one.tiny}".strip(), data=tuple(data), seconds=5, measured="", at_most=300
    )


def measure_null_half(file: Path, out: Path, tiny: bool) -> None:
    """Run the lessons that a GPU will run on null GPUs; the file can be carried to it.

    Raises:
        UserError: there can be no null GPU here.
    """
    words = [PYTHON, "lab/studies/gpu_cases.py", "null", "--null_half", str(file.resolve())]
    environment = environment_of(GPU[0], out)
    if tiny:
        run([*words, "--only", "04, short"], REPOSITORY, environment)
        return
    run(words, REPOSITORY, environment)
    for data in next(one.data for one in GPU if "large" in one.name):
        run([PYTHON, "data/prepare.py", *data.split()], REPOSITORY, environment)
    run([*words, "--large", "true"], REPOSITORY, environment)


def list_rows() -> None:
    """Print the rows with their seconds."""
    total = 0.0
    for one in (*GPU, *TABLES):
        total += one.seconds
        several = f"   needs {one.gpus} GPUs" if one.gpus > 1 else ""
        print(f"{one.name:32} until {total / 60:4.1f} min: {one.expected}{several}")


def end_on_signal(number: int, frame: FrameType | None) -> NoReturn:
    """Let the commands that run end too, which are in sessions of their own."""
    raise SystemExit(128 + number)


def main() -> None:
    """Measure what is named on the command line."""
    parser = Parser(__doc__)
    yes_or_no: dict[str, Any] = {"choices": ("true", "false"), "default": "false"}
    known = {one.name: one for one in CPU}
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"gpu, null_half, or some of: {', '.join(known)}")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the tables and plots (default: results/)")
    parser.add_argument("--minutes", type=float, default=13.0, help="time limit, with gpu (default: %(default)s)")
    parser.add_argument("--list", help="print the rows and their seconds, with gpu", **yes_or_no)
    parser.add_argument("--only", metavar="NAME,...", help="some of the rows, with gpu")
    parser.add_argument(
        "--null_half", type=Path, metavar="FILE", help=f"the null GPU's half (default: OUT/{NULL_HALF})"
    )
    parser.add_argument("--peers", type=Path, metavar="DIR", help="scripts (.py, .sh) to run too, with gpu")
    parser.add_argument("--tiny", help="as little work as possible, to try this on null GPUs", **yes_or_no)
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, end_on_signal)
    out, tiny = arguments.out.resolve(), arguments.tiny == "true"
    if arguments.names == ["gpu"] and arguments.list == "true":
        list_rows()
        return
    if arguments.peers is not None and not arguments.peers.is_dir():
        raise UserError(f"--peers {arguments.peers}: there is no such folder")
    out.mkdir(parents=True, exist_ok=True)
    if arguments.names == ["null_half"]:
        if out == RESULTS and arguments.null_half is None:
            raise UserError("name a folder with --out: a null GPU's half belongs on no page")
        measure_null_half(arguments.null_half or out / NULL_HALF, out, tiny)
        return
    if arguments.names == ["gpu"]:
        machine = this_machine(out)
        if machine.is_null and out == RESULTS:
            raise UserError("these are null GPUs, whose times belong on no page: name another folder with --out")
        chosen = rows_for(machine, tiny, arguments.peers)
        if arguments.only is not None:
            wanted, names = arguments.only.split(","), [one.name for one in chosen]
            if unknown := next((name for name in wanted if name not in names), None):
                raise UserError(f"--only: no row '{unknown}'; {nearest(unknown, names)}")
            chosen = [one for one in chosen if one.name in wanted]
        print(f"{machine.gpus} x {machine.name}; {arguments.minutes:g} minutes; stored in {out / machine.folder}")
        deadline = STARTED + 60 * arguments.minutes - RESERVE
        measure_on_gpus(chosen, out, machine, deadline, arguments.null_half)
        return
    if unknown := next((name for name in arguments.names if name not in known), None):
        raise UserError(f"no measurement '{unknown}'; {nearest(unknown, known)}")
    measure_all([known[name] for name in arguments.names or known], out)


if __name__ == "__main__":
    run_reporting_user_errors(main)
