"""Accuracy and loss of the validation are those that the model's outputs give when they are added up exactly."""

from collections.abc import Iterator

import torch

from clinic.runs import Script

RUNS = (("bf16", torch.bfloat16, 3000, 1), ("fp16", torch.float16, 5000, 1), ("bf16", torch.bfloat16, 301, 2))
"""precision, what the model then returns, validation samples (fp16 counts correctly up to 2048), and ranks"""
BATCH = 16
"""the smaller the batches, the more of each is lost when it is added to a large sum"""


def grade(script: Script) -> Iterator[str]:
    """Yield what is still seen to be wrong."""
    for precision, dtype, val, ranks in RUNS:
        flags = ("--precision", precision, "--loader", "memory", "--batch_size", BATCH)
        run = script.run(*flags, ranks=ranks, train=320, val=val, keep=True)
        where = f"with {ranks} rank{'s' * (ranks > 1)} in {precision}"
        calls = [call for rank in run.ranks for call in rank.shown if not call.training]
        if any(call.outputs is None or call.outputs.dtype != dtype for call in calls):
            yield f"{where}, the model does not validate in {dtype}".replace("torch.", "")
        if wrong := run.wrong_validation(val, rel_tol=1e-4):
            yield f"{where}, {wrong}"
            return
