"""What a step does on a GPU, without one: tensors that hold no numbers and claim to lie on it.

An operation on tensors of different devices raises, and so does asking such a tensor for its number, as ``.item()``
does, for which the CPU would have to wait. Not held here, as torch asks the driver for them even so: the engine of
autograd, in whose place every gradient simply appears; streams, CUDA graphs and DistributedDataParallel; and pinning,
of which only the asking is seen. Fused optimizers have no fake kernels: `fused_kernel` checks what they would be given.
"""

from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim.lr_scheduler import LambdaLR

from conftest import REPOSITORY
from workshop.config import TrainConfig
from workshop.distributed.ranks import ONE_PROCESS
from workshop.measuring.launching import load_script
from workshop.run.progress import Progress
from workshop.step.optimizers import build_optimizer

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
LESSON = load_script(REPOSITORY / "04_mixed_precision")
UNET = {"dataset": "nbody", "model": "unet3d", "width": 2, "depth": 1}
KINDS = ["eager", "fused", "capturable", "fused capturable"]
"""of optimizers, by the options they are built with"""
FOR_SGD = ["eager", "fused", "fused capturable"]


def fused_kernel(weights: list[torch.Tensor], *lists: list[torch.Tensor], **options: object) -> None:
    """See that all a fused kernel is given is on the GPU, and what belongs to a weight in the same order in memory."""
    for tensors in lists:
        for weight, tensor in zip(weights, tensors, strict=bool(tensors)):
            assert tensor.device == CUDA
            assert tensor.dim() == 0 or tensor.stride() == weight.stride()
    for option in options.values():
        assert not isinstance(option, torch.Tensor) or option.device == CUDA


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every tensor made from here on is fake, wherever it claims to lie."""
    monkeypatch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)
    monkeypatch.setattr(torch.Tensor, "__deepcopy__", lambda tensor, _: tensor.clone())  # they have no memory to copy
    for name in ("_fused_adam_", "_fused_adamw_", "_fused_sgd_"):
        monkeypatch.setattr(torch, name, fused_kernel)
    with FakeTensorMode(allow_non_fake_inputs=True):
        yield


def build(config: TrainConfig, model: torch.nn.Module, kind: str) -> torch.optim.Optimizer:
    with pytest.MonkeyPatch.context() as patch:  # optimizers ask, once, whether the rate is negative
        patch.setattr(torch.Tensor, "__ge__", lambda *_: True)
        patch.setattr(torch.Tensor, "__lt__", lambda *_: False)
        return build_optimizer(config, model, fused="fused" in kind, capturable="capturable" in kind)


def give_gradients(model: torch.nn.Module, *_: object) -> None:
    for weight in model.parameters():
        weight.grad = torch.empty_like(weight)


def checkpoint(config: TrainConfig, model: torch.nn.Module, kind: str) -> dict:
    """What a run on a GPU with such an optimizer has saved, as it is read: on the CPU."""
    optimizer = build_optimizer(config, model)
    scheduler = LambdaLR(optimizer, lambda step: 1 / (step + 1))
    give_gradients(model)
    optimizer.step()
    scheduler.step()
    parts = {"optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
    (group,) = parts["optimizer"]["param_groups"]
    group["fused"] = "fused" in kind or None
    if "capturable" in kind:
        group |= {name: torch.tensor(group[name]) for name in ("lr", "initial_lr")} | {"capturable": True}
        parts["scheduler"]["base_lrs"] = [group["initial_lr"]]
    return parts | {"run": {"lr": config.lr, "epochs": [], "steps": 0, "step": 0, "ranks": []}}


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize(
    ("name", "before", "after"),
    [("adam", *pair) for pair in product(KINDS, KINDS)] + [("sgd", *pair) for pair in product(FOR_SGD, FOR_SGD)],
)
def test_a_resumed_optimizer_is_that_of_its_own_flags(name: str, before: str, after: str) -> None:
    saved = checkpoint(TrainConfig(optimizer=name, lr=0.5), torch.nn.Conv2d(2, 2, 3), before)
    with CUDA:
        model = torch.nn.Conv2d(2, 2, 3)
    model.weight = torch.nn.Parameter(model.weight.detach().contiguous(memory_format=torch.channels_last))
    config = TrainConfig(optimizer=name, lr=0.25)
    optimizer = build(config, model, after)
    scheduler = LambdaLR(optimizer, lambda step: 1 / (step + 1))
    options = {name: option for name, option in optimizer.param_groups[0].items() if name != "params"}
    rate = options.pop("lr")
    progress = Progress(config, CPU, ONE_PROCESS, Path("none"), print)
    progress._parts = {"optimizer": optimizer, "scheduler": scheduler}
    progress._restore(saved)
    (group,) = optimizer.param_groups
    assert {name: group[name] for name in options} == options
    assert group["lr"] is rate if "capturable" in after else group["lr"] == 0.125
    give_gradients(model)
    optimizer.step()
    scheduler.step()
    assert group["lr"] is rate if "capturable" in after else group["lr"] == pytest.approx(0.25 / 3)
    for weight, state in optimizer.state.items():
        if "step" in state:
            assert state.pop("step").device == (CPU if after == "eager" else CUDA)
        assert {(tensor.device, tensor.stride()) for tensor in state.values()} == {(CUDA, weight.stride())}
