"""CIFAR-10's files: generated, read as torchvision reads them, checked, downloaded."""

import hashlib
import io
import os
import pickle
import shutil
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torchvision.datasets import CIFAR10

from data_helpers import Mirror, assert_one_line
from data_helpers import prepare as prepare
from sources import generate
from synthetic_images import NAMES, generate_images
from workshop.datasets import cifar10
from workshop.errors import UserError
from workshop.loaders.images import ImageDataset


def batches(data_dir: Path) -> Path:
    return data_dir / "cifar-10-batches-py"


def contents(data_dir: Path) -> dict[str, bytes]:
    return {name: (batches(data_dir) / name).read_bytes() for name in cifar10.ALL_FILES}


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """103 + 30 generated images of seed 7; not to be changed."""
    folder = tmp_path_factory.mktemp("generated")
    generate("cifar10", folder, train_samples=103, val_samples=30, seed=7)
    return folder


def test_the_same_recipe_gives_the_same_bytes(tmp_path: Path, generated: Path) -> None:
    generate("cifar10", tmp_path, train_samples=103, val_samples=30, seed=7)
    assert contents(tmp_path) == contents(generated)
    assert torch.equal(cifar10.arrays(generated, "train")[0], generate_images(103, seed=14)[0])
    assert torch.equal(cifar10.arrays(generated, "val")[0], generate_images(30, seed=15)[0])


def test_files_and_keys_are_those_that_torchvision_knows() -> None:
    assert CIFAR10.base_folder == cifar10.FOLDER
    lists = {"train": CIFAR10.train_list, "val": CIFAR10.test_list}
    assert {split: [name for name, _ in files] for split, files in lists.items()} == cifar10.FILES
    assert (CIFAR10.meta["filename"], CIFAR10.meta["key"]) == (cifar10.NAMES_FILE, cifar10.NAMES_KEY)


@pytest.mark.parametrize(("split", "samples"), [("train", 103), ("val", 30)])
def test_torchvision_reads_what_arrays_returns(
    generated: Path, split: str, samples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    images, labels = cifar10.arrays(generated, split)
    assert (images.shape, images.dtype) == ((samples, *cifar10.SAMPLE_SHAPE), torch.uint8)
    assert (labels.shape, labels.dtype) == ((samples,), torch.int64)
    ours = ImageDataset("cifar10", generated, split, seed=3)
    md5 = {name: hashlib.md5(data).hexdigest() for name, data in contents(generated).items()}
    for files in ("train_list", "test_list"):
        monkeypatch.setattr(CIFAR10, files, [(name, md5[name]) for name, _ in getattr(CIFAR10, files)])
    monkeypatch.setattr(CIFAR10, "meta", CIFAR10.meta | {"md5": md5["batches.meta"]})
    theirs = CIFAR10(generated, train=split == "train", transform=ours.transform)
    assert np.array_equal(theirs.data, images.permute(0, 2, 3, 1))
    assert theirs.targets == labels.tolist()
    assert theirs.classes == list(NAMES)
    assert len(theirs) == len(ours) == samples
    for index in range(samples):
        image, label = ours[2, index]
        with torch.random.fork_rng():
            torch.manual_seed(hash((3, 2, index)))  # seed, epoch, index
            expected, expected_label = theirs[index]
        assert torch.equal(image, expected) and label == expected_label


def test_only_training_images_are_augmented(generated: Path) -> None:
    train, val = (ImageDataset("cifar10", generated, split) for split in ("train", "val"))
    assert len({train[epoch, 5][0].numpy().tobytes() for epoch in range(10)}) > 5
    mean, std = torch.tensor(cifar10.MEAN).view(3, 1, 1), torch.tensor(cifar10.STD).view(3, 1, 1)
    image, label = val[1, 5]
    assert torch.equal(image, val[2, 5][0])
    torch.testing.assert_close(image, (cifar10.arrays(generated, "val")[0][5] / 255 - mean) / std)
    assert isinstance(label, int)


def change(**values: object) -> Callable[[Path], None]:
    return lambda path: path.write_bytes(pickle.dumps(pickle.loads(path.read_bytes()) | values, protocol=4))


DATA = np.zeros((21, 3072), np.uint8)
DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda path: path.unlink(), "cannot read .*data_batch_2: No such file"),
    "cut": (lambda path: os.truncate(path, 999), "data_batch_2: damaged.*truncated"),
    "keys": (lambda path: path.write_bytes(pickle.dumps({})), "expected an array 'data' and a list 'labels'"),
    "shape": (change(data=DATA[:, 1:]), r"data \(21, 3071\) uint8, expected \(N, 3072\) uint8"),
    "type": (change(data=DATA.astype(float)), r"data \(21, 3072\) float64, expected"),
    "counts": (change(data=DATA[1:]), "has 20 images, but 21 labels"),
    "label": (change(labels=[9] * 20 + [10]), r"label 20 \(counted from 0\) is 10, expected 0..9"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damage_is_reported_and_repaired(case: str, generated: Path, tmp_path: Path, prepare: Callable) -> None:
    harm, message = DAMAGE[case]
    copy = Path(shutil.copytree(generated, tmp_path / "copy"))
    path, origin = batches(copy) / "data_batch_2", batches(copy) / "ORIGIN.json"
    length = path.stat().st_size
    harm(path)
    if case == "label":  # of the same length, so that only reading it shows the damage
        cifar10.check(copy)
    else:
        with pytest.raises(UserError, match=rf"data_batch_2: damaged, expected {length} bytes, found \d+"):
            cifar10.check(copy)
    origin.rename(copy / "origin")  # as with files of the user's own
    for call in (cifar10.check, lambda folder: cifar10.arrays(folder, "train")):
        with pytest.raises(UserError, match=message) as error:
            call(copy)
        assert f"`python data/prepare.py cifar10 --synthetic --data_dir {copy}`" in str(error.value)
    (copy / "origin").rename(origin)
    status, stdout, stderr = prepare("cifar10", "--synthetic", "--data_dir", copy)
    assert (status, stderr) == (0, "") and "replacing" in stdout
    assert contents(copy) == contents(generated)


@pytest.fixture
def mirror(generated: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Mirror]:
    """A server of the generated data, which torchvision accepts as the real ones; one file must not be unpacked."""
    members = {"../escaped": b"!"} | {f"cifar-10-batches-py/{name}": data for name, data in contents(generated).items()}
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w:gz") as tar:
        for name, data in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    mirror = Mirror()
    mirror.pages = {"/packed.tar.gz": archive.getvalue()}
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(CIFAR10, "url", mirror.address + "packed.tar.gz")
    monkeypatch.setattr(CIFAR10, "tgz_md5", hashlib.md5(archive.getvalue()).hexdigest())
    yield mirror
    mirror.close()


def test_download_whole_or_not_at_all(mirror: Mirror, tmp_path: Path, generated: Path, prepare: Callable) -> None:
    for said in ("downloaded data; complete", "nothing to do"):
        status, stdout, stderr = prepare("cifar10", "--data_dir", tmp_path)
        assert (status, stderr) == (0, "") and said in stdout
    assert contents(tmp_path) == contents(generated)
    assert {path.name for path in batches(tmp_path).iterdir()} == {*cifar10.ALL_FILES, "ORIGIN.json"}
    assert not list(tmp_path.rglob("escaped"))
    assert len(mirror.asked) == 1
    mirror.cut = 1
    status, stdout, stderr = prepare("cifar10", "--data_dir", tmp_path / "other")
    assert (status, stdout) == (2, "")
    assert_one_line(stderr)
    assert mirror.address in stderr and "`python data/prepare.py cifar10 --synthetic --data_dir" in stderr
    assert not batches(tmp_path / "other").exists()
