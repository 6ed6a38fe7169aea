"""Accuracy and loss of the validation are those that the model's outputs give when they are added up exactly."""

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F

from clinic import coded
from clinic.observe import Observed, Script

RUNS = (("bf16", torch.bfloat16, 3000, 1), ("fp16", torch.float16, 5000, 1), ("bf16", torch.bfloat16, 301, 2))
"""precision, what the model then returns, validation samples (fp16 counts correctly up to 2048), and ranks"""
BATCH = 16
"""the smaller the batches, the more of each is lost when it is added to a large sum"""


def grade(script: Script) -> Iterator[str]:
    """Yield what is still seen to be wrong."""
    for precision, dtype, val, ranks in RUNS:
        flags = ("--precision", precision, "--loader", "memory", "--batch_size", BATCH)
        run = script.run(*flags, ranks=ranks, train=320, val=val, keep=True)
        found = list(faults_of(run, precision, dtype, val))
        yield from found
        if found:
            return


def faults_of(run: Observed, precision: str, dtype: torch.dtype, val: int) -> Iterator[str]:
    """Yield what is wrong in the validation of a run."""
    calls = [call for rank in run.ranks for call in rank.shown if not call.training]
    samples = [sample for rank in run.ranks for sample in rank.validated]
    if sorted(samples) != list(range(coded.FIRST_VAL, coded.FIRST_VAL + val)):
        yield f"of {val} validation samples, the model was given {len(set(samples))}"
        return
    if any(call.outputs.dtype != dtype for call in calls):
        yield f"with --precision {precision}, the model does not validate in {dtype}".replace("torch.", "")
    outputs = torch.cat([call.outputs for call in calls]).double()
    labels = coded.label_of(torch.tensor(samples))
    correct = (outputs.argmax(1) == labels).sum().item()
    reported = run.epochs[-1]["val_accuracy"] * val
    where = f"in {precision}, on {val} validation samples,"
    if len(run.ranks) > 1:
        where = f"with {len(run.ranks)} ranks, {where}"
    if abs(reported - correct) > 0.01:
        yield f"{where} the model has {correct} right answers, but the reported accuracy means {reported:.1f}"
    loss, reported_loss = F.cross_entropy(outputs, labels).item(), run.epochs[-1]["val_loss"]
    if not math.isclose(reported_loss, loss, rel_tol=1e-4):
        yield f"{where} the mean loss is {loss:.5f}, but {reported_loss:.5f} is reported"
