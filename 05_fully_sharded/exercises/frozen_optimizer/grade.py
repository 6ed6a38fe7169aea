"""Each update moves each weight by what its gradient asks for, and the learning rate follows its schedule."""

import math
from collections.abc import Iterator

import torch

from clinic.observe import Script
from clinic.sharded import Step, note_steps

LR = 0.1
STEPS = 3
FLAGS = ("--optimizer", "sgd", "--batch_size", 8, "--lr", LR, "--warmup", 0, "--vit_width", 32, "--vit_depth", 2)
MOMENTUM = 0.9


def grade(script: Script) -> Iterator[str]:
    """Yield a line for each thing that is still wrong."""
    run = script.run(*FLAGS, ranks=2, train=STEPS * 16, val=8, notes=False, watch=note_steps)
    for number, rank in enumerate(run.ranks):
        steps = rank.extra.steps
        if len(steps) != STEPS:
            yield f"rank {number} made {len(steps)} updates, not {STEPS}"
            return
        if without := [name for name in rank.extra.numbers if name not in steps[0].gradients]:
            yield f"on rank {number}, {len(without)} weights got no gradient in the first step: {without[0]} is one"
            return
        if wrong := first_wrong(steps):
            yield f"on rank {number}, {wrong}"
            return
    schedule = [LR * 0.5 * (1 + math.cos(math.pi * step / STEPS)) for step in range(STEPS)]
    for step, expected in zip(run[0].extra.steps, schedule, strict=True):
        if not math.isclose(step.lrs[0], expected, rel_tol=1e-6, abs_tol=1e-9):
            used = [round(step.lrs[0], 5) for step in run[0].extra.steps]
            yield f"the optimizer's learning rates are {used}, but its schedule has {[round(lr, 5) for lr in schedule]}"
            return


def first_wrong(steps: list[Step]) -> str | None:
    """Return how the first wrong update differs from SGD with momentum at the optimizer's own learning rate."""
    averages: dict[str, torch.Tensor] = {}
    for number, step in enumerate(steps, 1):
        still, other = [], []
        for name, gradient in step.gradients.items():
            averages[name] = MOMENTUM * averages.get(name, 0) + gradient
            expected = -step.lrs[0] * averages[name]
            moved = step.moved[name] - step.weights[name]
            if expected.numel() and expected.norm() > 1e-6 and not moved.any():
                still.append(name)
            elif (moved - expected).norm() > 1e-3 * expected.norm() + 1e-6:
                other.append(name)
        if still:
            many = f"{len(still)} of {len(step.gradients)} weights"
            return f"{many} did not move in update {number}: {still[0]} is one of them"
        if other:
            return f"update {number} moves {other[0]} by something else than its gradient and the learning rate ask for"
    return None
