"""On one rank and on two, no weight changes in a step in which a loss is not finite, and every other update is made.

Here it is the model that returns values that are not finite, in some steps on one of the ranks, whatever the images
are. The weights of each step are compared with those of the exercise's own script on one rank, where it is right.
"""

import math
import os
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from clinic import coded
from clinic.catalogue import Exercise
from clinic.collectives import apart, compare_collectives
from clinic.observe import Fault, Script, percent

STEPS = 10
FLAGS = ("--global_batch_size", 32, "--optimizer", "sgd", "--lr", 0.01, "--dropout", "false")
NOT_FINITE = {2: (1, math.nan), 4: (0, math.nan), 6: (1, math.inf), 7: (0, math.inf)}
"""step, counted from 1: the rank whose loss is not finite, and this loss"""
CLOSE = 1e-3
"""relative; the order in which float32 numbers are added up changes a tenth of it or less"""


def grade(script: Script) -> Iterator[str]:
    """Yield a line for each thing that is still wrong."""
    faulty = script.folder / script.path.name
    faulty.write_text(Exercise(Path(__file__).parent).faulty())
    (expected,), fault = run(Script(faulty, script.folder), 1)
    assert fault is None and len(expected) == STEPS + 1, "the exercise's own script is right on one rank"
    for ranks in (1, 2, 4):
        found, fault = run(script, ranks)
        if wrong := first_wrong(found, expected):
            yield f"with {ranks} rank{'s' * (ranks > 1)}, {wrong}"
            return
        if fault:
            raise fault
        for rank, weights in enumerate(found):
            if len(weights) != STEPS + 1:
                yield f"with {ranks} rank{'s' * (ranks > 1)}, rank {rank} makes {len(weights) - 1} of {STEPS} steps"
                return


def run(script: Script, ranks: int) -> tuple[list[list[torch.Tensor]], Fault | None]:
    """Return, for each rank, all weights before each step and at the end; and how the script failed, if it did."""
    notes = Path(tempfile.mkdtemp(dir=script.folder))
    fault = None
    try:
        watch = partial(make_losses_not_finite, notes=notes, ranks=ranks)
        script.run(*FLAGS, ranks=ranks, train=32 * STEPS, val=32, watch=watch)
    except Fault as raised:
        fault = raised
    if waiting := apart(notes):
        fault = Fault(f"with {ranks} ranks, {waiting}")
    files = [[notes / f"{rank}_{step}.pt" for step in range(1, STEPS + 2)] for rank in range(ranks)]
    return [[torch.load(file) for file in of_rank if file.exists()] for of_rank in files], fault


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
            else:
                update = expected[step] - expected[step - 1]
                off = ((after - expected[step]).norm() / update.norm()).item()
                if not off < CLOSE:
                    whose = "the weights" if alone else f"the weights of rank {rank}"
                    by = f"by {percent(off)} of an update " if math.isfinite(off) else ""
                    right = "the script as `start` wrote it" if alone else "one process with the same global batch"
                    hint = "; does the learning rate follow its schedule as before?" if step > min(NOT_FINITE) else ""
                    return f"after step {step}, {whose} differ {by}from those of {right}{hint}"
    return None


def make_losses_not_finite(script: Path, notes: Path, ranks: int) -> Callable[[], None]:
    """Have the model return values that are not finite in some steps; note the weights before each step."""
    rank = int(os.environ.get("RANK", 0))
    step = 0

    def after_forward(module: nn.Module, inputs: tuple[torch.Tensor, ...], outputs: torch.Tensor) -> Any:  # noqa: ANN401
        nonlocal step
        if not isinstance(module, coded.SmallReader) or not (outputs.requires_grad or not module.training):
            return None
        file = notes / f"{rank}_{step + 1}.pt"
        if not file.exists():
            torch.save(torch.cat([weight.detach().flatten() for weight in module.parameters()]), file)
        if not module.training:
            return None
        step += 1
        bad_rank, loss = NOT_FINITE.get(step, (None, 0.0))
        if bad_rank is None or (ranks > 1 and bad_rank != rank):
            return None
        factors = torch.ones_like(outputs)
        if math.isnan(loss):
            factors[0] = math.nan
        else:  # the score of the right class becomes minus infinity, and so the loss becomes infinite
            right = coded.label_of(coded.numbers_of(inputs[0]))[0]
            factors[0, right] = -math.inf * outputs[0, right].detach().sign()
        return outputs * factors

    register_module_forward_hook(after_forward)
    return compare_collectives(script, notes, ranks, backward=True) if ranks > 1 else lambda: None
