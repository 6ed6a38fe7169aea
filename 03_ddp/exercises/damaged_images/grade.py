"""On one rank and on two, no weight changes in a step in which a loss is not finite, and every other update is made.

Here it is the model that returns values that are not finite, in some steps on one of the ranks, whatever the images
are. The weights of each step are compared with those of the exercise's own script on one rank, where it is right.
"""

import math
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from clinic import coded
from clinic.observe import Rank
from clinic.runs import Observed, Script, difference, percent, raise_if_failed

STEPS = 10
FLAGS = ("--global_batch_size", 32, "--optimizer", "sgd", "--lr", 0.01, "--dropout", "false")
NOT_FINITE = {2: (1, math.nan), 4: (0, math.nan), 6: (1, math.inf), 7: (0, math.inf)}
"""step, counted from 1: the rank whose loss is not finite, and this loss"""
CLOSE = 1e-3
"""relative; the order in which float32 numbers are added up changes a tenth of it or less"""


def grade(script: Script) -> Iterator[str]:
    """Yield a line for each thing that is still wrong."""
    expected = weights_of(train(script.as_started(), 1)[0])
    assert len(expected) == STEPS + 1, "the exercise's own script is right on one rank"
    for ranks in (1, 2, 4):
        run = train(script, ranks)
        found = [weights_of(rank) for rank in run.ranks]
        if wrong := first_wrong(found, expected):
            yield f"with {ranks} rank{'s' * (ranks > 1)}, {wrong}"
            return
        raise_if_failed(run.ranks)
        for rank, weights in enumerate(found):
            if len(weights) != STEPS + 1:
                yield f"with {ranks} rank{'s' * (ranks > 1)}, rank {rank} makes {len(weights) - 1} of {STEPS} steps"
                return


def train(script: Script, ranks: int) -> Observed:
    """Train for an epoch, also if the script fails."""
    watch = partial(make_losses_not_finite, ranks=ranks)
    return script.run(*FLAGS, ranks=ranks, train=32 * STEPS, val=32, keep=True, watch=watch, fail=False)


def weights_of(rank: Rank) -> list[torch.Tensor]:
    """Return the weights before each step, and at the end."""
    all_weights = [call.weights for call in rank.training] + [list(rank.weights.values())]
    return [torch.cat([weight.flatten() for weight in weights]) for weights in all_weights if weights]


def first_wrong(found: list[list[torch.Tensor]], expected: list[torch.Tensor]) -> str | None:
    """Return what the first wrong step of any rank does, among the steps that the ranks have made."""
    alone = len(found) == 1
    for step in range(1, min(map(len, found))):
        for rank, weights in enumerate(found):
            name = "it" if alone else f"rank {rank}"
            before, after = weights[step - 1 : step + 1]
            if step in NOT_FINITE:
                bad_rank, loss = NOT_FINITE[step]
                whose = "the loss" if alone else f"the loss of rank {bad_rank}"
                if not torch.equal(before, after):
                    value = "NaN" if math.isnan(loss) else "infinite"
                    return f"in step {step}, {whose} is {value}, but {name} changes its weights"
            elif torch.equal(before, after):
                where = "the loss is finite" if alone else "the losses of all ranks are finite"
                return f"in step {step}, {where}, but {name} does not change its weights"
            elif not (off := difference(after - before, expected[step] - expected[step - 1])) < CLOSE:
                by = f"by {percent(off)} " if math.isfinite(off) else ""
                right = "the script as `start` wrote it" if alone else "one process with the same global batch"
                hint = "; does the learning rate follow its schedule as before?" if step > min(NOT_FINITE) else ""
                return f"in step {step}, the update of {name} differs {by}from that of {right}{hint}"
    return None


def make_losses_not_finite(_: Path, ranks: int) -> Callable[[], None]:
    """Have the model return values that are not finite in some steps; see `Script.run`."""
    rank = int(os.environ.get("RANK", 0))
    step = 0

    def after_forward(module: nn.Module, inputs: tuple[torch.Tensor, ...], outputs: torch.Tensor) -> torch.Tensor:
        nonlocal step
        if not isinstance(module, coded.SmallReader) or not module.training or not outputs.requires_grad:
            return outputs
        step += 1
        bad_rank, loss = NOT_FINITE.get(step, (None, 0.0))
        if bad_rank is None or (ranks > 1 and bad_rank != rank):
            return outputs
        factors = torch.ones_like(outputs)
        if math.isnan(loss):
            factors[0] = math.nan
        else:  # the score of the right class becomes minus infinity, and so the loss becomes infinite
            right = coded.label_of(coded.numbers_of(inputs[0]))[0]
            factors[0, right] = -math.inf * outputs[0, right].detach().sign()
        return outputs * factors

    register_module_forward_hook(after_forward)
    return lambda: None
