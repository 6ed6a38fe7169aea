"""What the data sets that are drawn by the computer share: how much to draw, and how to draw the same each time."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from workshop.datasets.files import read_origin
from workshop.errors import UserError


@contextmanager
def one_thread() -> Iterator[None]:
    """Keep every sum in one order, so that rounding is the same however many threads the caller uses."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def complete_recipe(folder: Path, usual: dict[str, int], asked: dict[str, int | None]) -> dict[str, int]:
    """Return what to draw: what is asked for, for the rest as in the data drawn in ``folder`` before, else as usual.

    Args:
        folder: Where the drawn files go.
        usual: The values for ``seed`` and for each of the sizes.
        asked: Some of the same keys; None where nothing is asked for.

    Raises:
        UserError: a size below one, or a seed outside 0..2^32-1.
    """
    before = read_origin(folder) or {}
    given = {key: value for key, value in asked.items() if value is not None}
    recipe = {key: given.get(key, before.get(key, value)) for key, value in usual.items()}
    sizes = [key for key in recipe if key != "seed"]
    if min(recipe[key] for key in sizes) < 1:
        raise UserError(f"{' and '.join(f'--{key}' for key in sizes)} must be at least 1")
    if not 0 <= recipe["seed"] < 2**32:
        raise UserError(f"--seed {recipe['seed']} must be in 0..{2**32 - 1}")
    return recipe
