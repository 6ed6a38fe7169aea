"""Accuracy and loss of the validation are those that the model's outputs give when they are added up exactly."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from clinic import coded
from clinic.observe import Script


def grade(script: Script) -> Iterator[str]:
    for val in (300, 3000):
        run = script.run("--precision", "bf16", "--loader", "memory", "--batch_size", 64, train=960, val=val, keep=True)
        shown = [call for call in run[0].shown if not call.training]
        outputs = torch.cat([call.outputs for call in shown]).double()
        labels = coded.label_of(torch.tensor(run[0].validated))
        if sorted(run[0].validated) != list(range(coded.FIRST_VAL, coded.FIRST_VAL + val)):
            yield f"of {val} validation samples, {len(set(run[0].validated))} were shown to the model"
            continue
        right = (outputs.argmax(1) == labels).sum().item()
        told = run.epochs[-1]["val_accuracy"] * val
        if abs(told - right) > 0.01:
            yield f"of {val} validation samples the model has {right} right, but the accuracy says {told:.1f}"
        loss = F.cross_entropy(outputs, labels).item()
        told_loss = run.epochs[-1]["val_loss"]
        if abs(told_loss - loss) > 0.01 * loss:
            yield f"on {val} validation samples the mean loss is {loss:.4f}, but {told_loss:.4f} is told"
