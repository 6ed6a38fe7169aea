"""Synthetic boxes of dark matter and gas in the early universe, in place of simulations where there is no network.

Random density waves with a given power spectrum set particles in motion, in the approximation of Zel'dovich (1970): all
particles move on straight lines, further where the potential is steeper. Their mass and momentum are distributed to the
cells that they lie in ("cloud in cell", Hockney and Eastwood 1981). Gas follows them, but its pressure smooths it below
the Jeans scale, and denser gas is hotter (Hui and Gnedin 1997). Boxes are periodic: what leaves on one side enters on
the other. Lengths are comoving and in Mpc/h, wave numbers in h/Mpc.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import torch


@dataclass(frozen=True)
class Physics:
    """The physics of a box."""

    cell: float = 0.1
    """edge of a cell"""
    rms: float = 1.0
    """root mean square of the linear density contrast, all scales taken together"""
    spectral_index: float = 0.96
    """of the power spectrum on the largest scales"""
    shape: float = 0.21
    """matter density parameter times h: where the spectrum bends"""
    cutoff: float = 0.1
    """there are no waves much shorter than this; where streams of particles cross, the method would fail"""
    speed: float = 1.09
    """speed of a particle that has moved by 1 Mpc/h, in units of 100 km/s: a H f, here at redshift 3"""
    jeans: float = 0.15
    """standard deviation of the Gaussian that smooths the gas"""
    slope: float = 0.6
    """temperature grows as the density to this power"""
    scatter: float = 0.05
    """standard deviation of the logarithm of the temperature at a given density"""

    def power(self, k: torch.Tensor) -> torch.Tensor:
        """Return the power spectrum, (Mpc/h)^3, of the linear density contrast at wave numbers ``k``.

        P(k) = A k^n T(k)^2 exp(-(k R)^2), with the transfer function T of cold dark matter of Bardeen, Bond, Kaiser
        and Szalay (1986), eq. G3. A makes the integral of k^2 P(k) / (2 pi^2) over all k the square of ``rms``.
        """
        ln_k = torch.linspace(math.log(1e-5), math.log(10 / self.cutoff), 10_000, dtype=torch.float64)
        variance = torch.trapezoid(ln_k.exp() ** 3 * self._shape_of_power(ln_k.exp()) / (2 * math.pi**2), ln_k)
        return self.rms**2 / variance * self._shape_of_power(k.double())

    def _shape_of_power(self, k: torch.Tensor) -> torch.Tensor:
        q = (k / self.shape).clamp_min(1e-12)
        transfer = torch.log1p(2.34 * q) / (2.34 * q)
        transfer *= (1 + 3.89 * q + (16.1 * q) ** 2 + (5.46 * q) ** 3 + (6.71 * q) ** 4) ** -0.25
        return k**self.spectral_index * transfer**2 * torch.exp(-((k * self.cutoff) ** 2))


def generate_box(cells: int, seed: int, physics: Physics = Physics()) -> tuple[torch.Tensor, torch.Tensor]:
    """Generate a box of ``cells``^3 cells, with one particle for each.

    On one thread the same arguments give the same box. This needs about 60 bytes of memory per cell.

    Returns:
        Particles (4, cells, cells, cells) float32: density contrast (density / mean - 1) and the three components of
        the velocity, in 100 km/s; and gas (5, cells, cells, cells) float32: the same and the temperature contrast
        (temperature / temperature at mean density - 1).
    """
    generator = torch.Generator().manual_seed(seed)
    nbody = _deposit(_displacements(linear_density(cells, generator, physics), physics), physics)
    hydro = torch.empty(5, cells, cells, cells)
    for channel in range(4):
        hydro[channel] = _smooth(nbody[channel], physics.jeans / physics.cell)
    hydro[1:4] /= hydro[0].clamp_min(1e-6)  # from momentum to velocity
    for axis in (1, 2, 3):  # a cell without particles is given the velocity of the gas there
        nbody[axis] = torch.where(nbody[0] > 0, nbody[axis] / nbody[0], hydro[axis])
    hydro[4].normal_(generator=generator).mul_(physics.scatter).exp_()
    hydro[4].mul_(hydro[0] ** physics.slope).sub_(1)
    nbody[0] -= 1
    hydro[0] -= 1
    return nbody, hydro


def linear_density(cells: int, generator: torch.Generator, physics: Physics = Physics()) -> torch.Tensor:
    """Generate a Gaussian random field with the spectrum of ``physics``: (cells, cells, cells) float32, mean 0."""
    k = torch.sqrt(sum(component**2 for component in _wave_numbers(cells, physics)))
    waves = torch.fft.rfftn(torch.randn(cells, cells, cells, generator=generator))  # of power cell^3, all of them
    waves *= torch.sqrt(physics.power(k) / physics.cell**3).float()
    return torch.fft.irfftn(waves, s=(cells,) * 3)


def _wave_numbers(cells: int, physics: Physics) -> Iterator[torch.Tensor]:
    """Yield the components of the wave vectors that `torch.fft.rfftn` returns the amplitudes of; they broadcast."""
    spacing = physics.cell / (2 * math.pi)
    yield torch.fft.fftfreq(cells, spacing)[:, None, None]
    yield torch.fft.fftfreq(cells, spacing)[None, :, None]
    yield torch.fft.rfftfreq(cells, spacing)[None, None, :]


def _displacements(density: torch.Tensor, physics: Physics) -> torch.Tensor:
    """Return how far, in Mpc/h, the particle of each cell has moved: (3, n, n, n); minus its divergence is density."""
    cells = len(density)
    waves = torch.fft.rfftn(density)
    components = list(_wave_numbers(cells, physics))
    waves /= sum(component**2 for component in components).clamp_min(1e-12)
    displacements = torch.empty(3, *density.shape)
    for axis, component in enumerate(components):
        odd = component * (component.abs() < 0.999 * math.pi / physics.cell)  # the shortest wave has no direction
        torch.fft.irfftn(1j * odd * waves, s=density.shape, out=displacements[axis])
    return displacements


def _deposit(displacements: torch.Tensor, physics: Physics) -> torch.Tensor:
    """Distribute the particles' mass and momentum: each to the eight cells around it, more to the nearer ones.

    Returns:
        (4, n, n, n) float32: density in units of the mean, and density times velocity.
    """
    cells = displacements.shape[-1]
    box = torch.zeros(4, cells**3)
    rows = torch.arange(cells)
    for plane in range(cells):  # one at a time, to save memory
        moved = displacements[:, plane]
        x, y, z = moved / physics.cell + torch.stack(torch.broadcast_tensors(torch.tensor(plane), rows[:, None], rows))
        velocities = physics.speed * moved
        near = [axis.floor() for axis in (x, y, z)]
        parts = [axis - floor for axis, floor in zip((x, y, z), near, strict=True)]
        for corner in product((0, 1), repeat=3):
            index, weight = torch.zeros_like(x, dtype=torch.int64), torch.ones_like(x)
            for step, floor, part in zip(corner, near, parts, strict=True):
                index = index * cells + (floor.long() + step) % cells
                weight = weight * (part if step else 1 - part)
            box[0].index_add_(0, index.flatten(), weight.flatten())
            for axis in range(3):
                box[1 + axis].index_add_(0, index.flatten(), (weight * velocities[axis]).flatten())
    return box.view(4, cells, cells, cells)


def _smooth(field: torch.Tensor, width: float) -> torch.Tensor:
    """Smooth a periodic field with a Gaussian of this standard deviation, in cells, cut off at four of them."""
    reach = math.ceil(4 * width)
    weights = torch.exp(-0.5 * (torch.arange(-reach, reach + 1) / width) ** 2)
    weights /= weights.sum()
    for axis in range(3):
        field = sum(
            weight * field.roll(step, axis) for weight, step in zip(weights, range(-reach, reach + 1), strict=True)
        )
    return field
