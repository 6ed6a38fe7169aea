"""What takes how long from typing the command to the end of the first step, for ``--start_times true``.

The parts are functions: those of the train script, by their names there, and a few of PyTorch that are known to take
long. Each is timed without the parts that it calls. What is called from the first batch on belongs to the first step.
"""

import functools
import inspect
import time
from collections.abc import Callable
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

OF_THE_SCRIPT = (
    *("ranks_from_env", "device_of_rank", "join_ranks", "make_loader", "make_model", "distribute_model"),
    *("shard_model", "make_optimizer", "compile_parts", "resume"),
)
OF_PYTORCH: tuple[tuple[Any, str, str], ...] = (
    (torch.cuda, "_lazy_init", "CUDA: driver, context, libraries"),
    (dist, "init_process_group", "init_process_group: other ranks, NCCL"),
    (dist, "new_group", "new_group"),
    (DistributedDataParallel, "__init__", "DistributedDataParallel(...), which imports the compiler"),
    (DataLoader, "__iter__", "starting the loader's workers"),
)
IMPORTS, FIRST_BATCH, FIRST_STEP = "Python, imports, flags", "waiting for the first batch", "first step"
OTHER = "everything else"


class StartTimes:
    """Times the parts of a start; as an instrument of the log it learns of the first batch and of the first step.

    Args:
        script: the globals of the train script; its functions are wrapped in there.
    """

    def __init__(self, script: dict[str, Any]) -> None:
        # The age of the process counts from when it was started; perf_counter would count from here on.
        self.seconds: dict[str, float] = {IMPORTS: time.time() - psutil.Process().create_time()}
        self.began = time.perf_counter() - self.seconds[IMPORTS]
        self._inner = [0.0]
        """seconds of timed parts within each part that is being timed"""
        self._restore: list[tuple[Any, str, Any]] = []
        for name in OF_THE_SCRIPT:
            if callable(script.get(name)):
                script[name] = self._timed(script[name], name)
        for owner, name, part in OF_PYTORCH:
            self._restore.append((owner, name, getattr(owner, name)))
            setattr(owner, name, self._timed(getattr(owner, name), part))
        self.done = False

    def _timed(self, function: Callable[..., Any], part: str) -> Callable[..., Any]:
        @functools.wraps(function)
        def timed(*arguments: Any, **named: Any) -> Any:  # noqa: ANN401
            if self.done:
                return function(*arguments, **named)
            began = time.perf_counter()
            self._inner.append(0.0)
            try:
                return function(*arguments, **named)
            finally:
                took = time.perf_counter() - began
                self.seconds[part] = self.seconds.get(part, 0.0) + took - self._inner.pop()
                self._inner[-1] += took

        return timed

    def start_epoch(self) -> None:
        """Note that the first batch is asked for."""
        self._asked, self._inner = time.perf_counter(), [0.0]

    def first_batch(self) -> None:
        """Note that the first batch is here."""
        self._here = time.perf_counter()
        self.seconds[FIRST_BATCH] = self._here - self._asked - self._inner[0]
        self._inner = [0.0]

    def table(self, device: torch.device) -> str:
        """Wait until the device has ended the first step; return the table, the longest part first."""
        if device.type != "cpu":
            torch.accelerator.synchronize()
        now = time.perf_counter()
        self.done = True
        for owner, name, function in self._restore:
            setattr(owner, name, function)
        self.seconds[FIRST_STEP] = now - self._here - self._inner[0]
        whole = now - self.began
        self.seconds[OTHER] = whole - sum(self.seconds.values())
        parts = sorted(self.seconds.items(), key=lambda part: -part[1])
        rows = "".join(f"\n  {seconds:6.2f} s  {part}" for part, seconds in parts if seconds >= 0.005)
        return f"{whole:.2f} s from the start of the process to the end of the first step:{rows}"


current: StartTimes | None = None
"""those of this process, if --start_times true was given"""


def time_start(main: Callable[..., Any]) -> None:
    """Time the start from here on; ``main`` is the function of the train script that is called next."""
    global current
    current = StartTimes(inspect.unwrap(main).__globals__)
