"""What a step does on a GPU, without one: fake tensors, which hold no numbers, on a device that is said to be CUDA.

An operation on tensors of different devices raises an error, and so does reading the number of such a tensor, as
``.item()`` does, for which the CPU would have to wait. Not tested here, because torch asks the driver for them even so:
the engine of autograd, which is replaced by giving every weight a gradient; validation, which is in inference mode;
streams, CUDA graphs and DistributedDataParallel; and pinning, of which only the call is seen. Fused optimizers have no
fake kernels: `fused_kernel` checks what they would be given.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.optim.lr_scheduler import LambdaLR

from conftest import REPOSITORY
from lab.launching import load_script
from workshop.datasets.nbody import CHANNELS
from workshop.loaders import DistributedBatchSampler, Loader
from workshop.loaders.crops import Crops
from workshop.loaders.device import DeviceLoader
from workshop.loaders.transform import BatchTransform
from workshop.loaders.volumes import VolumeLoader
from workshop.models import build_model
from workshop.run.checkpoint import GoodCheckpoint, fingerprint
from workshop.run.position import Position

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
LESSON = load_script(REPOSITORY / "04_mixed_precision")
DIGITS = {"dataset": "mnist", "model": "mnist_cnn"}
IMAGES = {"dataset": "cifar10", "model": "cifar_cnn"}
VOLUMES = {"dataset": "nbody", "model": "unet3d", "unet_width": 2, "unet_depth": 1}
KINDS = ["eager", "fused", "capturable", "fused capturable"]
"""of optimizers, by the options they are built with"""
FOR_SGD = ["eager", "fused", "fused capturable"]


def fused_kernel(weights: list[torch.Tensor], *lists: list[torch.Tensor], **options: object) -> None:
    """Check that all arguments are on the GPU, and that what belongs to a weight is in the same order in memory."""
    for tensors in lists:
        for weight, tensor in zip(weights, tensors, strict=bool(tensors)):
            assert tensor.device == CUDA
            assert tensor.dim() == 0 or tensor.stride() == weight.stride()
    for option in options.values():
        assert not isinstance(option, torch.Tensor) or option.device == CUDA


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every tensor made from here on is fake, on whichever device."""
    monkeypatch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)
    monkeypatch.setattr(torch.Tensor, "__deepcopy__", lambda tensor, _: tensor.clone())  # they have no memory to copy
    monkeypatch.setattr(torch.Tensor, "pin_memory", torch.Tensor.clone)
    for name in ("_fused_adam_", "_fused_adamw_", "_fused_sgd_"):
        monkeypatch.setattr(torch, name, fused_kernel)
    with FakeTensorMode(allow_non_fake_inputs=True):
        yield


def make_optimizer(config: object, model: torch.nn.Module, kind: str) -> torch.optim.Optimizer:
    with pytest.MonkeyPatch.context() as patch:  # optimizers ask, once, whether the learning rate is negative
        patch.setattr(torch.Tensor, "__ge__", lambda *_: True)
        patch.setattr(torch.Tensor, "__lt__", lambda *_: False)
        return LESSON.make_optimizer(replace(config, fused="fused" in kind, cuda_graph="capturable" in kind), model)


def give_gradients(model: torch.nn.Module, *_: object) -> None:
    for weight in model.parameters():
        weight.grad = torch.empty_like(weight)


def checkpoint(config: object, model: torch.nn.Module, kind: str) -> dict:
    """What a run on a GPU with such an optimizer has saved, as it is read: on the CPU."""
    optimizer = LESSON.make_optimizer(config, model)
    scheduler = LambdaLR(optimizer, lambda step: 1 / (step + 1))
    give_gradients(model)
    optimizer.step()
    scheduler.step()
    parts = {"optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
    (group,) = parts["optimizer"]["param_groups"]
    group["fused"] = "fused" in kind or None
    if "capturable" in kind:
        group |= {name: torch.tensor(group[name]) for name in ("lr", "initial_lr")}
        if "capturable" in group:  # SGD has no such option
            group["capturable"] = True
        parts["scheduler"]["base_lrs"] = [group["initial_lr"]]
    return parts


def position_after(config: object, saved: dict, patch: pytest.MonkeyPatch, lr: float) -> Position:
    """The position of a run that finds this checkpoint, whose run had this --lr; fake tensors cannot be in a file."""
    run = {"is": fingerprint(config, 1, config.batch_size, saved), "size": {}, "lr": lr, "ranks": []}
    run |= {"epochs": [], "finished_epochs": 1, "steps": 2, "step": 0}
    good = GoodCheckpoint(Path("none"), "a checkpoint", 0)
    patch.setattr("workshop.run.position.find_checkpoint", lambda _: good)
    patch.setattr("workshop.run.position.read_checkpoint", lambda _: saved | {"run": run})
    return Position(config, CPU, 0, 1, Path("none"), print)


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize(
    ("name", "before", "after"),
    [("adam", *pair) for pair in product(KINDS, KINDS)] + [("sgd", *pair) for pair in product(FOR_SGD, FOR_SGD)],
)
def test_a_resumed_optimizer_is_that_of_its_own_flags(
    name: str, before: str, after: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = checkpoint(LESSON.Config(optimizer=name, lr=0.5), torch.nn.Conv2d(2, 2, 3), before)
    with CUDA:
        model = torch.nn.Conv2d(2, 2, 3)
    model.weight = torch.nn.Parameter(model.weight.detach().contiguous(memory_format=torch.channels_last))
    config = LESSON.Config(optimizer=name, lr=0.25)
    optimizer = make_optimizer(config, model, after)
    scheduler = LambdaLR(optimizer, lambda step: 1 / (step + 1))
    options = {name: option for name, option in optimizer.param_groups[0].items() if name != "params"}
    lr = options.pop("lr")
    state = {"optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
    loaded = position_after(config, saved, monkeypatch, lr=0.5).load(matching=state)
    LESSON.load_optimizer(optimizer, loaded["optimizer"])
    scheduler.load_state_dict(loaded["scheduler"])
    (group,) = optimizer.param_groups
    assert {name: group[name] for name in options} == options
    assert group["lr"] is lr if "capturable" in after else group["lr"] == 0.125
    give_gradients(model)
    optimizer.step()
    scheduler.step()
    assert group["lr"] is lr if "capturable" in after else group["lr"] == pytest.approx(0.25 / 3)
    for weight, state in optimizer.state.items():
        if "step" in state:
            assert state.pop("step").device == (CPU if after == "eager" else CUDA)
        assert {(tensor.device, tensor.stride()) for tensor in state.values()} == {(CUDA, weight.stride())}


@pytest.mark.usefixtures("fake")
def test_mixed_devices_and_asking_for_a_number_are_noticed() -> None:
    on_gpu = torch.ones(3, device=CUDA)
    with pytest.raises(RuntimeError, match=r"(?i)device"):
        on_gpu + torch.ones(3)
    with pytest.raises(DataDependentOutputException):
        on_gpu.sum().item()


@pytest.fixture
def train_loader(request: pytest.FixtureRequest, fake: None, monkeypatch: pytest.MonkeyPatch) -> Loader:
    """The loader ``device``: all data are there."""
    if request.param is VOLUMES:
        crops = Crops(samples=4, cells=8, size=4, periodic=True, seed=1)
        boxes = tuple(torch.zeros(channels, 8, 8, 8, device=CUDA) for channels in CHANNELS.values())
        return VolumeLoader(boxes, crops, DistributedBatchSampler(4, 2, seed=1, shuffle=True))
    monkeypatch.setattr("workshop.hardware.free_bytes", lambda _: 2**40)
    shape = (1, 28, 28) if request.param is DIGITS else (3, 32, 32)
    images, labels = torch.zeros(4, *shape, dtype=torch.uint8), torch.zeros(4, dtype=torch.int64)
    transform = BatchTransform([0.5], [0.5], augment=request.param is IMAGES, samples=4, seed=1)
    return DeviceLoader(images, labels, DistributedBatchSampler(4, 2, seed=1, shuffle=True), transform, CUDA)


def train_two_steps(config: object, loader: Loader, kind: str, patch: pytest.MonkeyPatch) -> None:
    with CUDA:
        model = LESSON.make_model(config)
    patch.setattr(torch.Tensor, "backward", partial(give_gradients, model))
    optimizer = make_optimizer(config, model, kind)
    scheduler = LambdaLR(optimizer, lambda step: 1 / (step + 1))
    scaler = torch.amp.GradScaler("cuda", enabled=config.precision == "fp16")
    position = Position(config, CUDA, 0, 1, Path("none"), print)
    for inputs, targets in loader:
        assert (inputs.device, targets.device) == (CUDA, CUDA)
        loss = LESSON.train_step(config, model, optimizer, scaler, inputs, targets)
        scheduler.step()
        position.count_step(loss)
    assert position.step == 2


@pytest.mark.parametrize(
    ("train_loader", "workload"), [(w, w) for w in (DIGITS, IMAGES, VOLUMES)], indirect=["train_loader"]
)
@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "fp16"])
@pytest.mark.parametrize("kind", KINDS)
def test_no_step_waits_for_the_gpu(
    train_loader: Loader, workload: dict, precision: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = LESSON.Config(**workload, precision=precision)
    if precision == "fp16" and "fused" not in kind:  # the scaler asks whether gradients overflowed
        with pytest.raises(DataDependentOutputException):
            train_two_steps(config, train_loader, kind, monkeypatch)
    else:
        train_two_steps(config, train_loader, kind, monkeypatch)


class Steps:
    """What `train_one_epoch` uses of a run."""

    count = 0
    partial_loss_sum = 0.0

    def batches(self, loader: Loader) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return iter(loader)

    def end_step(self, _: torch.Tensor) -> None:
        self.count += 1

    def should_save(self) -> bool:
        return False


@pytest.mark.parametrize("train_loader", [IMAGES], indirect=True)
@pytest.mark.parametrize("lesson", ["01_single_gpu", "02_dataparallel", "03_ddp"])
def test_an_epoch_asks_for_a_number_after_its_last_step(
    train_loader: Loader, lesson: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, run = load_script(REPOSITORY / lesson), Steps()
    config = script.Config(**IMAGES)
    with CUDA:
        model = build_model(config.model, config.dataset)
    monkeypatch.setattr(torch.Tensor, "backward", partial(give_gradients, model))
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda _: None)
    optimizer = script.make_optimizer(config, model)
    scheduler = LambdaLR(optimizer, lambda step: 1 / (step + 1))
    with pytest.raises(DataDependentOutputException):
        script.train_one_epoch(config, model, train_loader, optimizer, scheduler, CUDA, run)
    assert run.count == 2


@pytest.mark.parametrize("train_loader", [VOLUMES], indirect=True)
def test_cubes_are_cut_without_a_copy_that_waits(train_loader: Loader, monkeypatch: pytest.MonkeyPatch) -> None:
    pinned, copied = [], []
    copy = torch.Tensor.to

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        pinned.append(tensor.clone())
        return pinned[-1]

    def to(tensor: torch.Tensor, *where: object, **how: object) -> torch.Tensor:
        found = copy(tensor, *where, **how)
        if found.device != tensor.device:
            copied.append((tensor, how))
        return found

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    monkeypatch.setattr(torch.Tensor, "to", to)
    next(iter(train_loader))
    assert copied
    assert [id(tensor) for tensor, _ in copied] == [id(tensor) for tensor in pinned]
    assert all(how == {"non_blocking": True} for _, how in copied)
