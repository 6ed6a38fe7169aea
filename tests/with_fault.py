"""Run by tests as a rank: a script to which something happens at an event, on one rank or on all of them.

    python with_fault.py RANK EVENT COUNT WHAT train.py FLAGS...

EVENT is a function, such as ``workshop.log.Log.start_step``, or ``files``, which is any operation on a file or
folder of checkpoints; WHAT, which happens just before the COUNT-th of them, is the name of a signal. With the event
``seconds`` it happens after so much time. A lesson's script calls it in each step: call n is step n.
The signal SIGUSR1 is also sent to the workers of the loader, as Slurm does.
"""

import os
import pkgutil
import runpy
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import psutil

rank, event, count, what, script = sys.argv[1:6]
process, calls = os.getpid(), 0
FILES = {"open", "os.rename", "os.remove", "os.rmdir", "os.mkdir"}


def count_call() -> None:
    global calls
    if os.getpid() == process:  # not a worker of the loader
        calls += 1
        if calls == int(count):
            strike()


def strike() -> None:
    if rank not in (os.environ.get("RANK", "0"), "all"):
        return
    if what == "SIGUSR1":
        for worker in psutil.Process().children():
            worker.send_signal(signal.SIGUSR1)
    os.kill(process, signal.Signals[what])


def hook(name: str, arguments: tuple[Any, ...]) -> None:
    if name in FILES and "checkpoint" in str(arguments[0]):
        count_call()


if event == "files":
    sys.addaudithook(hook)
elif event == "seconds":
    timer = threading.Timer(float(count), strike)
    timer.daemon = True
    timer.start()
else:
    module, _, function = event.rpartition(".")
    owner: Any = pkgutil.resolve_name(module)
    original = getattr(owner, function)

    def counted(*arguments: Any, **options: Any) -> Any:  # noqa: ANN401
        count_call()
        return original(*arguments, **options)

    setattr(owner, function, counted)
sys.argv = sys.argv[5:]
sys.path.insert(0, str(Path(script).resolve().parent))
runpy.run_path(script, run_name="__main__")
