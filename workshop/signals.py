"""Being told to stop: signals are noted when they come and acted on later, between two steps.

Ctrl-C sends SIGINT, a terminal that is closed SIGHUP. Slurm sends SIGTERM when a job is cancelled, preempted or
requeued, and whatever ``#SBATCH --signal`` says before the time limit. All may reach those that load data as well.
"""

import os
import signal
import threading
from multiprocessing.queues import Queue
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT)


class StopSignals:
    """While it is entered, notes the stop signals instead of dying of them, except of a second SIGINT."""

    received = 0
    """number of the last one, 0 while there was none"""

    def __enter__(self) -> "StopSignals":
        heeded = [number for number in STOP_SIGNALS if signal.getsignal(number) != signal.SIG_IGN]  # nohup ignores one
        self._before = {number: signal.signal(number, self._note) for number in heeded}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _: FrameType | None) -> None:
        self.received = number
        if number == signal.SIGINT:
            signal.signal(number, signal.SIG_DFL)
            self._before[number] = signal.SIG_DFL  # also while the run ends


def obey_only_parent(_: int = 0) -> None:
    """Let this worker process ignore the stop signals, unless the process that it works for sends them.

    A ``DataLoader`` whose worker dies raises in the middle of whatever the training process is doing, so a worker must
    not die while that one has a checkpoint to write. Use as ``worker_init_fn``.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # which no training process sends
    # Lacking files or shared memory it would drop a batch, for which the training process would wait for good.
    Queue._on_queue_feeder_error = staticmethod(lambda *_: os._exit(1))
    if not hasattr(signal, "sigwaitinfo"):  # macOS, where there is no Slurm
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    threading.Thread(target=_end_when_parent_says, args=[os.getppid()], daemon=True).start()


def _end_when_parent_says(parent: int) -> None:
    while signal.sigwaitinfo(STOP_SIGNALS).si_pid != parent:
        pass
    os._exit(0)
