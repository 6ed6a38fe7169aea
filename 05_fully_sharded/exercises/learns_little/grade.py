"""Each update moves every weight as its gradient asks for, after a validation of the same weights before training."""

import json
import math
from collections.abc import Iterator

import torch

from clinic.coded import SEQUENCE_LENGTH
from clinic.runs import Observed, Script, difference, percent

LR, MOMENTUM, STEPS = 0.1, 0.9, 3
FLAGS = (
    *("--optimizer", "sgd", "--lr", LR, "--warmup", 0, "--batch_size", 8),
    *("--width", 64, "--depth", 2, "--sequence_length", SEQUENCE_LENGTH),
)
NAME = "untrained_val_loss"


def grade(script: Script) -> Iterator[str]:
    """Yield a line for each thing that is still wrong."""
    expected = untrained_loss(run(script.as_started(), "blocks"))
    for shard in ("blocks", "keep", "root"):
        found = run(script, shard)
        if wrong := wrong_update(found):
            yield f"with --shard {shard}, {wrong}"
            return
        if (loss := untrained_loss(found)) is None:
            yield f"with --shard {shard}, summary.json has no {NAME}"
        elif not math.isclose(loss, expected or math.nan, rel_tol=1e-5):
            yield f"with --shard {shard}, {NAME} is {loss:.5f}; that of the model which is trained is {expected:.5f}"


def run(script: Script, shard: str) -> Observed:
    """Train for an epoch on two ranks."""
    return script.run(*FLAGS, "--shard", shard, ranks=2, train=16 * STEPS, val=16, keep=True)


def untrained_loss(run: Observed) -> float | None:
    """Return the validation loss before training that a run reports."""
    return json.loads((run.run_dir / "summary.json").read_text()).get(NAME)


def wrong_update(run: Observed) -> str | None:
    """Return what is wrong with the second update, or with the learning rates; None if nothing."""
    rates = [update.lr for update in run[0].updates]
    schedule = [LR * 0.5 * (1 + math.cos(math.pi * step / STEPS)) for step in range(STEPS)]
    if len(rates) != STEPS or not all(math.isclose(*pair, rel_tol=1e-6) for pair in zip(rates, schedule, strict=True)):
        both = [", ".join(f"{rate:.4f}" for rate in found) for found in (rates, schedule)]
        return f"the learning rates of the updates are {both[0]}; those of the schedule are {both[1]}"
    for number, rank in enumerate(run.ranks):
        before, after = rank.training[1].weights, rank.training[2].weights
        moved = [new - old for old, new in zip(before, after, strict=True)]
        gradients = zip(*(update.gradients for update in rank.updates[:2]), strict=True)
        asked = [-rates[1] * (MOMENTUM * first + second) for first, second in gradients]
        names = list(rank.weights)
        if still := [name for name, part in zip(names, moved, strict=True) if not part.any()]:
            numbers = torch.tensor([part.numel() for part in moved])
            share = numbers[[name in still for name in names]].sum() / numbers.sum()
            return (
                f"{len(still)} of {len(names)} weights do not move in update 2 on rank {number}, {share:.0%} of the "
                f"numbers that it stores: {still[0]} is one of them"
            )
        off = difference(*(torch.cat([part.flatten() for part in parts]) for parts in (moved, asked)))
        if not off < 1e-3:
            return f"update 2 moves the weights on rank {number} by {percent(off)} more or less than it should"
    return None
