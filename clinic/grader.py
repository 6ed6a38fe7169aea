"""A process that judges learners' files, one after the other: ``python -m clinic.grader``.

It reads requests, ``{"exercise": NAME, "file": PATH}``, one a line, and answers each with ``{"seen": [...]}``, the
lines that say what is still wrong; none if the exercise is passed. Each file is judged by a child, within `LIMIT`
seconds, or more on a busy machine; whatever processes it started are ended with it, also those that left their parents.
"""

import codecs
import ctypes
import importlib.util
import io
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import tokenize
import traceback
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
from clinic.observe import Fault, Script, slowness

LIMIT = 50.0
"""seconds for one file, on an idle machine"""
FOLDERS: list[Path] = []
"""the temporary folder of the file that is being judged"""


def mistake_in(file: Path) -> str | None:
    """Return, in a line, why the file is no Python; None if it is."""
    content = file.read_bytes()
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "the file is not Python: it is saved as UTF-16, but Python reads UTF-8"
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(content).readline)
        content.decode(encoding)  # compile() would accept any bytes in a comment; Python does not
        compile(content, file.name, "exec", dont_inherit=True)
    except UnicodeDecodeError as error:
        line, byte = content.count(b"\n", 0, error.start) + 1, content[error.start]
        return f"line {line} is not Python (its byte 0x{byte:02x} is not {encoding}; save the file as UTF-8)"
    except SyntaxError as error:
        if error.lineno is None:
            return f"the file is not Python: {error.msg}"
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
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(place.filename).name}, line {place.lineno}"
        return [f"the check itself failed on this script, which does something unexpected ({error!r} in {where})"]


def answer(request: dict[str, Any]) -> dict[str, list[str]]:
    """Judge one file in a child process, and end all that it leaves behind.

    The child writes the result into a pipe. The processes that run the script do not have it, so none of them can write
    a result in its place.
    """
    folder = Path(tempfile.mkdtemp(prefix="clinic_"))
    FOLDERS.append(folder)
    seconds = request.get("seconds", LIMIT * slowness())
    result, child_result = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # `leave` is for the grader itself
            os.close(result)
            out = only_in_this_process(child_result)
            with open(os.devnull) as nothing:
                os.dup2(nothing.fileno(), 0)
            os.dup2(2, 1)  # stdout carries the answers, so the script must not write there
            seen = judge(catalogue.find(request["exercise"]), Path(request["file"]), folder)
            with out:
                out.write(json.dumps({"seen": seen}))
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            sys.stderr.flush()
            os._exit(0)
    os.close(child_result)
    os.set_blocking(result, False)
    written = b""
    end = time.monotonic() + seconds
    is_running = True
    while time.monotonic() < end and is_running:
        is_running = os.waitpid(child, os.WNOHANG) == (0, 0)
        with suppress(BlockingIOError):
            while piece := os.read(result, 65536):
                written += piece
        time.sleep(0.02)
    os.close(result)
    end_all(psutil.Process().children(recursive=True))
    shutil.rmtree(folder, ignore_errors=True)
    FOLDERS.remove(folder)
    if is_running:
        return {"seen": [f"no result within {seconds:.0f} s"]}
    try:
        return json.loads(written)
    except ValueError:
        return {"seen": ["the check itself ended early: was it killed by the script?"]}


def only_in_this_process(descriptor: int) -> TextIO:
    """Return an open file to write to, which the processes that this one forks do not have.

    Each fork closes it, also one that is forked by a fork. Closing the file a second time does nothing; closing the
    descriptor a second time could close another file, which has got the same number in the meantime.
    """
    file = open(descriptor, "w")  # noqa: SIM115
    os.register_at_fork(after_in_child=file.close)
    return file


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
    """End with everything that was started or written."""
    end_all(psutil.Process().children(recursive=True))
    for folder in FOLDERS:
        shutil.rmtree(folder, ignore_errors=True)
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
    try:
        serve(sys.stdin, sys.stdout)
    except BrokenPipeError:  # the process that asked has ended
        os._exit(1)
