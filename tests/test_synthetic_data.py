"""The synthetic data are what data/README.md says: like the real ones to a reader, and physics in the boxes."""

import math

import pytest
import torch

from synthetic_digits import generate_digits
from synthetic_images import generate_images
from synthetic_nbody import Physics, generate_box, linear_density
from workshop.datasets import cifar10, mnist

CELLS = 32
PHYSICS = Physics()


@pytest.mark.parametrize("generate", [generate_digits, generate_images])
def test_fewer_samples_are_the_first_of_more(generate) -> None:  # noqa: ANN001
    images, labels = generate(1100, seed=14)
    few, few_labels = generate(30, seed=14)
    assert torch.equal(images[:30], few) and torch.equal(labels[:30], few_labels)
    assert not torch.equal(images[1000:], images[:100])
    assert not torch.equal(generate(30, seed=15)[0], few)


def accuracy_of_linear_model(features: torch.Tensor, labels: torch.Tensor) -> float:
    """Fit ridge regression to three quarters of the samples; return its accuracy on the rest."""
    features = torch.cat([features, torch.ones(len(features), 1)], dim=1)
    split = 3 * len(features) // 4
    train, val = slice(0, split), slice(split, None)
    gram = features[train].T @ features[train] + 30 * torch.eye(features.shape[1])
    weights = torch.linalg.solve(gram, features[train].T @ torch.eye(10)[labels[train].long()])
    return ((features[val] @ weights).argmax(1) == labels[val]).float().mean().item()


def test_digits_look_like_mnist_to_a_linear_model() -> None:
    images, labels = generate_digits(8000, seed=0)
    pixels = images.flatten(1).float() / 255
    assert abs(pixels.mean().item() - mnist.MEAN[0]) < 0.02
    assert abs(pixels.std().item() - mnist.STD[0]) < 0.03
    assert labels.bincount().min() > 700
    assert 0.7 < accuracy_of_linear_model(pixels, labels) < 0.95


def test_a_linear_model_cannot_separate_the_color_images() -> None:
    images, labels = generate_images(8000, seed=0)
    pixels = images.float() / 255
    torch.testing.assert_close(pixels.mean((0, 2, 3)), torch.tensor(cifar10.MEAN), atol=0.06, rtol=0)
    torch.testing.assert_close(pixels.std((0, 2, 3)), torch.tensor(cifar10.STD), atol=0.04, rtol=0)
    assert labels.bincount().min() > 700
    assert accuracy_of_linear_model(torch.cat([pixels.flatten(1)[:, ::3], pixels.mean((2, 3))], dim=1), labels) < 0.3


# The boxes


def wave_vectors() -> torch.Tensor:
    """(3, n, n, n), in h/Mpc, of all amplitudes that `torch.fft.fftn` returns."""
    k = torch.fft.fftfreq(CELLS, PHYSICS.cell / (2 * math.pi))
    return torch.stack(torch.meshgrid(k, k, k, indexing="ij"))


def density(seed: int, physics: Physics = PHYSICS) -> torch.Tensor:
    return linear_density(CELLS, torch.Generator().manual_seed(seed), physics)


def test_power_spectrum_is_the_stated_one() -> None:
    k = torch.linspace(1e-4, 60, 400_000, dtype=torch.float64)
    variance = torch.trapezoid(k**2 * PHYSICS.power(k) / (2 * math.pi**2), k).item()
    assert math.isclose(math.sqrt(variance), PHYSICS.rms, rel_tol=1e-3)
    k = wave_vectors().norm(dim=0)
    measured = sum(torch.fft.fftn(density(seed)).abs() ** 2 for seed in range(4)) / 4 * PHYSICS.cell**3 / CELLS**3
    for low, high in ((1, 4), (4, 8), (8, 16), (16, 25)):
        modes = (k >= low) & (k < high)
        independent = 4 * int(modes.sum()) / 2  # the wave with vector -k is that with k
        assert abs((measured / PHYSICS.power(k))[modes].mean().item() - 1) < 4 / math.sqrt(independent)


def test_particles_follow_the_waves() -> None:
    """On large scales the cells' density is the linear one, and the flow converges where it grows."""
    small_waves = Physics(rms=0.05)  # so small that the linear theory holds
    particles, _ = generate_box(CELLS, 3, small_waves)
    k = wave_vectors()
    large = (k.norm(dim=0) < 8) & (k.norm(dim=0) > 0)
    linear = torch.fft.fftn(density(3, small_waves))[large]
    found, *velocity = (torch.fft.fftn(channel)[large] for channel in particles)
    divergence = sum(1j * component[large] * along for component, along in zip(k, velocity, strict=True))
    for measured, expected in ((found, linear), (divergence, -small_waves.speed * linear)):
        assert ((measured - expected).abs() ** 2).sum() < 0.03 * (expected.abs() ** 2).sum()


def test_mass_and_momentum_are_conserved_and_gas_is_smooth_and_hot_where_it_is_dense() -> None:
    particles, gas = generate_box(CELLS, 3)
    for box in (particles, gas):
        assert box.dtype == torch.float32 and box.isfinite().all()
        assert box[0].min() >= -1
        assert abs(box[0].mean(dtype=torch.float64).item()) < 1e-6
    for axis in (1, 2, 3):
        momenta = [((1 + box[0]) * box[axis]).mean(dtype=torch.float64).item() for box in (particles, gas)]
        assert math.isclose(*momenta, abs_tol=1e-6)
    smooth = torch.exp(-0.5 * (wave_vectors().norm(dim=0) * PHYSICS.jeans) ** 2) * torch.fft.fftn(particles[0])
    assert (torch.fft.fftn(gas[0]) - smooth).abs().max() < 1e-3 * smooth.abs().max()
    scatter = torch.log1p(gas[4]) - PHYSICS.slope * torch.log1p(gas[0])
    independent = math.sqrt(scatter.numel())
    assert abs(scatter.mean().item()) < 4 * PHYSICS.scatter / independent
    assert abs(scatter.std().item() / PHYSICS.scatter - 1) < 4 / independent
