"""The first changes that lesson 01 makes, measured alternately: a case that pays, one with workers, one that does not.

Each configuration trains under the line profiler in every round, so that the share of the data loader is known, and
some of them also measure IO, SYNTHETIC and FULL.
"""

import pstats
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from lab.lesson_runs import LESSON_01, line_profile, train

ROUNDS = 5
BENCHMARK_ROUNDS = 3
CIFAR = ("--config", "../configs/cifar10.yaml", "--epochs", 1, "--limit_train", 12800, "--limit_val", 640)
MNIST = ("--limit_train", 6400, "--limit_val", 640)
SLOW = ("--limit_train", 2560, "--limit_val", 64)
SLOW_FILES = "experiments/slow_files.py"
CASES: dict[str, tuple[str, tuple[object, ...]]] = {
    "CIFAR-10, map": ("train.py", (*CIFAR, "--num_workers", 0)),
    "CIFAR-10, memory": ("train.py", (*CIFAR, "--loader", "memory")),
    "slow files, 0 workers": (SLOW_FILES, (*SLOW, "--num_workers", 0)),
    "slow files, 1 worker": (SLOW_FILES, (*SLOW, "--num_workers", 1)),
    "slow files, 4 workers": (SLOW_FILES, (*SLOW, "--num_workers", 4)),
    "MNIST, 0 workers": ("train.py", (*MNIST, "--num_workers", 0)),
    "MNIST, 1 worker": ("train.py", (*MNIST, "--num_workers", 1)),
    "MNIST, 2 workers": ("train.py", (*MNIST, "--num_workers", 2)),
    "MNIST, memory": ("train.py", (*MNIST, "--loader", "memory")),
}
"""script and flags of each configuration"""
BENCHMARKED = (
    "CIFAR-10, map",
    "CIFAR-10, memory",
    "MNIST, 0 workers",
    "MNIST, 1 worker",
    "slow files, 0 workers",
    "slow files, 4 workers",
)
"""configurations that also measure IO, SYNTHETIC and FULL"""

SHOWN = "CIFAR-10, map"
"""the configuration whose log the page shows"""


def first_changes() -> dict[str, Any]:
    """Lesson 01's first changes: line profiles, and the throughput of loading and of training."""
    rows: dict[str, dict[str, Any]] = {
        name: {"script": script, "flags": list(map(str, flags)), "trials": []}
        for name, (script, flags) in CASES.items()
    }
    profiles: dict[str, list[dict[str, Any]]] = {name: [] for name in CASES}
    for _ in range(ROUNDS):
        for name, (script, flags) in CASES.items():
            profile = line_profile(*flags, script=script)
            profiles[name].append(profile)
            rows[name]["trials"].append(trial(profile))
    for name, found in profiles.items():
        rows[name]["profile"] = sorted(found, key=for_share)[len(found) // 2]
    rows[SHOWN]["log"] = log_of(SHOWN)
    for _ in range(BENCHMARK_ROUNDS):
        for name in BENCHMARKED:
            script, flags = CASES[name]
            measured = train(*flags, "--benchmark", "true", script=script)
            for kind in ("IO", "SYNTHETIC", "FULL"):
                rows[name].setdefault(kind, {"trials": []})["trials"] += measured[kind]["trials"]
    for name in BENCHMARKED:
        for kind in ("IO", "SYNTHETIC", "FULL"):
            trials = rows[name][kind]["trials"]
            rows[name][kind] |= {"mean": statistics.mean(trials), "std": statistics.stdev(trials)}
    return {"rounds": ROUNDS, "rows": rows, "cprofile": python_functions(20)}


def for_share(profile: dict[str, Any]) -> float:
    """Return the percentage of the time that the line of the data loader took."""
    return next(line["percent"] for line in profile["lines"] if line["text"].strip().startswith("for inputs"))


def trial(profile: dict[str, Any]) -> dict[str, float]:
    """Return samples per second and the percentage of the ``for`` line of one run."""
    return {"samples_per_second": profile["epoch"]["samples_per_second"], "for_percent": for_share(profile)}


def log_of(case: str) -> list[str]:
    """Run a configuration under ``kernprof`` and return the lines that it prints, without this machine's folders."""
    script, flags = CASES[case]
    with tempfile.TemporaryDirectory() as folder:
        profile, run_dir = Path(folder, "before.lprof"), Path(folder, "cifar10")
        words = [sys.executable, "-m", "kernprof", "-l", "-o", profile, script, *flags, "--run_dir", run_dir]
        result = subprocess.run(list(map(str, words)), cwd=LESSON_01, capture_output=True, text=True, check=True)
    runs = "/home/you/workshop/runs/01_single_gpu"
    return result.stdout.replace(str(run_dir), f"{runs}/cifar10").replace(f"{folder}/", "").splitlines()


def python_functions(count: int) -> list[dict[str, Any]]:
    """Return the functions with most time of their own, by cProfile, of a run that loads in the training process."""
    with tempfile.TemporaryDirectory() as folder:
        file, run_dir = Path(folder, "train.cprof"), Path(folder, "run")
        words = ["train.py", *CIFAR, "--limit_train", 6400, "--num_workers", 0, "--run_dir", run_dir]
        command = [sys.executable, "-m", "cProfile", "-o", file, *words]
        subprocess.run(list(map(str, command)), cwd=LESSON_01, check=True)
        stats: Any = pstats.Stats(str(file)).strip_dirs()
    rows = [
        {"name": name_of(*function), "calls": calls, "tottime": own, "cumtime": total}
        for function, (_, calls, own, total, _) in stats.stats.items()
    ]
    return sorted(rows, key=lambda row: -row["tottime"])[:count]


def name_of(file: str, line: int, function: str) -> str:
    """Return the name of a function as ``pstats`` prints it: in braces without a file if it is written in C++."""
    return function.replace("<", "{").replace(">", "}") if file == "~" else f"{file}:{line}({function})"
