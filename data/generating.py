"""What the generators of synthetic data share: how much to generate, and how to generate the same data each time."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from workshop.datasets.files import read_origin
from workshop.errors import UserError


@contextmanager
def one_thread() -> Iterator[None]:
    """Add up in the same order every time, so that rounding does not depend on the number of threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def complete_recipe(folder: Path, defaults: dict[str, int], asked: dict[str, int | None]) -> dict[str, int]:
    """Return what to generate: what was asked for; the rest as in the data that ``folder`` has, else the default.

    Args:
        folder: where the generated files go.
        defaults: the values for ``seed`` and for each of the sizes.
        asked: some of the same keys; None where nothing was asked for.

    Raises:
        UserError: a size below one, or a seed outside 0..2^32-1.
    """
    before = read_origin(folder) or {}
    given = {key: value for key, value in asked.items() if value is not None}
    recipe = {key: given.get(key, before.get(key, value)) for key, value in defaults.items()}
    sizes = [key for key in recipe if key != "seed"]
    if min(recipe[key] for key in sizes) < 1:
        raise UserError(f"{' and '.join(f'--{key}' for key in sizes)} must be at least 1")
    if not 0 <= recipe["seed"] < 2**32:
        raise UserError(f"--seed {recipe['seed']} must be in 0..{2**32 - 1}")
    return recipe
