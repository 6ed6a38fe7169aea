"""IO, SYNTHETIC and FULL in a few lines, for your script: copy `rate` and `three_rates` into it.

    python experiments/three_rates.py

The demonstration reads images whose transformation is Python code, without workers and with one. You should see that
FULL is about 1 / (1/IO + 1/SYNTHETIC) without workers.
"""

import argparse
import time
from collections.abc import Callable, Iterable
from itertools import repeat

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


def rate(batches: Iterable, step: Callable = lambda batch: None, skip: int = 10, steps: int = 100) -> float:
    """Return batches per second, without the first ones, in which workers start and memory is allocated."""
    for number, batch in enumerate(batches, start=1):
        step(batch)
        if number in (skip, skip + steps) and torch.cuda.is_available():
            torch.cuda.synchronize()  # the CPU only launched the work: wait until the GPU has done it
        if number == skip:
            started = time.perf_counter()
        if number == skip + steps:
            return steps / (time.perf_counter() - started)
    raise ValueError(
        f"there are fewer than {skip + steps} batches: pass a smaller number of steps; and as a generator has one pass "
        "only, put it into a class whose __iter__ makes a new one"
    )


def three_rates(loader: Iterable, train_step: Callable, steps: int = 100) -> None:
    """Print IO, SYNTHETIC and FULL three times; ``train_step`` takes a batch, as the loader gives it, and trains."""
    for _ in range(3):
        io = rate(loader, steps=steps)
        synthetic = rate(repeat(next(iter(loader))), train_step, steps=steps)
        full = rate(loader, train_step, steps=steps)
        print(f"IO {io:.1f}  SYNTHETIC {synthetic:.1f}  FULL {full:.1f} batches/s")


class Images(Dataset):
    """Random images, flipped several times."""

    def __len__(self) -> int:
        return 32 * 110

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        image = torch.rand(3, 32, 32, generator=torch.Generator().manual_seed(index))
        for _ in range(12):
            image = image.flip(-1)
        return image, index % 10


def main() -> None:
    """Measure a small network with 0 workers and with 1."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 900, 10)).to(device)
    optimizer = torch.optim.Adam(model.parameters())

    def train_step(batch: list[torch.Tensor]) -> None:
        inputs, targets = (tensor.to(device, non_blocking=True) for tensor in batch)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()

    for workers in (0, 1):
        print(f"{workers} workers")
        three_rates(DataLoader(Images(), batch_size=32, num_workers=workers), train_step)


if __name__ == "__main__":
    main()
