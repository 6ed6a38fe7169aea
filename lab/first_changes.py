"""The first changes that lesson 01 makes, measured alternately: another loader, and workers with slow files.

All configurations are in one process, so that a round of one trial each takes seconds: then a machine whose speed
drifts slows all of them alike. A trial is an epoch of lesson 01's `train_one_epoch` under the line profiler, so that
the share of the loader is known.
"""

import contextlib
import importlib.util
import io
import os
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

ROUNDS = 3
CIFAR = ("--config", "../configs/cifar10.yaml", "--epochs", 1, "--limit_train", 3840, "--limit_val", 64)
MNIST = ("--limit_train", 1280, "--limit_val", 64)
SLOW = ("--limit_train", 1280, "--limit_val", 64)
SLOW_FILES = "experiments/slow_files.py"
Flags = tuple[object, ...]
CHANGES: dict[str, Flags] = {
    "CIFAR-10, map": (*CIFAR, "--num_workers", 0),
    "CIFAR-10, memory": (*CIFAR, "--loader", "memory"),
    "MNIST, 0 workers": (*MNIST, "--num_workers", 0),
}
WORKERS: dict[str, Flags] = {
    "0 workers": (*SLOW, "--num_workers", 0),
    "1 worker": (*SLOW, "--num_workers", 1),
    "4 workers": (*SLOW, "--num_workers", 4),
}
"""with slow_files.py"""


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
        words = [str(LESSON_01 / str(word)) if str(word).endswith(".yaml") else str(word) for word in flags]
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


def build_cases(script: ModuleType, flags: dict[str, Flags], folder: Path) -> dict[str, Case]:
    """Make all configurations ready; each writes into a folder of its own in ``folder``."""
    return {name: Case.build(script, own, folder / str(number)) for number, (name, own) in enumerate(flags.items())}


def in_turn(script: ModuleType, flags: dict[str, Flags]) -> dict[str, Any]:
    """Measure all configurations alternately; return the trials of each, and the profile of its median trial."""
    profiles: dict[str, list[dict[str, Any]]] = {name: [] for name in flags}
    with tempfile.TemporaryDirectory() as folder:
        cases = build_cases(script, flags, Path(folder))
        for number in range(1 + ROUNDS):
            if number == 1:  # the round before starts the workers, and does not count
                started, cpu = time.perf_counter(), sum(os.times()[:4])
            for name, case in cases.items():
                found = case.trial()
                if number > 0:
                    profiles[name].append(found)
            print(f"round {number} of {ROUNDS}", flush=True)
        # Of this process: the times of workers count only when they have ended, and these have not.
        busy = (sum(os.times()[:4]) - cpu) / (time.perf_counter() - started)
        del cases  # ends the workers, which have files in the folder
    rows = {}
    for name, trials in profiles.items():
        rows[name] = {
            "flags": list(map(str, flags[name])),
            "trials": [
                {"samples_per_second": one["samples_per_second"], "for_percent": for_share(one)} for one in trials
            ],
            "profile": sorted(trials, key=for_share)[len(trials) // 2],
        }
    return {"rounds": ROUNDS, "cpus_used": busy, "rows": rows}


def first_changes() -> dict[str, Any]:
    """Lesson 01's first changes: the line profiles of a slow loader, of a fast one, and of a heavier model."""
    return in_turn(load_script(LESSON_01), CHANGES)


def slow_files() -> dict[str, Any]:
    """Lesson 01 with 0, 1 and 4 workers and a slow file system."""
    return in_turn(load_slow_files(), WORKERS)


def for_share(profile: dict[str, Any]) -> float:
    """Return the percentage of the time that the line of the data loader took."""
    return next(line["percent"] for line in profile["lines"] if line["text"].strip().startswith("for inputs"))
