"""N-body boxes: generated with the physics that they state, read unchanged, and checked."""

import math
import os
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

from data_helpers import Mirror, assert_one_line
from data_helpers import prepare as prepare
from lab.experiment_functions import trivial_loss
from sources import NBODY_FILES, generate
from synthetic_nbody import Physics, generate_box, linear_density
from workshop.datasets import nbody
from workshop.errors import UserError

CELLS = 32
PHYSICS = Physics()
SMALL_WAVES = Physics(rms=0.05)  # so small that the linear theory holds


def wave_vectors() -> torch.Tensor:
    """(3, n, n, n), in h/Mpc, of all amplitudes that `torch.fft.fftn` returns."""
    k = torch.fft.fftfreq(CELLS, PHYSICS.cell / (2 * math.pi))
    return torch.stack(torch.meshgrid(k, k, k, indexing="ij"))


def field(seed: int, physics: Physics = PHYSICS) -> torch.Tensor:
    return linear_density(CELLS, torch.Generator().manual_seed(seed), physics)


# Physics


def test_measured_power_spectrum_follows_the_stated_one() -> None:
    k = wave_vectors().norm(dim=0)
    measured = sum(torch.fft.fftn(field(seed)).abs() ** 2 for seed in range(4)) / 4
    measured *= PHYSICS.cell**3 / CELLS**3
    expected = PHYSICS.power(k)
    for low, high in ((1, 4), (4, 8), (8, 16), (16, 25)):
        modes = (k >= low) & (k < high)
        ratios = measured[modes] / expected[modes]
        independent = 4 * int(modes.sum()) / 2  # the wave with vector -k is that with k
        assert abs(ratios.mean().item() - 1) < 4 / math.sqrt(independent)


def test_stated_power_spectrum() -> None:
    k = torch.linspace(1e-4, 60, 400_000, dtype=torch.float64)
    for physics in (PHYSICS, Physics(rms=0.3, spectral_index=1.1, cutoff=0.2)):
        variance = torch.trapezoid(k**2 * physics.power(k) / (2 * math.pi**2), k).item()
        assert math.isclose(math.sqrt(variance), physics.rms, rel_tol=1e-3)
        far = physics.power(torch.tensor([1e-4, 1.01e-4])).log()
        assert math.isclose((far[1] - far[0]).item() / math.log(1.01), physics.spectral_index, abs_tol=0.02)
    # The transfer function at q = 1, worked out by hand, against that at 0, where it is 1.
    no_cutoff = Physics(spectral_index=0, cutoff=1e-3)
    low, bend = no_cutoff.power(torch.tensor([1e-7, no_cutoff.shape]))
    assert math.isclose(math.sqrt(bend / low), 0.0732, rel_tol=1e-3)


def test_particles_follow_the_waves() -> None:
    """On large scales the cells' density is the linear one, and the flow converges where it grows."""
    particles, _ = generate_box(CELLS, 3, SMALL_WAVES)
    k = wave_vectors()
    large = (k.norm(dim=0) < 8) & (k.norm(dim=0) > 0)
    linear = torch.fft.fftn(field(3, SMALL_WAVES))[large]
    density, *velocity = (torch.fft.fftn(channel)[large] for channel in particles)
    divergence = sum(1j * component[large] * along for component, along in zip(k, velocity, strict=True))
    for found, expected in ((density, linear), (divergence, -SMALL_WAVES.speed * linear)):
        assert ((found - expected).abs() ** 2).sum() < 0.03 * (expected.abs() ** 2).sum()
    power = (density.abs() ** 2 / SMALL_WAVES.power(k.norm(dim=0))[large]).mean() * SMALL_WAVES.cell**3 / CELLS**3
    assert abs(power.item() - 1) < 4 / math.sqrt(len(density) / 2) + 0.05  # sampling noise, and cells of finite size


def test_mass_and_momentum_are_conserved() -> None:
    particles, gas = generate_box(CELLS, 3)
    for box in (particles, gas):
        assert box.dtype == torch.float32 and box.isfinite().all()
        assert box[0].min() >= -1
        torch.testing.assert_close(box[0].mean(dtype=torch.float64).item(), 0.0, atol=1e-6, rtol=0)
    for axis in (1, 2, 3):
        momenta = [((1 + box[0]) * box[axis]).mean(dtype=torch.float64).item() for box in (particles, gas)]
        torch.testing.assert_close(momenta[0], momenta[1], atol=1e-6, rtol=0)


def test_gas_is_smooth_and_hot_where_it_is_dense() -> None:
    particles, gas = generate_box(CELLS, 3)
    k = wave_vectors().norm(dim=0)
    smooth = torch.exp(-0.5 * (k * PHYSICS.jeans) ** 2) * torch.fft.fftn(particles[0])
    found = torch.fft.fftn(gas[0])
    assert (found - smooth).abs().max() < 1e-3 * smooth.abs().max()
    scatter = torch.log1p(gas[4]) - PHYSICS.slope * torch.log1p(gas[0])
    independent = math.sqrt(scatter.numel())
    assert abs(scatter.mean().item()) < 4 * PHYSICS.scatter / independent
    assert abs(scatter.std().item() / PHYSICS.scatter - 1) < 4 / independent


def test_trivial_loss() -> None:
    inputs, targets = torch.zeros(2, 4, 3, 3, 3), torch.zeros(2, 5, 3, 3, 3)
    inputs[:, 0], targets[:, 0], targets[:, 4] = 3.0, 1.0, -0.5
    assert math.isclose(trivial_loss(inputs, targets).item(), (2 + 0.5) / 5, rel_tol=1e-6)
    inputs, targets = (
        torch.stack(fields) for fields in zip(generate_box(CELLS, 0), generate_box(CELLS, 1), strict=True)
    )
    identity = (inputs - targets[:, :4]).abs().mean() * 4 / 5 + targets[:, 4].abs().mean() / 5
    torch.testing.assert_close(trivial_loss(inputs, targets), identity)
    assert identity > 2 * (0.8 * PHYSICS.scatter) / 5  # more than twice the noise, which no network can predict


# Files


def contents(data_dir: Path) -> list[bytes]:
    return [(data_dir / "nbody" / f"{split}.h5").read_bytes() for split in ("train", "val")]


def write(path: Path, **fields: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(path, "w") as file:
        for name, values in fields.items():
            file[name] = values


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A data folder with boxes that a user has put there."""
    numbers = np.random.default_rng(0)
    for split, cells in (("train", 12), ("val", 10)):
        fields = {name: numbers.normal(size=(c, *[cells] * 3)).astype("f4") for name, c in nbody.CHANNELS.items()}
        write(tmp_path / "nbody" / f"{split}.h5", **fields)
    return tmp_path


def test_only_the_seed_decides_what_is_generated(tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    try:
        for number in (1, 2):
            torch.set_num_threads(number)
            generate("nbody", tmp_path / str(number), cells=24, seed=7)
    finally:
        torch.set_num_threads(threads)
    generate("nbody", tmp_path / "other", cells=24, seed=8)
    first, second, other = (contents(tmp_path / name) for name in ("1", "2", "other"))
    assert first == second
    assert len({*first, *other}) == 4


def test_generated_files_hold_what_was_generated(tmp_path: Path, prepare: Callable) -> None:
    command = ("nbody", "--synthetic", "--cells", "24", "--data_dir", tmp_path)
    status, stdout, stderr = prepare(*command)
    assert (status, stderr) == (0, "") and "generated data (seed 0, cells 24, version 1); complete" in stdout
    assert "nothing to do" in prepare(*command)[1]
    for split, seed in (("train", 0), ("val", 1)):
        for found, expected in zip(nbody.arrays(tmp_path, split), generate_box(24, seed), strict=True):
            assert torch.equal(found, expected)
        assert nbody.box(tmp_path, split) == nbody.Box(tmp_path / "nbody" / f"{split}.h5", cells=24, periodic=True)
        with h5py.File(tmp_path / "nbody" / f"{split}.h5") as file:
            assert file.attrs["box_size_mpc_h"] == pytest.approx(2.4)
            assert file.attrs["physics_rms"] == PHYSICS.rms


def test_own_boxes_are_read_unchanged(own: Path, prepare: Callable) -> None:
    before = contents(own)
    status, stdout, _ = prepare("nbody", "--data_dir", own)
    assert status == 0 and "data of your own; complete, nothing to do" in stdout
    particles, gas = nbody.arrays(own, "val")
    with h5py.File(own / "nbody" / "val.h5") as file:
        assert np.array_equal(particles.numpy(), file["Nbody"]) and np.array_equal(gas.numpy(), file["Hydro"])
    assert not nbody.box(own, "val").periodic
    status, _, stderr = prepare("nbody", "--synthetic", "--data_dir", own)
    assert status == 2 and "never overwritten" in stderr
    assert contents(own) == before


ZEROS = {name: np.zeros((channels, 8, 8, 8), "f4") for name, channels in nbody.CHANNELS.items()}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"Nbody": ZEROS["Nbody"]}, "has no field Hydro, only Nbody"),
        ({}, "has no field Nbody, only nothing"),
        (ZEROS | {"Hydro": ZEROS["Nbody"]}, "Hydro is of shape (4, 8, 8, 8), expected (5, n, n, n)"),
        (ZEROS | {"Nbody": np.zeros((4, 8, 8, 7), "f4")}, "Nbody is of shape (4, 8, 8, 7), expected (4, n, n, n)"),
        (ZEROS | {"Nbody": np.zeros((4, 8, 8), "f4")}, "Nbody is of shape (4, 8, 8), expected (4, n, n, n)"),
        (ZEROS | {"Nbody": np.zeros((4, 6, 6, 6), "f4")}, "Nbody has 6 cells along an edge, but Hydro has 8"),
        (ZEROS | {"Nbody": np.zeros((4, 8, 8, 8))}, "Nbody holds float64, expected float32"),
    ],
)
def test_files_of_another_layout(fields: dict, message: str, own: Path, prepare: Callable) -> None:
    write(own / "nbody" / "val.h5", **fields)
    with pytest.raises(UserError) as error:
        nbody.check(own)
    assert f"{own}/nbody/val.h5: {message}" in str(error.value)
    assert "prepare.py nbody --synthetic" in str(error.value)
    status, stdout, stderr = prepare("nbody", "--data_dir", own)
    assert (status, stdout) == (2, "") and message in stderr
    assert_one_line(stderr)


def test_values_that_are_no_numbers(own: Path, prepare: Callable) -> None:
    with h5py.File(own / "nbody" / "train.h5", "a") as file:
        file["Hydro"][4, 0, 0, :3] = [np.nan, np.inf, -np.inf]
    nbody.check(own)  # reads no values
    message = "train.h5: 3 of the 8640 values of Hydro are not finite numbers"
    with pytest.raises(UserError, match=message):
        nbody.arrays(own, "train")
    status, _, stderr = prepare("nbody", "--data_dir", own)
    assert status == 2 and message in stderr
    assert_one_line(stderr)


def test_files_missing_or_cut_short(own: Path, prepare: Callable) -> None:
    path = own / "nbody" / "val.h5"
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(UserError, match=r"val\.h5: not a whole HDF5 file"):
        nbody.check(own)
    path.unlink()
    with pytest.raises(UserError, match=r"nbody: has no val\.h5; to prepare nbody run `python .*prepare\.py nbody"):
        nbody.check(own)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nbody", "--synthetic", "--cells", "0"], "--cells must be at least 1"),
        (["nbody", "--synthetic", "--cells", "9000"], "--cells 9000 needs 43740.0 GB of memory, but"),
        (["nbody", "--cells", "8"], "--cells needs --synthetic"),
        (["nbody", "--synthetic", "--train_samples", "8"], "--train_samples is not for nbody, which takes --seed, --c"),
        (["mnist", "--synthetic", "--cells", "8"], "--cells is not for mnist, which takes --seed, --train_samples, "),
        (["nbody", "--shards"], "--shards packs images (mnist, cifar10), not nbody"),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], message: str, tmp_path: Path, prepare: Callable) -> None:
    status, stdout, stderr = prepare(*arguments, "--data_dir", tmp_path)
    assert (status, stdout) == (2, "")
    assert_one_line(stderr)
    assert message in stderr


def test_download(own: Path, tmp_path: Path, prepare: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    mirror = Mirror()
    try:
        monkeypatch.setattr("sources.NBODY_URL", mirror.address)
        status, _, stderr = prepare("nbody", "--data_dir", tmp_path / "new")
        assert status == 2 and "Not Found" in stderr and "prepare.py nbody --synthetic" in stderr
        names = NBODY_FILES.values()
        mirror.pages = {f"/{name}": data for name, data in zip(names, contents(own), strict=True)}
        mirror.cut = 1000
        status, _, stderr = prepare("nbody", "--data_dir", tmp_path / "new")
        assert status == 2 and "cut short, 63256 of 64256 bytes" in stderr
        mirror.cut = 0
        status, stdout, _ = prepare("nbody", "--data_dir", tmp_path / "new")
        assert status == 0 and "downloaded data; complete" in stdout
        assert contents(tmp_path / "new") == contents(own)
    finally:
        mirror.close()
