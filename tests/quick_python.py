"""A Python that starts at once, because importing torch takes seconds: a server has imported it, and forks itself.

`commands` returns a folder with `python`, `kernprof` and `torchrun`: small clients that pass their arguments, folder,
environment and streams to the server, pass signals on to the fork, and exit as it does. What begins neither with a
file nor with ``-m``, and all with LD_PRELOAD or a sitecustomize.py, is passed to the real Python, `sys.executable`.
"""

import atexit
import gc
import json
import os
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

LONGEST = 1 << 17
MODULES: dict[str, list[str]] = {
    "python": [],
    "kernprof": ["-m", "kernprof"],
    "torchrun": ["-m", "torch.distributed.run"],
}
PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGCONT)
CLIENT = """#!{python} -IS
import sys
sys.path.insert(0, {here!r})
from quick_python import ask
ask({words!r} + sys.argv[1:])
"""


@cache
def commands() -> Path:
    """Return the folder of the commands, which work as long as this process lives."""
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    server = subprocess.Popen(
        [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True
    )
    commands.server = server  # it ends when its stdin is closed, at the latest with this process
    return Path(server.stdout.readline().rstrip())


def ask(words: list[str]) -> None:
    """In the client: look like the fork that runs these words."""
    words = [word for word in words if word != "-u"]  # torchrun's
    quick = bool(words) and (words[0] == "-m" or words[0].endswith(".py"))
    path = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    watched = any(Path(folder, "sitecustomize.py").is_file() for folder in filter(None, path))  # by the doctor
    if not quick or watched or "LD_PRELOAD" in os.environ:  # a library in front of torch's, such as the null GPU
        os.execv(sys.executable, [sys.executable, *words])
    signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)  # until there is a process to pass them on to
    here = Path(sys.argv[0]).resolve().parent
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(str(here / "server"))
    request = {"words": words, "folder": os.getcwd(), "environment": dict(os.environ), "python": str(here / "python")}
    socket.send_fds(connection, [json.dumps(request).encode()], [0, 1, 2])
    process = int(connection.recv(LONGEST))
    for number in PASSED_ON:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda number, _: os.kill(process, number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
    status = int(connection.recv(LONGEST))
    if status < 0:
        signal.signal(-status, signal.SIG_DFL) if -status != signal.SIGKILL else None
        os.kill(os.getpid(), -status)
    os._exit(status)


def serve(folder: Path) -> dict[str, Any] | None:
    """Fork for every client until stdin is closed, then return None; in a fork, return what its client asks for."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(folder / "server"))
    listener.listen(64)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the forks
    print(folder, flush=True)
    while sys.stdin not in select.select([listener, sys.stdin], [], [])[0]:
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            return fork_for(connection)
        connection.close()
    return None


def fork_for(connection: socket.socket) -> dict[str, Any]:
    """Fork, and return in the new process what its client asks for; otherwise wait for it and send its status."""
    content, streams, _, _ = socket.recv_fds(connection, LONGEST, 3)
    process = os.fork()
    if process == 0:
        connection.close()
        for stream, number in zip(streams, range(3), strict=True):
            os.dup2(stream, number)
            os.close(stream)
        return json.loads(content)
    for stream in streams:
        os.close(stream)

    def end_with_client() -> None:
        connection.recv(1)  # returns when the client is gone
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)

    with suppress(OSError):  # the client was killed
        connection.send(str(process).encode())
        threading.Thread(target=end_with_client, daemon=True).start()
        connection.send(str(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])).encode())
    os._exit(0)


def become(request: dict[str, Any]) -> None:
    """Run a script, or a module with ``-m``, in this fork as Python would."""
    import torch

    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    threads = int(os.environ.get("OMP_NUM_THREADS", torch.get_num_threads()))
    torch.set_num_threads(threads)  # also if nothing changes: the fork has none of the threads there were
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=stream.isatty() or "PYTHONUNBUFFERED" in os.environ)
    sys.executable = request["python"]
    words = request["words"]
    sys.path[:1] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    if words[0] == "-m":
        sys.path.insert(0, os.getcwd())
        sys.argv = words[1:]
        sys.modules.pop(words[1], None)  # else runpy warns
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(words[0]).resolve().parent))
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")


def run_and_exit(request: dict[str, Any]) -> None:
    """Run what was asked for, and exit with its status; Python's own end would take apart all that was imported."""
    status: object = 0
    try:
        become(request)
    except SystemExit as stop:
        status = stop.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
        status = 1
    if not isinstance(status, int | None):
        print(status, file=sys.stderr)
        status = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    with suppress(OSError):
        sys.stdout.flush()
    os._exit(status or 0)


if __name__ == "__main__":
    import jsonargparse  # noqa: F401
    import matplotlib.pyplot  # noqa: F401
    import torch._dynamo
    import torch.distributed.checkpoint
    import torch.distributed.run
    import torch.utils.tensorboard  # noqa: F401
    import torchvision  # noqa: F401

    gc.freeze()  # what is here now stays: to look through it would copy it into each fork
    folder = Path(tempfile.mkdtemp(prefix="quick-python-"))
    for command, words in MODULES.items():
        (folder / command).write_text(
            CLIENT.format(python=sys.executable, here=str(Path(__file__).parent), words=words)
        )
        (folder / command).chmod(0o755)
    request = serve(folder)
    if request is not None:
        run_and_exit(request)
    shutil.rmtree(folder)
