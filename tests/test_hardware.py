"""What the machine has: a GPU that was granted is used or missed, formats that are emulated and limits are known."""

from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from conftest import REPOSITORY, Script
from lab.launching import load_script
from workshop import hardware
from workshop.checks import choose_precision
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
    assert {precision for precision in formats if hardware.computes_in(CPU, precision) is False} == emulated
    assert choose_precision("auto", CPU) == ("fp32" if "bf16" in emulated or not text else "bf16")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
    for capability, chosen in (((8, 0), "bf16"), ((7, 5), "fp32")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, found=capability: found)
        assert choose_precision("auto", GPU) == chosen


def test_a_format_that_gains_nothing_is_warned_of(cpuinfo: Path, run_script: Script) -> None:
    cpuinfo.write_text(ZEN_3)
    flags = ("--limit_train", 64, "--limit_val", 16, "--loader", "memory")
    asked = run_script("04_mixed_precision/train.py", *flags, "--precision", "bf16")
    assert "warning: this CPU has no instructions for bf16 and emulates it" in asked.stderr
    auto = run_script("04_mixed_precision/train.py", *flags)
    assert auto.stderr == ""
    assert "--precision auto: fp32, because the CPU is not known to compute in bf16 by itself\n" in auto.stdout


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


@pytest.mark.parametrize(
    ("environment", "granted"), [*((found, True) for found in GRANTED), *((found, False) for found in NOT_GRANTED)]
)
def test_a_gpu_that_was_granted_must_be_found(
    environment: dict[str, str], granted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: None)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    devices = [hardware.pick_device, lambda: load_script(REPOSITORY / "03_ddp").device_of_rank(0)]
    for device in devices:
        if granted:
            ((name, value),) = environment.items()
            with pytest.raises(
                UserError, match=f"^{name}={value}, but torch .* finds no GPU: .*R580 or newer.*older CUDA"
            ):
                device()
        else:
            assert device() == CPU


def test_what_does_not_fit_into_a_control_group_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Slurm and containers limit the memory of a job in this way; the machine has more."""
    (tmp_path / "own").write_text("0::/job_7/step_0\n")
    for folder, limit, used in (("", "max", 0), ("job_7", 3_000_000, 2_000_000), ("job_7/step_0", "max", 1)):
        group = tmp_path / "groups" / folder
        group.mkdir(parents=True, exist_ok=True)
        (group / "memory.max").write_text(f"{limit}\n")
        (group / "memory.current").write_text(f"{used}\n")
        (group / "memory.stat").write_text("anon 5\ninactive_file 500000\n")
    monkeypatch.setattr(hardware, "CGROUPS", tmp_path / "groups")
    monkeypatch.setattr(hardware, "OWN_CGROUP", tmp_path / "own")
    assert hardware.free_bytes(CPU) == 1_500_000
    hardware.require_memory("memory", 1_500_000, CPU, "take fewer samples")
    with pytest.raises(UserError, match=r"--loader memory needs 0\.00 GB on cpu, but 0\.00 GB are free; take fewer"):
        hardware.require_memory("memory", 1_500_001, CPU, "take fewer samples")


def test_a_description_names_processor_versions_and_threads() -> None:
    described = hardware.describe_hardware(CPU)
    assert described["cpu"] and described["memory_bytes"] > 1e8 and described["threads"] >= 1
    versions = hardware.describe_versions()
    assert versions["torch"] and {"python", "cuda", "cudnn", "nccl"} <= versions.keys()


@pytest.mark.parametrize(
    ("others", "cpus", "wanted", "noted"),
    [
        (0.1, 2, 2, False),
        (1.0, 2, 2, True),
        (1.0, 2, 1, False),
        (1.9, 2, 1, True),
        (40, 64, 8, False),
        (60, 64, 8, True),
    ],
)
def test_programs_that_take_cpus_from_a_run_are_noted(others: float, cpus: int, wanted: int, noted: bool) -> None:
    note = hardware.busy_note(others, cpus, wanted)
    assert bool(note) == noted
    assert note is None or f"other programs used {others:.1f} of {cpus} CPUs" in note


def test_the_work_of_a_run_is_not_that_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 10.0])
    busy, own = iter([100.0, 118.0]), iter([50.0, 58.0])  # of 18 s on two CPUs, 8 s are of this run
    monkeypatch.setattr(hardware, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    monkeypatch.setattr(hardware, "processes", lambda: (next(own), 0))
    monkeypatch.setattr(hardware, "allowed_cpus", lambda: [0, 1])
    monkeypatch.setattr(hardware, "available_cpus", lambda: 2)
    monkeypatch.setattr(hardware.torch, "get_num_threads", lambda: 2)

    def cpu_times(percpu: bool) -> list:
        times = namedtuple("times", "user idle guest")
        return [times(next(busy), 1.0, 0.0), times(0.0, 1.0, 0.0)]

    monkeypatch.setattr(hardware.psutil, "cpu_times", cpu_times)
    assert "used 1.0 of 2 CPUs" in (hardware.OtherWork().note() or "")
