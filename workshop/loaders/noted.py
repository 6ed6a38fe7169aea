"""When a loader's worker processes prepared their batches, for ``--trace true``, which cannot look into them."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from torch.utils.data import get_worker_info

FOLDER = "WORKSHOP_WORKER_TIMES"
"""environment variable, which workers inherit: where to note; not set while nobody wants to know"""


@contextmanager
def noted() -> Iterator[None]:
    """Note when what runs inside began and ended, in nanoseconds of the system's clock, if this is a worker."""
    began = time.time_ns()
    yield
    worker, folder = get_worker_info(), os.environ.get(FOLDER)
    if worker and folder:
        with (
            suppress(FileNotFoundError),
            Path(folder, f"worker {worker.id}").open("a") as file,
        ):  # gone: the trace is over
            file.write(f"{began} {time.time_ns()}\n")
