"""MNIST's files: drawn, downloaded, checked and read; whole or not at all, and never over a user's own data."""

import gzip
import hashlib
import json
import os
import runpy
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
import torch
from conftest import REPOSITORY
from torchvision.datasets import MNIST

from workshop.datasets import default_data_dir, files, mnist
from workshop.datasets.digits import VERSION, draw_digits
from workshop.errors import UserError

PREPARE = REPOSITORY / "data" / "prepare.py"
NAMES = [f"{prefix}-{kind}-ubyte" for prefix in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")]


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """300 + 100 generated digits of seed 7; not to be changed."""
    folder = tmp_path_factory.mktemp("generated")
    mnist.generate(folder, 300, 100, seed=7)
    return folder


@pytest.fixture
def copy(generated: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(generated, tmp_path / "copy"))


@pytest.fixture
def prepare(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture) -> Callable[..., tuple[int, str, str]]:
    """Run prepare.py with these arguments: exit status, stdout, stderr."""

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["prepare.py", *map(str, arguments)])
        capfd.readouterr()
        status = 0
        try:
            runpy.run_path(str(PREPARE), run_name="__main__")
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


# What is drawn


def test_the_seed_alone_decides_what_is_drawn(tmp_path: Path, generated: Path) -> None:
    threads = torch.get_num_threads()
    state = torch.get_rng_state()
    try:
        for number in (1, 2, 5):
            torch.set_num_threads(number)
            mnist.generate(tmp_path / str(number), 300, 100, seed=7)
            assert torch.get_num_threads() == number
            assert contents(tmp_path / str(number)) == contents(generated)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(torch.get_rng_state(), state)
    mnist.generate(tmp_path / "other", 300, 100, seed=8)
    assert all(contents(tmp_path / "other")[name] != contents(generated)[name] for name in NAMES)


def test_fewer_samples_are_the_first_of_more_and_splits_differ(generated: Path) -> None:
    images, labels = draw_digits(1100, seed=14)
    train_images, train_labels = mnist.arrays(generated, "train")
    assert torch.equal(images[:300], train_images[:, 0])
    assert torch.equal(labels[:300], train_labels)
    assert not torch.equal(images[1000:], images[:100])
    assert not torch.equal(mnist.arrays(generated, "val")[1], train_labels[:100])


def test_drawn_digits_look_like_mnist_to_a_linear_model() -> None:
    images, labels = draw_digits(8000, seed=0)
    pixels = images.flatten(1).float() / 255
    assert abs(pixels.mean().item() - mnist.MEAN[0]) < 0.02
    assert abs(pixels.std().item() - mnist.STD[0]) < 0.03
    assert labels.bincount().min() > 700
    features = torch.cat([pixels, torch.ones(len(pixels), 1)], dim=1)
    train, val = slice(0, 6000), slice(6000, None)
    gram = features[train].T @ features[train] + 30 * torch.eye(785)
    weights = torch.linalg.solve(gram, features[train].T @ torch.eye(10)[labels[train].long()])
    accuracy = ((features[val] @ weights).argmax(1) == labels[val]).float().mean().item()
    assert 0.7 < accuracy < 0.95


# What is read


@pytest.mark.parametrize(("split", "samples"), [("train", 300), ("val", 100)])
def test_torchvision_reads_what_arrays_returns(generated: Path, split: str, samples: int) -> None:
    images, labels = mnist.arrays(generated, split)
    assert (images.shape, images.dtype) == ((samples, *mnist.SAMPLE_SHAPE), torch.uint8)
    assert (labels.shape, labels.dtype) == ((samples,), torch.int64)
    theirs = MNIST(generated, train=split == "train")
    assert torch.equal(theirs.data, images[:, 0])
    assert torch.equal(theirs.targets, labels)
    image, label = mnist.dataset(generated, split)[5]
    assert label == labels[5]
    torch.testing.assert_close(image, (images[5] / 255 - mnist.MEAN[0]) / mnist.STD[0])


def test_a_wrong_split_is_told(generated: Path) -> None:
    with pytest.raises(UserError, match="no split 'test': it is 'train' or 'val'"):
        mnist.arrays(generated, "test")


def test_missing_data_name_both_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError) as error:
        mnist.check(tmp_path / "my data")
    for command in ("mnist --data_dir", "mnist --synthetic --data_dir"):
        assert f"`python data/prepare.py {command} '{tmp_path}/my data'`" in str(error.value)
    monkeypatch.setenv("WORKSHOP_DATA", str(tmp_path))
    with pytest.raises(UserError) as error:
        mnist.check(tmp_path)
    assert "`python data/prepare.py mnist`" in str(error.value)
    assert "`python data/prepare.py mnist --synthetic`" in str(error.value)
    monkeypatch.setenv("WORKSHOP_DATA", "")
    assert default_data_dir() == REPOSITORY / "data"


def edit(path: Path, position: int, *values: int) -> None:
    data = bytearray(path.read_bytes())
    data[position : position + len(values)] = bytes(values)
    path.write_bytes(data)


DAMAGE = {
    "missing": ("t10k-labels-idx1", lambda path: path.unlink(), "raw: has no t10k-labels-idx1-ubyte"),
    "empty": ("train-labels-idx1", lambda path: os.truncate(path, 0), "expected at least 8 bytes of header, found 0"),
    "header cut": ("train-images-idx3", lambda path: os.truncate(path, 15), "at least 16 bytes of header, found 15"),
    "images cut": ("train-images-idx3", lambda path: os.truncate(path, 999), "expected 235216 bytes, found 999 bytes"),
    "labels cut": ("t10k-labels-idx1", lambda path: os.truncate(path, 107), "expected 108 bytes, found 107 bytes"),
    "overlong": ("t10k-images-idx3", lambda path: os.truncate(path, 80000), "expected 78416 bytes, found 80000 bytes"),
    "images magic": ("train-images-idx3", lambda path: edit(path, 3, 1), "expected magic number 0x00000803, found 0x0"),
    "labels magic": ("train-labels-idx1", lambda path: edit(path, 2, 9), "number 0x00000801, found 0x00000901"),
    "size": (
        "t10k-images-idx3",
        lambda path: edit(path, 11, 14, 0, 0, 0, 56),
        "images of 14x56 pixels, expected 28x28",
    ),
    "label 10": (
        "train-labels-idx1",
        lambda path: edit(path, 8 + 123, 10),
        "label 123 (counted from 0) is 10, expected",
    ),
    "counts": (
        "t10k-labels-idx1",
        lambda path: (edit(path, 7, 99), os.truncate(path, 8 + 99)),
        "t10k-images-idx3-ubyte has 100 images, but",
    ),
    "none": (
        "t10k-images-idx3",
        lambda path: [
            (edit(file, 7, 0), os.truncate(file, size))
            for file, size in [(path, 16), (path.with_name("t10k-labels-idx1-ubyte"), 8)]
        ],
        "t10k-images-idx3-ubyte: has no images",
    ),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damage_is_told_and_mended(case: str, copy: Path, generated: Path, prepare: Callable) -> None:
    name, harm, message = DAMAGE[case]
    path = raw(copy) / f"{name}-ubyte"
    harm(path)
    with pytest.raises(UserError) as error:
        mnist.check(copy)
    for text in (message, path.name, f"python data/prepare.py mnist --synthetic --data_dir {copy}"):
        assert text in str(error.value)

    marker = (raw(copy) / "ORIGIN.json").rename(copy / "kept")  # without it the data are the user's own
    for flags in ([], ["--synthetic"]):
        status, stdout, stderr = prepare("mnist", "--data_dir", copy, *flags)
        assert (status, stdout) == (2, "")
        assert_one_line(stderr)
        assert message in stderr and "never overwritten" in stderr

    marker.rename(raw(copy) / "ORIGIN.json")  # with it they are ours to replace
    status, stdout, stderr = prepare("mnist", "--data_dir", copy, "--synthetic")
    assert (status, stderr) == (0, "")
    assert message in stdout and "replacing" in stdout
    assert contents(copy) == contents(generated)


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_unreadable_files_are_told(copy: Path) -> None:
    (raw(copy) / NAMES[1]).chmod(0)
    with pytest.raises(UserError, match=f"cannot read .*{NAMES[1]}: Permission denied"):
        mnist.check(copy)
    raw(copy).parent.chmod(0)
    try:
        with pytest.raises(UserError, match=r"cannot read .*: Permission denied"):
            mnist.check(copy)
        with pytest.raises(UserError, match=r"cannot write .*: .*Permission denied"):
            mnist.generate(copy)
    finally:
        raw(copy).parent.chmod(0o755)


# What is left alone and what is replaced


def test_twice_does_nothing_other_values_replace(copy: Path, prepare: Callable) -> None:
    before = {path: path.stat().st_mtime_ns for path in raw(copy).iterdir()}
    for flags in ([], ["--seed", 7], ["--train_samples", 300, "--val_samples", 100]):
        status, stdout, _ = prepare("mnist", "--synthetic", "--data_dir", copy, *flags)
        assert status == 0 and "nothing to do" in stdout
        assert {path: path.stat().st_mtime_ns for path in raw(copy).iterdir()} == before
    status, stdout, _ = prepare("mnist", "--synthetic", "--data_dir", copy, "--val_samples", 50)
    assert status == 0 and "replacing generated data" in stdout and "val_samples 50" in stdout
    origin = json.loads((raw(copy) / "ORIGIN.json").read_text())
    assert origin == {"origin": "generated", "seed": 7, "train_samples": 300, "val_samples": 50, "version": VERSION}
    assert len(mnist.arrays(copy, "val")[0]) == 50


def test_generated_real_and_own_data_never_replace_each_other(copy: Path, prepare: Callable) -> None:
    marker = raw(copy) / "ORIGIN.json"
    before = contents(copy)
    status, _, stderr = prepare("mnist", "--data_dir", copy)
    assert status == 2 and "generated data, downloaded ones will not replace them" in stderr
    assert_one_line(stderr)
    marker.write_text('{"origin": "downloaded"}')
    status, _, stderr = prepare("mnist", "--data_dir", copy, "--synthetic")
    assert status == 2 and "downloaded data, generated ones will not replace them" in stderr
    for own in (None, "half a {", "[]"):
        marker.unlink() if own is None else marker.write_text(own)
        status, _, stderr = prepare("mnist", "--data_dir", copy, "--synthetic", "--seed", 1)
        assert status == 2 and "data of your own, complete, which are never overwritten" in stderr
        status, stdout, _ = prepare("mnist", "--data_dir", copy)
        assert status == 0 and "data of your own; complete, nothing to do" in stdout
    assert contents(copy) == before


def test_leftovers_are_removed_even_when_there_is_nothing_to_do(copy: Path, prepare: Callable) -> None:
    for name in ("raw.new", "raw.old"):
        shutil.copytree(raw(copy), raw(copy).with_name(name))
    assert prepare("mnist", "--synthetic", "--data_dir", copy)[0] == 0
    assert sorted(path.name for path in raw(copy).parent.iterdir()) == [".raw.lock", "raw"]


def test_two_at_once_draw_once(tmp_path: Path, generated: Path, capfd: pytest.CaptureFixture) -> None:
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda _: mnist.generate(tmp_path, 300, 100, 7), range(2)))
    stdout = capfd.readouterr().out
    assert stdout.count("nothing to do") == 1
    assert contents(tmp_path) == contents(generated)


# Interruption

KILLED_AT_EVERY_STEP = """
import os, signal, sys
from pathlib import Path
from workshop.datasets import digits, mnist
from workshop.errors import UserError

drawn = {seed: digits.draw_digits(20, seed) for seed in (2, 3, 4, 5)}
digits.draw_digits = lambda samples, seed: drawn[seed]  # drawn once, to be quick


def die_at(step, folder):
    events = 0

    def hook(event, arguments):
        nonlocal events
        if any(folder in str(argument) for argument in arguments):
            events += 1
            if events == step:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)  # called before each file is opened, renamed, removed, ...


for before in (None, 1):  # onto nothing, onto earlier data
    for step in range(1, 1000):
        folder = Path(sys.argv[1]) / f"{before}-{step}"
        if before:
            mnist.generate(folder, 20, 20, seed=before)
        if (pid := os.fork()) == 0:
            die_at(step, str(folder))
            mnist.generate(folder, 20, 20, seed=2)
            os._exit(0)
        finished = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        seen = "missing"
        if (folder / "MNIST" / "raw").exists():
            train, val = (mnist.arrays(folder, split)[0][:, 0] for split in ("train", "val"))
            (seed,) = [seed for seed in (1, 2) if train.equal(drawn[2 * seed][0]) and val.equal(drawn[2 * seed + 1][0])]
            seen = f"seed {seed}"
        else:
            try:
                mnist.check(folder)
            except UserError as error:
                assert "has no" in str(error)
        mnist.generate(folder, 20, 20, seed=2)
        mnist.check(folder)
        assert {path.name for path in (folder / "MNIST").iterdir()} == {".raw.lock", "raw"}
        print("seen", before, seen, flush=True)
        if finished:
            break
"""


def test_killed_at_every_step_leaves_all_or_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED_AT_EVERY_STEP, str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    seen = [line for line in result.stdout.splitlines() if line.startswith("seen")]
    assert set(seen) == {
        *("seen None missing", "seen None seed 2"),
        *("seen 1 seed 1", "seen 1 missing", "seen 1 seed 2"),
    }
    assert len(seen) > 30


def test_killed_command_leaves_nothing_and_the_next_mends_it(
    tmp_path: Path, generated: Path, prepare: Callable
) -> None:
    flags = ["mnist", "--synthetic", "--data_dir", str(tmp_path), "--seed", "7", "--train_samples"]
    process = subprocess.Popen([sys.executable, str(PREPARE), *flags, "20000"])
    unfinished = raw(tmp_path).with_name("raw.new")
    while not (unfinished / NAMES[0]).exists() and process.poll() is None:
        time.sleep(0.002)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    assert unfinished.exists()
    with pytest.raises(UserError, match="has no train-images"):
        mnist.check(tmp_path)
    assert prepare(*flags, 300, "--val_samples", 100)[0] == 0
    assert contents(tmp_path) == contents(generated)
    assert not unfinished.exists()


# Download


class Mirror:
    """A web server on this machine; ``pages`` maps a path to its body, or to None for "not found"."""

    def __init__(self) -> None:
        self.pages: dict[str, bytes | None] = {}
        self.cut = 0  # bytes withheld from the end of each page
        self.asked: list[str] = []
        mirror = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                mirror.asked.append(self.path)
                page = mirror.pages.get(self.path)
                self.send_response(404 if page is None else 200)
                self.send_header("Content-Length", str(len(page or b"")))
                self.end_headers()
                self.wfile.write((page or b"")[: len(page or b"") - mirror.cut])

            def log_message(self, *arguments: object) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.server.server_port}/"
        Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def mirrors(generated: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Mirror, Mirror]]:
    """Two mirrors that serve the generated data, which torchvision takes for the real ones."""
    packed = {f"/{name}.gz": gzip.compress(data) for name, data in contents(generated).items()}
    both = Mirror(), Mirror()
    for mirror in both:
        mirror.pages = dict(packed)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(MNIST, "mirrors", [mirror.address for mirror in both])
    resources = [(path[1:], hashlib.md5(data).hexdigest()) for path, data in packed.items()]
    monkeypatch.setattr(MNIST, "resources", resources)
    yield both
    for mirror in both:
        mirror.close()


def test_download_then_nothing_to_do(mirrors: tuple, tmp_path: Path, generated: Path, prepare: Callable) -> None:
    status, stdout, stderr = prepare("mnist", "--data_dir", tmp_path)
    assert (status, stderr) == (0, "") and "downloaded data; complete" in stdout
    assert contents(tmp_path) == contents(generated)
    assert {path.name for path in raw(tmp_path).iterdir()} == {*NAMES, "ORIGIN.json"}
    status, stdout, _ = prepare("mnist", "--data_dir", tmp_path)
    assert status == 0 and "nothing to do" in stdout
    assert len(mirrors[0].asked) == 4 and not mirrors[1].asked
    (raw(tmp_path) / NAMES[1]).unlink()
    status, stdout, _ = prepare("mnist", "--data_dir", tmp_path)
    assert status == 0 and f"has no {NAMES[1]}; replacing" in stdout
    assert contents(tmp_path) == contents(generated)


@pytest.mark.parametrize("fault", ["wrong bytes", "cut short", "not found", "closed"])
def test_next_mirror_when_one_fails(
    fault: str, mirrors: tuple, tmp_path: Path, generated: Path, prepare: Callable
) -> None:
    first, second = mirrors
    if fault == "wrong bytes":
        first.pages["/t10k-images-idx3-ubyte.gz"] = gzip.compress(b"something else")
    elif fault == "cut short":
        first.cut = 1
    elif fault == "not found":
        first.pages.clear()
    else:
        first.close()
    assert prepare("mnist", "--data_dir", tmp_path)[0] == 0
    assert contents(tmp_path) == contents(generated)
    assert "/t10k-images-idx3-ubyte.gz" in second.asked


@pytest.mark.parametrize(
    ("fault", "reasons"),
    [("wrong bytes", ["wrong checksum, 5 bytes"] * 2), ("closed", ["Connection refused", "Not Found"])],
)
def test_no_mirror_delivers(fault: str, reasons: list[str], mirrors: tuple, tmp_path: Path, prepare: Callable) -> None:
    first, second = mirrors
    if fault == "wrong bytes":
        first.pages["/t10k-labels-idx1-ubyte.gz"] = second.pages["/t10k-labels-idx1-ubyte.gz"] = b"spoof"
    else:
        first.close()
        second.pages.clear()
    status, stdout, stderr = prepare("mnist", "--data_dir", tmp_path)
    assert (status, stdout) == (2, "")
    assert_one_line(stderr)
    for mirror, reason in zip(mirrors, reasons, strict=True):
        assert f"{mirror.address}t" in stderr and reason in stderr
    assert f"`python data/prepare.py mnist --synthetic --data_dir {tmp_path}`" in stderr
    assert [path.name for path in (tmp_path / "MNIST").iterdir()] == [".raw.lock"]


def test_silent_mirror_is_given_up(mirrors: tuple, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "TIMEOUT_SECONDS", 0.2)
    monkeypatch.setattr(mirrors[0].server, "process_request", lambda *request: None)  # takes the call, never answers
    mnist.download(tmp_path)
    mnist.check(tmp_path)


# The command line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["mnsit"], "no data set 'mnsit'; did you mean mnist?"),
        ([], "NAME"),
        (["mnist", "--synth"], "--synth"),
        (["mnist", "--seed", "one"], "argument --seed: invalid int value: 'one'"),
        (["mnist", "--seed", "1"], "--seed needs --synthetic"),
        (["mnist", "--synthetic", "--seed", "-1"], "--seed -1 must be in 0..4294967295"),
        (["mnist", "--synthetic", "--val_samples", "0"], "--train_samples and --val_samples must be at least 1"),
        (["mnist", "--synthetic", "--data_dir", __file__], "Not a directory"),
    ],
)
def test_mistakes_are_told_in_one_line(arguments: list[str], message: str, prepare: Callable) -> None:
    status, stdout, stderr = prepare(*arguments)
    assert (status, stdout) == (2, "")
    assert_one_line(stderr)
    assert message in stderr


def test_command_from_another_folder(copy: Path) -> None:
    """The script as a user runs it: its own process, not from the repository's root."""
    command = [sys.executable, str(PREPARE), "mnist"]
    environment = os.environ | {"WORKSHOP_DATA": str(copy)}
    result = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (2, "")
    assert_one_line(result.stderr)
    assert "generated data" in result.stderr
