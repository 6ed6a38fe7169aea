"""Cubes cut from boxes: rotated with their velocities, the same from all loaders, and different on each rank."""

import os
import sys
import tracemalloc
from itertools import pairwise
from pathlib import Path

import h5py
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from conftest import REPOSITORY
from data_helpers import assert_pipelines_end_with
from lab.launching import load_script
from sources import generate
from tensor_memory import peak_bytes_on_cpu
from workshop import hardware
from workshop.datasets.nbody import VELOCITY
from workshop.errors import UserError
from workshop.loaders import DistributedBatchSampler, Loader, crops, volumes
from workshop.loaders.crops import AXES, FLIPS, Crops, cut

LESSON = load_script(REPOSITORY / "04_mixed_precision")
LOADERS = ["map", "memory", "device", "dali"]
FLAGS = {"dataset": "nbody", "model": "unet3d", "unet_depth": 3}
FLAGS |= {"crop_size": 8, "train_crops": 10, "val_crops": 6, "batch_size": 4, "num_workers": 0}
ALL = torch.arange(48)


@pytest.fixture(scope="module", params=["periodic", "not periodic"])
def boxes_dir(request: pytest.FixtureRequest, data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder with boxes that continue at their opposite side, and one with boxes that do not."""
    if request.param == "periodic":
        return data_dir
    folder = tmp_path_factory.mktemp("own")
    generate("nbody", folder, cells=10)
    for path in (folder / "nbody").glob("*.h5"):
        with h5py.File(path, "a") as file:
            del file.attrs["periodic"]
    (folder / "nbody" / "ORIGIN.json").unlink()
    return folder


def loaders(data_dir: Path, kind: str, rank: int = 0, world_size: int = 1, **flags: object) -> tuple[Loader, Loader]:
    """The loaders of both splits, as lesson 04 builds them."""
    config = LESSON.Config(**(FLAGS | {"data_dir": data_dir, "loader": kind} | flags))
    train, val = (
        LESSON.make_loader(config, split, torch.device("cpu"), rank, world_size) for split in ("train", "val")
    )
    return train, val


Batches = list[tuple[torch.Tensor, torch.Tensor]]


def epoch_of(loader: Loader, epoch: int) -> Batches:
    loader.batch_sampler.set_epoch(epoch)
    batches = [(inputs.clone(), targets.clone()) for inputs, targets in loader]
    assert len(batches) == len(loader)
    return batches


def same(some: Batches, others: Batches) -> bool:
    pairs = zip(some, others, strict=True)
    return all(torch.equal(a, b) for batches in pairs for a, b in zip(*batches, strict=True))


def cubes(batches: Batches) -> torch.Tensor:
    return torch.cat([inputs for inputs, _ in batches])


# Symmetries


def turns() -> torch.Tensor:
    """(48, 3, 3): the matrix of each symmetry, by new axis and old axis."""
    return torch.nn.functional.one_hot(AXES, 3) * torch.where(FLIPS, -1, 1)[:, :, None]


def test_48_symmetries_that_form_a_group() -> None:
    matrices = turns()
    assert torch.equal(matrices[0], torch.eye(3, dtype=torch.int64))
    assert len(matrices.unique(dim=0)) == 48
    products = (matrices[:, None] @ matrices[None]).flatten(0, 1)
    assert torch.equal(products.unique(dim=0), matrices.unique(dim=0))
    assert sorted(torch.linalg.det(matrices.float()).round().tolist()) == [-1] * 24 + [1] * 24
    box = torch.rand(4, 3, 3, 3)
    assert len(cut(box, torch.zeros(48, 3, dtype=torch.int64), ALL, 3).unique(dim=0)) == 48


def test_cut_is_roll_and_slice_and_turn() -> None:
    box = torch.rand(4, 7, 7, 7)
    corners = torch.randint(7, (48, 3))
    for cube, corner, axes, flips, turn in zip(cut(box, corners, ALL, 4), corners, AXES, FLIPS, turns(), strict=True):
        plain = box.roll((-corner).tolist(), (1, 2, 3))[:, :4, :4, :4]
        expected = plain.permute(0, *(1 + axes).tolist()).flip((1 + flips.nonzero().flatten()).tolist())
        assert torch.equal(cube[0], expected[0])
        assert torch.equal(cube[1:], torch.einsum("ij,jxyz->ixyz", turn.float(), expected[1:]))


def cut_by_channels(box: torch.Tensor, corners: torch.Tensor, symmetries: torch.Tensor, size: int) -> torch.Tensor:
    """What `cut` does, with an index of 8 bytes that is built anew for each channel: more traffic, simpler code."""
    cells = box.shape[-1]
    axes, flips = AXES[symmetries], FLIPS[symmetries]
    steps = torch.arange(size)
    steps = torch.where(flips[:, :, None], size - 1 - steps, steps)
    strides = torch.tensor([cells**2, cells, 1])[axes]
    x, y, z = ((corners.gather(1, axes)[:, :, None] + steps) % cells * strides[:, :, None]).unbind(1)
    position = x[:, :, None, None] + y[:, None, :, None] + z[:, None, None, :]
    sources = torch.arange(len(box)).repeat(len(corners), 1)
    sources[:, VELOCITY] = VELOCITY[0] + axes
    batch = box.new_empty(len(corners), len(box), size, size, size)
    for channel in range(len(box)):
        offset = (sources * cells**3)[:, channel, None, None, None]
        torch.take(box, position + offset, out=batch[:, channel])
    batch[:, VELOCITY[0] : VELOCITY[-1] + 1] *= torch.where(flips, -1, 1).to(box.dtype)[:, :, None, None, None]
    return batch


@pytest.fixture(params=["on the CPU", "as on an accelerator"])
def gathering(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways to gather; the second one in several parts."""
    if request.param != "on the CPU":
        monkeypatch.setattr(crops, "_is_accelerated", lambda _: True)
        monkeypatch.setattr(crops, "INDICES_AT_ONCE", 6000)
    return request.param


@pytest.mark.parametrize(("channels", "cells", "size"), [(4, 9, 9), (5, 16, 7), (5, 7, 1)])
def test_gathering_gives_the_same_bits(gathering: str, channels: int, cells: int, size: int) -> None:
    box = torch.randn(channels, cells, cells, cells)
    box[:, 0] = 0.0  # which a flip makes -0
    corners = torch.randint(cells, (48, 3))
    mine, reference = cut(box, corners, ALL, size), cut_by_channels(box, corners, ALL, size)
    assert torch.equal(mine.view(torch.int32), reference.view(torch.int32))
    assert mine.stride() == reference.stride()


class Traffic(TorchDispatchMode):
    """Counts the bytes that operations read and write, if each reads its inputs from memory and writes its result."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):  # noqa: ANN001, ANN204
        result = operation(*args, **(kwargs or {}))
        aliases = [returned.alias_info for returned in operation._schema.returns]
        is_view = any(alias is not None and not alias.is_write for alias in aliases)
        if isinstance(result, torch.Tensor) and not is_view and "empty" not in operation.name():
            gathers = operation.name().startswith(("aten::take", "aten::index_select"))
            for tensor in (result, *(arg for arg in args if isinstance(arg, torch.Tensor))):
                values = result.numel() if gathers else min(tensor.numel(), result.numel())
                self.bytes += values * tensor.element_size()
        return result


def test_gathering_moves_few_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The index is written and read in 4 bytes, the box read, the batch written; then three of four channels twice."""
    monkeypatch.setattr(crops, "_is_accelerated", lambda _: True)
    box, corners = torch.rand(4, 32, 32, 32), torch.randint(32, (48, 3))
    moved = {}
    for function in (cut, cut_by_channels):
        with Traffic() as traffic:
            batch = function(box, corners, ALL, 32)
        moved[function] = traffic.bytes / batch.numel()
    assert 22 <= moved[cut] < 23
    assert moved[cut_by_channels] > 40


def slope(field: torch.Tensor, axis: int) -> torch.Tensor:
    """Differences between the cells on either side, on the last three axes."""
    return (field.roll(-1, axis - 3) - field.roll(1, axis - 3)) / 2


def divergence(velocity: torch.Tensor) -> torch.Tensor:
    return sum(slope(velocity[..., axis, :, :, :], axis) for axis in range(3))


def helicity(velocity: torch.Tensor) -> torch.Tensor:
    """How much the flow rotates around its direction: velocity times curl, which changes its sign in a mirror image."""
    x, y, z = velocity.unbind(-4)
    curl = slope(z, 1) - slope(y, 2), slope(x, 2) - slope(z, 0), slope(y, 0) - slope(x, 1)
    return sum(component * along for component, along in zip((x, y, z), curl, strict=True))


def test_velocities_turn_with_the_volume() -> None:
    velocity = torch.randn(3, 8, 8, 8, dtype=torch.float64)
    box = torch.cat([divergence(velocity)[None], velocity, helicity(velocity)[None]])  # rotate like places
    corners = torch.zeros(48, 3, dtype=torch.int64)
    turned = cut(box, corners, ALL, 8)
    hands = torch.linalg.det(turns().double()).round()[:, None, None, None]
    torch.testing.assert_close(divergence(turned[:, 1:4]), turned[:, 0])
    torch.testing.assert_close(helicity(turned[:, 1:4]), hands * turned[:, 4])
    # As if the components were three densities: each is moved to its place, and still points where it did.
    moved = torch.stack([cut(component.expand(4, 8, 8, 8), corners, ALL, 8)[:, 0] for component in velocity], dim=1)
    wrong = (divergence(moved) - turned[:, 0]).abs().mean((1, 2, 3)) > 0.1 * turned[:, 0].abs().mean()
    assert wrong.tolist() == [False] + [True] * 47
    wrong = (helicity(moved) - hands * turned[:, 4]).abs().mean((1, 2, 3)) > 0.1 * turned[:, 4].abs().mean()
    reversal = (turns() == -torch.eye(3)).all((1, 2)).nonzero().item()  # of all axes: two wrong signs cancel
    assert wrong.tolist() == [symmetry not in (0, reversal) for symmetry in range(48)]


# Loaders


def test_loaders_give_the_same_batches(boxes_dir: Path) -> None:
    memory, memory_val = loaders(boxes_dir, "memory")
    expected = [epoch_of(memory, epoch) for epoch in (1, 2)]
    expected_val = epoch_of(memory_val, 1)
    assert [tuple(inputs.shape) for inputs, _ in expected[0]] == [(n, 4, 8, 8, 8) for n in (4, 4, 2)]
    assert [tuple(targets.shape) for _, targets in expected[0]] == [(n, 5, 8, 8, 8) for n in (4, 4, 2)]
    for kind in ("map", "device", "dali"):
        train, val = loaders(boxes_dir, kind)
        assert same(epoch_of(train, 1), expected[0])
        assert same(epoch_of(train, 2), expected[1])
        assert same(epoch_of(val, 1), expected_val) and same(epoch_of(val, 2), expected_val)


def test_workers_read_what_the_training_process_reads(data_dir: Path) -> None:
    train, _ = loaders(data_dir, "map", num_workers=2)
    plain, _ = loaders(data_dir, "map")
    for epoch in (1, 2):  # the workers stay
        assert same(epoch_of(train, epoch), epoch_of(plain, epoch))


def test_no_cube_twice_and_others_with_another_seed_or_epoch(data_dir: Path) -> None:
    train, val = loaders(data_dir, "memory")
    epochs = [epoch_of(train, epoch) for epoch in (1, 2)]
    assert len(torch.cat([cubes(epoch) for epoch in epochs]).unique(dim=0)) == 20
    other, other_val = loaders(data_dir, "memory", seed=2)
    assert len(torch.cat([cubes(epochs[0]), cubes(epoch_of(other, 1))]).unique(dim=0)) == 20
    assert same(epoch_of(val, 1), epoch_of(other_val, 1))


@pytest.mark.parametrize("kind", LOADERS)
def test_ranks_share_the_cubes_of_one(data_dir: Path, kind: str) -> None:
    one, _ = loaders(data_dir, kind)
    together = epoch_of(one, 3)
    parts = [epoch_of(loaders(data_dir, kind, rank, 2, batch_size=2)[0], 3) for rank in range(2)]
    for step, (inputs, targets) in enumerate(together):
        for rank in range(2):
            assert torch.equal(parts[rank][step][0], inputs[rank::2])
            assert torch.equal(parts[rank][step][1], targets[rank::2])
    assert len(torch.cat([cubes(part) for part in parts]).unique(dim=0)) == 10


@pytest.mark.parametrize("kind", LOADERS)
def test_an_interrupted_epoch_does_not_change_the_next_one(data_dir: Path, kind: str) -> None:
    train, _ = loaders(data_dir, kind)
    train.batch_sampler.set_epoch(1)
    next(iter(train))
    assert same(epoch_of(train, 2), epoch_of(loaders(data_dir, kind)[0], 2))


@pytest.mark.parametrize("kind", LOADERS)
def test_a_limited_loader_says_how_many_samples_it_has(data_dir: Path, kind: str) -> None:
    for loader, samples in zip(loaders(data_dir, kind, limit_train=4, limit_val=3), (4, 3), strict=True):
        assert len(loader.dataset) == samples  # by which the sum of the losses is divided


def test_limits_take_the_first_cubes(data_dir: Path) -> None:
    train, val = loaders(data_dir, "memory", limit_train=4, limit_val=3)
    full, full_val = loaders(data_dir, "memory")
    few = {cube.numpy().tobytes() for cube in cubes(epoch_of(train, 1))}
    assert len(few) == 4 and few < {cube.numpy().tobytes() for cube in cubes(epoch_of(full, 1))}
    assert torch.equal(cubes(epoch_of(val, 1)), cubes(epoch_of(full_val, 1))[:3])


def test_symmetries_and_corners_are_distributed_evenly() -> None:
    corners, symmetries = Crops(48_000, cells=20, size=16, periodic=False, seed=1).of_epoch(1)
    assert (symmetries.bincount(minlength=48) - 1000).abs().max() < 5 * 1000**0.5
    assert (corners.min().item(), corners.max().item()) == (0, 4)
    assert Crops(1000, cells=20, size=16, periodic=True, seed=1).of_epoch(1)[0].max() == 19
    draws = [Crops(9, 20, 16, True, seed).of_epoch(epoch)[0] for seed, epoch in ((1, 1), (1, 2), (2, 1))]
    assert not any(torch.equal(a, b) for a, b in pairwise([*draws, draws[0]]))


def test_a_box_that_is_not_periodic_is_not_left(data_dir: Path, tmp_path: Path) -> None:
    os.makedirs(tmp_path / "nbody")
    for split, cells in (("train", 10), ("val", 9)):
        ramp = torch.arange(cells).float().expand(9, cells, cells, cells) / cells
        with h5py.File(tmp_path / "nbody" / f"{split}.h5", "w") as file:
            file["Nbody"], file["Hydro"] = ramp[:4].numpy(), ramp[4:].numpy()
    _, val = loaders(tmp_path, "map")
    assert (cubes(epoch_of(val, 1)).diff(dim=-1) > 0).all()  # over the side, the ramp falls


def test_what_is_pinned_is_the_batch(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pinned = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: pinned.append(tensor.clone()) or pinned[-1])
    config = LESSON.Config(**FLAGS | {"data_dir": data_dir, "loader": "memory"})
    loader = LESSON.make_loader(config, "train", torch.device("cuda"), 0, 1)
    batches = list(loader)
    assert [id(tensor) for batch in batches for tensor in batch] == [id(tensor) for tensor in pinned]


# Mistakes


@pytest.mark.parametrize("kind", LOADERS)
def test_values_that_are_no_numbers_are_reported(kind: str, tmp_path: Path) -> None:
    generate("nbody", tmp_path, cells=16)
    with h5py.File(tmp_path / "nbody" / "train.h5", "a") as file:
        file["Nbody"][0, 0, 0, 0] = float("nan")
    with pytest.raises(UserError, match=r"train\.h5: 1 of the 16384 values of Nbody are not finite numbers"):
        loaders(tmp_path, kind)


def test_missing_library(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nvidia.dali", None)
    for module in ("dali", "volume_dali"):
        monkeypatch.delitem(sys.modules, f"workshop.loaders.{module}", raising=False)
    with pytest.raises(UserError, match="--loader dali needs NVIDIA DALI"):
        loaders(data_dir, "dali")


def test_mistakes(data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"--crop_size 64 is larger than the box in .*train\.h5, which has 32 cells"):
        loaders(data_dir, "memory", crop_size=64)
    with pytest.raises(UserError, match="--loader shards has no volumes; --loader map, memory, device or dali has"):
        loaders(data_dir, "shards")
    with pytest.raises(UserError, match="--batch_size 4 on 4 rank"):
        loaders(data_dir, "memory", world_size=4)
    with pytest.raises(UserError, match=r"has no train\.h5; to prepare nbody run `python"):
        loaders(tmp_path, "memory")
    monkeypatch.setattr(hardware, "free_bytes", lambda _: 1_000_000)
    for kind, other in (("device", "memory"), ("memory", "map"), ("dali", "map")):
        with pytest.raises(UserError, match=rf"--loader {kind} needs 0.00 GB on cpu .*; use --loader {other}"):
            loaders(data_dir, kind)


@pytest.mark.parametrize(("kind", "where"), [("memory", "cpu"), ("device", "meta")])
def test_a_box_is_read_within_the_memory_that_was_asked_for(
    kind: str, where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another device, such as the meta device here, is given the box channel by channel."""
    asked, traced = {}, []

    def ask(_: str, needed: int, place: torch.device, advice: str, what: str) -> None:
        asked[place.type] = needed

    monkeypatch.setattr(volumes, "require_memory", ask)
    generate("nbody", tmp_path, cells=64)
    dataset = volumes.VolumeDataset(tmp_path, "train", crop_size=8, crops=10)
    sampler = DistributedBatchSampler(len(dataset), 4, shuffle=True)

    def build() -> None:
        tracemalloc.start()
        loader = volumes.build_volume_loader(kind, dataset, sampler, torch.device(where))
        traced.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert [field.device.type for field in loader.boxes] == [where] * 2

    model = torch.nn.Linear(1, 1)
    peak = peak_bytes_on_cpu(build, model, torch.optim.SGD(model.parameters())) + traced[0]
    box = 4 * 9 * 64**3
    assert asked[where] >= box
    assert peak <= asked["cpu"] < (box / 3 if where == "meta" else 2 * box)


@pytest.mark.parametrize("dataset", ["mnist", "cifar10"])
@pytest.mark.parametrize("flag", ["crop_size", "train_crops", "val_crops", "unet_width", "unet_depth"])
def test_flags_of_volumes_are_refused_where_there_are_none(flag: str, dataset: str) -> None:
    message = rf"^--{flag} 3 needs --dataset nbody, not {dataset}; configs/unet3d\.yaml and configs/vit3d\.yaml say so"
    with pytest.raises(UserError, match=message):
        LESSON.Config(dataset=dataset, **{flag: 3})


def test_a_dali_pipeline_ends_with_its_loader(data_dir: Path) -> None:
    built = list(loaders(data_dir, "dali"))
    epoch_of(built[0], 1)
    assert_pipelines_end_with(built)
