"""Running the lessons and their experiments for their figures: what all measurements share."""

import functools
import json
import linecache
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lab.launching import reason, torchrun
from lab.machine_facts import this_machine
from lab.processes import show, started
from lab.results_file import machine_name
from workshop.errors import UserError
from workshop.paths import REPOSITORY

POLL_SECONDS = 0.5
"""how often an experiment's file is looked at while the experiment runs"""
TARGET = 0.98
RESULTS = REPOSITORY / "results"
LESSON_01 = REPOSITORY / "01_single_gpu"
LESSON_02 = REPOSITORY / "02_dataparallel"
LESSON_03 = REPOSITORY / "03_ddp"
LESSON_04 = REPOSITORY / "04_mixed_precision"
LESSON_05 = REPOSITORY / "05_fully_sharded"
BASELINE = ("--config", "../configs/mnist.yaml")
FAST = (*BASELINE, "--config", "../configs/mnist_fast.yaml")
TO_TARGET = {
    "baseline": (LESSON_01, BASELINE),
    "fewer": (LESSON_01, (*BASELINE, "--limit_train", 40000)),
    "fast": (LESSON_04, FAST),
    "fast_fp32": (LESSON_04, (*FAST, "--precision", "fp32")),
}
"""lesson and flags of the runs whose seconds to `TARGET` are compared; the first is what others are compared with"""
CUDA_GRAPH = ("--cuda_graph", "true")
ON_GPU_TO_TARGET = TO_TARGET | {"fast_graph": (LESSON_04, (*FAST, *CUDA_GRAPH))}
"""the same runs on a GPU, where a CUDA graph is possible"""


def run_parts(
    command: Sequence[object], folder: Path, *, flag: str = "--out", keep: Mapping[str, Path] | None = None
) -> Generator[dict[str, Any], None, None]:
    """Run a script that writes one JSON file into an output folder; yield what it holds whenever it has changed.

    So a script that rewrites its file after each configuration can be stopped at any time, and what it had measured by
    then is known. When the caller stops, the script is killed with all processes that it has started.

    Args:
        command: the words that start Python, the script and its flags, but for the output folder.
        folder: where to run it.
        flag: the script's flag for its output folder.
        keep: folder to copy files to when the script has ended, by the pattern of their names.

    Raises:
        UserError: it failed, or wrote no JSON file.
    """
    with tempfile.TemporaryDirectory() as written, tempfile.TemporaryFile("w+") as stderr:
        words = [*map(str, command), flag, written]
        print("$", shlex.join(words), flush=True)
        known = ""
        with started(words, folder, stderr) as process:
            while process.poll() is None:
                try:
                    process.wait(POLL_SECONDS)
                except subprocess.TimeoutExpired:
                    if (text := _read(Path(written))) not in ("", known):
                        known = text
                        yield json.loads(text)
        errors = show(stderr)
        for pattern, target in (keep or {}).items():
            for file in Path(written).glob(pattern):
                shutil.copy(file, target)
        if process.returncode:
            raise UserError(reason(errors) or f"exit status {process.returncode} from: {shlex.join(words[:-2])}")
        if not (text := _read(Path(written))):
            raise UserError(f"no JSON file was written by: {shlex.join(words[:-2])}")
        if text != known:
            yield json.loads(text)


def _read(folder: Path) -> str:
    """Return the text of the only JSON file of a folder; "" if there is none, or it is not complete yet."""
    files = list(folder.glob("*.json"))
    try:
        text = files[0].read_text() if len(files) == 1 else ""
        json.loads(text)
    except (OSError, ValueError):
        return ""
    return text


def last(parts: Iterator[dict[str, Any]]) -> dict[str, Any]:
    """Return the last of the figures that a measurement yields, which are all of them."""
    *_, figures = parts
    return figures


def train(
    *flags: object,
    lesson: Path = LESSON_01,
    launcher: Sequence[str] = (sys.executable,),
    keep: Mapping[str, Path] | None = None,
    script: str = "train.py",
) -> dict[str, Any]:
    """Train a lesson; return its summary, or with ``--benchmark true`` its throughput.

    Args:
        flags: of the script.
        lesson: its folder.
        launcher: the words before the script.
        keep: as in `run_parts`.
        script: the lesson's own, or an experiment that takes the same flags.
    """
    return last(run_parts([*launcher, script, *flags], lesson, flag="--run_dir", keep=keep))


def study_parts(
    lesson: Path, script: str, *flags: object, name: str | None = None, ranks: int = 1, machine: Path | None = None
) -> Generator[dict[str, Any], None, None]:
    """Run an experiment of a lesson; yield its figures whenever its file has changed, and keep its plot, if any.

    The plot is named after the machine and after the script, or ``name``; it lies beside the file ``machine`` (default:
    that of this machine in results/).
    """
    start = [sys.executable] if ranks == 1 else torchrun(ranks)
    with tempfile.TemporaryDirectory() as plots:
        command = [*start, f"experiments/{script}", *flags]
        for figures in run_parts(command, lesson, keep={"*.png": Path(plots)}):
            for path in ("data_dir", "run_dir", "out"):  # of this machine
                figures.get("config", {}).pop(path, None)
            yield figures
        for plot in Path(plots).glob("*.png"):
            beside = machine or RESULTS / machine_name()
            shutil.copy(plot, beside.with_name(f"{beside.name}_{name or plot.stem}.png"))


def measured_in_turn(
    parts: Mapping[str, Callable[[], Any]], key: str = "rows", about: Mapping[str, Any] | None = None
) -> Iterator[dict[str, Any]]:
    """Measure one part after the other; yield all figures after each: ``about``, and each part's under ``key``.

    A part that fails is named under ``failed``, with the reason, and the others are measured all the same.
    """
    figures: dict[str, Any] = {**(about or {}), key: {}}
    for name, measure in parts.items():
        try:
            figures[key][name] = measure()
        except Exception as error:
            figures.setdefault("failed", {})[name] = describe_failure(error)
            print(f"{name} failed: {figures['failed'][name]}", file=sys.stderr, flush=True)
        yield figures


def describe_failure(error: Exception) -> str:
    """Return in one line what went wrong: the message of a user's mistake, else type and message."""
    text = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
    return " ".join(text.split())


@functools.cache
def prepare(data_set: str) -> None:
    """Generate a data set, and the shards of images; one that is there is left alone."""
    shards = [] if data_set == "nbody" else ["--shards"]
    subprocess.run([sys.executable, "data/prepare.py", data_set, "--synthetic", *shards], cwd=REPOSITORY, check=True)


def line_profile(*flags: object, script: str = "train.py") -> dict[str, Any]:
    """Run lesson 01 under the line profiler; return its first epoch and the time of each line.

    ``script`` is as in `train`.
    """
    import line_profiler  # not every machine has it

    with tempfile.TemporaryDirectory() as folder:
        profile = Path(folder) / "train.lprof"
        kernprof = (sys.executable, "-m", "kernprof", "-l", "-o", str(profile))
        summary = train(*flags, launcher=kernprof, script=script)
        stats = line_profiler.load_stats(str(profile))
    ((file, first_line, function), timings) = next(item for item in stats.timings.items() if item[1])
    total = sum(time for _, _, time in timings)
    lines = [
        {
            "line": line,
            "hits": hits,
            "seconds": time * stats.unit,
            "percent": 100 * time / total,
            "text": linecache.getline(str(LESSON_01 / file), line).rstrip(),
        }
        for line, hits, time in timings
    ]
    return {"epoch": summary["epochs"][0], "function": function, "first_line": first_line, "lines": lines}


def loader_throughputs(loaders: Sequence[tuple[str, str, int]], *flags: object) -> Iterator[dict[str, Any]]:
    """Measure IO, SYNTHETIC and FULL with each of the loaders (name, ``--loader``, workers); yield all after each."""

    def throughput(loader: str, num_workers: int) -> dict[str, Any]:
        return train("--benchmark", "true", "--num_workers", num_workers, *flags, "--loader", loader)

    parts = {name: functools.partial(throughput, loader, workers) for name, loader, workers in loaders}
    yield from measured_in_turn(parts, "loaders")


def epoch_seconds(lesson: Path, *flags: object) -> dict[str, Any]:
    """Train a lesson on images; return the time and accuracy of each epoch; the first one includes start-up."""
    summary = train(*flags, lesson=lesson)
    names = ("seconds", "samples_per_second", "val_accuracy")
    epochs = [{name: epoch[name] for name in names} for epoch in summary["epochs"]]
    return {"flags": list(flags), "epochs": epochs, "first_step_seconds": summary["first_step_seconds"]}


def time_to_target(
    rounds: int,
    *flags: object,
    runs: Mapping[str, tuple[Path, Sequence[object]]] = TO_TARGET,
    target: float = TARGET,
) -> Iterator[dict[str, Any]]:
    """Train each of ``runs`` once per round; yield the figures of all rounds so far after each round.

    A run's seconds are those of its epochs up to the first one that reaches the target.
    """
    configurations = dict(runs)
    emulated = None
    if "fast" in configurations and this_machine()["emulates_bf16"]:  # it would take too long: a short run is enough
        lesson, fast_flags = configurations.pop("fast")
        short = train(*fast_flags, "--limit_train", 1280, "--limit_val", 500, *flags, lesson=lesson)
        emulated = short["epochs"][0]["samples_per_second"]
    measured: dict[str, list[dict[str, Any]]] = {name: [] for name in configurations}
    for _ in range(rounds):
        for name, (lesson, own_flags) in configurations.items():
            summary = train(*own_flags, *flags, lesson=lesson)
            run = _until_target(summary["epochs"], target, name)
            measured[name].append(run | {"first_step_seconds": summary["first_step_seconds"]})
        medians = {name: statistics.median(run["seconds"] for run in found) for name, found in measured.items()}
        first = next(iter(medians.values()))
        speedup = {name: first / seconds for name, seconds in medians.items()}
        yield {"target": target, "runs": measured, "speedup": speedup, "emulated_bf16_samples_per_second": emulated}


def _until_target(epochs: Sequence[dict[str, Any]], target: float, name: str) -> dict[str, float]:
    """Return seconds, samples/s and accuracy of a run at the end of its first epoch that reaches the target."""
    seconds = 0.0
    for epoch in epochs:
        seconds += epoch["seconds"]
        if epoch["val_accuracy"] >= target:
            names = ("samples_per_second", "val_accuracy")
            return {"seconds": seconds, **{key: epoch[key] for key in names}}
    reached = max(epoch["val_accuracy"] for epoch in epochs)
    raise UserError(f"{name} reached {reached:.2%} in {len(epochs)} epoch(s), not {target:.0%}")
