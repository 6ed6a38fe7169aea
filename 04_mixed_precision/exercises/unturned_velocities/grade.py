"""The cubes are turned and mirrored in all ways, and the velocities in them, which are vectors, turn with the cubes.

In the boxes here the velocity is the gradient of the density. This stays so in a cube that is turned or mirrored, if
its velocities are turned with it. Each value of the density occurs once, so it shows where and how a cube was cut.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F

from clinic.observe import Script
from workshop.datasets import nbody
from writing import write_box

CELLS, SIZE, CUBES, BATCH, EPOCHS = 12, 6, 96, 4, 2
TOLERANCE = 1e-5
VELOCITY = list(nbody.VELOCITY)


def grade(script: Script) -> Iterator[str]:
    """Yield what is still wrong."""
    data_dir = script.folder / "boxes"
    density = write_boxes(nbody.folder(data_dir))
    flags = "--dataset nbody --model unet3d --unet_width 4 --unet_depth 1 --optimizer adam --lr 0.001 --loader memory "
    flags += f"--crop_size {SIZE} --train_crops {CUBES} --val_crops {BATCH} --batch_size {BATCH} --epochs {EPOCHS}"
    run = script.run(*flags.split(), data_dir=data_dir, keep=True, watch=keep_targets)
    inputs = torch.cat([call.inputs for call in run[0].shown if call.training])
    targets = torch.cat(run[0].extra)
    if len(inputs) != EPOCHS * CUBES or inputs.shape[1:] != (4, SIZE, SIZE, SIZE) or len(targets) != len(inputs):
        yield f"in {EPOCHS} epochs it trains on {len(inputs)} cubes, not on {CUBES} in each"
        return
    for what, cubes in (("inputs", inputs), ("targets", targets)):
        wrong = (gradient(cubes[:, 0]) - inside(cubes[:, VELOCITY])).abs().amax(dim=(1, 2, 3, 4)) > TOLERANCE
        if wrong.any():
            yield (
                f"in {int(wrong.sum())} of {len(cubes)} cubes, the velocities of the {what} are no longer along the "
                "gradient of the density, as they do in the box"
            )
    if not (torch.equal(targets[:, 0], 2 * inputs[:, 0]) and torch.equal(targets[:, 4], inputs[:, 0] ** 2)):
        yield "the density and the temperature of the targets are not those of the same places in the inputs"
    try:
        symmetries = [symmetry_of(cube, density) for cube in inputs[:, 0]]
    except LookupError:
        yield "the densities of the cubes are no longer those of the box"
        return
    orders = {tuple(axes) for axes, _ in symmetries}
    if len(orders) < 6:
        yield f"in {len(inputs)} cubes, the axes occur in {len(orders)} of 6 orders"
    if (ways := len({tuple(flips) for _, flips in symmetries})) < 8:
        yield f"in {len(inputs)} cubes, the axes are reversed in {ways} of 8 combinations"
    if len({bool(is_mirrored(*symmetry)) for symmetry in symmetries}) < 2:
        yield f"of {len(inputs)} cubes, either all or none are mirror images"
    turns = [
        Counter((tuple(axes), tuple(flips)) for axes, flips in epoch)
        for epoch in (symmetries[:CUBES], symmetries[CUBES:])
    ]
    if turns[0] == turns[1]:  # each epoch has its own order of the cubes, so the lists cannot be compared
        yield "the cubes are turned in the same ways in both epochs"


def keep_targets(_: Path) -> Callable[[], list[torch.Tensor]]:
    """Keep what the model's outputs are compared with in training; see `Script.run`."""
    targets = []
    l1_loss = F.l1_loss

    def kept(outputs: torch.Tensor, wanted: torch.Tensor, *more: object, **keywords: object) -> torch.Tensor:
        if torch.is_grad_enabled():
            targets.append(wanted.detach().clone())
        return l1_loss(outputs, wanted, *more, **keywords)

    F.l1_loss = kept
    return lambda: targets


def write_boxes(folder: Path) -> torch.Tensor:
    """Write boxes whose velocity is the gradient of their density; return the density of the training box."""
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(1)
    for split in reversed(nbody.SPLITS):
        density = torch.randn(CELLS, CELLS, CELLS, generator=generator)
        slopes = torch.stack([density.roll(-1, axis) - density.roll(1, axis) for axis in range(3)])
        hydro = torch.cat([2 * density[None], 2 * slopes, density[None] ** 2])
        write_box(nbody.path_of(folder, split), torch.cat([density[None], slopes]), hydro, {"periodic": True})
    return density


def gradient(density: torch.Tensor) -> torch.Tensor:
    """Return the differences (N, 3, c - 2, c - 2, c - 2) along the axes of densities (N, c, c, c), inside."""
    parts = [density.roll(-1, axis) - density.roll(1, axis) for axis in (1, 2, 3)]
    return inside(torch.stack(parts, dim=1))


def inside(fields: torch.Tensor) -> torch.Tensor:
    """Leave out the outermost cells."""
    return fields[..., 1:-1, 1:-1, 1:-1]


def symmetry_of(cube: torch.Tensor, density: torch.Tensor) -> tuple[list[int], list[bool]]:
    """Return which axis of the box each axis of the cube is, and whether it is reversed; LookupError if it is none."""
    places = []
    for corner in ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)):
        found = (density == cube[corner]).nonzero().tolist()
        if len(found) != 1:
            raise LookupError
        places.append(found[0])
    axes, flips = [], []
    for place in places[1:]:
        step = [(new - old) % CELLS for new, old in zip(place, places[0], strict=True)]
        if sorted(step) not in ([0, 0, 1], [0, 0, CELLS - 1]):
            raise LookupError
        axes.append(step.index(max(step)))
        flips.append(max(step) > 1)
    return axes, flips


def is_mirrored(axes: list[int], flips: list[bool]) -> bool:
    """Whether this is no rotation."""
    swaps = sum(axes[i] > axes[j] for i in range(3) for j in range(i + 1, 3))
    return (swaps + sum(flips)) % 2 == 1
