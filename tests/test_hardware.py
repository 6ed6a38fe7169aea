"""What a CPU can compute with is known where Linux tells, and users are told when a format gains them nothing."""

from pathlib import Path

import pytest
import torch

from conftest import Script
from workshop import hardware
from workshop.profiling.throughput import verdict

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
    ("text", "imitated"),
    [(ZEN_3, {"bf16", "fp16"}), (ZEN_4, {"fp16"}), (GRAVITON_3, set()), ("", set())],
    ids=["AVX2", "AVX-512", "ARM", "unknown"],
)
def test_formats_that_a_device_only_imitates(
    cpuinfo: Path, text: str, imitated: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cpuinfo.write_text(text)
    formats = ("fp32", "tf32", "bf16", "fp16")
    assert {precision for precision in formats if hardware.only_imitates(CPU, precision)} == imitated
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    assert not any(hardware.only_imitates(GPU, precision) for precision in formats)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    assert [precision for precision in formats if hardware.only_imitates(GPU, precision)] == ["bf16"]


def test_no_file_tells_nothing(cpuinfo: Path) -> None:
    assert not cpuinfo.exists()
    assert not hardware.only_imitates(CPU, "bf16")
    assert hardware.describe_hardware(CPU)["cpu"]


@pytest.mark.parametrize(("text", "warned"), [(ZEN_3, True), (ZEN_4, False)], ids=["AVX2", "AVX-512"])
def test_a_format_that_gains_nothing_is_warned_of(cpuinfo: Path, run_script: Script, text: str, warned: bool) -> None:
    cpuinfo.write_text(text)
    flags = ("--precision", "bf16", "--limit_train", 128, "--limit_val", 64, "--loader", "memory")
    result = run_script("04_mixed_precision/train.py", *flags)
    assert result.status == 0, result.stderr
    assert ("warning: this CPU has no instructions for bf16" in result.stderr) == warned


def test_a_verdict_recommends_only_what_gains_something() -> None:
    rates = {"io": 300, "synthetic": 100, "full": 95}
    assert "to the step: --precision bf16 and --channels_last true." in verdict(**rates, loader="map")
    assert "to the step: --channels_last true." in verdict(**rates, loader="map", bf16=False)
