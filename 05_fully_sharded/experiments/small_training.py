"""The training that every way of dividing a model must repeat: a small language model on one process, a few steps.

Model, batches and optimizer are the same for one process and for ranks, so that losses and weights can be compared.
"""

from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from lab.launching import load_script
from mean_loss import mean_loss
from workshop.models.gpt import GPT, GPTSize
from workshop.paths import REPOSITORY

LESSON = load_script(REPOSITORY / "05_fully_sharded")
STEPS = 4
BATCH_SIZE = 16
"""samples in a step, of all ranks together"""
SEQUENCE_LENGTH = 16
LEARNING_RATE = 1e-3
ADAMW_EPS = 1e-6
"""AdamW divides a gradient by its own size plus this number.

Some of many gradients are so close to zero that their rounding errors are as large as they are. With AdamW's default of
1e-8, these errors alone make weights differ by up to 4e-5 after four steps. With 1e-6 it is about 2e-6.
"""


def make_model(depth: int = 4) -> GPT:
    """Return a very small language model with four attention heads, and with the same weights in every process."""
    torch.manual_seed(0)
    return GPT(GPTSize(width=64, depth=depth, head_dimension=16))


def batches(batch_size: int = BATCH_SIZE) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the batch of each step: random letters as bytes, inputs (N, T), and the next byte of each, targets (N, T).

    They are letters, and not any bytes, so that there is something to learn: which bytes occur. The loss therefore
    falls within a few steps, and a model that is not trained as it should be has other losses.
    """
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        letters = torch.randint(ord("a"), ord("z") + 1, (batch_size, SEQUENCE_LENGTH + 1), generator=generator)
        yield letters[:, :-1], letters[:, 1:]


def part_of(batch: tuple[torch.Tensor, torch.Tensor], index: int, count: int) -> tuple[torch.Tensor, ...]:
    """Return the part with this index when the batch is divided into ``count`` equal parts."""
    return tuple(tensor.chunk(count)[index] for tensor in batch)


def make_optimizer(model: nn.Module, *, fused: bool | None = None) -> torch.optim.AdamW:
    """Return AdamW over the weights of ``model``."""
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, eps=ADAMW_EPS, fused=fused)


def train_one_process(model: nn.Module, batch_size: int = BATCH_SIZE, max_norm: float | None = None) -> list[float]:
    """Train ``model`` on whole batches and return the loss of each step."""
    optimizer = make_optimizer(model)
    losses = []
    for inputs, targets in batches(batch_size):
        loss = mean_loss(model(inputs), targets)
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
