"""Lesson 04 refuses in one line what the device lacks, and options that cannot be combined."""

import re
import signal
import subprocess
from collections.abc import Callable
from functools import partial

import pytest
import torch

from conftest import REPOSITORY, Script
from lab.launching import load_script
from workshop.errors import UserError
from workshop.signals import STOP_SIGNALS

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
LESSON = load_script(REPOSITORY / "04_mixed_precision")
Config, check_options = LESSON.Config, LESSON.check_options
TINY = ["--config", "../configs/unet3d.yaml", "--config", "../configs/unet3d_tiny.yaml"]


@pytest.fixture
def train(run_script: Script) -> Script:
    return partial(run_script, "04_mixed_precision/train.py")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--precision", "tf32"], "--precision tf32 needs an NVIDIA GPU of compute capability 8.0 or newer"),
        (["--precision", "fp8"], "--precision takes one of 'fp32', 'tf32', 'bf16', 'fp16', got 'fp8'"),
        (["--cuda_graph", "true"], "--cuda_graph true needs an NVIDIA GPU; this is the CPU"),
        (["--cudnn_benchmark", "true"], "--cudnn_benchmark true needs an NVIDIA GPU; this is the CPU"),
        (["--compile", "fast"], "--compile takes one of 'off', 'default', 'reduce-overhead', 'max-autotune'"),
        (["--fused", "true", "--optimizer", "adadelta"], "PyTorch has no fused adadelta"),
        ([*TINY, "--crop_size", 18], "--crop_size 18 cannot be halved 2 times; take --crop_size 16, or --unet_depth 1"),
        ([*TINY, "--crop_size", 64], "--crop_size 64 is larger than the box"),
        (
            TINY[2:],
            "--crop_size 16 needs --dataset nbody, not mnist; configs/unet3d.yaml and configs/vit3d.yaml say so",
        ),
        ([*TINY, "--model", "resnet18"], "--dataset nbody holds volumes, and only --model unet3d"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(train: Script, flags: list, message: str) -> None:
    result = train(*flags)
    assert result.status == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    assert message in line


def test_processes_that_compile_leave_stop_signals_to_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU the trial starts these processes; they inherit which signals are blocked."""
    status = []

    def compile_elsewhere(function: Callable) -> Callable:
        status.append(subprocess.run(["grep", "SigBlk", "/proc/self/status"], capture_output=True, text=True).stdout)
        return function

    monkeypatch.setattr(torch, "compile", compile_elsewhere)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    check_options(Config(compile="default"), CPU)
    blocked = int(status[0].split()[1], base=16)
    assert all(blocked >> number - 1 & 1 for number in STOP_SIGNALS)
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before


def test_without_a_compiler_one_line_says_so(train: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_nothing(*_: object, **__: object) -> None:
        raise RuntimeError("InvalidCxxCompiler: No working C++ compiler found\nin a long list")

    monkeypatch.setattr(torch, "compile", compile_nothing)
    result = train("--compile", "default")
    assert result.status == 2
    (line,) = result.stderr.splitlines()
    assert "torch.compile does not work here: InvalidCxxCompiler: No working C++ compiler found; it needs" in line


class FakeGPU:
    """A device that looks like a GPU to code that asks for its capabilities."""

    type = "cuda"


@pytest.fixture
def old_gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGPU:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "an old GPU")
    return FakeGPU()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"precision": "tf32"}, "compute capability 8.0 or newer; this is an old GPU"),
        (
            {"precision": "bf16"},
            "compute capability 8.0 or newer; this is an old GPU: try --precision fp16, because",
        ),
        ({"cuda_graph": True, "compile": "reduce-overhead"}, "--compile reduce-overhead makes CUDA graphs of its own"),
        ({"cuda_graph": True, "precision": "fp16"}, "with --precision fp16 needs --fused true"),
        ({"cuda_graph": True, "optimizer": "sgd"}, "--cuda_graph true with --optimizer sgd needs --fused true"),
        (
            {"fused": True, "optimizer": "adadelta"},
            "--fused true: PyTorch has no fused adadelta; choose another --optimizer",
        ),
    ],
)
def test_what_a_gpu_lacks_or_what_excludes_another_is_refused(old_gpu: FakeGPU, flags: dict, message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        check_options(Config(**flags), old_gpu)
    check_options(Config(cuda_graph=True, precision="fp16", fused=True), old_gpu)
    check_options(Config(cuda_graph=True, optimizer="sgd", fused=True), old_gpu)


def test_a_cuda_graph_is_refused_with_dali(old_gpu: FakeGPU) -> None:
    with pytest.raises(
        UserError, match=r"^--cuda_graph true cannot be combined with --loader dali: .*; use --loader device$"
    ):
        check_options(Config(cuda_graph=True, loader="dali"), old_gpu)
    check_options(Config(cuda_graph=True, loader="device"), old_gpu)
    check_options(Config(loader="dali"), old_gpu)


VOLUMES = {"dataset": "nbody", "model": "unet3d"}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            {**VOLUMES, "crop_size": 48},
            r"--crop_size 48 cannot be halved 6 times; take --crop_size 64, or --unet_depth 4",
        ),
        (
            {**VOLUMES, "crop_size": 15, "unet_depth": 2},
            r"--crop_size 15 cannot be halved 2 times; take --crop_size 16$",
        ),
        (
            {"dataset": "nbody", "model": "resnet18"},
            r"--dataset nbody holds volumes, and only --model unet3d and --model vit map",
        ),
        ({**VOLUMES, "model": "unet3"}, r"--dataset nbody holds volumes, and only --model unet3d and --model vit map"),
        ({"dataset": "nbody"}, r"--dataset nbody holds volumes, and only --model unet3d and --model vit map"),
        ({"model": "unet3d"}, r"--model unet3d maps volumes to volumes: it needs --dataset nbody, not mnist"),
    ],
)
def test_what_does_not_fit_the_unet_is_refused(flags: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Config(**flags)
