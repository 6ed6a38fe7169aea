"""Run by tests as a rank: a lesson's script in which one rank sends itself a signal in one of its steps, or fails.

python signalled.py RANK STEP SIGNAL train.py FLAGS...        # the step is counted over all epochs
python signalled.py RANK STEP EXCEPTION train.py FLAGS...

With SIGSTOP the others wait for seconds only.
"""

import builtins
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
        if name in vars(builtins):
            raise vars(builtins)[name]
        os.kill(os.getpid(), signal.Signals[name])


signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever runs the tests may ignore it
Progress.count_step = counted
if name == "SIGSTOP":
    heartbeat.SILENCE, heartbeat.SILENCE_AFTER_FAILURE = 6.0, 3.0
sys.argv = [script, *sys.argv[5:]]
runpy.run_path(script, run_name="__main__")
