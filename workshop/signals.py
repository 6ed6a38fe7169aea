"""Signals that ask a run to stop: they are recorded when they arrive, and acted on later, between two steps.

Ctrl-C sends SIGINT, a terminal that is closed SIGHUP. Slurm sends SIGTERM when a job is cancelled, preempted or
requeued, and the signal of ``#SBATCH --signal`` before the time limit. The workers of a loader may get all of them too.
"""

import os
import signal
import threading
from multiprocessing.queues import Queue
from types import FrameType
from typing import Any

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT)


class StopSignals:
    """Context manager that records stop signals instead of letting them end the process; a second SIGINT ends it."""

    received = 0
    """number of the last signal, 0 if there was none"""

    def __enter__(self) -> "StopSignals":
        handled = [
            number for number in STOP_SIGNALS if signal.getsignal(number) != signal.SIG_IGN
        ]  # nohup ignores SIGHUP
        self._before: dict[int, Any] = {number: signal.signal(number, self._on_signal) for number in handled}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        self.received = number
        if number == signal.SIGINT:
            signal.signal(number, signal.SIG_DFL)
            self._before[number] = signal.SIG_DFL  # a second Ctrl-C ends the process, also while the run ends


def ignore_stop_signals() -> None:
    """Let this worker process ignore the stop signals, unless the process that it works for sends them.

    A ``DataLoader`` whose worker dies raises an error in the middle of whatever the training process is doing. So a
    worker must not die while the training process has a checkpoint to write.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the training process never sends it
    # A worker without file descriptors or shared memory drops its batch, and the training process would wait forever.
    Queue._on_queue_feeder_error = staticmethod(lambda *_: os._exit(1))  # type: ignore[attr-defined]
    if not hasattr(signal, "sigwaitinfo"):  # macOS, where there is no Slurm
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    threading.Thread(target=_exit_when_parent_asks, args=[os.getppid()], daemon=True).start()


def _exit_when_parent_asks(parent: int) -> None:
    while signal.sigwaitinfo(STOP_SIGNALS).si_pid != parent:
        pass
    os._exit(0)
