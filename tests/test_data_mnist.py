"""MNIST's files: generated, read, downloaded; and the command line that prepares them reports mistakes."""

import gzip
import hashlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torchvision.datasets import MNIST

from conftest import REPOSITORY
from data_helpers import NAMES, PREPARE, Mirror, assert_one_line, contents, raw
from data_helpers import copy as copy
from data_helpers import generated as generated
from data_helpers import prepare as prepare
from sources import download, generate
from synthetic_digits import generate_digits
from workshop.datasets import mnist
from workshop.errors import UserError
from workshop.loaders.images import ImageDataset
from workshop.paths import default_data_dir

# What is generated


def test_only_the_seed_decides_what_is_generated(tmp_path: Path, generated: Path) -> None:
    threads = torch.get_num_threads()
    state = torch.get_rng_state()
    try:
        for number in (1, 2, 5):
            torch.set_num_threads(number)
            generate("mnist", tmp_path / str(number), train_samples=300, val_samples=100, seed=7)
            assert torch.get_num_threads() == number
            assert contents(tmp_path / str(number)) == contents(generated)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(torch.get_rng_state(), state)
    generate("mnist", tmp_path / "other", train_samples=300, val_samples=100, seed=8)
    assert all(contents(tmp_path / "other")[name] != contents(generated)[name] for name in NAMES)


def test_fewer_samples_are_the_first_of_more_and_splits_differ(generated: Path) -> None:
    images, labels = generate_digits(1100, seed=14)
    train_images, train_labels = mnist.arrays(generated, "train")
    assert torch.equal(images[:300], train_images[:, 0])
    assert torch.equal(labels[:300], train_labels)
    assert not torch.equal(images[1000:], images[:100])
    assert not torch.equal(mnist.arrays(generated, "val")[1], train_labels[:100])


def test_generated_digits_look_like_mnist_to_a_linear_model() -> None:
    images, labels = generate_digits(8000, seed=0)
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
    image, label = ImageDataset("mnist", generated, split)[1, 5]
    assert label == labels[5]
    torch.testing.assert_close(image, (images[5] / 255 - mnist.MEAN[0]) / mnist.STD[0])


def test_missing_data_name_both_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError) as error:
        mnist.check(tmp_path / "my data")
    real, synthetic = (
        f"`python data/prepare.py {command} --data_dir '{tmp_path}/my data'`"
        for command in ("mnist", "mnist --synthetic")
    )
    assert f"to prepare mnist run {real}, or without a network {synthetic}" in str(error.value)
    monkeypatch.setenv("WORKSHOP_DATA", str(tmp_path))
    with pytest.raises(UserError) as error:
        mnist.check(tmp_path)
    assert "`python data/prepare.py mnist`" in str(error.value)
    assert "`python data/prepare.py mnist --synthetic`" in str(error.value)
    monkeypatch.setenv("WORKSHOP_DATA", "")
    assert default_data_dir() == REPOSITORY / "data"


# Download


@pytest.fixture
def mirrors(generated: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Mirror, Mirror]]:
    """Two mirrors that serve the generated data, which torchvision is made to accept as the real ones."""
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
    [
        ("wrong bytes", ["wrong checksum, 5 bytes"] * 2),
        ("cut short", ["cut short, 10 of 20 bytes"] * 2),
        ("no length", ["wrong checksum, 5 bytes"] * 2),
        ("drips", ["too slow, "] * 2),
        ("drips headers", ["too slow, no answer in 0.1 s"] * 2),
        ("closed", ["Connection refused", "Not Found"]),
    ],
)
def test_no_mirror_delivers(
    fault: str, reasons: list[str], mirrors: tuple, tmp_path: Path, prepare: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = mirrors
    if fault == "closed":
        first.close()
        second.pages.clear()
    elif fault in ("wrong bytes", "no length"):
        first.pages["/t10k-labels-idx1-ubyte.gz"] = second.pages["/t10k-labels-idx1-ubyte.gz"] = b"spoof"
    else:
        first.pages = second.pages = dict.fromkeys(first.pages, b"x" * 20)
    for mirror in mirrors:
        mirror.cut = 10 if fault == "cut short" else 0
        mirror.length = "many" if fault == "no length" else None
        mirror.pause = 0.02 if fault == "drips" else 0.0
        mirror.header_pause = 0.02 if fault == "drips headers" else 0.0
    if "drips" in fault:
        monkeypatch.setattr("downloading.PERIOD_SECONDS", 0.1)
    status, stdout, stderr = prepare("mnist", "--data_dir", tmp_path)
    assert (status, stdout) == (2, "")
    assert_one_line(stderr)
    for mirror, reason in zip(mirrors, reasons, strict=True):
        assert f"{mirror.address}t" in stderr and reason in stderr
    assert f"`python data/prepare.py mnist --synthetic --data_dir {tmp_path}`" in stderr
    assert [path.name for path in (tmp_path / "MNIST").iterdir()] == [".raw.lock"]


def test_a_silent_mirror_is_given_up(mirrors: tuple, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("downloading.TIMEOUT_SECONDS", 0.2)
    monkeypatch.setattr(
        mirrors[0].server, "process_request", lambda *request: None
    )  # accepts the connection, never answers
    download("mnist", tmp_path)
    mnist.check(tmp_path)


# The command line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["mnsit"], "no data set 'mnsit'; did you mean mnist?"),
        ([], "NAME"),
        (["mnist", "--synth"], "--synth"),
        (["mnist", "--seed", "one"], "--seed: invalid int value: 'one'"),
        (["mnist", "--seed", "1"], "--seed needs --synthetic"),
        (["mnist", "--synthetic", "--seed", "-1"], "--seed -1 must be in 0..4294967295"),
        (["mnist", "--synthetic", "--val_samples", "0"], "--train_samples and --val_samples must be at least 1"),
        (["mnist", "--synthetic", "--data_dir", __file__], "Not a directory"),
    ],
)
def test_mistakes_are_reported_in_one_line(arguments: list[str], message: str, prepare: Callable) -> None:
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
