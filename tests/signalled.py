"""Run by tests as a rank: a lesson's script in which one rank sends itself a signal in one of its steps, or fails.

python signalled.py RANK STEP SIGNAL train.py FLAGS...      # the step is counted over all epochs; 0: after rendezvous
python signalled.py RANK STEP EXCEPTION train.py FLAGS...

With SIGSTOP, or in step 0, the other ranks wait only for seconds until they count the rank as lost.
"""

import builtins
import importlib
import os
import runpy
import signal
import sys

import torch
import torch.distributed as dist

import workshop.distributed
from workshop.run.position import Position

rank, step, name, script = sys.argv[1:5]
count_step, rendezvous = Position.count_step, workshop.distributed.rendezvous


def count_step_then_signal(position: Position, loss: torch.Tensor) -> None:
    count_step(position, loss)
    if position.rank == int(rank) and position.finished_steps + position.step == int(step):
        if name in vars(builtins):
            raise vars(builtins)[name]
        os.kill(os.getpid(), signal.Signals[name])


def rendezvous_then_signal(rank_: int, world_size: int, device: torch.device) -> dist.Store:
    store = rendezvous(rank_, world_size, device)
    if rank_ == int(rank):
        os.kill(os.getpid(), signal.Signals[name])
    return store


signal.signal(signal.SIGINT, signal.default_int_handler)  # the process that runs the tests may ignore it
Position.count_step = count_step_then_signal
if step == "0":
    workshop.distributed.rendezvous = rendezvous_then_signal
if name == "SIGSTOP" or step == "0":
    detector = importlib.import_module("workshop.distributed.failure_detector")  # the package has a function so named
    detector.TIMEOUT, detector.TIMEOUT_AFTER_FAILURE = 6.0, 3.0
sys.argv = [script, *sys.argv[5:]]
sys.path.insert(0, os.path.dirname(os.path.abspath(script)))  # as Python does; the script imports modules beside it
runpy.run_path(script, run_name="__main__")
