"""Lesson 01's train.py with a slow file system: each sample takes 2 ms to arrive.

    python experiments/slow_files.py --num_workers 0 --limit_train 1280 --limit_val 64 --log_interval 10
    python experiments/slow_files.py --num_workers 4 --limit_train 1280 --limit_val 64 --log_interval 10

You should see in the log lines that the time *load* becomes much shorter with four workers. A process that waits for a
file needs no CPU, so workers help here even on two CPUs. All flags are those of train.py.
"""

import time
from pathlib import Path
from typing import Any

from lab.launching import load_script
from workshop.config import run_with_config
from workshop.loaders import ImageDataset

SECONDS = 0.002
"""that each sample takes to arrive; a shared file system with many users may take longer for a small file"""


class SlowFiles(ImageDataset):
    """The images of a data set, each of which arrives late."""

    def __getitem__(self, key: tuple[int, int]) -> tuple[Any, int]:
        time.sleep(SECONDS)
        return super().__getitem__(key)


script: Any = load_script(Path(__file__).resolve().parent.parent)
script.ImageDataset = SlowFiles  # in place of the class that make_loader uses

if __name__ == "__main__":
    run_with_config(script.main, script.Config, __doc__)
