"""The first changes that lesson 01 makes, measured alternately: a case that pays, one with workers, one that does not.

All configurations are in one process, so that a round of one trial each takes seconds: then a machine whose speed
drifts slows all of them alike. A trial is an epoch of lesson 01's `train_one_epoch` under the line profiler, so that
the share of the loader is known.
"""

import contextlib
import importlib.util
import io
import pstats
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from lab.launching import load_script
from lab.lesson_runs import LESSON_01
from workshop.commandline import load_config
from workshop.run import Run

ROUNDS = 5
CIFAR = ("--config", "../configs/cifar10.yaml", "--epochs", 1, "--limit_train", 12800, "--limit_val", 640)
MNIST = ("--limit_train", 3200, "--limit_val", 64)
SLOW = ("--limit_train", 1280, "--limit_val", 64)
SLOW_FILES = "experiments/slow_files.py"
CASES: dict[str, tuple[str, tuple[object, ...]]] = {
    "CIFAR-10, map": ("train.py", (*CIFAR, "--num_workers", 0)),
    "CIFAR-10, memory": ("train.py", (*CIFAR, "--loader", "memory")),
    "slow files, 0 workers": (SLOW_FILES, (*SLOW, "--num_workers", 0)),
    "slow files, 1 worker": (SLOW_FILES, (*SLOW, "--num_workers", 1)),
    "slow files, 4 workers": (SLOW_FILES, (*SLOW, "--num_workers", 4)),
    "MNIST, 0 workers": ("train.py", (*MNIST, "--num_workers", 0)),
}
"""script and flags of each configuration"""
SHOWN = "CIFAR-10, map"
"""the configuration whose log the page shows"""


@dataclass
class Case:
    """A configuration that is ready to train: its workers stay from one trial to the next."""

    script: ModuleType
    config: Any
    parts: tuple[Any, ...]
    """model, training loader, optimizer and schedule"""

    @classmethod
    def build(cls, script: ModuleType, flags: tuple[object, ...], folder: Path) -> "Case":
        """Make what a run of lesson 01 makes; ``folder`` is for its files."""
        words = [str(LESSON_01 / word) if str(word).endswith(".yaml") else str(word) for word in flags]
        config = load_config(script.Config, [*words, "--run_dir", str(folder)])
        device = torch.device("cpu")
        torch.manual_seed(config.seed)
        loader = script.make_loader(config, "train", device)
        model = script.build_model(config.model, config.dataset, dropout=config.dropout)
        optimizer = script.make_optimizer(config, model)
        return cls(script, config, (model, loader, optimizer, script.StepLR(optimizer, step_size=1)))

    def trial(self) -> dict[str, Any]:
        """Train an epoch under the line profiler; return samples per second and the time of each line."""
        from line_profiler import LineProfiler  # not every machine has it

        profiler, device = LineProfiler(), torch.device("cpu")
        train_one_epoch = profiler(self.script.train_one_epoch)
        loader = self.parts[1]
        loader.batch_sampler.set_epoch(loader.batch_sampler.epoch + 1)
        with contextlib.redirect_stdout(io.StringIO()), Run(self.config, device) as run:
            started = time.perf_counter()
            train_one_epoch(self.config, *self.parts, device, run)
            seconds = time.perf_counter() - started
        stats = profiler.get_stats()
        ((_, timings),) = stats.timings.items()
        total = sum(ticks for _, _, ticks in timings)
        text = (LESSON_01 / "train.py").read_text().splitlines()
        lines = [
            {
                "line": line,
                "hits": hits,
                "seconds": ticks * stats.unit,
                "percent": 100 * ticks / total,
                "text": text[line - 1],
            }
            for line, hits, ticks in timings
        ]
        return {"samples_per_second": len(loader.dataset) / seconds, "lines": lines}


def load_slow_files() -> ModuleType:
    """Return lesson 01's script with the slow file system of slow_files.py."""
    spec = importlib.util.spec_from_file_location("slow_files", LESSON_01 / SLOW_FILES)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.script


def build_cases(folder: Path) -> dict[str, Case]:
    """Make all configurations ready; each writes into a folder of its own in ``folder``."""
    scripts = {SLOW_FILES: load_slow_files(), "train.py": load_script(LESSON_01)}
    return {
        name: Case.build(scripts[script], flags, folder / str(number))
        for number, (name, (script, flags)) in enumerate(CASES.items())
    }


def first_changes() -> dict[str, Any]:
    """Lesson 01's first changes: throughput and line profiles, before and after."""
    rows: dict[str, dict[str, Any]] = {
        name: {"script": script, "flags": list(map(str, flags)), "trials": []}
        for name, (script, flags) in CASES.items()
    }
    profiles: dict[str, list[dict[str, Any]]] = {name: [] for name in CASES}
    with tempfile.TemporaryDirectory() as folder:
        cases = build_cases(Path(folder))
        for number in range(1 + ROUNDS):
            for name, case in cases.items():
                found = case.trial()
                if number > 0:  # the first round starts the workers, and does not count
                    profiles[name].append(found)
            print(f"round {number} of {ROUNDS}", flush=True)
        del cases  # ends the workers, which have files in the folder
    for name, found in profiles.items():
        rows[name]["trials"] = [
            {"samples_per_second": one["samples_per_second"], "for_percent": for_share(one)} for one in found
        ]
        rows[name]["profile"] = sorted(found, key=for_share)[len(found) // 2]
    rows[SHOWN]["log"] = log_of(SHOWN)
    return {"rounds": ROUNDS, "rows": rows, "cprofile": python_functions(20)}


def for_share(profile: dict[str, Any]) -> float:
    """Return the percentage of the time that the line of the data loader took."""
    return next(line["percent"] for line in profile["lines"] if line["text"].strip().startswith("for inputs"))


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
