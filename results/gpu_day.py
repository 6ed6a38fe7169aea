"""Fill a machine's record on a GPU within the minutes that there are: `python results/measure.py gpu --minutes 8`.

The experiments of all lessons that one GPU can run, most important first; on several GPUs also those that need several.
Figures are written as soon as they are there, and again after each part of an experiment, so that a run that is cut off
loses little. An experiment is started if its first part fits into the time that is left; the others are named at the
end. A later run begins with what is missing.

With --out DIR the file and the plots are written into that folder instead of results/. With --rehearse true every
experiment runs on the CPU, with as little work as possible, into a file that no page shows: runs/gpu_rehearsal, or DIR.
"""

import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Any

from lesson_runs import (
    BASELINE,
    CUDA_GRAPH,
    FAST,
    LESSON_01,
    LESSON_02,
    LESSON_03,
    LESSON_04,
    ON_GPU_TO_TARGET,
    RESULTS,
    TARGET,
    data_ladder,
    describe_failure,
    epoch_seconds,
    line_profile,
    measured_in_turn,
    study_parts,
    time_to_target,
    train,
)
from machine_facts import ask, this_machine
from processes import run_together
from record_file import machine_name, put_record, read_records
from trace_table import trace_table
from workshop.errors import UserError
from workshop.measuring.flags import Parser, make_output_folder, require_positive
from workshop.measuring.launching import torchrun
from workshop.paths import REPOSITORY, default_data_dir, default_runs_dir

UNET = ("--config", "../configs/unet3d.yaml")
OPTIONS = (*UNET, "--config", "../configs/unet3d_opt.yaml")
TINY_UNET = (*UNET, "--config", "../configs/unet3d_tiny.yaml", "--crop_size", 8, "--width", 4, "--limit_val", 16)
UNET_BATCH = 64
"""samples per step in unet3d.yaml, of one GPU"""
RESNET = ("--config", "../configs/cifar10.yaml", "--model", "resnet50")
RESNET_BATCH = 512
"""samples per GPU: a step of this model takes tens of milliseconds, so launching its kernels is a small part of it"""
FEW_IMAGES = ("--limit_train", 32, "--limit_val", 16, "--batch_size", 2)
SHORT_TRIALS = ("--benchmark_seconds", 0.01)
LOADERS = ("map", "memory", "device", "shards", "dali")
NEEDS = {"shards": "webdataset", "dali": "nvidia.dali"}
"""the package without which a loader cannot be measured"""
CELLS = 128
"""along each edge of the N-body boxes: 75 MB each, more than the cache of any GPU holds"""
LONGEST_PART = 120
"""seconds that a part of an experiment may take, if three times its estimate is less

A part that hangs must not take the time of all that follows.
"""
SPARE_SECONDS = 5
"""at the end, to write the last part"""

Figures = Iterator[dict[str, Any]]


@dataclass(frozen=True)
class Session:
    """Where the figures go, and what the experiments can use."""

    file: Path
    rehearsal: bool = False
    cpus: int = 1
    gpus: int = 0
    boxes: Path = field(default_factory=default_data_dir)
    """data folder with the N-body boxes"""

    @property
    def num_workers(self) -> int:
        """Loader processes: two CPUs are left to the training process."""
        return max(1, self.cpus - 2)

    def pick(self, rehearsed: tuple, measured: tuple) -> tuple:
        """Return the flags that suit."""
        return rehearsed if self.rehearsal else measured

    def study_parts(self, lesson: Path, script: str, *flags: object, **how: Any) -> Figures:  # noqa: ANN401
        """Run an experiment; its plot lies beside the file."""
        return study_parts(lesson, script, *flags, machine=self.file.with_suffix(""), **how)

    def cells(self) -> int:
        """Return the number of cells along each edge of the N-body boxes."""
        from workshop.datasets import nbody

        return nbody.box(self.boxes, "train").cells

    def unet_flags(self, *flags: object) -> tuple[object, ...]:
        """Return the flags of a U-Net that is trained on the boxes of this session: full, or tiny in a rehearsal."""
        chosen = self.pick((*TINY_UNET, "--loader", "device", "--precision", "bf16"), flags)
        return (*chosen, "--data_dir", self.boxes)


def unet3d_throughput(session: Session) -> Figures:
    """IO, SYNTHETIC and FULL of the full U-Net: with all options, also as a CUDA graph, and with none."""
    sets = {"options": OPTIONS, "options, CUDA graph": (*OPTIONS, *CUDA_GRAPH), "fp32": (*UNET, "--loader", "device")}
    if session.rehearsal:
        sets = {"options": OPTIONS}
    yield from _unet_throughputs(session, {name: (session.unet_flags(*flags), 1) for name, flags in sets.items()})


def unet3d_scaling(session: Session) -> Figures:
    """The same with all options on one GPU and on all, with the same batch for each."""
    counts = (1,) if session.rehearsal else (1, session.gpus)
    flags = {
        f"{ranks} rank(s)": ((*session.unet_flags(*OPTIONS), "--global_batch_size", UNET_BATCH * ranks), ranks)
        for ranks in counts
    }
    yield from _unet_throughputs(session, flags)


def _unet_throughputs(session: Session, runs: dict[str, tuple[tuple[object, ...], int]]) -> Figures:
    """Measure the throughput of each of ``runs`` (flags, ranks); yield it at once, then again in TFLOP/s.

    The peak of matrix products, which those are compared with, is that of one GPU in bf16, the fastest format here.
    """
    seconds = session.pick(SHORT_TRIALS, ("--benchmark_seconds", 1))

    def throughput(flags: Sequence[object], ranks: int) -> dict[str, Any]:
        start = [sys.executable] if ranks == 1 else torchrun(ranks)
        return train(*flags, "--benchmark", "true", *seconds, lesson=LESSON_04, launcher=start)

    parts = {name: partial(throughput, flags, ranks) for name, (flags, ranks) in runs.items()}
    facts: dict[str, Any] = {"batch_size": UNET_BATCH, "cells": session.cells()}
    for number, figures in enumerate(measured_in_turn(parts)):
        yield figures | facts
        if number == 0:
            (flags, _), *_ = runs.values()
            try:
                facts["flops_per_sample"] = ask("flops", *flags)
                facts["peak_tflops"] = ask("peak", "fp32" if session.rehearsal else "bf16")
            except UserError as error:  # samples/s are worth having all the same
                figures.setdefault("failed", {})["TFLOP/s"] = describe_failure(error)
        for name, row in figures["rows"].items():
            row["ranks"] = runs[name][1]
            if "flops_per_sample" in facts:
                rates = {kind: row[kind]["mean"] for kind in ("SYNTHETIC", "FULL")}
                row["tflops"] = {kind: rate * facts["flops_per_sample"] / 1e12 for kind, rate in rates.items()}
        yield figures | facts


def mnist_epochs(session: Session) -> Figures:
    """Seconds of the first and of later epochs on MNIST: of lesson 01, and of the fast configuration of lesson 04."""
    epochs = session.pick((*FEW_IMAGES, "--epochs", 2), ("--epochs", 3))
    workers = ("--num_workers", session.num_workers)
    runs = {
        "lesson 01": (LESSON_01, BASELINE),
        "fast": (LESSON_04, FAST),
        "fast, CUDA graph": (LESSON_04, (*FAST, *CUDA_GRAPH)),
        f"lesson 01, {session.num_workers} worker(s)": (LESSON_01, (*BASELINE, *workers)),
    }
    if session.rehearsal:
        runs = {"lesson 01": runs["lesson 01"]}
    yield from measured_in_turn(
        {name: partial(epoch_seconds, lesson, *flags, *epochs) for name, (lesson, flags) in runs.items()}
    )


def precision_ladder(session: Session) -> Figures:
    """The full U-Net at 64^3 cells and batches of 64: what each option costs and gives."""
    flags = session.pick(("--quick", "true", "--trials", 2), ("--steps", 30, "--trial_seconds", 0.5))
    words = ("--loader", "device", "--data_dir", session.boxes, *flags)
    for figures in session.study_parts(LESSON_04, "ladder.py", *words, name="precision_ladder"):
        yield figures | {"cells": session.cells()}


def ladder(session: Session) -> Figures:
    """IO, SYNTHETIC and FULL of CIFAR-10 with each loader, with enough workers for a GPU."""
    yield from _loaders(session, "../configs/cifar10.yaml")


def mnist_ladder(session: Session) -> Figures:
    """The same of MNIST."""
    yield from _loaders(session, "../configs/mnist.yaml")


def _loaders(session: Session, config: str) -> Figures:
    loaders = session.pick(("map",), LOADERS)
    missing = [loader for loader in loaders if loader in NEEDS and not installed(NEEDS[loader])]
    flags = session.pick((*FEW_IMAGES, *SHORT_TRIALS), ("--benchmark_seconds", 1))
    measured = [loader for loader in loaders if loader not in missing]
    for figures in data_ladder(measured, "--config", config, *flags, num_workers=session.num_workers):
        yield figures | {"not_installed": missing}


def trace(session: Session) -> Figures:
    """The kernels of a step of the full U-Net, without compilation, so that they have their own names."""
    full = (*OPTIONS, "--compile", "off", "--limit_train", 1280, "--limit_val", 64)
    few = ("--limit_train", 160) if session.rehearsal else ()
    with tempfile.TemporaryDirectory() as folder:
        flags = (*session.unet_flags(*full), *few, "--epochs", 1, "--trace", "true")
        train(*flags, lesson=LESSON_04, keep={"*.pt.trace.json.gz": Path(folder)})
        yield trace_table(Path(folder) / "rank0.pt.trace.json.gz") | {"cells": session.cells()}


def baseline(session: Session) -> Figures:
    """Lesson 01 with its default settings, under the line profiler."""
    yield line_profile(*BASELINE, *session.pick(FEW_IMAGES, ()))


def line_profiles(session: Session) -> Figures:
    """Lesson 01 under the line profiler without workers, and with enough of them for a GPU."""
    flags = session.pick(FEW_IMAGES, ("--limit_train", 20000, "--limit_val", 1000))
    counts = {f"{count} worker(s)": count for count in (0, session.num_workers)}
    parts = {
        name: partial(line_profile, *BASELINE, "--num_workers", count, *flags)
        for name, count in counts.items()
        if count == 0 or not session.rehearsal
    }
    yield from measured_in_turn(parts)


def fast(session: Session) -> Figures:
    """Training seconds to 98 % accuracy, one round of all runs after the other."""
    if session.rehearsal:
        yield from time_to_target(1, *FEW_IMAGES, runs={"baseline": ON_GPU_TO_TARGET["baseline"]}, target=0.0)
    else:
        yield from time_to_target(3, runs=ON_GPU_TO_TARGET, target=TARGET)


def bandwidth(session: Session) -> Figures:
    """How fast data move: disk, memory, to the GPU and on it."""
    yield from session.study_parts(LESSON_01, "bandwidth.py", "--quick", "true")


def underflow(session: Session) -> Figures:
    """Gradients that 16 bits cannot hold, of the full U-Net."""
    flags = session.pick(("--quick", "true"), ("--steps", 50))
    words = ("--loader", "device", "--data_dir", session.boxes, *flags)
    for figures in session.study_parts(LESSON_04, "underflow.py", *words):
        yield figures | {"cells": session.cells()}


def tensor_cores(session: Session) -> Figures:
    """Matrix products of sizes that are multiples of 8, and others."""
    flags = session.pick(("--quick", "true"), ("--around", 8))
    yield from session.study_parts(LESSON_04, "tensor_cores.py", *flags)


def cpu_or_gpu(session: Session) -> Figures:
    """All computations of cpu_or_gpu.py."""
    which = session.pick(("--experiment", "elementwise"), ("--all",))
    yield from session.study_parts(LESSON_01, "cpu_or_gpu.py", *which, "--quick", "true")


def compare(session: Session) -> Figures:
    """One GPU, DataParallel and DDP on the same work."""
    few = ("--seconds", 0.01, "--limit_train", 32, "--global_batch_size", 1, "--ranks", 1)
    full = (*RESNET, "--loader", "device", "--global_batch_size", RESNET_BATCH * session.gpus)
    yield from session.study_parts(LESSON_02, "compare.py", *session.pick(few, (*full, "--rounds", 2, "--seconds", 1)))


def scaling(session: Session) -> Figures:
    """Weak and strong scaling over the GPUs."""
    few = ("--quick", "true", "--max_ranks", 1, "--limit_train", 32, "--seconds", 0.01, "--batch_size", 1)
    strong = ("--global_batch_size", RESNET_BATCH * session.gpus)
    full = (*RESNET, "--loader", "device", "--batch_size", RESNET_BATCH, *strong, "--rounds", 2, "--seconds", 1)
    yield from session.study_parts(LESSON_03, "scaling.py", *session.pick(few, full))


def allreduce(session: Session) -> Figures:
    """All-reduce by message size, over all GPUs."""
    flags = session.pick(("--seconds", 0.001, "--max_mib", 0.25), ("--seconds", 0.2, "--max_mib", 512))
    yield from session.study_parts(LESSON_03, "allreduce.py", *flags, ranks=session.gpus or 2)


def bucket_timelines(session: Session) -> Figures:
    """DDP's all-reduces during backward, in one bucket and in many: how much of them overlaps with it."""
    few = ("--rounds", 1, "--steps", 12, "--batch_size", 1, "--model", "cifar_cnn")
    full = ("--rounds", 2, "--batch_size", RESNET_BATCH, "--model", "resnet50")
    yield from session.study_parts(LESSON_03, "bucket_timelines.py", *session.pick(few, full))


def nccl_backends(session: Session) -> Figures:
    """A traced step with each of PyTorch's two NCCL backends: whether all-reduces overlap with backward."""
    yield from session.study_parts(LESSON_03, "nccl_backends.py")


@dataclass(frozen=True)
class Configuration:
    """Something to measure: ``measure`` yields all its figures so far, and so again after each part."""

    measure: Callable[[Session], Figures]
    first_part_seconds: int
    """rough need of its first part on one GPU, before it has been measured there"""
    data: tuple[str, ...] = ()
    """the data sets it needs"""
    gpus: int = 1
    package: str = ""
    """a package that it cannot do without, and the rest can"""
    script: Path | None = None
    """an experiment that not every version has"""
    in_rehearsal: bool = True

    @property
    def name(self) -> str:
        """The experiment that its figures belong to."""
        return self.measure.__name__

    def lacks(self, session: Session) -> str:
        """Say what this machine lacks for it; nothing, if it lacks nothing."""
        if self.package and not installed(self.package):
            return f"{self.package} is not installed"
        if self.script and not self.script.exists():
            return f"there is no {self.script.relative_to(REPOSITORY)}"
        if session.rehearsal and not self.in_rehearsal:
            return "needs two GPUs, even in a rehearsal"
        return ""


CONFIGURATIONS = (
    Configuration(unet3d_throughput, 90, ("nbody",)),
    Configuration(mnist_epochs, 35, ("mnist",)),
    Configuration(precision_ladder, 60, ("nbody",)),
    Configuration(unet3d_scaling, 75, ("nbody",), gpus=2),
    Configuration(ladder, 20, ("cifar10",)),
    Configuration(mnist_ladder, 20, ("mnist",)),
    Configuration(trace, 40, ("nbody",)),
    Configuration(line_profiles, 25, ("mnist",), package="line_profiler"),
    Configuration(baseline, 30, ("mnist",), package="line_profiler"),
    Configuration(compare, 90, ("cifar10",), gpus=2),
    Configuration(bucket_timelines, 90, ("cifar10",), gpus=2),
    Configuration(
        nccl_backends,
        60,
        ("cifar10",),
        gpus=2,
        script=LESSON_03 / "experiments" / "nccl_backends.py",
        in_rehearsal=False,
    ),
    Configuration(allreduce, 30, gpus=2),
    Configuration(fast, 80, ("mnist",)),
    Configuration(bandwidth, 30),
    Configuration(underflow, 60, ("nbody",)),
    Configuration(tensor_cores, 40),
    Configuration(cpu_or_gpu, 60),
    Configuration(scaling, 180, ("cifar10",), gpus=2),
)
"""most important first"""


def installed(package: str) -> bool:
    """Return whether a package, such as "nvidia.dali", can be imported."""
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:  # "nvidia.dali", where there is no "nvidia"
        return False


class TimeIsUp(BaseException):
    """The minutes are over. No `Exception`, so that what catches all of those lets it pass."""


@contextmanager
def ended_after(seconds: float) -> Iterator[Callable[[float], None]]:
    """Raise `TimeIsUp` inside the block after so many seconds; a process that it waits for is ended with it.

    The block gets a function that starts the clock again, with so many seconds.
    """

    def start(seconds: float) -> None:
        signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.001))

    def end(*_: int | FrameType | None) -> None:
        raise TimeIsUp

    before = signal.signal(signal.SIGALRM, end)
    start(seconds)
    try:
        yield start
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def measure_in_time(
    configurations: Sequence[Configuration], session: Session, deadline: float, command: str, no_data: dict[str, str]
) -> dict[str, str]:
    """Measure in turn what fits until ``deadline``, of `time.monotonic`; return what was not measured, and why.

    Args:
        configurations: most important first.
        session: where the figures go.
        deadline: when the run must have ended.
        command: what is written into the file as the command that measured it.
        no_data: why a data set is missing, by name.
    """
    reasons = {}
    for configuration in configurations:
        known = read_records(session.file).get(configuration.name, {})
        needed = 1 if session.rehearsal else known.get("first_part_seconds", configuration.first_part_seconds)
        left = deadline - time.monotonic() - SPARE_SECONDS
        missing = [f"no {name} data: {no_data[name]}" for name in configuration.data if name in no_data]
        if missing:
            reasons[configuration.name] = f"failed: {missing[0]}"
        elif reason := configuration.lacks(session):
            reasons[configuration.name] = f"not measured: {reason}"
        elif needed > left:
            text = f"its first part takes about {needed:.0f} s, and {max(left, 0):.0f} s are left"
            reasons[configuration.name] = f"not measured: {text}"
        elif reason := _measure(configuration, session, left, command):
            reasons[configuration.name] = reason
    return reasons


def _measure(configuration: Configuration, session: Session, seconds: float, command: str) -> str:
    """Measure a configuration, and write each part at once; return what went wrong, or nothing."""
    name = configuration.name
    print(f"\n== {name}: {configuration.measure.__doc__}", flush=True)
    started = time.monotonic()
    figures: dict[str, Any] = {}
    times: dict[str, float] = {}
    longest = max(LONGEST_PART, 3 * configuration.first_part_seconds)
    try:
        with ended_after(min(seconds, longest)) as start_clock, closing(configuration.measure(session)) as parts:
            for figures in parts:
                start_clock(min(started + seconds - time.monotonic(), longest))
                elapsed = round(time.monotonic() - started, 1)
                times = {"first_part_seconds": elapsed, **times, "total_seconds": elapsed}
                put_record(session.file, name, figures | times | {"unfinished": True}, command)
    except TimeIsUp:
        kept = ", what it had measured by then is kept" if figures else ""
        return f"cut off: after {time.monotonic() - started:.0f} s{kept}"
    except Exception as error:
        kept = "; what it had measured by then is kept" if figures else ""
        return f"failed: {describe_failure(error)}{kept}"
    if not figures:
        return "failed: it gave no figures"
    complete = {key: value for key, value in figures.items() if key != "unfinished"}
    put_record(session.file, name, complete | times, command)
    print(f"== {name}: written to {session.file} after {time.monotonic() - started:.0f} s", flush=True)
    failed = [f"{part} ({reason})" for part, reason in figures.get("failed", {}).items()]
    return f"failed in part: {'; '.join(failed)}" if failed else ""


def data_commands(session: Session) -> dict[str, list[object]]:
    """Return by data set the command that generates it, of those that are missing; what is there is left alone.

    Boxes with fewer cells than a measurement needs are left alone too: larger ones are put into a folder of their own.
    """
    data_dir = default_data_dir()
    few = ("--train_samples", 640, "--val_samples", 128) if session.rehearsal else ()
    prepare = [sys.executable, "data/prepare.py"]
    commands: dict[str, list[object]] = {}
    for name, folder in {"mnist": "MNIST", "cifar10": "cifar-10-batches-py"}.items():
        words: list[object] = [] if (data_dir / folder).exists() else ["--synthetic", *few]
        if not session.rehearsal and installed(NEEDS["shards"]) and not (data_dir / "shards" / name).exists():
            words.append("--shards")
        if words:
            commands[name] = [*prepare, name, *words]
    if not (session.boxes / "nbody").exists():
        commands["nbody"] = [*prepare, "nbody", "--synthetic", "--cells", fewest_cells(session)]
        commands["nbody"] += ["--data_dir", session.boxes]
    return commands


def fewest_cells(session: Session) -> int:
    """Return how many cells the N-body boxes must have along each edge."""
    return 16 if session.rehearsal else CELLS


def with_boxes(session: Session) -> Session:
    """Return the session with the folder of its N-body boxes: the usual one if they are large enough, or missing."""
    data_dir = default_data_dir()
    try:
        enough = replace(session, boxes=data_dir).cells() >= fewest_cells(session)
    except Exception:  # missing or damaged: `prepare` says which
        enough = not (data_dir / "nbody").exists() and session.rehearsal
    return replace(session, boxes=data_dir if enough else data_dir / f"boxes_of_{fewest_cells(session)}_cells")


def generate_data(session: Session) -> dict[str, str]:
    """Generate the data sets that are missing, all at the same time; return why, by name, those that cannot be had."""
    failures = run_together(data_commands(session), REPOSITORY)
    still_missing = data_commands(session)  # images whose shards failed are no failure: the other loaders read them
    return {name: reason for name, reason in failures.items() if not {"--shards"} >= set(still_missing[name][3:])}


def rehearse(out: Path | None) -> Session:
    """Hide the GPUs and all CPUs but one from all that is started; point to data and files of its own."""
    folder = default_runs_dir() / "gpu_rehearsal"
    make_output_folder(folder)
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "SLURM_CPUS_PER_TASK": "1", "OMP_NUM_THREADS": "1"}
    os.environ["WORKSHOP_DATA"] = str(folder / "data")
    return Session((out or folder) / "rehearsal.json", rehearsal=True)


def measuring_session(out: Path | None) -> Session:
    """Return the session that measures on this machine's GPUs; with ``out`` it goes on from what results/ has.

    Raises:
        UserError: there is no GPU.
    """
    hardware = this_machine()["hardware"]
    if hardware["device"] != "cuda":
        raise UserError("this machine has no NVIDIA GPU: try everything on the CPU with --rehearse true")
    known = RESULTS / f"{machine_name()}.json"
    file = out / known.name if out else known
    if known.exists() and not file.exists():
        shutil.copy(known, file)
    return Session(file, cpus=hardware["cpus_available"], gpus=hardware["gpus"])


def main(arguments: list[str], started: float) -> None:
    """Measure what fits into the minutes; then say what was not measured, and why.

    Args:
        arguments: the command line.
        started: when the minutes began, by `time.monotonic`.

    Raises:
        UserError: there is no GPU, or configurations have failed.
    """
    parser = Parser(__doc__)
    parser.add_argument("--minutes", type=float, default=8.0, help="stop in time (default: %(default)s)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder for the file and the plots (default: results/)")
    parser.add_switch("--rehearse", "everything on the CPU, with the least work, into a file that no page shows")
    asked = parser.parse_args(arguments)
    require_positive(asked, "minutes")
    if asked.out:
        make_output_folder(asked.out)
    out = asked.out.resolve() if asked.out else None
    session = with_boxes(rehearse(out) if asked.rehearse else measuring_session(out))
    records = read_records(session.file)
    configurations = [one for one in CONFIGURATIONS if one.gpus <= session.gpus or session.rehearsal]
    configurations.sort(key=lambda one: not {"unfinished", "failed"} & records.get(one.name, {"unfinished": 1}).keys())
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # which ends what was started, too
    deadline = started + 60 * asked.minutes
    command = f"python results/measure.py gpu --minutes {asked.minutes:g}"
    try:
        with ended_after(deadline - time.monotonic() - SPARE_SECONDS):
            no_data = generate_data(session)
    except TimeIsUp:
        raise UserError(f"--minutes {asked.minutes:g} are over before the data sets were generated") from None
    reasons = measure_in_time(configurations, session, deadline, command, no_data)
    print(f"\n{len(configurations) - len(reasons)} of {len(configurations)} measured completely: {session.file}")
    for name, reason in reasons.items():
        print(f"{name}: {reason}")
    if failed := [name for name, reason in reasons.items() if reason.startswith("failed")]:
        raise UserError(f"failed: {', '.join(failed)}; the lines above say why")
