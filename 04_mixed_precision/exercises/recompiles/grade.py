"""The model is compiled a few times and not in every step, and the gradients are still those without the nines."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from clinic.runs import Script, difference

FEW = 3
"""compilations of a whole epoch: one for training, one for validation, and one for a last batch that is smaller"""
STEPS = 10
FLAGS = ("--batch_size", 32, "--optimizer", "sgd", "--dropout", "false", "--seed", 5)
"""with this seed, the batches without their nines have six sizes"""


def grade(script: Script) -> Iterator[str]:
    """Yield what is still seen to be wrong."""
    expected = script.as_started().run(*FLAGS)[0].updates  # its gradients are right, only its shapes are not
    run = script.run(*FLAGS, keep=True)
    found = run[0].updates
    if len(found) != len(expected):
        yield f"an epoch has {len(found)} updates, but {len(expected)} are expected"
    for step, (update, wanted) in enumerate(zip(found, expected, strict=False), 1):
        if not difference(update.gradient, wanted.gradient) < 1e-3:
            yield f"the gradient of step {step} is not that of the samples without the nines"
            break
    if wrong := run.wrong_validation(64, rel_tol=1e-4):
        yield f"in the validation, {wrong}"
    compilations = script.run(*FLAGS, "--compile", "default", notes=False, watch=count_compilations)[0].extra
    if not compilations:
        yield "with --compile default, nothing was compiled"
    elif compilations > FEW:
        yield (
            f"with --compile default, PyTorch compiles the model {compilations} times for {STEPS} steps and a "
            f"validation; {FEW} times would do"
        )


def count_compilations(script: Path) -> Callable[[], int]:
    """Count the graphs that torch.compile makes of the script's model; run them uncompiled, to save the time of C++."""
    own_compile = torch.compile
    count = 0

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable:
        nonlocal count
        count += 1
        return graph.forward

    def compile_counted(model: Any = None, **options: Any) -> Any:  # noqa: ANN401
        options = {name: value for name, value in options.items() if name not in ("backend", "mode", "options")}
        # The package compiles something small, as a trial, which does not count.
        return own_compile(model, backend=backend if called_by(script) else "eager", **options)

    def called_by(script: Path) -> bool:
        caller = sys._getframe(2)
        while caller and caller.f_code.co_filename.startswith(f"{Path(torch.__file__).parent}/"):  # Module.compile
            caller = caller.f_back
        return caller is not None and caller.f_code.co_filename == str(script)

    torch._dynamo.config.optimize_ddp = False  # which splits one graph into several
    torch.compile = compile_counted
    return lambda: count
