"""What the tests of data sets share: generated digits, prepare.py run as by a user, and a web server to download from.

For example, `from data_helpers import copy as copy` makes `copy` a fixture of that test module.
"""

import gc
import shutil
import sys
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from conftest import REPOSITORY, run_as_script
from sources import generate

PREPARE = REPOSITORY / "data" / "prepare.py"
NAMES = [f"{prefix}-{kind}-ubyte" for prefix in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")]


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """300 + 100 generated digits of seed 7; not to be changed."""
    folder = tmp_path_factory.mktemp("generated")
    generate("mnist", folder, train_samples=300, val_samples=100, seed=7)
    return folder


@pytest.fixture
def copy(generated: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(generated, tmp_path / "copy"))


@pytest.fixture
def prepare(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture) -> Callable[..., tuple[int, str, str]]:
    """Run prepare.py with these arguments: exit status, stdout, stderr."""

    def run(*arguments: object) -> tuple[int, str, str]:
        with monkeypatch.context() as patch:
            patch.setattr(sys, "argv", ["prepare.py", *map(str, arguments)])
            capfd.readouterr()
            status = 0
            try:
                run_as_script(PREPARE, patch)
            except SystemExit as stop:
                status = stop.code
            return status, *capfd.readouterr()

    return run


def raw(data_dir: Path) -> Path:
    return data_dir / "MNIST" / "raw"


def contents(data_dir: Path) -> dict[str, bytes]:
    return {name: (raw(data_dir) / name).read_bytes() for name in NAMES}


def assert_one_line(stderr: str) -> None:
    assert stderr.startswith("error: ")
    assert stderr.count("\n") == 1
    assert "Traceback" not in stderr


class Mirror:
    """A web server on this machine; ``pages`` maps a path to its body, or to None for "not found"."""

    def __init__(self) -> None:
        self.pages: dict[str, bytes | None] = {}
        self.cut = 0  # bytes withheld from the end of each page
        self.length: str | None = None  # sent as the length of each page, whatever it is
        self.pause = 0.0  # seconds between one byte and the next
        self.header_pause = 0.0  # the same between the bytes of a header that comes first
        self.asked: list[str] = []
        mirror = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                mirror.asked.append(self.path)
                page = mirror.pages.get(self.path)
                self.send_response(404 if page is None else 200)
                if mirror.header_pause:
                    self.flush_headers()
                    with suppress(OSError):
                        for _ in range(round(30 / mirror.header_pause)):
                            self.wfile.write(b"x")
                            time.sleep(mirror.header_pause)
                        self.wfile.write(b": y\r\n")
                self.send_header("Content-Length", mirror.length or str(len(page or b"")))
                self.end_headers()
                content = (page or b"")[: len(page or b"") - mirror.cut]
                with suppress(OSError):  # the other side may have closed the connection
                    for part in [content[i : i + 1] for i in range(len(content))] if mirror.pause else [content]:
                        self.wfile.write(part)
                        time.sleep(mirror.pause)

            def log_message(self, *arguments: object) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.server.server_port}/"
        Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


def assert_pipelines_end_with(loaders: list[Any]) -> None:
    """Check that their DALI pipelines end when ``loaders`` is emptied, not later, when garbage is collected.

    If garbage collection in a forked loader process ended a pipeline, it would wait there forever.
    """
    pipelines = [weakref.ref(loader.pipeline) for loader in loaders]
    gc.disable()
    try:
        loaders.clear()
        assert [pipeline() for pipeline in pipelines] == [None, None]
    finally:
        gc.enable()
