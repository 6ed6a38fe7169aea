"""Run by tests as a rank: a lesson's script in which one rank sends itself a signal in one of its steps, or fails.

python signalled.py RANK STEP SIGNAL train.py FLAGS...        # the step is counted over all epochs; 0: having met
python signalled.py RANK STEP EXCEPTION train.py FLAGS...

With SIGSTOP, or in step 0, the others wait for seconds only.
"""

import builtins
import os
import runpy
import signal
import sys

import torch
from workshop.distributed.ranks import Ranks

from workshop.distributed import heartbeat, process_group
from workshop.run.position import Progress

rank, step, name, script = sys.argv[1:5]
count_step, meet = Progress.count_step, process_group.meet


def counted(progress: Progress, loss: torch.Tensor) -> None:
    count_step(progress, loss)
    if progress.ranks.rank == int(rank) and progress.steps + progress.step == int(step):
        if name in vars(builtins):
            raise vars(builtins)[name]
        os.kill(os.getpid(), signal.Signals[name])


def met(ranks: Ranks, device: torch.device) -> torch.distributed.Store:
    store = meet(ranks, device)
    if ranks.rank == int(rank):
        os.kill(os.getpid(), signal.Signals[name])
    return store


signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever runs the tests may ignore it
Progress.count_step = counted
if step == "0":
    process_group.meet = met
if name == "SIGSTOP" or step == "0":
    heartbeat.SILENCE, heartbeat.SILENCE_AFTER_FAILURE = 6.0, 3.0
sys.argv = [script, *sys.argv[5:]]
runpy.run_path(script, run_name="__main__")
