"""A data set's files: in the real formats, complete or not there, never overwritten; damage is one clear line."""

import gzip
import hashlib
import io
import os
import pickle
import shutil
import sys
import tarfile
from collections.abc import Callable, Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import h5py
import numpy as np
import pytest
import torch
from torchvision.datasets import CIFAR10, MNIST

import sources
from conftest import REPOSITORY, Script
from sources import generate
from workshop.datasets import cifar10, image_dataset, mnist, nbody
from workshop.errors import UserError
from workshop.jsonfile import read_json
from workshop.loaders import ImageDataset
from workshop.seeds import seed_of

MODULES = {"mnist": mnist, "cifar10": cifar10, "nbody": nbody}
SMALL = {name: {"train_samples": 103, "val_samples": 30, "seed": 7} for name in ("mnist", "cifar10")}
SMALL["nbody"] = {"cells": 12, "seed": 7}
Content = dict[str, bytes]


def contents(folder: Path) -> Content:
    """All files in a folder, and in those in it."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder with few samples of each data set; not to be changed."""
    folder = tmp_path_factory.mktemp("generated")
    for name, recipe in SMALL.items():
        generate(name, folder, **recipe)
    return folder


@pytest.fixture
def small(generated: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(generated, tmp_path / "small"))


# Formats


def test_the_same_recipe_gives_the_same_bytes_on_any_number_of_threads(small: Path, tmp_path: Path) -> None:
    torch.set_num_threads(3)
    try:
        for name, recipe in SMALL.items():
            generate(name, tmp_path / "again", **recipe)
            generate(name, tmp_path / "other", **(recipe | {"seed": 8}))
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(1)
    assert contents(small) == contents(tmp_path / "again")
    for name, module in MODULES.items():
        data = [
            module.arrays(tmp_path / folder, split)[0] for folder in ("again", "other") for split in ("train", "val")
        ]
        assert len({tensor[:30].numpy().tobytes() for tensor in data}) == 4, f"splits or seeds of {name} are alike"


def assert_reads_alike(theirs: MNIST | CIFAR10, name: str, data_dir: Path, split: str) -> None:
    """Torchvision's data set has the samples that ours has, augmented in the same way with the same random numbers."""
    images, labels = image_dataset(name).arrays(data_dir, split)
    assert images.shape[1:] == image_dataset(name).SAMPLE_SHAPE and images.dtype == torch.uint8
    assert labels.dtype == torch.int64
    ours = ImageDataset(name, data_dir, split, seed=3)
    theirs.transform = ours.transform
    assert len(theirs) == len(ours) == len(images) == (103 if split == "train" else 30)
    for index in range(len(theirs)):
        with torch.random.fork_rng():
            torch.manual_seed(seed_of(3, 2, index))  # seed, epoch, index
            image, label = theirs[index]
        assert torch.equal(image, ours[2, index][0])
        assert label == ours[2, index][1] == labels[index]
    if split == "val":  # not augmented
        mean, std = (
            torch.tensor(values)[:, None, None] for values in (image_dataset(name).MEAN, image_dataset(name).STD)
        )
        torch.testing.assert_close(ours[2, 5][0], (images[5] / 255 - mean) / std)


@pytest.mark.parametrize("split", ["train", "val"])
def test_torchvision_reads_the_generated_files(small: Path, split: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_reads_alike(MNIST(small, train=split == "train"), "mnist", small, split)
    accept_cifar10(cifar10.folder(small), monkeypatch)
    assert_reads_alike(CIFAR10(small, train=split == "train"), "cifar10", small, split)


def accept_cifar10(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have torchvision take generated files for the real ones."""
    md5 = {name: hashlib.md5(data).hexdigest() for name, data in contents(folder).items()}
    for files in ("train_list", "test_list"):
        monkeypatch.setattr(CIFAR10, files, [(name, md5[name]) for name, _ in getattr(CIFAR10, files)])
    monkeypatch.setattr(CIFAR10, "meta", CIFAR10.meta | {"md5": md5["batches.meta"]})


class Python2Pickler(pickle._Pickler):
    """Writes as Python 2 and NumPy 1 did, and so as the real CIFAR-10 files are."""

    dispatch = dict(pickle._Pickler.dispatch)  # noqa: RUF012

    def save_string(self, string: str | bytes) -> None:
        data = string.encode("latin1") if isinstance(string, str) else string
        self.write(pickle.BINSTRING + len(data).to_bytes(4, "little") + data)

    dispatch[str] = dispatch[bytes] = save_string


@pytest.mark.filterwarnings("error")
def test_cifar10_files_that_python_2_wrote_are_read(small: Path) -> None:
    path = cifar10.folder(small) / "test_batch"
    images, labels = cifar10.arrays(small, "val")
    file = io.BytesIO()
    Python2Pickler(file, protocol=2).dump(pickle.loads(path.read_bytes()))
    path.write_bytes(file.getvalue().replace(b"numpy._core.multiarray", b"numpy.core.multiarray"))
    assert b"cnumpy.core.multiarray\n_reconstruct\n" in path.read_bytes()
    again, labels_again = cifar10.arrays(small, "val")
    assert torch.equal(images, again) and torch.equal(labels, labels_again)


# Damage


def change_batch(path: Path, **values: object) -> None:
    path.write_bytes(pickle.dumps(pickle.loads(path.read_bytes()) | values))


def change_box(path: Path, fields: dict[str, tuple[int, ...]], dtype: str = "f4") -> None:
    with h5py.File(path, "w") as file:
        for name, shape in fields.items():
            file[name] = np.zeros(shape, dtype)


def change_bytes(path: Path, start: int, *values: int) -> None:
    data = bytearray(path.read_bytes())
    data[start : start + len(values)] = bytes(values)
    path.write_bytes(data)


BOX = {"Nbody": (4, 8, 8, 8), "Hydro": (5, 8, 8, 8)}
IMAGES_FILE, LABELS_FILE, BATCH_FILE = "train-images-idx3-ubyte", "t10k-labels-idx1-ubyte", "data_batch_2"
DAMAGE: list[tuple[str, str, Callable[[Path], object], str]] = [
    *[(name, file, Path.unlink, "No such file") for name, file in (("mnist", LABELS_FILE), ("cifar10", BATCH_FILE))],
    ("nbody", "val.h5", Path.unlink, "No such file"),
    ("mnist", IMAGES_FILE, lambda path: os.truncate(path, 0), "expected magic number 0x00000803, found 0x00000000"),
    ("mnist", IMAGES_FILE, lambda path: os.truncate(path, 999), "expected 80768 bytes, found 999 bytes"),
    ("mnist", IMAGES_FILE, lambda path: os.truncate(path, 99_999), "expected 80768 bytes, found 99999 bytes"),
    ("mnist", IMAGES_FILE, lambda path: change_bytes(path, 11, 14, 0, 0, 0, 56), "images of 14x56 pixels"),
    ("mnist", LABELS_FILE, lambda path: change_bytes(path, 7, 29), "expected 37 bytes, found 38 bytes"),
    ("mnist", LABELS_FILE, lambda path: change_bytes(path, 20, 10), "has a label 10, expected 0..9"),
    ("mnist", LABELS_FILE, lambda path: (change_bytes(path, 7, 29), os.truncate(path, 37)), "30 images, and"),
    ("cifar10", BATCH_FILE, lambda path: os.truncate(path, 0), "damaged"),
    ("cifar10", BATCH_FILE, lambda path: os.truncate(path, 999), "damaged"),
    ("cifar10", BATCH_FILE, lambda path: path.write_bytes(pickle.dumps({})), "damaged, or not such a file"),
    ("cifar10", BATCH_FILE, lambda path: change_batch(path, labels=[9] * 20), "(21, 3072) uint8 and 20 labels"),
    ("cifar10", BATCH_FILE, lambda path: change_batch(path, labels=[10] * 21), "labels in 0..9"),
    ("nbody", "val.h5", lambda path: os.truncate(path, path.stat().st_size // 2), "damaged, or not such an HDF5 file"),
    ("nbody", "val.h5", lambda path: change_box(path, {"Nbody": (4, 8, 8, 8)}), "Hydro"),
    ("nbody", "val.h5", lambda path: change_box(path, BOX | {"Hydro": (4, 8, 8, 8)}), "(5, n, n, n)"),
    ("nbody", "val.h5", lambda path: change_box(path, BOX | {"Nbody": (4, 6, 6, 6)}), "with the same n"),
    ("nbody", "val.h5", lambda path: change_box(path, BOX, "f8"), "float64"),
]


@pytest.mark.parametrize(("name", "file", "harm", "message"), DAMAGE)
def test_damage_is_one_line_with_the_commands_that_help(
    name: str, file: str, harm: Callable, message: str, small: Path, run_script: Script
) -> None:
    folder = MODULES[name].folder(small)
    harm(folder / file)
    before = contents(folder)
    with pytest.raises(UserError) as error:
        MODULES[name].check(small)
    for part in (message, str(folder / file), f"move {folder} away", f"data/prepare.py {name} --data_dir {small}`"):
        assert part in str(error.value)
    assert message in run_script("data/prepare.py", name, "--synthetic", "--data_dir", small).error
    assert contents(folder) == before


def test_missing_data_name_both_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORKSHOP_DATA", str(tmp_path))
    for name, module in MODULES.items():
        prepare = os.path.relpath(REPOSITORY / "data" / "prepare.py")
        expected = (
            f"; to prepare {name} run `python {prepare} {name}`, or without a network `python {prepare} {name} --syn"
        )
        with pytest.raises(UserError, match="No such file") as error:
            module.check(tmp_path)
        assert expected in str(error.value)


# What is there is not changed, and what is new is complete


def test_what_is_there_is_never_changed(small: Path, run_script: Script) -> None:
    prepare = partial(run_script, "data/prepare.py", "mnist", "--data_dir", small)
    before = contents(small)
    for words in (["--synthetic"], ["--synthetic", "--seed", 7, "--train_samples", 103]):
        result = prepare(*words)
        assert result.status == 0 and "complete, nothing to do" in result.stdout
    for words in ([], ["--synthetic", "--seed", 8], ["--synthetic", "--val_samples", 31]):
        assert "has other data (origin generated, seed 7, train_samples 103, val_samples 30)" in prepare(*words).error
    assert contents(small) == before
    (mnist.folder(small) / "ORIGIN.json").unlink()  # now they are files that the user put there
    before = contents(small)
    for words in ([], ["--synthetic"]):
        assert "never changed: move it away" in prepare(*words).error
    assert contents(small) == before
    assert len(mnist.arrays(small, "train")[0]) == 103


def test_killed_at_any_moment_a_data_set_is_complete_or_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    zeros = torch.zeros(1, 28, 28, dtype=torch.uint8), torch.zeros(1, dtype=torch.uint8)
    monkeypatch.setattr("synthetic_digits.generate_digits", lambda samples, seed: zeros)
    outcomes = []
    while not outcomes or outcomes[-1] != 0:
        if not (pid := os.fork()):
            generate_until(len(outcomes), tmp_path)
        outcomes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        if mnist.folder(tmp_path).exists():
            mnist.check(tmp_path)
            assert read_json(mnist.folder(tmp_path) / "ORIGIN.json")["origin"] == "generated"
        else:
            assert outcomes[-1] == 9
    assert len(outcomes) > 10


def generate_until(events: int, data_dir: Path) -> None:
    """In a process of its own: generate digits, and end as if killed before it does anything more to files."""
    left = iter(range(events))

    def watch(event: str, arguments: tuple) -> None:
        if event in ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir") and next(left, None) is None:
            os._exit(9)

    sys.addaudithook(watch)
    try:
        generate("mnist", data_dir, train_samples=1, val_samples=1)
    finally:
        os._exit(0)


# Download


class Mirror:
    """A web server on this machine; ``pages`` maps a path to its body, of which the last ``cut`` bytes are not sent."""

    def __init__(self) -> None:
        self.pages: Content = {}
        self.cut = 0
        mirror = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                page = mirror.pages.get(self.path)
                self.send_response(404 if page is None else 200)
                self.send_header("Content-Length", str(len(page or b"")))
                self.end_headers()
                self.wfile.write((page or b"")[: len(page or b"") - mirror.cut])

            def log_message(self, *arguments: object) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.server.server_port}/"
        Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()


@pytest.fixture
def mirrors(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Mirror, Mirror]]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    both = Mirror(), Mirror()
    yield both
    for mirror in both:
        mirror.server.shutdown()
        mirror.server.server_close()


def serve(name: str, mirrors: tuple[Mirror, Mirror], small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the mirrors serve a generated data set, and torchvision take it for the real one."""
    files = contents(MODULES[name].folder(small))
    del files["ORIGIN.json"]
    if name == "mnist":
        pages = {f"/{file}.gz": gzip.compress(data) for file, data in files.items()}
        monkeypatch.setattr(MNIST, "mirrors", [mirror.address for mirror in mirrors])
        md5 = [(page[1:], hashlib.md5(data).hexdigest()) for page, data in pages.items()]
        monkeypatch.setattr(MNIST, "resources", md5)
    elif name == "cifar10":
        archive = io.BytesIO()
        with tarfile.open(fileobj=archive, mode="w:gz") as tar:
            tar.add(cifar10.folder(small), cifar10.folder(Path()).name)
        pages = {"/cifar-10-python.tar.gz": archive.getvalue()}
        monkeypatch.setattr(CIFAR10, "url", f"{mirrors[0].address}cifar-10-python.tar.gz")
        monkeypatch.setattr(CIFAR10, "tgz_md5", hashlib.md5(archive.getvalue()).hexdigest())
        accept_cifar10(cifar10.folder(small), monkeypatch)
    else:
        pages = {f"/{page}": files[f"{split}.h5"] for split, page in sources.NBODY_FILES.items()}
        monkeypatch.setattr(sources, "NBODY_URL", mirrors[0].address)
    for mirror in mirrors:
        mirror.pages = dict(pages)


@pytest.mark.parametrize("name", MODULES)
def test_download_whole_or_not_at_all(
    name: str,
    mirrors: tuple[Mirror, Mirror],
    small: Path,
    tmp_path: Path,
    run_script: Script,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    serve(name, mirrors, small, monkeypatch)
    new = tmp_path / "new"
    prepare = partial(run_script, "data/prepare.py", name, "--data_dir", new)

    def assert_fails(reason: str) -> None:
        result = prepare()
        assert result.status == 2 and contents(new) == {}
        line = result.stderr.splitlines()[-1]  # progress bars come before it
        assert line.startswith("error: ") and reason in line
        assert f"`python prepare.py {name} --synthetic --data_dir {new}`" in line

    for mirror in mirrors:
        mirror.cut = 1000
    assert_fails("damaged" if name == "nbody" else "corrupted")  # nbody's files come without a checksum
    for mirror in mirrors:
        mirror.cut = 0
    pages, mirrors[0].pages = mirrors[0].pages, {}
    if name != "mnist":  # which the second mirror delivers
        assert_fails("Not Found")
        mirrors[0].pages = pages
    assert prepare().status == 0
    expected, found = (contents(MODULES[name].folder(folder)) for folder in (small, new))
    assert found | {"ORIGIN.json": b""} == expected | {"ORIGIN.json": b""}
    result = prepare()
    assert result.status == 0 and "complete, nothing to do" in result.stdout
    assert "has other data" in prepare("--synthetic").error


# The command line


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["mnsit"], "invalid choice: 'mnsit' (choose from "),
        ([], "name"),
        (["mnist", "--synth"], "--synth"),
        (["mnist", "--seed", "one"], "--seed: invalid int value: 'one'"),
        (["mnist", "--seed", "1"], "--seed needs --synthetic"),
        (["mnist", "--synthetic", "--val_samples", "0"], "--val_samples: must be at least 1, got 0"),
        (["nbody", "--synthetic", "--train_samples", "8"], "--train_samples"),
        (["nbody", "--shards"], "--shards"),
        (["mnist", "--synthetic", "--data_dir", __file__], "Not a directory"),
    ],
)
def test_mistakes_are_one_line(words: list[str], message: str, run_script: Script) -> None:
    assert message in run_script("data/prepare.py", *words).error
