"""What a CPU can compute with is known where Linux reports it, and users are warned of a format without a gain."""

from pathlib import Path
from types import SimpleNamespace

import pynvml
import pytest
import torch

from conftest import REPOSITORY, Script
from lab.launching import load_script
from lab.results import machine_name
from workshop import hardware
from workshop.errors import UserError

CPU, GPU = torch.device("cpu"), torch.device("cuda")
ZEN_3 = "processor\t: 0\nmodel name\t: AMD EPYC\nflags\t\t: fpu sse2 avx2 fma\n\nprocessor\t: 1\n"
ZEN_4 = ZEN_3.replace("avx2", "avx2 avx512f avx512_bf16")
GRAVITON_3 = "processor\t: 0\nFeatures\t: fp asimd asimdhp bf16\n"


@pytest.fixture
def cpuinfo(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    file = tmp_path / "cpuinfo"
    monkeypatch.setattr(hardware, "CPUINFO", file)
    return file


@pytest.mark.parametrize(
    ("text", "emulated"),
    [(ZEN_3, {"bf16", "fp16"}), (ZEN_4, {"fp16"}), (GRAVITON_3, set()), ("", set())],
    ids=["AVX2", "AVX-512", "ARM", "unknown"],
)
def test_formats_that_a_device_emulates(
    cpuinfo: Path, text: str, emulated: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cpuinfo.write_text(text)
    formats = ("fp32", "tf32", "bf16", "fp16")
    assert {precision for precision in formats if hardware.emulates(CPU, precision)} == emulated
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    assert not any(hardware.emulates(GPU, precision) for precision in formats)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    assert [precision for precision in formats if hardware.emulates(GPU, precision)] == ["bf16"]


def test_a_results_file_has_gpus_driver_and_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(name="NVIDIA H200", total_memory=2**37)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlSystemGetDriverVersion", lambda: "580.159.03")
    found = hardware.describe_hardware(GPU)
    assert (found["device_name"], found["gpus"], found["driver"]) == ("NVIDIA H200", 8, "580.159.03")
    assert machine_name(hardware.describe_hardware(GPU)) == "nvidia_h200_8gpu"
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: 1 / 0)
    assert hardware.describe_hardware(GPU)["driver"] is None
    versions = hardware.describe_versions()
    assert {"cuda", "cudnn", "nccl"} <= versions.keys()
    assert all(version is None or isinstance(version, str) for version in versions.values())


def test_without_the_file_nothing_is_known(cpuinfo: Path) -> None:
    assert not cpuinfo.exists()
    assert not hardware.emulates(CPU, "bf16")
    assert hardware.describe_hardware(CPU)["cpu"]


@pytest.mark.parametrize(("text", "warned"), [(ZEN_3, True), (ZEN_4, False)], ids=["AVX2", "AVX-512"])
def test_a_format_that_gains_nothing_is_warned_of(cpuinfo: Path, run_script: Script, text: str, warned: bool) -> None:
    cpuinfo.write_text(text)
    flags = ("--precision", "bf16", "--limit_train", 128, "--limit_val", 64, "--loader", "memory")
    result = run_script("04_mixed_precision/train.py", *flags)
    assert result.status == 0, result.stderr
    assert ("warning: this CPU has no instructions for bf16" in result.stderr) == warned


GRANTED = [
    {"CUDA_VISIBLE_DEVICES": "0,1"},
    {"CUDA_VISIBLE_DEVICES": "GPU-8932f937"},
    {"CUDA_VISIBLE_DEVICES": "MIG-7ea0c0a0"},
    {"SLURM_JOB_GPUS": "0"},
    {"SLURM_GPUS_ON_NODE": "2"},
]
NOT_GRANTED = [
    {},
    {"CUDA_VISIBLE_DEVICES": "", "SLURM_JOB_GPUS": "0,1"},
    {"CUDA_VISIBLE_DEVICES": "-1"},
    {"CUDA_VISIBLE_DEVICES": "NoDevFiles"},
    {"SLURM_GPUS_ON_NODE": "0"},
    {"CUDA_VISIBLE_DEVICES": "100", "SLURM_JOB_GPUS": "0", "WORKSHOP_FAKE_GPUS": "yes"},
]


@pytest.fixture
def no_gpu_is_found(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name in {name for environment in GRANTED for name in environment}:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def set_all(patch: pytest.MonkeyPatch, environment: dict[str, str]) -> None:
    for name, value in environment.items():
        patch.setenv(name, value)


def run_main(lesson: str) -> None:
    script = load_script(REPOSITORY / lesson)
    script.main(script.Config())


@pytest.mark.parametrize("environment", GRANTED, ids=str)
@pytest.mark.parametrize("lesson", sorted(folder.name for folder in REPOSITORY.glob("0*_*")))
def test_a_gpu_that_was_granted_must_be_found(
    no_gpu_is_found: pytest.MonkeyPatch, environment: dict[str, str], lesson: str
) -> None:
    set_all(no_gpu_is_found, environment)
    ((name, value),) = environment.items()
    with pytest.raises(UserError, match=f"^{name}={value}, but torch .* finds no GPU: .*R580 or newer.*older CUDA"):
        run_main(lesson)


@pytest.mark.parametrize("environment", NOT_GRANTED, ids=str)
def test_without_a_gpu_granted_the_cpu_is_right(no_gpu_is_found: pytest.MonkeyPatch, environment: dict) -> None:
    set_all(no_gpu_is_found, environment)
    assert hardware.pick_device() == hardware.cpu_or_error() == CPU
