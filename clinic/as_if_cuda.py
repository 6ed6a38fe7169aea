"""Have a script's training loop take the branches that it has for an NVIDIA GPU, on a machine without one.

A line such as ``if torch.cuda.is_available(): torch.cuda.synchronize()`` does nothing on a CPU. Here, in the lines of
the script and while its model trains, `torch.cuda.is_available` returns True, and a comparison of the type of a device
with "cuda" is true. What the loop then calls of `torch.cuda` in order to wait for the GPU is replaced. Other lines for
a GPU may fail without one; therefore a run in this mode that fails says nothing about the script.
"""

import ast
import builtins
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeGuard

import torch

IS_CUDA = "_type_is_cuda"
"""name of the function that is asked instead of comparing the type of a device"""


def rewritten(source: str) -> str:
    """Return a script that asks `IS_CUDA` instead of comparing ``X.type`` with "cuda" or "cpu"; its lines stay."""
    lines = [line.encode() for line in source.split("\n")]  # the columns of a syntax tree count bytes
    found = [node for node in ast.walk(ast.parse(source)) if _is_comparison(node)]
    for node in sorted(found, key=lambda node: (node.lineno, node.col_offset), reverse=True):
        if node.lineno != node.end_lineno:
            continue
        device, other = node.left.value, node.comparators[0]  # type: ignore[attr-defined]  # `_is_comparison` has looked
        line = lines[node.lineno - 1]
        name = line[device.col_offset : device.end_col_offset].decode()
        is_cuda = isinstance(node.ops[0], ast.Eq) == (ast.literal_eval(other) == "cuda")
        call = f"({'' if is_cuda else 'not '}{IS_CUDA}({name}))".encode()
        lines[node.lineno - 1] = line[: node.col_offset] + call + line[node.end_col_offset :]
    return b"\n".join(lines).decode()


def _is_comparison(node: ast.AST) -> TypeGuard[ast.Compare]:
    return (
        isinstance(node, ast.Compare)
        and isinstance(node.left, ast.Attribute)
        and node.left.attr == "type"
        and isinstance(node.ops[0], ast.Eq | ast.NotEq)
        and len(node.ops) == 1
        and isinstance(node.comparators[0], ast.Constant)
        and node.comparators[0].value in ("cuda", "cpu")
    )


class StandIn:
    """Takes the place of a stream or an event: it does nothing, and calls ``waits`` where the CPU would wait."""

    def __init__(self, waits: Callable[[str], None]) -> None:
        self._waits = waits

    def synchronize(self) -> None:
        """Wait for all work before, on a GPU."""
        self._waits("synchronize")

    def query(self) -> bool:
        """Return whether the work is done, without waiting."""
        return True

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *_, **__: None  # record, wait_event, wait_stream and others, which only the GPU waits for


def take_cuda_branches(script: Path, is_training: Callable[[], bool], waits: Callable[[str], None]) -> None:
    """Begin: for the rest of this process.

    Args:
        script: path of the script, made by `rewritten`.
        is_training: whether the model is being trained; otherwise all is as without this.
        waits: called with the name of each function that would wait for the GPU.
    """

    def only_in_script(own: Callable[[], bool]) -> Callable[[], bool]:
        def is_available() -> bool:
            return own() or (is_training() and sys._getframe(1).f_code.co_filename == str(script))

        return is_available

    def make_stand_in(*_: object, **__: object) -> StandIn:
        return StandIn(waits)

    setattr(builtins, IS_CUDA, lambda device: device.type == "cuda" or is_training())
    for module in (torch.cuda, torch.accelerator):
        module.is_available = only_in_script(module.is_available)
        module.synchronize = lambda *_, **__: waits("synchronize")
        module.current_stream = make_stand_in
    torch.cuda.default_stream = torch.cuda.Stream = torch.cuda.Event = make_stand_in
