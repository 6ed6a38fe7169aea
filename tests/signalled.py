"""Run by tests as a rank: a lesson's script in which one rank sends itself a signal in one of its steps.

python signalled.py RANK STEP SIGNAL train.py FLAGS...        # the step is counted over all epochs

With SIGSTOP the others wait for seconds only.
"""

import os
import runpy
import signal
import sys

import torch

from workshop.distributed import heartbeat
from workshop.run.progress import Progress

rank, step, name, script = sys.argv[1:5]
count_step = Progress.count_step


def counted(progress: Progress, loss: torch.Tensor) -> None:
    count_step(progress, loss)
    if progress.ranks.rank == int(rank) and progress.steps + progress.step == int(step):
        os.kill(os.getpid(), signal.Signals[name])


Progress.count_step = counted
if name == "SIGSTOP":
    heartbeat.SILENCE, heartbeat.SILENCE_AFTER_FAILURE = 6.0, 3.0
sys.argv = [script, *sys.argv[5:]]
runpy.run_path(script, run_name="__main__")
