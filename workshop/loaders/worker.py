"""What every worker process of a ``DataLoader`` does first: pass `init_worker` as ``worker_init_fn``."""

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch.utils.data import get_worker_info

from workshop.signals import ignore_stop_signals

WORKER_TIMES = "WORKSHOP_WORKER_TIMES"
"""environment variable with the folder in which workers log when they prepared each batch; not set: they do not"""


def init_worker(worker_id: int = 0) -> None:
    """Let this worker ignore the signals that stop a run, and log its batches while a trace is recorded.

    A ``DataLoader`` whose worker dies raises an error in the middle of whatever the training process is doing. So the
    workers must live until the training process has written its checkpoint.
    """
    ignore_stop_signals()
    info = get_worker_info()
    if info and os.environ.get(WORKER_TIMES) and hasattr(info.dataset, "__getitem__"):
        _log_batches(info.dataset, worker_id)


def _log_batches(dataset: Any, worker_id: int) -> None:  # noqa: ANN401
    """Have ``dataset`` log when it read the samples of a batch: start and end in ns, a line per batch."""
    file = Path(os.environ[WORKER_TIMES], f"worker {worker_id}")
    own = getattr(dataset, "__getitems__", None)

    def get_items(keys: list) -> list:
        began = time.time_ns()
        samples = own(keys) if own else [dataset[key] for key in keys]
        with suppress(FileNotFoundError), file.open("a") as log:  # the folder is deleted when the trace is complete
            log.write(f"{began} {time.time_ns()}\n")
        return samples

    dataset.__getitems__ = get_items  # PyTorch calls this, if there is one, to read all samples of a batch


__all__ = ["WORKER_TIMES", "init_worker"]
