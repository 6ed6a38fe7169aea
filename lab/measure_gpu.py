"""Measure all experiments on a GPU within the minutes that there are: `python lab/measure.py gpu --minutes 8`.

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
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

from lab.experiments import EXPERIMENTS
from lab.flags import Parser, make_output_folder, require_positive
from lab.lesson_runs import RESULTS, describe_failure
from lab.machine_facts import this_machine
from lab.processes import run_together
from lab.results_file import machine_name, read_results, save_results
from lab.session import NEEDS, Experiment, Session, installed
from workshop.errors import UserError
from workshop.paths import REPOSITORY, default_data_dir, default_runs_dir

CELLS = 128
"""along each edge of the N-body boxes: 75 MB each, more than the cache of any GPU holds"""
LONGEST_PART = 120
"""seconds that a part of an experiment may take, if three times its estimate is less

A part that hangs must not take the time of all that follows.
"""
SPARE_SECONDS = 5
"""at the end, to write the last part"""


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
    experiments: Sequence[Experiment], session: Session, deadline: float, command: str, no_data: dict[str, str]
) -> dict[str, str]:
    """Measure in turn what fits until ``deadline``, of `time.monotonic`; return what was not measured, and why.

    Args:
        experiments: most important first.
        session: where the figures go.
        deadline: when the run must have ended.
        command: what is written into the file as the command that measured it.
        no_data: why a data set is missing, by name.
    """
    reasons = {}
    for experiment in experiments:
        known = read_results(session.file).get(experiment.name, {})
        needed = 1 if session.rehearsal else known.get("first_part_seconds", experiment.seconds)
        left = deadline - time.monotonic() - SPARE_SECONDS
        missing = [f"no {name} data: {no_data[name]}" for name in experiment.data if name in no_data]
        if missing:
            reasons[experiment.name] = f"failed: {missing[0]}"
        elif reason := experiment.lacks(session):
            reasons[experiment.name] = f"not measured: {reason}"
        elif needed > left:
            text = f"its first part takes about {needed:.0f} s, and {max(left, 0):.0f} s are left"
            reasons[experiment.name] = f"not measured: {text}"
        elif reason := _measure(experiment, session, left, command):
            reasons[experiment.name] = reason
    return reasons


def _measure(experiment: Experiment, session: Session, seconds: float, command: str) -> str:
    """Measure an experiment, and write each part at once; return what went wrong, or nothing."""
    name = experiment.name
    print(f"\n== {name}: {experiment.title}", flush=True)
    started = time.monotonic()
    figures: dict[str, Any] = {}
    times: dict[str, float] = {}
    longest = max(LONGEST_PART, 3 * experiment.seconds)
    try:
        with ended_after(min(seconds, longest)) as start_clock, closing(experiment.run(session)) as parts:
            for figures in parts:
                start_clock(min(started + seconds - time.monotonic(), longest))
                elapsed = round(time.monotonic() - started, 1)
                times = {"first_part_seconds": elapsed, **times, "total_seconds": elapsed}
                save_results(session.file, name, figures | times | {"unfinished": True}, command)
    except TimeIsUp:
        kept = ", what it had measured by then is kept" if figures else ""
        return f"cut off: after {time.monotonic() - started:.0f} s{kept}"
    except Exception as error:
        kept = "; what it had measured by then is kept" if figures else ""
        return f"failed: {describe_failure(error)}{kept}"
    if not figures:
        return "failed: it gave no figures"
    complete = {key: value for key, value in figures.items() if key != "unfinished"}
    save_results(session.file, name, complete | times, command)
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
    still_missing = data_commands(session)
    # Images whose shards failed are no failure, because the other loaders read them; nor is data that is there now.
    return {name: why for name, why in failures.items() if not {"--shards"} >= set(still_missing.get(name, [])[3:])}


def rehearse(out: Path | None) -> Session:
    """Hide the GPUs and all CPUs but one from all that is started; point to data and files of its own."""
    folder = default_runs_dir() / "gpu_rehearsal"
    make_output_folder(folder)
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "SLURM_CPUS_PER_TASK": "1", "OMP_NUM_THREADS": "1"}
    os.environ["WORKSHOP_DATA"] = str(folder / "data")
    return Session((out or folder) / "rehearsal.json", mode="rehearsal")


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
    return Session(file, mode="gpu", cpus=hardware["cpus_available"], gpus=hardware["gpus"])


def main(arguments: list[str], started: float) -> None:
    """Measure what fits into the minutes; then say what was not measured, and why.

    Args:
        arguments: the command line.
        started: when the minutes began, by `time.monotonic`.

    Raises:
        UserError: there is no GPU, or experiments have failed.
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
    all_results = read_results(session.file)
    on_gpu = [one for one in EXPERIMENTS if one.gpu is not None]
    experiments = [one for one in on_gpu if one.gpus <= session.gpus or session.rehearsal]
    experiments.sort(key=lambda one: not {"unfinished", "failed"} & all_results.get(one.name, {"unfinished": 1}).keys())
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # which ends what was started, too
    deadline = started + 60 * asked.minutes
    command = f"python lab/measure.py gpu --minutes {asked.minutes:g}"
    try:
        with ended_after(deadline - time.monotonic() - SPARE_SECONDS):
            no_data = generate_data(session)
    except TimeIsUp:
        raise UserError(f"--minutes {asked.minutes:g} are over before the data sets were generated") from None
    reasons = measure_in_time(experiments, session, deadline, command, no_data)
    print(f"\n{len(experiments) - len(reasons)} of {len(experiments)} measured completely: {session.file}")
    for name, reason in reasons.items():
        print(f"{name}: {reason}")
    if failed := [name for name, reason in reasons.items() if reason.startswith("failed")]:
        raise UserError(f"failed: {', '.join(failed)}; the lines above say why")
