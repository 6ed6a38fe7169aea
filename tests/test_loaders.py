"""The loaders: all give the same samples, normalized in the same way, each once per epoch."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from conftest import REPOSITORY, Script
from data_helpers import assert_pipelines_end_with
from lab.launching import load_script
from sources import generate, pack
from workshop import hardware
from workshop.datasets import mnist, shards
from workshop.errors import UserError
from workshop.loaders import DistributedBatchSampler, Loader
from workshop.loaders.dali import DaliLoader
from workshop.loaders.device import DeviceLoader
from workshop.loaders.memory import MemoryLoader
from workshop.loaders.transform import PADDING, BatchTransform, flip_and_crop

CPU = torch.device("cpu")
LOADERS = ["map", "shards", "memory", "device", "dali"]
LESSON = load_script(REPOSITORY / "03_ddp")


@pytest.fixture(scope="module")
def packed_data(data_dir: Path) -> Path:
    pack("mnist", data_dir)
    return data_dir


def loaders(data_dir: Path, kind: str, rank: int = 0, world_size: int = 1, **flags: object) -> tuple[Loader, Loader]:
    """The loaders of both splits, as lesson 03 builds them."""
    config = LESSON.Config(data_dir=data_dir, loader=kind, **flags)
    train, val = (LESSON.make_loader(config, split, CPU, rank, world_size) for split in ("train", "val"))
    return train, val


def epoch_of(loader: Loader, epoch: int) -> tuple[torch.Tensor, torch.Tensor]:
    loader.batch_sampler.set_epoch(epoch)
    batches = list(loader)
    assert len(batches) == len(loader)
    assert all(len(targets) == 64 for _, targets in batches[:-1])
    return torch.cat([inputs for inputs, _ in batches]), torch.cat([targets for _, targets in batches])


def sorted_samples(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The samples in an order that depends on nothing but themselves."""
    rows = torch.cat([targets[:, None].float(), inputs.flatten(1).mul(1000).round()], dim=1)
    return torch.unique(rows, dim=0)


@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize("num_workers", [0, 2])
def test_every_sample_once_per_epoch_in_a_new_order(packed_data: Path, kind: str, num_workers: int) -> None:
    images, labels = mnist.arrays(packed_data, "train")
    expected = (images / 255 - 0.1307) / 0.3081
    train, val = loaders(packed_data, kind, num_workers=num_workers)
    first, first_labels = epoch_of(train, 1)
    second, _ = epoch_of(train, 2)
    again, _ = epoch_of(train, 1)
    assert first.dtype == torch.float32
    assert torch.equal(sorted_samples(first, first_labels), sorted_samples(expected, labels))
    assert not torch.equal(first, second)
    assert torch.equal(first, again)
    val_inputs, val_labels = epoch_of(val, 0)
    val_images, expected_labels = mnist.arrays(packed_data, "val")
    val_expected = (val_images / 255 - 0.1307) / 0.3081
    assert torch.equal(sorted_samples(val_inputs, val_labels), sorted_samples(val_expected, expected_labels))


@pytest.mark.parametrize("kind", LOADERS)
def test_ranks_share_an_epoch(packed_data: Path, kind: str) -> None:
    images, labels = mnist.arrays(packed_data, "train")
    parts = []
    for rank in range(2):
        train, _ = loaders(packed_data, kind, rank, world_size=2, num_workers=0)
        train.batch_sampler.set_epoch(3)
        batches = list(train)
        parts += batches
        assert len(batches) == len(train) == -(-len(images) // 128)
    inputs, targets = torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])
    expected = sorted_samples((images / 255 - 0.1307) / 0.3081, labels)
    assert torch.equal(sorted_samples(inputs, targets), expected)


@pytest.mark.parametrize("kind", LOADERS)
def test_limits_take_the_first_samples(packed_data: Path, kind: str) -> None:
    train, val = loaders(packed_data, kind, limit_train=100, limit_val=50, num_workers=0)
    _, labels = mnist.arrays(packed_data, "train")
    assert torch.equal(epoch_of(train, 1)[1].sort().values, labels[:100].sort().values)
    assert len(epoch_of(val, 1)[1]) == 50


def colour_loaders() -> dict[str, Loader]:
    """Every loader that augments whole batches, over the same random images."""
    images = torch.randint(0, 256, (500, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    targets = torch.arange(500)

    def parts() -> tuple[DistributedBatchSampler, BatchTransform]:
        sampler = DistributedBatchSampler(500, 64, shuffle=True, seed=1)
        return sampler, BatchTransform((0.5, 0.4, 0.3), (0.2, 0.25, 0.3), augment=True, samples=500, seed=1)

    return {
        "memory": MemoryLoader(images, targets, *parts(), pin_memory=False),
        "device": DeviceLoader(images, targets, *parts(), CPU),
        "dali": DaliLoader(images, targets, *parts(), num_threads=1, device=CPU),
    }


def test_loaders_augment_alike() -> None:
    for epoch in (1, 2):
        memory, on_device, dali = (epoch_of(loader, epoch) for loader in colour_loaders().values())
        for inputs, targets in (on_device, dali):
            assert torch.equal(targets, memory[1])
            torch.testing.assert_close(inputs, memory[0], atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", ["shards", "memory"])
def test_what_is_pinned_is_the_batch(packed_data: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pinned = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: pinned.append(tensor.clone()) or pinned[-1])
    loader, _ = loaders(packed_data, kind, num_workers=0, limit_train=128)
    loader.pin_memory = True
    batches = list(loader)
    assert [id(tensor) for batch in batches for tensor in batch] == [id(tensor) for tensor in pinned]
    assert [len(targets) for _, targets in batches] == [64, 64]


def test_an_interrupted_epoch_does_not_change_the_next_one() -> None:
    for loader, fresh in zip(colour_loaders().values(), colour_loaders().values(), strict=True):
        next(iter(loader))
        assert torch.equal(epoch_of(loader, 2)[0], epoch_of(fresh, 2)[0])


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


def test_random_transforms_of_map_follow_from_the_sample_alone(data_dir: Path) -> None:
    seen = {}
    for ranks, workers in ((1, 0), (1, 2), (2, 1)):
        numbers = {}
        for rank in range(ranks):
            loader, _ = loaders(data_dir, "map", rank, ranks, batch_size=4, limit_train=20, num_workers=workers)
            loader.dataset.transform = lambda _: torch.rand(1)
            loader.dataset.labels = list(range(20))
            state = torch.get_rng_state()
            loader.batch_sampler.set_epoch(1)
            for values, indices in loader:
                numbers |= dict(zip(indices.tolist(), values.flatten().tolist(), strict=True))
            if workers == 0:
                assert torch.equal(state, torch.get_rng_state())
        seen[ranks, workers] = numbers
    assert seen[1, 0] == seen[1, 2] == seen[2, 1]
    assert len(set(seen[1, 0].values())) == 20


def test_map_is_the_data_loader_of_pytorch_with_the_flags(data_dir: Path) -> None:
    flags = {"num_workers": 2, "prefetch_factor": 3, "persistent_workers": False, "batch_size": 16}
    for loader in loaders(data_dir, "map", **flags):
        assert type(loader) is torch.utils.data.DataLoader
        assert (loader.num_workers, loader.prefetch_factor, loader.persistent_workers) == (2, 3, False)
        assert isinstance(loader.batch_sampler, DistributedBatchSampler)
    without_workers, _ = loaders(data_dir, "map", num_workers=0)
    assert not without_workers.persistent_workers


def test_shards_missing_or_cut_short(tmp_path: Path, packed_data: Path, run_script: Script) -> None:
    generate("mnist", tmp_path, train_samples=200, val_samples=100)
    result = run_script("01_single_gpu/train.py", "--loader", "shards", "--data_dir", tmp_path)
    assert (result.status, len(result.stderr.splitlines())) == (2, 1)
    assert "no shards in" in result.stderr
    assert "python ../data/prepare.py mnist --shards" in result.stderr
    pack("mnist", tmp_path)
    path = shards.shard_path(shards.folder_of("mnist", tmp_path), "train", 3)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(UserError, match=f"{path}: damaged, expected"):
        shards.check("mnist", tmp_path)


@pytest.mark.parametrize("kind", LOADERS)
def test_damage_is_reported_before_anything_is_read(tmp_path: Path, kind: str) -> None:
    generate("mnist", tmp_path, train_samples=200, val_samples=100)
    pack("mnist", tmp_path)
    path = tmp_path / "MNIST" / "raw" / "t10k-images-idx3-ubyte"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(UserError, match=f"{path}: truncated, .*; to prepare mnist run `python"):
        loaders(tmp_path, kind, num_workers=0)
    with pytest.raises(UserError, match=f"{path}: truncated"):
        pack("mnist", tmp_path)


def test_new_data_are_packed_again(tmp_path: Path, run_script: Script) -> None:
    command = ("data/prepare.py", "mnist", "--synthetic", "--val_samples", "50", "--data_dir", tmp_path)
    assert run_script(*command, "--train_samples", "100", "--shards").status == 0
    assert shards.check("mnist", tmp_path) == {"train": 100, "val": 50}
    assert run_script(*command, "--train_samples", "120").status == 0
    assert shards.check("mnist", tmp_path) == {"train": 120, "val": 50}


def test_device_too_small(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "free_bytes", lambda _: 1_000_000)
    with pytest.raises(UserError, match=r"--loader device needs 0.02 GB on cpu, but 0.00 GB are free"):
        loaders(data_dir, "device")


@pytest.mark.parametrize("kind", ["memory", "dali", "device"])
@pytest.mark.parametrize("version", [1, 2])
def test_a_job_may_have_less_memory_than_the_machine(
    kind: str, version: int, data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hardware, "OWN_CGROUPS", tmp_path / "own")
    monkeypatch.setattr(hardware, "CGROUPS", tmp_path)
    line, folder = {1: ("4:cpu,memory:/job/step", "memory/job"), 2: ("0::/job/step", "job")}[version]
    (tmp_path / "own").write_text(f"7:pids:/\n{line}\n")
    job, (limit, usage, cache) = tmp_path / folder, hardware.CGROUP_FILES[version]
    (job / "step").mkdir(parents=True)
    (job / "step" / limit).write_text("max\n")  # its own group sets no limit, the one above does
    files = {limit: "300000000\n", usage: "299500000\n", "memory.stat": f"rss 1\n{cache} 1000000\n"}
    for name, text in files.items():
        (job / name).write_text(text)
    assert hardware.free_bytes(CPU) == 1_500_000
    with pytest.raises(UserError, match=rf"--loader {kind} needs 0.0\d GB on cpu, but 0.00 GB are free; use --loader"):
        loaders(data_dir, kind)
    (job / limit).write_text("900000000\n")
    loaders(data_dir, kind)


@pytest.mark.parametrize(
    ("kind", "module", "advice"),
    [
        ("dali", "nvidia.dali", "pip install nvidia-dali-cuda120"),
        ("shards", "webdataset", "pip install webdataset"),
    ],
)
def test_missing_library(
    packed_data: Path, kind: str, module: str, advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delitem(sys.modules, f"workshop.loaders.{kind}", raising=False)
    with pytest.raises(UserError, match=advice):
        loaders(packed_data, kind)


def test_what_takes_long_to_import_is_imported_only_where_it_is_needed(data_dir: Path) -> None:
    code = """
import sys
from pathlib import Path
import torch
from workshop.config import TrainConfig
from workshop.loaders import build_loader
from workshop.models import build_model

for dataset, model in (("mnist", "mnist_cnn"), ("cifar10", "cifar_cnn")):
    config = TrainConfig(data_dir=Path(sys.argv[1]), dataset=dataset, model=model, loader="memory")
    for split in ("train", "val"):
        build_loader(config, split, torch.device("cpu"))
    build_model(model, dataset)
print([name for name in ("torchvision", "matplotlib", "h5py", "webdataset", "nvidia.dali") if name in sys.modules])
"""
    command = [sys.executable, "-c", code, str(data_dir)]
    assert subprocess.run(command, check=True, capture_output=True, text=True).stdout == "[]\n"


def test_packing_needs_a_library_too(tmp_path: Path, run_script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "webdataset", None)
    flags = ("--train_samples", "64", "--val_samples", "64", "--data_dir", tmp_path)
    result = run_script("data/prepare.py", "mnist", "--synthetic", "--shards", *flags)
    assert (result.status, result.stderr) == (2, "error: --shards needs WebDataset: pip install webdataset\n")
    assert not shards.folder_of("mnist", tmp_path).exists()


def test_a_dali_pipeline_ends_with_its_loader(data_dir: Path) -> None:
    built = list(loaders(data_dir, "dali"))
    epoch_of(built[0], 1)
    assert_pipelines_end_with(built)
