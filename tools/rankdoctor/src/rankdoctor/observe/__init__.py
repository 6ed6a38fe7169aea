"""Observation inside a process of the script: one module for each subject. `events` lists what they write."""

import atexit
import faulthandler
import multiprocessing.util
import os
import signal
import sys
import time
import traceback
from types import TracebackType

import torch

from .. import standin
from ..overlay import own
from ..trail import note, trail
from . import (
    averages,
    by_hand,
    collectives,
    contrast,
    data,
    files,
    frozen,
    handles,
    influence,
    model,
    modes,
    optimizer,
    parity,
    passes,
    probe,
    randomness,
    reference,
    states,
    totals,
    works,
)
from .common import CONFIG, quietly, state

LEAVE = 0.2
"""seconds for gloo's threads to let go of tensors: later, while Python ends, that aborts the process"""
SUBJECTS = (
    data,
    model,
    passes,
    optimizer,
    collectives,
    files,
    randomness,
    handles,
    influence,
    reference,
    parity,
    totals,
    frozen,
    contrast,
    states,
    averages,
    modes,
    works,
    by_hand,
)


def install() -> None:
    """Patch torch, which has just been imported in this process."""
    stack = os.fdopen(own["open"](f"{CONFIG.logs}/{os.getpid()}.stack", os.O_CREAT | os.O_WRONLY), "w")
    faulthandler.register(signal.SIGQUIT, file=stack, all_threads=False)
    os.register_at_fork(after_in_child=state.forget)
    standin.install(CONFIG)
    for subject in SUBJECTS:
        subject.install()
    atexit.register(time.sleep, LEAVE)
    atexit.register(finish, "end")
    multiprocessing.util.Finalize(None, finish, ("end",), exitpriority=1000)  # a process of mp.spawn runs no atexit
    _note_errors()


def _note_errors() -> None:
    own_hook = sys.excepthook

    def failed(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        frames = traceback.extract_tb(trace)
        users = [f"{frame.filename}:{frame.lineno}" for frame in frames if trail.kind_of(frame.filename) > 0]
        last = frames[-1] if frames else None
        note(
            "error",
            type=kind.__name__,
            text=str(error)[:2000],
            at=users[-1] if users else "?",
            inner=f"{last.filename}:{last.lineno} {last.name}" if last else "?",
        )
        finish("error")
        own_hook(kind, error, trace)

    sys.excepthook = failed


def finish(how: str) -> None:
    """Write what is known only at the end; ``how`` the process ends."""
    if state.ended or trail.file is None or torch.utils.data.get_worker_info():
        return
    state.ended = True
    if how != "error":
        probe.look_at_samples()
    _write_end(how)


@quietly
def _write_end(how: str) -> None:
    for subject in (model, optimizer, averages):
        subject.finish()
    standin.Profiling.note_end()
    values = sys.modules.get("nullgpu.values")
    if values and values.not_computed:
        note("no_values", names=sorted(values.not_computed))
    note("end", how=how)


state.finish = finish
