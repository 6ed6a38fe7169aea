"""A Python that starts at once: a server has imported torch, and every process is a fork of it.

`commands` fills a folder with `python`, `kernprof` and `torchrun`, each a small client: it hands its arguments, folder,
environment and streams to the server, passes signals on, and ends as the fork does. Where how Python starts is what a
test is about, it takes the real one, `sys.executable`.
"""

import atexit
import gc
import json
import os
import runpy
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from pathlib import Path

LONGEST = 1 << 17
MODULES: dict[str, list[str]] = {"python": [], "kernprof": ["-m", "kernprof"]}
MODULES["torchrun"] = ["-m", "torch.distributed.run"]
PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT)
CLIENT = """#!{python} -IS
import sys
sys.path.insert(0, {here!r})
from quick_python import ask
ask({words!r} + sys.argv[1:])
"""


@cache
def commands() -> Path:
    """Return a folder of commands that work as long as this process lives, and begin to keep a server for them."""
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    server = subprocess.Popen(
        [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True
    )
    commands.server = server  # it ends when its stdin is closed, at the latest with this process
    return Path(server.stdout.readline().rstrip())


def write_commands(folder: Path) -> None:
    """Write the clients of a server that listens in this folder."""
    for name, words in MODULES.items():
        client = CLIENT.format(python=sys.executable, here=str(Path(__file__).parent), words=words)
        (folder / name).write_text(client)
        (folder / name).chmod(0o755)


def ask(words: list[str]) -> None:
    """Look from outside like the process that the server forks for these words."""
    plain = [word for word in words if word != "-u"]  # torchrun's
    if not plain or not (plain[0] == "-m" or plain[0].endswith(".py")):
        os.execv(sys.executable, [sys.executable, *words])
    signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)  # until there is a process to pass them on to
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    here = Path(sys.argv[0]).resolve().parent
    connection.connect(str(here / "server"))
    request = {"words": plain, "folder": os.getcwd(), "environment": dict(os.environ), "python": str(here / "python")}
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


def serve(folder: Path) -> dict | None:
    """Fork for everyone who asks, until stdin is closed; return, in a fork, what was asked of it."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(folder / "server"))
    listener.listen(64)
    woken, waker = socket.socketpair()
    waker.setblocking(False)
    signal.set_wakeup_fd(waker.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)
    print(folder, flush=True)
    clients: dict[int, socket.socket] = {}
    with selectors.DefaultSelector() as selector:
        for readable in (listener, woken, sys.stdin):
            selector.register(readable, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is sys.stdin:
                    for process in clients:
                        os.kill(process, signal.SIGKILL)
                    return None
                if key.fileobj is woken:
                    woken.recv(LONGEST)
                    for process in list(clients):
                        ended, status = os.waitpid(process, os.WNOHANG)
                        if ended:
                            client = clients.pop(process)
                            selector.unregister(client)
                            with suppress(OSError):  # whoever asked was killed meanwhile
                                client.send(str(os.waitstatus_to_exitcode(status)).encode())
                            client.close()
                elif key.fileobj is listener:
                    client, _ = listener.accept()
                    content, streams, _, _ = socket.recv_fds(client, LONGEST, 3)
                    if not content:
                        client.close()
                        continue
                    process = os.fork()
                    if process == 0:
                        signal.set_wakeup_fd(-1)
                        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                        for stream, number in zip(streams, range(3), strict=True):
                            os.dup2(stream, number)
                            os.close(stream)
                        for kept in (listener, woken, waker, client, *clients.values()):
                            kept.close()
                        return json.loads(content)
                    for stream in streams:
                        os.close(stream)
                    clients[process] = client
                    selector.register(client, selectors.EVENT_READ, process)
                    with suppress(OSError):  # whoever asked was killed, as the next event will show
                        client.send(str(process).encode())
                elif key.data in clients:  # whoever asked was killed
                    os.kill(key.data, signal.SIGKILL)
                    selector.unregister(key.fileobj)
                    clients.pop(key.data).close()
                    os.waitpid(key.data, 0)


def become(request: dict) -> None:
    """Run a script, or a module with ``-m``, in this fork as Python would."""
    import torch

    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    threads = int(os.environ.get("OMP_NUM_THREADS", torch.get_num_threads()))
    torch.set_num_threads(threads)  # also if nothing changes: autograd's threads would replace the lost ones in a race
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=stream.isatty() or "PYTHONUNBUFFERED" in os.environ)
    sys.executable = request["python"]
    words = request["words"]
    path = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:1] = filter(None, path)
    if words[0] == "-m":
        sys.path.insert(0, os.getcwd())
        sys.argv = words[1:]
        sys.modules.pop(words[1], None)  # else runpy warns
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(words[0]).resolve().parent))
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")


def end_as_python_does(run: Callable[[], None]) -> None:
    """Run it, end this process with its status; Python's own end would take apart all that was imported."""
    status: object = 0
    try:
        run()
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
    import torch.distributed.run
    import torch.utils.tensorboard  # noqa: F401
    import torchvision  # noqa: F401

    gc.freeze()  # what is here now stays: to look through it would copy it into each fork
    own = Path(tempfile.mkdtemp(prefix="quick-python-"))
    write_commands(own)
    request = serve(own)
    if request:
        end_as_python_does(partial(become, request))
    shutil.rmtree(own)
    os._exit(0)
