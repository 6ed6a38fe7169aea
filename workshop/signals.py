"""Being told to stop: SIGTERM and SIGUSR1 are noted when they come and acted on later, between two steps.

Slurm sends SIGTERM when a job is cancelled, preempted or requeued, and whatever ``#SBATCH --signal`` says before the
time limit. It may send them to all processes of a task, so also to those that load data.
"""

import os
import signal
import threading
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class StopSignals:
    """While it is entered, notes the stop signals instead of dying of them."""

    received = 0
    """number of the last one, 0 while there was none"""

    def __enter__(self) -> "StopSignals":
        self._before = {number: signal.signal(number, self._note) for number in STOP_SIGNALS}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _: FrameType | None) -> None:
        self.received = number


def obey_only_parent(_: int = 0) -> None:
    """Let this worker process ignore the stop signals, unless the process that it works for sends them.

    A ``DataLoader`` whose worker dies raises in the middle of whatever the training process is doing, so a worker must
    not die while that one has a checkpoint to write. Use as ``worker_init_fn``.
    """
    if not hasattr(signal, "sigwaitinfo"):  # macOS, where there is no Slurm
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    threading.Thread(target=_end_when_parent_says, args=[os.getppid()], daemon=True).start()


def _end_when_parent_says(parent: int) -> None:
    while signal.sigwaitinfo(STOP_SIGNALS).si_pid != parent:
        pass
    os._exit(0)
