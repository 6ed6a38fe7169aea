"""Accuracy and loss of the validation are those that the model's outputs give when they are added up exactly."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from clinic import coded
from clinic.observe import Script


def grade(script: Script) -> Iterator[str]:
    for val in (300, 3000):
        run = script.run("--precision", "bf16", "--loader", "memory", "--batch_size", 64, train=960, val=val, keep=True)
        calls = [call for call in run[0].shown if not call.training]
        outputs = torch.cat([call.outputs for call in calls]).double()
        labels = coded.label_of(torch.tensor(run[0].validated))
        if sorted(run[0].validated) != list(range(coded.FIRST_VAL, coded.FIRST_VAL + val)):
            yield f"of {val} validation samples, the model was given {len(set(run[0].validated))}"
            continue
        correct = (outputs.argmax(1) == labels).sum().item()
        reported = run.epochs[-1]["val_accuracy"] * val
        if abs(reported - correct) > 0.01:
            yield (
                f"of {val} validation samples the model answers {correct} correctly, "
                f"but the reported accuracy means {reported:.1f}"
            )
        loss = F.cross_entropy(outputs, labels).item()
        reported_loss = run.epochs[-1]["val_loss"]
        if abs(reported_loss - loss) > 0.01 * loss:
            yield f"on {val} validation samples the mean loss is {loss:.4f}, but {reported_loss:.4f} is reported"
