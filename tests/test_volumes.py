"""Cubes cut from boxes: rotated with their velocities, the same from all loaders, and different on each rank."""

import os
from itertools import product
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from conftest import REPOSITORY
from lab.launching import load_script
from sources import generate
from workshop import hardware
from workshop.datasets import nbody
from workshop.errors import UserError
from workshop.loaders import DistributedBatchSampler, Loader, build_volume_loader
from workshop.loaders.volumes import SYMMETRIES, VolumeDataset, cut, cut_batch, with_reversed

Config = load_script(REPOSITORY / "04_mixed_precision").Config
CPU = torch.device("cpu")
LOADERS = ["map", "memory", "device", "dali"]
EACH_LOADER = pytest.mark.parametrize("kind", LOADERS)
ALL = range(48)
ORIGIN = [0, 0, 0]


@pytest.fixture(scope="module", params=["periodic", "not periodic"])
def boxes_dir(request: pytest.FixtureRequest, data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder with boxes that continue at their opposite side, and one with boxes that do not."""
    if request.param == "periodic":
        return data_dir
    folder = tmp_path_factory.mktemp("own")
    generate("nbody", folder, cells=10)
    for path in nbody.folder(folder).glob("*.h5"):
        with h5py.File(path, "a") as file:
            del file.attrs["periodic"]
    return folder


def make_loader(
    data_dir: Path,
    kind: str,
    split: str = "train",
    rank: int = 0,
    ranks: int = 1,
    *,
    crops: int = 10,
    limit: int | None = None,
    seed: int = 1,
    batch_size: int = 4,
    num_workers: int = 0,
) -> Loader:
    dataset = VolumeDataset(data_dir, split, 8, crops, limit, seed)
    sampler = DistributedBatchSampler(
        len(dataset), batch_size, rank=rank, num_replicas=ranks, shuffle=split == "train", seed=seed
    )
    if kind == "map":
        persistent = num_workers > 0
        return DataLoader(dataset, batch_sampler=sampler, num_workers=num_workers, persistent_workers=persistent)
    config = Config(loader=kind, num_workers=num_workers)
    return build_volume_loader(config, dataset, sampler, CPU)


Batches = list[tuple[torch.Tensor, torch.Tensor]]


def epoch_of(loader: Loader, epoch: int, start_step: int = 0) -> Batches:
    loader.batch_sampler.set_epoch(epoch, start_step)
    batches = [(inputs.clone(), targets.clone()) for inputs, targets in loader]
    assert len(batches) == len(loader) - start_step
    return batches


def same(some: Batches, others: Batches) -> bool:
    pairs = zip(some, others, strict=True)
    return all(torch.equal(a, b) for batches in pairs for a, b in zip(*batches, strict=True))


def cubes(*epochs: Batches) -> torch.Tensor:
    return torch.cat([inputs for batches in epochs for inputs, _ in batches])


# Symmetries


def matrix(symmetry: int) -> torch.Tensor:
    """(3, 3): of a symmetry, by new axis and old axis."""
    axes, flips = SYMMETRIES[symmetry]
    signs = torch.where(torch.tensor(flips), -1.0, 1.0)
    return torch.nn.functional.one_hot(torch.tensor(axes), 3) * signs[:, None]


def test_48_symmetries_that_form_a_group() -> None:
    matrices = torch.stack([matrix(symmetry) for symmetry in ALL])
    assert torch.equal(matrices[0], torch.eye(3))
    assert len(matrices.unique(dim=0)) == 48
    products = (matrices[:, None] @ matrices[None]).flatten(0, 1)
    assert torch.equal(products.unique(dim=0), matrices.unique(dim=0))


@pytest.mark.parametrize("symmetry", ALL)
def test_each_cell_of_a_cube_is_that_of_the_box_which_the_symmetry_says(symmetry: int) -> None:
    cells, size, corner = 5, 3, [4, 1, 3]  # reaches over two sides
    box = torch.randn(5, cells, cells, cells)
    cube, turn = cut(box, corner, symmetry, size), matrix(symmetry)
    for place in product(range(size), repeat=3):
        centered = torch.tensor(place) - (size - 1) / 2
        inside = (turn.T @ centered + (size - 1) / 2).round().long()
        x, y, z = ((torch.tensor(corner) + inside) % cells).tolist()
        found, expected = cube[(slice(None), *place)], box[:, x, y, z]
        assert torch.equal(found[[0, 4]], expected[[0, 4]])
        assert torch.equal(found[1:4], turn @ expected[1:4])


def test_a_batch_is_cut_as_cubes_are_one_by_one() -> None:
    boxes = torch.randn(4, 7, 7, 7), torch.randn(5, 7, 7, 7)
    corners, symmetries = torch.randint(7, (48, 3)), torch.randperm(48)
    for box, found in zip(boxes, cut_batch(map(with_reversed, boxes), corners, symmetries, 5), strict=True):
        cubes = [cut(box, corner.tolist(), int(number), 5) for corner, number in zip(corners, symmetries, strict=True)]
        assert torch.equal(found, torch.stack(cubes))
        assert found.is_contiguous()


def slope(field: torch.Tensor, axis: int) -> torch.Tensor:
    """Differences between the cells on either side, on the last three axes."""
    return (field.roll(-1, axis - 3) - field.roll(1, axis - 3)) / 2


def divergence(velocity: torch.Tensor) -> torch.Tensor:
    return sum(slope(velocity[axis], axis) for axis in range(3))


@pytest.mark.parametrize("symmetry", ALL)
def test_velocities_turn_with_the_volume(symmetry: int) -> None:
    velocity = torch.randn(3, 8, 8, 8)
    box = torch.cat([divergence(velocity)[None], velocity])  # a divergence is moved as a density is
    turned = cut(box, ORIGIN, symmetry, 8)
    torch.testing.assert_close(divergence(turned[1:4]), turned[0])


# Loaders


def test_loaders_give_the_same_batches(boxes_dir: Path) -> None:
    train, val = (make_loader(boxes_dir, "memory", split) for split in ("train", "val"))
    expected = [epoch_of(train, epoch) for epoch in (1, 2)]
    expected_val = epoch_of(val, 1)
    assert [tuple(inputs.shape) for inputs, _ in expected[0]] == [(n, 4, 8, 8, 8) for n in (4, 4, 2)]
    assert [tuple(targets.shape) for _, targets in expected[0]] == [(n, 5, 8, 8, 8) for n in (4, 4, 2)]
    for kind, num_workers in (("map", 0), ("map", 2), ("device", 0), ("dali", 1)):
        train, val = (make_loader(boxes_dir, kind, split, num_workers=num_workers) for split in ("train", "val"))
        assert same(epoch_of(train, 1), expected[0])
        assert same(epoch_of(train, 2), expected[1])
        assert same(epoch_of(val, 1), expected_val) and same(epoch_of(val, 2), expected_val)


def test_no_cube_twice_and_others_with_another_seed_or_epoch(data_dir: Path) -> None:
    train, other = (make_loader(data_dir, "memory", seed=seed) for seed in (1, 2))
    assert len(cubes(epoch_of(train, 1), epoch_of(train, 2), epoch_of(other, 1)).unique(dim=0)) == 30
    val, other_val = (make_loader(data_dir, "memory", "val", seed=seed) for seed in (1, 2))
    assert same(epoch_of(val, 1), epoch_of(other_val, 1))


def test_places_and_symmetries_are_distributed_evenly(data_dir: Path) -> None:
    corners, symmetries = VolumeDataset(data_dir, "train", 8, 48_000).places(1)
    assert (symmetries.bincount(minlength=48) - 1000).abs().max() < 5 * 1000**0.5
    for axis in range(3):
        assert (corners[:, axis].bincount(minlength=32) - 1500).abs().max() < 5 * 1500**0.5


@EACH_LOADER
def test_ranks_share_the_cubes_of_one(data_dir: Path, kind: str) -> None:
    together = epoch_of(make_loader(data_dir, kind), 3)
    parts = [epoch_of(make_loader(data_dir, kind, "train", rank, 2, batch_size=2), 3) for rank in range(2)]
    for step, batch in enumerate(together):
        for rank in range(2):
            assert same([parts[rank][step]], [tuple(tensor[rank::2] for tensor in batch)])
    assert len(cubes(*parts).unique(dim=0)) == 10


@EACH_LOADER
def test_an_epoch_that_is_resumed_or_interrupted_is_like_any_other(data_dir: Path, kind: str) -> None:
    train = make_loader(data_dir, kind)
    whole = epoch_of(train, 1)
    assert same(epoch_of(train, 1, start_step=1), whole[1:])
    next(iter(train))
    assert same(epoch_of(train, 1), whole)


@EACH_LOADER
def test_limits_take_the_first_cubes(data_dir: Path, kind: str) -> None:
    full, few = (make_loader(data_dir, kind, "val", limit=limit) for limit in (None, 3))
    assert torch.equal(cubes(epoch_of(few, 1)), cubes(epoch_of(full, 1))[:3])
    assert (len(full.dataset), len(few.dataset)) == (10, 3)  # by which the sum of the losses is divided


def test_a_box_that_is_not_periodic_is_not_left(tmp_path: Path) -> None:
    os.makedirs(tmp_path / "nbody")
    for split, cells in (("train", 10), ("val", 9)):
        ramp = np.broadcast_to(np.arange(cells, dtype="f4") / cells, (9, cells, cells, cells))
        with h5py.File(tmp_path / "nbody" / f"{split}.h5", "w") as file:
            file["Nbody"], file["Hydro"] = ramp[:4], ramp[4:]
    val = make_loader(tmp_path, "map", "val")
    assert (cubes(epoch_of(val, 1)).diff(dim=-1) > 0).all()  # over the side, the ramp falls


# Mistakes


def test_values_that_are_no_numbers_are_one_line(tmp_path: Path) -> None:
    generate("nbody", tmp_path, cells=16)
    with h5py.File(tmp_path / "nbody" / "train.h5", "a") as file:
        file["Hydro"][4, 0, 0, 0] = float("nan")
    reading = [lambda kind=kind: make_loader(tmp_path, kind) for kind in ("memory", "device", "dali")]
    for read in (*reading, make_loader(tmp_path, "map").dataset.check_values):
        with pytest.raises(UserError, match=r"train\.h5: channel 4 of Hydro has values that are not finite numbers"):
            read()


def test_what_cannot_be_loaded_is_one_line(data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="--loader shards has no volumes; --loader map, memory, device or dali has"):
        make_loader(data_dir, "shards")
    with pytest.raises(UserError, match=r"--crop_size 33 is larger than the box in .*, which has 32 cells a side"):
        VolumeDataset(data_dir, "train", 33, 10)
    for kind in LOADERS:
        with pytest.raises(UserError, match=r"train\.h5: No such file .*; to prepare nbody run `python"):
            make_loader(tmp_path, kind)
    monkeypatch.setattr(hardware, "free_bytes", lambda _: 1_000_000)
    for kind, other in (("device", "memory"), ("memory", "map"), ("dali", "map")):
        with pytest.raises(UserError, match=rf"--loader {kind} needs 0.00 GB on cpu .*; use --loader {other}"):
            make_loader(data_dir, kind)
