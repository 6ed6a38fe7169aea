"""Train a lesson on CPU ranks whose memory for the training is limited, as that of a GPU is.

    export MALLOC_ARENA_MAX=1 MALLOC_MMAP_THRESHOLD_=65536 MALLOC_TRIM_THRESHOLD_=65536
    torchrun --standalone --nproc-per-node 2 experiments/limited_train.py 05_fully_sharded 450 --model vit

The first word is the folder of lesson 04 or 05, the second one the limit per rank in MB (10^6 bytes), and the flags are
those of the lesson's train.py. limited_memory.py starts this script for several lessons and compares them.

The limit (RLIMIT_DATA of Linux) holds for what a rank allocates after it has loaded its libraries and its data, until
its training steps are done. So model, gradients, optimizer state and activations count. Python, PyTorch, the data set
and the checkpoint do not: on a GPU they would be in the memory of the host. The three variables make the C library hand
freed memory back to the system at once. Otherwise it would keep some, and that would count too.
"""

import functools
import json
import os
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from lab.launching import load_script
from workshop.commandline import run_with_config
from workshop.entry import run_reporting_user_errors
from workshop.errors import UserError, first_on_node
from workshop.paths import REPOSITORY, write_json

MALLOC = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
"""read by the C library when a process starts"""
SMALLEST_MB = 64
"""With less, not even the threads of the libraries could start."""
PEAKS = "peak_of_rank{}.json"
"""name of the file in the run folder that says how much memory a rank needed"""
LESSONS = ("04_mixed_precision", "05_fully_sharded")


def check_system(budget_mb: int) -> None:
    """Raise `UserError` unless the limit is possible here, and large enough for a process to work at all."""
    if not Path("/proc/self/clear_refs").exists() or "CS_GNU_LIBC_VERSION" not in os.confstr_names:
        raise UserError("this experiment limits memory in a way that only Linux with the GNU C library has")
    if budget_mb < SMALLEST_MB:
        raise UserError(
            f"a limit of {budget_mb} MB is less than the libraries need for themselves; give at least {SMALLEST_MB}"
        )


def status_bytes(key: str) -> int:
    """Return an entry of /proc/self/status in bytes: VmData, VmRSS, or VmHWM, the largest VmRSS so far."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


def warm_up() -> None:
    """Compute and communicate a little, so that the libraries allocate now what they need for themselves."""
    layers = nn.Sequential(nn.Conv2d(1, 8, 2, stride=2), nn.Flatten(), nn.Linear(32, 8), nn.GELU())
    optimizer = torch.optim.AdamW(layers.parameters())
    F.cross_entropy(layers(torch.ones(2, 1, 4, 4)), torch.zeros(2, dtype=torch.long)).backward()
    optimizer.step()
    whole = torch.ones(2 * dist.get_world_size())
    dist.all_reduce(whole)
    dist.all_gather_into_tensor(whole, torch.ones(2))
    dist.reduce_scatter_tensor(torch.ones(2), whole)
    dist.broadcast(whole, src=0)


def limit_training(lesson: ModuleType, budget: int) -> None:
    """Change the loaded train.py of a lesson: from loading the data to the end of the steps, memory is limited.

    Args:
        lesson: as `load_script` returns it.
        budget: bytes that this process may allocate in addition to those that it has when its data is loaded.
    """
    make_loader: Callable[..., Any] = lesson.make_loader
    train_one_epoch: Callable[..., Any] = lesson.train_one_epoch
    resident = 0

    @functools.wraps(make_loader)
    def load_then_limit(config: Any, split: str, *others: Any) -> Any:  # noqa: ANN401
        nonlocal resident
        loader = make_loader(config, split, *others)
        if split == "val":  # the last that is loaded
            warm_up()
            Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again from here: see `man 5 proc`
            resident = status_bytes("VmRSS")
            resource.setrlimit(resource.RLIMIT_DATA, (status_bytes("VmData") + budget, resource.RLIM_INFINITY))
        return loader

    @functools.wraps(train_one_epoch)
    def train_then_lift(config: Any, *others: Any) -> Any:  # noqa: ANN401
        loss = train_one_epoch(config, *others)
        resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        file = Path(config.run_dir) / PEAKS.format(dist.get_rank())
        write_json(file, {"peak_bytes": status_bytes("VmHWM") - resident})
        return loss

    lesson.make_loader, lesson.train_one_epoch = load_then_limit, train_then_lift  # type: ignore[attr-defined]


def read_peaks(folder: Path) -> list[int]:
    """Return how many bytes each rank needed at most in the run of this folder."""
    return [json.loads(file.read_text())["peak_bytes"] for file in sorted(folder.glob(PEAKS.format("*")))]


def main() -> None:
    """Read lesson and limit, and hand the rest of the command line to the lesson's script."""
    words = sys.argv[1:]
    if words[:1] in (["--help"], ["-h"]):
        print(__doc__.strip())
        return
    reported = not first_on_node()
    if len(words) < 2 or words[0] not in LESSONS or not words[1].isdecimal():
        mistake = f"give {' or '.join(LESSONS)}, a limit in MB, then flags of its train.py (see --help)"
        raise UserError(mistake, already_reported=reported)
    budget_mb = int(words[1])
    check_system(budget_mb)
    if missing := [f"{name}={value}" for name, value in MALLOC.items() if os.environ.get(name) != value]:
        raise UserError(f"set {' '.join(missing)} before this script starts (see --help)", already_reported=reported)
    lesson = load_script(REPOSITORY / words[0])
    limit_training(lesson, budget_mb * 10**6)
    sys.argv = [str(REPOSITORY / words[0] / "train.py"), *words[2:]]
    run_with_config(lesson.main, lesson.Config, lesson.__doc__)


if __name__ == "__main__":
    run_reporting_user_errors(main)
