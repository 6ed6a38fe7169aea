"""A data set's files: damage is reported and repaired, they are complete or not there, a user's own stay."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from data_helpers import NAMES, PREPARE, assert_one_line, contents, raw
from data_helpers import copy as copy
from data_helpers import generated as generated
from data_helpers import prepare as prepare
from sources import generate
from synthetic_digits import VERSION
from workshop.datasets import mnist
from workshop.errors import UserError

# Damage


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
def test_damage_is_reported_and_repaired(case: str, copy: Path, generated: Path, prepare: Callable) -> None:
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
def test_unreadable_files_are_reported(copy: Path) -> None:
    (raw(copy) / NAMES[1]).chmod(0)
    with pytest.raises(UserError, match=f"cannot read .*{NAMES[1]}: Permission denied"):
        mnist.check(copy)
    raw(copy).parent.chmod(0)
    try:
        with pytest.raises(UserError, match=r"cannot read .*: Permission denied"):
            mnist.check(copy)
        with pytest.raises(UserError, match=r"cannot write .*: .*Permission denied"):
            generate("mnist", copy)
    finally:
        raw(copy).parent.chmod(0o755)


@pytest.mark.parametrize("flags", [[], ["--shards"]], ids=str)
def test_a_flipped_pixel_is_found_and_repaired(flags: list, copy: Path, generated: Path, prepare: Callable) -> None:
    path = raw(copy) / "train-images-idx3-ubyte"
    edit(path, 5000, path.read_bytes()[5000] ^ 1)
    if flags:  # any complete data can be packed, but not damaged ones
        status, stdout, stderr = prepare("mnist", "--data_dir", copy, *flags)
        assert (status, stdout) == (2, "") and f"damaged ({path}: damaged, changed since it was written" in stderr
        assert_one_line(stderr)
    status, stdout, _ = prepare("mnist", "--synthetic", "--data_dir", copy, *flags)
    assert status == 0 and f"{path}: damaged, changed since it was written; replacing" in stdout
    assert contents(copy) == contents(generated)


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
    assert origin.pop("files").keys() == contents(copy).keys()
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


def test_two_at_once_generate_once(tmp_path: Path, generated: Path, capfd: pytest.CaptureFixture) -> None:
    with ThreadPoolExecutor() as pool:
        recipe = {"train_samples": 300, "val_samples": 100, "seed": 7}
        list(pool.map(lambda _: generate("mnist", tmp_path, **recipe), range(2)))
    stdout = capfd.readouterr().out
    assert stdout.count("nothing to do") == 1
    assert contents(tmp_path) == contents(generated)


# Interruption

KILLED_AT_EVERY_STEP = """
import os, signal, sys
from pathlib import Path
import synthetic_digits
from sources import generate
from workshop.datasets import mnist
from workshop.errors import UserError

digits = {seed: synthetic_digits.generate_digits(20, seed) for seed in (2, 3, 4, 5)}
synthetic_digits.generate_digits = lambda samples, seed: digits[seed]  # generated once, to be quick


def prepare(folder, seed):
    generate("mnist", folder, train_samples=20, val_samples=20, seed=seed)


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
            prepare(folder, seed=before)
        if (pid := os.fork()) == 0:
            die_at(step, str(folder))
            prepare(folder, seed=2)
            os._exit(0)
        finished = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        seen = "missing"
        if (folder / "MNIST" / "raw").exists():
            mnist.check(folder)
            train, val = (mnist.arrays(folder, split)[0][:, 0] for split in ("train", "val"))
            (seed,) = [s for s in (1, 2) if train.equal(digits[2 * s][0]) and val.equal(digits[2 * s + 1][0])]
            seen = f"seed {seed}"
        else:
            try:
                mnist.check(folder)
            except UserError as error:
                assert "has no" in str(error)
        prepare(folder, seed=2)
        mnist.check(folder)
        assert {path.name for path in (folder / "MNIST").iterdir()} == {".raw.lock", "raw"}
        print("seen", before, seen, flush=True)
        if finished:
            break
"""


def test_killed_at_every_step_leaves_all_or_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED_AT_EVERY_STEP, str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(PREPARE.parent)}
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    seen = [line for line in result.stdout.splitlines() if line.startswith("seen")]
    assert set(seen) == {
        *("seen None missing", "seen None seed 2"),
        *("seen 1 seed 1", "seen 1 missing", "seen 1 seed 2"),
    }
    assert len(seen) > 30


def test_killed_command_leaves_nothing_and_the_next_one_repairs_it(
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
