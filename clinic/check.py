"""Judge files of learners: ``python -m clinic.check EXERCISE FILE...`` prints a line for each, a JSON list.

A line has all that the grader still finds wrong; it is empty if the exercise is passed. `exercise.py` starts this in a
separate process group, and ends the whole group after it.
"""

import importlib.util
import json
import os
import sys
import tempfile
import traceback
from pathlib import Path

import torch
import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp
import torch.utils.tensorboard
import torchvision.datasets  # noqa: F401  # these are imported here, so that the ranks, which are forks, need not

import workshop.config
import workshop.loaders
import workshop.log
import workshop.profiling.all_reduce_counter
import workshop.profiling.mfu
import workshop.profiling.monitor
import workshop.profiling.throughput
import workshop.profiling.trace
import workshop.run  # noqa: F401
from clinic.catalogue import Exercise, find
from clinic.runs import Fault, Script


def check(exercise: Exercise, file: Path) -> list[str]:
    """Return what the grader still finds wrong with a file."""
    try:
        compile(file.read_bytes(), file.name, "exec", dont_inherit=True)
    except SyntaxError as error:
        text = f": {error.text.strip()}" if error.text else ""
        return [f"line {error.lineno or 1} is not Python ({error.msg}){text}"]
    except ValueError as error:
        return [f"the file is not Python: {error}"]
    spec = importlib.util.spec_from_file_location("grade", exercise.folder / "grade.py")
    assert spec and spec.loader, exercise.folder
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    try:
        return list(module.grade(Script(file, Path(tempfile.mkdtemp()), exercise)))
    except Fault as fault:
        return [str(fault)]
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(place.filename).name}, line {place.lineno}"
        return [f"the check itself failed on this script, which does something unexpected ({error!r} in {where})"]


def main() -> None:
    """Judge the files of the command line."""
    name, *files = sys.argv[1:]
    exercise = find(name)
    sys.path.append(str(exercise.lesson))  # what stands beside train.py, wherever the file is
    torch.set_num_threads(1)  # this process forks, and torch's threads would not be there in the fork
    for file in files:
        print(json.dumps(check(exercise, Path(file))), flush=True)
    sys.stdout.flush()
    os._exit(0)  # nothing that the checks have left is waited for


if __name__ == "__main__":
    main()
