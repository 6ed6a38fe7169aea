"""The training that every way of dividing a model must repeat: a small vision transformer on one process, a few steps.

Model, batches and optimizer are the same for one process and for ranks, so that losses and weights can be compared.
"""

from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from lab.launching import load_script
from workshop.models.vit import VisionTransformer
from workshop.paths import REPOSITORY

LESSON = load_script(REPOSITORY / "05_fully_sharded")
STEPS = 4
BATCH_SIZE = 16
"""samples in a step, of all ranks together"""
WIDTH = 64
LEARNING_RATE = 1e-3
ADAMW_EPS = 1e-6
"""AdamW divides a gradient by its own size plus this number.

A gradient that is zero in theory is about 1e-9 in practice, because sums are rounded. With AdamW's default of 1e-8,
this rounding error could move a weight nearly as far as a real gradient does. (The biases of the keys are such weights:
the softmax does not change if all of its inputs grow by the same number.)
"""


def make_model(depth: int = 4, seed: int = 0) -> VisionTransformer:
    """Return the vision transformer of the lesson for images of 28 x 28 pixels, with the same weights everywhere."""
    torch.manual_seed(seed)
    return VisionTransformer(size=28, patch=7, channels=1, outputs=10, width=WIDTH, depth=depth, heads=4, volumes=False)


def batches(steps: int = STEPS, batch_size: int = BATCH_SIZE) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the batch of each step: images (N, 1, 28, 28) of random numbers, and random classes (N,)."""
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        images = torch.randn(batch_size, 1, 28, 28, generator=generator)
        yield images, torch.randint(10, (batch_size,), generator=generator)


def part_of(batch: tuple[torch.Tensor, torch.Tensor], index: int, count: int) -> tuple[torch.Tensor, ...]:
    """Return the part with this index when the batch is divided into ``count`` equal parts."""
    return tuple(tensor.chunk(count)[index] for tensor in batch)


def make_optimizer(model: nn.Module, **options: object) -> torch.optim.AdamW:
    """Return AdamW over the weights of ``model``; ``options`` such as fused and foreach are passed on to it."""
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, eps=ADAMW_EPS, **options)


def train_one_process(
    model: nn.Module, steps: int = STEPS, batch_size: int = BATCH_SIZE, max_norm: float | None = None
) -> list[float]:
    """Train ``model`` on whole batches and return the loss of each step."""
    optimizer = make_optimizer(model)
    losses = []
    for images, classes in batches(steps, batch_size):
        loss = LESSON.loss_function(model(images), classes)
        loss.backward()
        if max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def whole_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return all weights, whole, on every rank, by the names that they have in a model that is not divided.

    All ranks must call this.
    """
    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))


def largest_difference(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Return the largest difference between two sets of weights of equal names."""
    if found.keys() != expected.keys():
        raise AssertionError(f"other weights: {sorted(found.keys() ^ expected.keys())[:4]}")
    return max((found[name].float() - expected[name].float()).abs().max().item() for name in expected)
