"""A process that judges learners' files, one after the other: ``python -m clinic.grader``.

It reads requests, ``{"exercise": NAME, "file": PATH}``, one a line, and answers each with ``{"seen": [...]}``, the
lines that say what is still wrong; none if the exercise is passed. Each file is judged by a child, within
`LIMIT` seconds; whatever processes it started are ended with it, also those that left their parents.
"""

import ctypes
import importlib.util
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

import psutil
import torch
import torch.utils.tensorboard
import torchvision.datasets  # noqa: F401

import workshop.commandline
import workshop.run  # noqa: F401
from clinic import catalogue
from clinic.observe import Fault, Script

LIMIT = 50.0
"""seconds for one file"""


def mistake_in(file: Path) -> str | None:
    """Return, in a line, why the file is no Python; None if it is."""
    try:
        compile(file.read_bytes(), file.name, "exec", dont_inherit=True)
    except SyntaxError as error:
        text = f": {error.text.strip()}" if error.text else ""
        return f"line {error.lineno} is not Python ({error.msg}){text}"
    except ValueError as error:
        return f"the file is not Python: {error}"
    return None


def judge(exercise: catalogue.Exercise, file: Path, folder: Path) -> list[str]:
    """Return what is still seen to be wrong with ``file``, which may write into ``folder``."""
    if mistake := mistake_in(file):
        return [mistake]
    sys.path.append(str(exercise.lesson))  # what stands beside train.py, wherever the file is
    spec = importlib.util.spec_from_file_location("grade", exercise.folder / "grade.py")
    assert spec and spec.loader, exercise.folder
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    grade = module.grade
    try:
        return list(grade(Script(file, folder)))
    except Fault as fault:
        return [str(fault)]


def answer(request: dict[str, Any]) -> dict[str, list[str]]:
    """Judge one file in a child process, and end all that it leaves behind."""
    folder = Path(tempfile.mkdtemp(prefix="clinic_"))
    seconds = request.get("seconds", LIMIT)
    result = folder / "result.json"
    child = os.fork()
    if child == 0:
        try:
            with open(os.devnull) as nothing:
                os.dup2(nothing.fileno(), 0)
            os.dup2(2, 1)  # stdout carries the answers, so the script must not write there
            seen = judge(catalogue.find(request["exercise"]), Path(request["file"]), folder)
            (folder / "result.tmp").write_text(json.dumps({"seen": seen}))
            (folder / "result.tmp").rename(result)
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            sys.stderr.flush()
            os._exit(0)
    end = time.monotonic() + seconds
    while time.monotonic() < end and os.waitpid(child, os.WNOHANG) == (0, 0):
        time.sleep(0.02)
    end_all(psutil.Process().children(recursive=True))
    try:
        return json.loads(result.read_text())
    except OSError:
        late = time.monotonic() >= end
        return {"seen": [f"no result within {seconds:.0f} s" if late else "the check itself ended early; see above"]}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def end_all(processes: Iterable[psutil.Process]) -> None:
    """Kill these processes, and those that become children of this one when their parents are gone."""
    for _ in range(100):
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(processes, timeout=1)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG) != (0, 0):
                pass
        if not (processes := psutil.Process().children(recursive=True)):
            return


def adopt_orphans() -> None:
    """Have processes whose parents end become children of this one, so that it can end them; on Linux only."""
    if sys.platform == "linux":
        set_child_subreaper = 36  # of <linux/prctl.h>
        ctypes.CDLL(None).prctl(set_child_subreaper, 1)


def serve(requests: Iterable[str], answers: TextIO) -> None:
    """Answer requests until there are no more."""
    for request in requests:
        answers.write(json.dumps(answer(json.loads(request))) + "\n")
        answers.flush()


def leave(*_: object) -> None:
    """End with everything that was started."""
    end_all(psutil.Process().children(recursive=True))
    os._exit(1)


if __name__ == "__main__":
    # One thread: this process forks, and torch's threads would not be there in the child.
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    torch.set_num_threads(1)
    for name in [name for name in os.environ if name.startswith(("SLURM", "TORCHELASTIC"))]:
        del os.environ[name]
    signal.signal(signal.SIGTERM, leave)
    adopt_orphans()
    serve(sys.stdin, sys.stdout)
