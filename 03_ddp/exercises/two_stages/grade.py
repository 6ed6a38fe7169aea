"""In the first epoch only the last layer is trained, then all are, with the gradients of the whole global batch.

The gradients of four ranks are compared with those of one process, for which the exercise's own script is right.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer

from clinic import coded
from clinic.catalogue import Exercise
from clinic.notes import before_each_update
from clinic.observe import Fault, Observed, Script, percent

STEPS = 4
"""of each epoch"""
EPOCHS = 3
RANKS = 4
"""with two, one half would do where one divided by the number of ranks is meant"""
FLAGS = ("--global_batch_size", 32, "--optimizer", "sgd", "--lr", 0.01, "--dropout", "false")
DATA = {"train": 32 * STEPS, "val": 32}
LAYERS = ("the last layer", "the other layers")
CLOSE = 1e-4
"""relative; the order in which float32 numbers are added up changes a tenth of it or less"""


Step = dict[str, list[torch.Tensor]]
"""one training step of a rank: the "weights" before it, and the "gradients" that the optimizer gets; of the last layer,
and of the other layers"""


def grade(script: Script) -> Iterator[str]:
    """Yield a line for each thing that is still wrong."""
    faulty = script.folder / script.path.name
    faulty.write_text(Exercise(Path(__file__).parent).faulty())
    flags = (*FLAGS, "--epochs", EPOCHS)
    expected = Script(faulty, script.folder).run(*flags, **DATA, watch=note_steps)[0].extra
    run = script.run(*flags, ranks=RANKS, **DATA, watch=note_steps)
    for rank, notes in enumerate(run.ranks):
        if wrong := first_wrong(notes.extra, expected):
            yield f"on rank {rank} of {RANKS}, {wrong}"
            return
    if unequal := first_differing(run):
        yield f"with {RANKS} ranks, {unequal}"
        return
    flags = (*FLAGS, "--epochs", EPOCHS + 1, "--resume", "true")
    try:
        resumed = script.run(*flags, ranks=RANKS, **DATA, watch=note_steps, run_dir=run.run_dir)
    except Fault as fault:
        yield f"in a run that is resumed after epoch {EPOCHS}, {fault}"
        return
    for rank, notes in enumerate(resumed.ranks):
        if still := layers_that_stay(notes.extra, 1):  # before step 1, the learning rate is that of the run's end: 0
            yield f"in a run that is resumed after epoch {EPOCHS}, {still} do not change on rank {rank}"
            return
    if unequal := first_differing(resumed):
        yield f"in a run of {RANKS} ranks that is resumed after epoch {EPOCHS}, {unequal}"


def first_wrong(steps: list[Step], expected: list[Step]) -> str | None:
    """Return what is wrong with the epochs of a rank."""
    if len(steps) != len(expected):
        return f"there are {len(steps) - 1} training steps in {EPOCHS} epochs, not {len(expected) - 1}"
    for number in range(1, STEPS + 1):
        if not torch.equal(steps[number]["weights"][1], steps[0]["weights"][1]):
            return f"step {number} of the first epoch changes other layers than the last one"
    for epoch in (1, 2):
        for layers in range(epoch):
            first = (epoch - 1) * STEPS
            found = steps[first]["gradients"][layers]
            if not found.any():
                return f"in the first step of epoch {epoch}, no gradients reach {LAYERS[layers]}"
            off = difference(found, expected[first]["gradients"][layers])
            if not off < CLOSE:
                which = f"in the first step of epoch {epoch}, the gradients of {LAYERS[layers]}"
                return f"{which} differ by {percent(off)} from those of one process with the same global batch"
    if still := layers_that_stay(steps, STEPS):
        return f"{still} do not change after the first epoch"
    return None


def layers_that_stay(steps: list[Step], first: int) -> str | None:
    """Return which layers do not change from one step to the next, from the step ``first`` on."""
    for before, after in zip(steps[first:], steps[first + 1 :], strict=False):
        for layers in (1, 0):
            if torch.equal(before["weights"][layers], after["weights"][layers]):
                return f"the weights of {LAYERS[layers]}"
    return None


def first_differing(run: Observed) -> str | None:
    """Return which weights are the first ones that differ between two ranks."""
    for number, (of_rank_0, *of_others) in enumerate(zip(*(rank.extra for rank in run.ranks), strict=True)):
        for layers in (1, 0):
            off = max(difference(other["weights"][layers], of_rank_0["weights"][layers]) for other in of_others)
            if not off < CLOSE:
                return (
                    f"after {number} steps, the weights of {LAYERS[layers]} differ by {percent(off)} between the ranks"
                )
    return None


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the norm of the difference, relative to that of ``b``."""
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


def note_steps(_: Path) -> Callable[[], list[Step]]:
    """For ``watch``: note the weights before each step and at the end, and the gradients of a step's first update."""
    steps: list[Step] = []
    model: list[nn.Module] = []

    def parts(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        flat = [tensor.detach().flatten().clone() for tensor in tensors]
        return [torch.cat(flat[-2:]), torch.cat(flat[:-2])]

    def before_forward(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        is_trial = inputs[0].is_meta  # of the model's shapes
        if isinstance(module, coded.SmallReader) and module.training and torch.is_grad_enabled() and not is_trial:
            model[:] = [module]
            steps.append({"weights": parts(list(module.parameters()))})

    def before_update(_: Optimizer) -> None:
        if steps and "gradients" not in steps[-1]:
            weights = list(model[0].parameters())
            steps[-1]["gradients"] = parts([torch.zeros_like(w) if w.grad is None else w.grad for w in weights])

    def finish() -> list[Step]:
        return [*steps, {"weights": parts(list(model[0].parameters()))}]

    register_module_forward_pre_hook(before_forward)
    before_each_update(before_update)
    return finish
