"""The loaders of images: one interface, each sample once per epoch, the same samples from all of them."""

import gc
import os
import sys
import tarfile
import weakref
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
import torch
from torch.utils.data import DataLoader

from conftest import REPOSITORY, Script
from lab.launching import load_script
from sources import generate, pack
from workshop import hardware
from workshop.config import ImageFlags
from workshop.datasets import image_dataset, shards
from workshop.errors import UserError
from workshop.loaders import DistributedBatchSampler, ImageDataset, Loader, build_loader
from workshop.loaders.transform import PADDING, BatchTransform, flip_and_crop
from workshop.ranks import Ranks

Config = load_script(REPOSITORY / "01_single_gpu").Config
CPU = torch.device("cpu")
LOADERS = get_args(get_type_hints(ImageFlags)["loader"])
EACH_LOADER = pytest.mark.parametrize("kind", LOADERS)
BATCH = 64


@pytest.fixture(scope="module")
def packed(data_dir: Path) -> Path:
    """The data folder, with shards."""
    for name in ("mnist", "cifar10"):
        pack(name, data_dir)
    return data_dir


def make_loader(data_dir: Path, kind: str, split: str, rank: int = 0, ranks: int = 1, **flags: object) -> Loader:
    config = Config(data_dir=data_dir, loader=kind, **({"num_workers": 0} | flags))
    if kind != "map":
        return build_loader(config, split, Ranks(device=CPU, rank=rank, world_size=ranks))
    limit = config.limit_train if split == "train" else config.limit_val
    dataset = ImageDataset(config.dataset, data_dir, split, limit, seed=config.seed)
    sampler = DistributedBatchSampler(
        len(dataset), config.batch_size, rank=rank, num_replicas=ranks, shuffle=split == "train", seed=config.seed
    )
    workers = config.num_workers
    return DataLoader(dataset, batch_sampler=sampler, num_workers=workers, persistent_workers=workers > 0)


Batches = list[tuple[torch.Tensor, torch.Tensor]]


def epoch_of(loader: Loader, epoch: int, start_step: int = 0) -> Batches:
    loader.batch_sampler.set_epoch(epoch, start_step)
    batches = [(inputs.clone(), targets.clone()) for inputs, targets in loader]
    assert len(batches) == len(loader) - start_step
    return batches


def joined(batches: Batches) -> tuple[torch.Tensor, torch.Tensor]:
    inputs, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
    assert inputs.dtype == torch.float32 and targets.dtype == torch.int64
    return inputs, targets


def rows(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The samples in an order that depends on nothing but themselves."""
    return torch.unique(torch.cat([targets[:, None].float(), inputs.flatten(1).mul(1000).round()], dim=1), dim=0)


def stored(data_dir: Path, split: str, limit: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """The normalized samples of MNIST."""
    images, labels = image_dataset("mnist").arrays(data_dir, split)
    return (images[:limit] / 255 - 0.1307) / 0.3081, labels[:limit]


def same(some: Batches, others: Batches) -> bool:
    pairs = zip(some, others, strict=True)
    return all(torch.equal(a, b) for batches in pairs for a, b in zip(*batches, strict=True))


# Each sample once


@EACH_LOADER
@pytest.mark.parametrize("num_workers", [0, 2])
def test_every_sample_once_per_epoch_in_a_new_order(packed: Path, kind: str, num_workers: int) -> None:
    train, val = (make_loader(packed, kind, split, num_workers=num_workers) for split in ("train", "val"))
    first, second, again = (epoch_of(train, epoch) for epoch in (1, 2, 1))
    assert all(len(targets) == BATCH for _, targets in first[:-1])
    assert torch.equal(rows(*joined(first)), rows(*stored(packed, "train")))
    assert same(first, again) and not torch.equal(joined(first)[0], joined(second)[0])
    assert torch.equal(rows(*joined(epoch_of(val, 0))), rows(*stored(packed, "val")))
    assert (len(train.dataset), len(val.dataset)) == (2000, 500)


@EACH_LOADER
def test_ranks_share_an_epoch(packed: Path, kind: str) -> None:
    for split, expected in (("train", stored(packed, "train")), ("val", stored(packed, "val"))):
        parts = [epoch_of(make_loader(packed, kind, split, rank, 2), 3) for rank in range(2)]
        assert split == "val" or len(parts[0]) == len(parts[1])
        inputs, targets = joined(parts[0] + parts[1])
        assert len(inputs) == len(expected[0])
        assert torch.equal(rows(inputs, targets), rows(*expected))


@EACH_LOADER
def test_limits_take_the_first_samples(packed: Path, kind: str) -> None:
    for split, limit in (("train", 100), ("val", 50)):
        loader = make_loader(packed, kind, split, limit_train=100, limit_val=50)
        assert torch.equal(rows(*joined(epoch_of(loader, 1))), rows(*stored(packed, split, limit)))
        assert len(loader.dataset) == limit


@EACH_LOADER
def test_an_epoch_that_is_resumed_or_interrupted_is_like_any_other(packed: Path, kind: str) -> None:
    loader = make_loader(packed, kind, "train")
    whole = epoch_of(loader, 1)
    assert same(epoch_of(loader, 1, start_step=20), whole[20:])
    next(iter(loader))
    assert same(epoch_of(loader, 1), whole)


# The same samples, normalized and augmented in the same way


def test_loaders_of_whole_batches_augment_alike(packed: Path) -> None:
    source = image_dataset("cifar10")
    images, _ = source.arrays(packed, "train")
    for epoch in (1, 2):
        batches = {
            kind: epoch_of(make_loader(packed, kind, "train", dataset="cifar10"), epoch)
            for kind in ("memory", "device", "dali", "shards")
        }
        assert same(batches["memory"], batches["device"])
        inputs, targets = joined(batches["memory"])
        dali_inputs, dali_targets = joined(batches["dali"])
        assert torch.equal(targets, dali_targets)
        torch.testing.assert_close(inputs, dali_inputs, atol=1e-5, rtol=0)
        assert torch.equal(rows(inputs, targets), rows(*joined(batches["shards"])))
        transform = BatchTransform(source.MEAN, source.STD, augment=True, samples=len(images), seed=1)
        transform.set_epoch(epoch)
        order = DistributedBatchSampler(len(images), BATCH, shuffle=True, seed=1)
        order.set_epoch(epoch)
        alone = torch.stack([transform(images[i : i + 1], torch.tensor([i]))[0] for i in order.order()[:5]])
        assert torch.equal(alone, inputs[:5])  # what happens to a sample does not depend on its batch


def test_augmentation_of_map_follows_from_the_sample_alone(packed: Path) -> None:
    flags = {"dataset": "cifar10", "limit_train": 64}
    seen = {}
    for ranks, workers in ((1, 0), (1, 2), (2, 1)):
        loaders = [
            make_loader(packed, "map", "train", rank, ranks, num_workers=workers, batch_size=32 // ranks, **flags)
            for rank in range(ranks)
        ]
        for epoch in (1, 2):
            seen[ranks, workers, epoch] = rows(
                *joined([batch for loader in loaders for batch in epoch_of(loader, epoch)])
            )
    assert not torch.equal(seen[1, 0, 1], seen[1, 0, 2])
    for (_, _, epoch), samples in seen.items():
        assert torch.equal(samples, seen[1, 0, epoch])
    dataset = ImageDataset("cifar10", packed, "train", seed=1)
    state = torch.get_rng_state()
    assert torch.equal(dataset[1, 3][0], dataset[1, 3][0])
    assert torch.equal(state, torch.get_rng_state())  # the model's dropout uses this generator too


def test_flip_and_crop() -> None:
    images = torch.arange(2 * 3 * 8 * 8).view(2, 3, 8, 8)
    centre = torch.full((2, 2), PADDING)
    flips = torch.tensor([False, True])
    kept, mirrored = flip_and_crop(images, flips, centre)
    assert torch.equal(kept, images[0])
    assert torch.equal(mirrored, images[1].flip(-1))
    shifted, _ = flip_and_crop(images, flips, torch.tensor([[PADDING + 1, 0], [0, 0]]))
    assert torch.equal(shifted[:, :-1, PADDING:], images[0, :, 1:, :-PADDING])
    assert shifted[:, -1].eq(0).all()
    assert shifted[:, :, :PADDING].eq(0).all()


# Shards


@pytest.fixture
def few(tmp_path: Path) -> Path:
    generate("mnist", tmp_path, train_samples=200, val_samples=100)
    return tmp_path


def shard(data_dir: Path) -> Path:
    return shards.shard_paths("mnist", data_dir, "train")[3]


def test_a_sample_is_a_member_and_only_the_samples_in_use_are_read(few: Path) -> None:
    pack("mnist", few)
    with tarfile.open(shard(few)) as tar:
        names, places = zip(*((member.name, member.offset) for member in tar), strict=True)
    assert names == tuple(f"{index:08d}.bin" for index in range(3, 200, 32))
    content = shard(few).read_bytes()
    shard(few).write_bytes(content[: places[4]] + bytes(len(content) - places[4]))
    loader = make_loader(few, "shards", "train", limit_train=128)
    assert torch.equal(rows(*joined(epoch_of(loader, 1))), rows(*stored(few, "train", 128)))
    with pytest.raises(UserError, match=r"train-003\.tar: damaged, has no sample 131"):
        epoch_of(make_loader(few, "shards", "train"), 1)


def test_shards_missing_damaged_or_of_other_data_are_one_line(few: Path, run_script: Script) -> None:
    train = ("01_single_gpu/train.py", "--loader", "shards", "--data_dir", few)
    fix = f"run `python ../data/prepare.py mnist --shards --data_dir {few}`"
    error = run_script(*train).error
    assert "no shards in" in error and fix in error
    pack("mnist", few)
    os.truncate(shard(few), 5000)
    error = run_script(*train).error
    assert f"{shard(few)}: damaged, expected" in error and f"move {shard(few).parent} away and {fix}" in error
    assert "damaged" in run_script("data/prepare.py", "mnist", "--shards", "--data_dir", few).error
    for path in shard(few).parent.iterdir():
        path.unlink()
    assert run_script("data/prepare.py", "mnist", "--shards", "--data_dir", few).status == 0
    for path in (few / "MNIST" / "raw").iterdir():
        path.unlink()
    assert (
        "packed from another version"
        in run_script("data/prepare.py", "mnist", "--synthetic", "--train_samples", 128, "--data_dir", few).error
    )
    assert "packed from another version" in run_script(*train).error


def test_shards_that_change_while_they_are_read_are_one_line(few: Path, run_script: Script) -> None:
    pack("mnist", few)
    content = shard(few).read_bytes()
    shard(few).write_bytes(b"x" * 600 + content[600:])  # of the same length
    result = run_script("01_single_gpu/train.py", "--loader", "shards", "--num_workers", 1, "--data_dir", few)
    assert f"{shard(few)}: damaged" in result.error


# Mistakes


@EACH_LOADER
def test_data_that_are_missing_are_one_line(tmp_path: Path, kind: str) -> None:
    with pytest.raises(UserError, match=r"run `python data/prepare\.py mnist"):
        make_loader(tmp_path, kind, "train")


def test_a_device_that_is_too_small_is_one_line(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "free_bytes", lambda _: 1_000_000)
    with pytest.raises(
        UserError, match=r"--loader device needs 0.03 GB on cpu, but 0.00 GB are free; use --loader memory"
    ):
        make_loader(data_dir, "device", "train")


def test_shards_are_shared_evenly_or_not_at_all(packed: Path) -> None:
    with pytest.raises(UserError, match="--loader shards has 32 shards, which 3 ranks cannot share evenly"):
        make_loader(packed, "shards", "train", ranks=3)


def test_without_dali_the_line_says_what_to_install(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nvidia.dali", None)
    monkeypatch.delitem(sys.modules, "workshop.loaders.dali", raising=False)
    with pytest.raises(UserError, match="pip install nvidia-dali-cuda120"):
        make_loader(data_dir, "dali", "train")


# What loading leaves alone


@EACH_LOADER
def test_nothing_changes_in_a_data_folder_that_many_share(packed: Path, kind: str) -> None:
    """Tests may run as root, which can write anywhere; a folder's time shows files that were there for a while."""
    before = {path: path.stat().st_mtime_ns for path in [packed, *packed.rglob("*")]}
    for split in ("train", "val"):
        epoch_of(make_loader(packed, kind, split, num_workers=1), 1)
    assert {path: path.stat().st_mtime_ns for path in [packed, *packed.rglob("*")]} == before


def test_a_dali_pipeline_ends_with_its_loader(data_dir: Path) -> None:
    """If garbage collection in a forked loader worker ended the pipeline, it would wait there forever."""
    loader = make_loader(data_dir, "dali", "train")
    epoch_of(loader, 1)
    pipeline = weakref.ref(loader.pipeline)
    gc.disable()
    try:
        del loader
        assert pipeline() is None
    finally:
        gc.enable()
