"""A value read from the device in every step: the loop is to read one only now and then, and report the same loss.

Here the device is the CPU, where no copy is needed. So the tensors that would be on a GPU are marked: what was moved to
the device, what was made there, and what was computed from such tensors. Only to read those would wait for the GPU.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import decode_source
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

import workshop.hardware
from clinic import as_if_cuda, coded
from clinic.notes import GraphCounter, Shown
from clinic.observe import Observed, Script
from workshop.paths import REPOSITORY

READS = {
    *("item", "tolist", "numpy", "cpu", "is_nonzero", "equal", "allclose", "nonzero", "masked_select", "unique"),
    *("__float__", "__int__", "__bool__", "__index__", "__array__", "__format__", "__repr__", "__contains__"),
}
"""functions that wait for their tensor's values: they return Python numbers, or a tensor whose size depends on them"""
SYNCHRONIZE = ((torch.cuda, "synchronize"), (torch.accelerator, "synchronize"), (torch.cpu, "synchronize"))
ITS_OWN = ("torch/optim/", "torch/utils/data/", f"{REPOSITORY / 'workshop'}/", f"{REPOSITORY / 'clinic'}/")
"""who may read: optimizers on a CPU keep their step there, loaders have no device, the package does so on purpose"""
IS_CUDA = torch.Tensor.is_cuda.__get__  # type: ignore[attr-defined]
SAMPLES, BATCH, INTERVAL = 196, 8, 10
STOP = 13
"""updates after which a run is stopped, to be resumed: not a multiple of `INTERVAL`"""
GRAPHS = 3
"""steps whose autograd graphs may be in memory at once: the current one, and the one before until it is replaced"""


def grade(script: Script) -> Iterator[str]:
    """Yield what is still seen to be wrong."""
    flags = ("--batch_size", BATCH, "--log_interval", INTERVAL)
    run = script.run(*flags, train=SAMPLES, val=8, keep=True, watch=watch_loop)
    if wrong := list(faults_of(run)):
        yield from wrong
        return
    if wrong := list(waits_on_a_gpu(script, flags)):
        yield from wrong
        return
    first = script.run(*flags, train=SAMPLES, val=8, keep=True, stop_after=STOP)
    second = script.run(*flags, "--resume", "true", train=SAMPLES, val=8, keep=True, run_dir=first.run_dir)
    if difference := wrong_loss(second, first[0].shown + second[0].shown):
        yield f"stopped after {STOP} of {len(run[0].updates)} steps and resumed, {difference}"


def faults_of(run: Observed) -> Iterator[str]:
    """Yield what is wrong in a run that was not stopped."""
    reads, graphs = run[0].extra
    if sorted(run[0].trained) != list(range(SAMPLES)):
        yield f"it does not train on each of the {SAMPLES} samples once"
        return
    yield from too_often(reads, len(run[0].updates))
    if graphs > GRAPHS:
        yield f"the memory that it needs grows: the autograd graphs of {graphs} steps are in memory at once"
    if difference := wrong_loss(run, run[0].shown):
        yield difference


def too_often(reads: Counter[tuple[str, int]], steps: int, where: str = "") -> Iterator[str]:
    """Yield which lines wait in every step, if some do."""
    often = {place: count for place, count in reads.items() if count > steps / INTERVAL + 1}
    for (name, line), count in often.items():
        yield f"{where}in {steps} training steps, line {line} waits {count} times for a value from the device ({name})"
    if sum(reads.values()) > 2 * steps / INTERVAL + 2 and not often:
        yield f"{where}in {steps} training steps, the CPU waits {sum(reads.values())} times for a value from the device"


def waits_on_a_gpu(script: Script, flags: tuple[object, ...]) -> Iterator[str]:
    """Yield which lines that only run on a GPU would wait in every step."""
    copy = script.folder / script.path.name
    copy.write_text(as_if_cuda.rewritten(decode_source(script.path.read_bytes())))
    watch = partial(watch_loop, has_gpu=True)
    run = Script(copy, script.folder).run(*flags, train=SAMPLES, val=8, watch=watch, fail=False)
    if run[0].extra is not None:  # otherwise it has failed, as a line for a GPU may do here: that says nothing
        yield from too_often(run[0].extra[0], len(run[0].updates), where="on a GPU, ")


def wrong_loss(run: Observed, shown: list[Shown]) -> str | None:
    """Return how the reported training loss differs from that of the samples that the model was shown in the epoch."""
    calls = [call for call in shown if call.training]
    targets = coded.label_of(torch.tensor([sample for call in calls for sample in call.samples]))
    loss = F.cross_entropy(torch.cat([call.outputs for call in calls]), targets).item()
    if not run.epochs:
        return "there is no loss in summary.json"
    reported = run.epochs[-1]["train_loss"]
    if abs(reported - loss) > 1e-4 * abs(reported):
        return f"it reports a training loss of {reported:.4f}; over its samples it is {loss:.4f}"
    return None


def watch_loop(script: Path, has_gpu: bool = False) -> Callable[[], tuple[Counter[tuple[str, int]], int]]:
    """Note what the loop reads while the model trains, and how many autograd graphs it keeps; see `Script.run`.

    With ``has_gpu`` the loop takes the branches that it has for a GPU: see `clinic.as_if_cuda`. The result is how often
    each line of the script waited and by which function, and the largest number of training steps whose graphs were in
    memory at once.
    """
    reads: Counter[tuple[str, int]] = Counter()
    training = False
    graphs = GraphCounter()

    def before_forward(module: nn.Module, _: tuple) -> None:
        nonlocal training
        if isinstance(module, coded.SmallReader):  # no transform of the data set
            training = module.training

    def waits(name: str) -> None:
        if training and (line := line_of(script)):
            reads[name.strip("_"), line] += 1

    register_module_forward_pre_hook(before_forward)
    for module, name in SYNCHRONIZE:
        setattr(module, name, lambda *_, **__: waits("synchronize"))
    if has_gpu:
        as_if_cuda.take_cuda_branches(script, lambda: training, waits)
    EmulatedDevice(waits, has_gpu).__enter__()
    return lambda: (reads, graphs.most_kept)


def line_of(script: Path) -> int | None:
    """Return the line of the script that is being executed; None if it is the package or a loader that reads."""
    frame = sys._getframe(1)
    while frame and frame.f_code.co_filename != str(script):
        file = frame.f_code.co_filename
        if file not in (__file__, as_if_cuda.__file__) and any(part in file for part in ITS_OWN):
            return None
        frame = frame.f_back
    line = frame.f_lineno if frame else None
    while frame:  # a data set of the script's own, called by a loader
        if "torch/utils/data/" in frame.f_code.co_filename:
            return None
        frame = frame.f_back
    return line


class EmulatedDevice(TorchFunctionMode):
    """Marks the tensors that would be on a GPU if there were one, and calls ``waits`` when one of them is read.

    A tensor of the loader is on the host until `Tensor.to` is called with a device. The script's device and
    ``torch.device("cpu")`` are equal here, so the only difference is which object they are.

    Args:
        waits: called with the name of the function.
        has_gpu: let ``tensor.is_cuda`` of a marked tensor be true.
    """

    def __init__(self, waits: Callable[[str], None], has_gpu: bool) -> None:
        super().__init__()
        self.waits = waits
        self.has_gpu = has_gpu
        self.devices: list[torch.device] = []
        """the objects that stand for the GPU; kept, so that no other object gets the same id"""
        own_pick = workshop.hardware.pick_device

        def pick_device() -> torch.device:
            self.devices.append(own_pick())
            return self.devices[-1]

        workshop.hardware.pick_device = pick_device

    def __torch_function__(self, function: Callable, _: Any, arguments: tuple = (), keywords: Any = None) -> Any:  # noqa: ANN401
        """Call ``function``, and note whether it reads a marked tensor."""
        keywords = keywords or {}
        name = getattr(function, "__name__", "")
        given = list(tensors_in([*arguments, *keywords.values()]))
        marked = [tensor for tensor in given if self.is_marked(tensor)]
        devices = [value for value in (*arguments[1:], *keywords.values()) if isinstance(value, torch.device | str)]
        devices = [device for device in devices if not isinstance(device, str) or device.startswith("cpu")]
        here = any(device is one for device in devices for one in self.devices)
        if name == "to" and devices and not marked and isinstance(devices[0], torch.device):
            self.devices.append(devices[0])
            here = True
        if marked and self.reads(name, function, arguments, keywords, marked, bool(devices) and not here):
            self.waits(name)
        if self.has_gpu and marked and function == IS_CUDA:
            return True
        result = function(*arguments, **keywords)
        if name == "__get__" and marked and isinstance(result, torch.device):
            self.devices.append(result)
        if (marked or here) and name != "copy_":  # which does not move the tensor that it copies to
            for tensor in tensors_in([result]):
                tensor._is_on_device = True
        return result

    @staticmethod
    def is_marked(tensor: torch.Tensor) -> bool:
        return getattr(tensor, "_is_on_device", False)

    def reads(
        self, name: str, function: Callable, arguments: tuple, keywords: dict, marked: list, to_host: bool
    ) -> bool:
        """Whether a call that is given the ``marked`` tensors waits for their values."""
        if name in READS:
            return True
        if name == "to":
            return to_host and not keywords.get("non_blocking")
        if name == "copy_":
            return not self.is_marked(arguments[0]) and not keywords.get("non_blocking")
        if name == "__getitem__":
            return any(index.dtype == torch.bool for index in tensors_in([arguments[1]]) if self.is_marked(index))
        if name == "where":
            return len(arguments) + len(keywords) == 1
        return name == "tensor" and function is torch.tensor  # torch.tensor(loss)


def tensors_in(values: Any) -> Iterator[torch.Tensor]:  # noqa: ANN401
    """Yield the tensors in these values, and in the lists, tuples and dictionaries among them."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(value)
        elif isinstance(value, dict):
            yield from tensors_in(chain(value.values()))
