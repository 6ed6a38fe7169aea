"""A value read from the device in every step: the loop is to read one only now and then, and report the same loss.

Here the device is the CPU, where no copy is needed. So the tensors that would be on a GPU are marked: what the model
returns, and what is computed from it. Only to read those would wait for the GPU.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from clinic import coded
from clinic.observe import Shown
from clinic.runs import Observed, Script
from workshop.paths import REPOSITORY

READS = {
    *("item", "tolist", "numpy", "cpu", "is_nonzero", "equal", "allclose", "nonzero", "masked_select", "unique"),
    *("__float__", "__int__", "__bool__", "__index__", "__array__", "__format__", "__repr__", "__contains__"),
}
"""functions that wait for their tensor's values: they return Python numbers, or a tensor whose size depends on them"""
NOT_THE_LOOP = ("torch/optim/", f"{REPOSITORY / 'workshop'}/")
"""who may read: optimizers on a CPU keep their step there, and the package does so on purpose"""
SAMPLES, BATCH, INTERVAL = 196, 8, 10
STOP = 13
"""updates after which a run is stopped, to be resumed: not a multiple of `INTERVAL`"""
GRAPHS = 3
"""steps whose autograd graphs may be in memory at once: the current one, and the one before until it is replaced"""
FLAGS = ("--batch_size", BATCH, "--log_interval", INTERVAL)
DATA = {"train": SAMPLES, "val": 8}


def grade(script: Script) -> Iterator[str]:
    """Yield what is still seen to be wrong."""
    run = script.run(*FLAGS, **DATA, keep=True, graphs=True, watch=note_reads)
    if sorted(run[0].trained) != list(range(SAMPLES)):
        yield f"it does not train on each of the {SAMPLES} samples once"
        return
    wrong = list(too_often(run[0].extra, len(run[0].updates)))
    if (graphs := run[0].graphs[0]) > GRAPHS:
        wrong.append(f"the memory that it needs grows: the autograd graphs of {graphs} steps are in memory at once")
    if difference := wrong_loss(run, run[0].training):
        wrong.append(difference)
    if wrong:
        yield from wrong
        return
    first = script.run(*FLAGS, "--save_interval", STOP, **DATA, keep=True, stop_after=STOP)
    second = script.run(*FLAGS, "--save_interval", STOP, "--resume", "true", **DATA, keep=True, run_dir=first.run_dir)
    if difference := wrong_loss(second, first[0].training + second[0].training):
        yield f"stopped after {STOP} of {len(run[0].updates)} steps and resumed, {difference}"


def too_often(reads: Counter[tuple[str, int]], steps: int) -> Iterator[str]:
    """Yield which lines wait in every step, if some do."""
    often = {place: count for place, count in reads.items() if count > steps / INTERVAL + 1}
    for (name, line), count in often.items():
        if name == "copied":
            yield (
                f"in {steps} training steps, line {line} computes {count} times with what non_blocking=True may still "
                "be copying from the device"
            )
        else:
            yield f"in {steps} training steps, line {line} waits {count} times for a value from the device ({name})"
    if sum(reads.values()) > 2 * steps / INTERVAL + 2 and not often:
        yield f"in {steps} training steps, the CPU waits {sum(reads.values())} times for a value from the device"


def wrong_loss(run: Observed, training: list[Shown]) -> str | None:
    """Return how the reported training loss differs from that of the samples that the model was shown in the epoch."""
    targets = coded.label_of(torch.tensor([sample for call in training for sample in call.samples]))
    loss = F.cross_entropy(torch.cat([call.outputs for call in training]), targets).item()
    reported = run.epochs[-1]["train_loss"]
    if abs(reported - loss) > 1e-4 * abs(reported):
        return f"it reports a training loss of {reported:.4f}; over its samples it is {loss:.4f}"
    return None


def note_reads(script: Path) -> Callable[[], Counter[tuple[str, int]]]:
    """Note how often each line of the script waits while the model trains, and by which function; see `Script.run`."""
    device = EmulatedDevice(script)
    register_module_forward_hook(device.mark_outputs)
    for module in (torch.cuda, torch.accelerator, torch.cpu):
        module.synchronize = lambda *_, **__: device.note("synchronize")
    device.__enter__()
    return lambda: device.reads


class EmulatedDevice(TorchFunctionMode):
    """Marks the tensors that would be on a GPU if there were one, and notes when one of them is read."""

    def __init__(self, script: Path) -> None:
        super().__init__()
        self.script = script
        self.reads: Counter[tuple[str, int]] = Counter()
        self.step = 0
        """counted from 1; 0 outside of training"""

    def mark_outputs(self, module: nn.Module, _: tuple, outputs: torch.Tensor) -> None:
        """After a call of the model: what it returns is on the device."""
        if isinstance(module, coded.SmallReader):
            self.step = self.step + 1 if module.training else 0
            outputs.on_device = True  # type: ignore[attr-defined]

    def note(self, name: str) -> None:
        """Note that a value is read, unless it is not the script's loop that reads it."""
        frame = sys._getframe(1)
        while frame and frame.f_code.co_filename != str(self.script):
            if any(part in frame.f_code.co_filename for part in NOT_THE_LOOP):
                return
            frame = frame.f_back
        if frame and self.step:
            self.reads[name.strip("_"), frame.f_lineno] += 1

    def __torch_function__(self, function: Callable, _: Any, arguments: tuple = (), keywords: Any = None) -> Any:  # noqa: ANN401
        """Call ``function``, and note whether it reads a marked tensor."""
        name, given = getattr(function, "__name__", ""), tree_leaves((arguments, keywords))
        tensors = [value for value in given if isinstance(value, torch.Tensor)]
        marked = any(hasattr(tensor, "on_device") for tensor in tensors)
        to_host = name == "to" and any(isinstance(value, str) and value == "cpu" for value in given)
        waits_not = bool((keywords or {}).get("non_blocking"))
        if marked and (name in READS or (to_host and not waits_not) or indexed_by_booleans(name, arguments)):
            self.note(name)
        if self.step and any(getattr(tensor, "copied_in", None) == self.step for tensor in tensors):
            self.note("copied")
        result = function(*arguments, **(keywords or {}))
        for tensor in tree_leaves(result):
            if marked and isinstance(tensor, torch.Tensor):
                if to_host:
                    tensor = result = tensor.clone()  # where the device is the CPU, nothing was copied
                    tensor.copied_in = self.step if waits_not else None  # type: ignore[attr-defined]
                else:
                    tensor.on_device = True  # type: ignore[attr-defined]
        return result


def indexed_by_booleans(name: str, arguments: tuple) -> bool:
    """Return whether this is a selection whose size depends on values."""
    return name == "__getitem__" and any(
        isinstance(index, torch.Tensor) and index.dtype == torch.bool for index in tree_leaves(arguments[1])
    )
