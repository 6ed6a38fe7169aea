"""The monitor reports what processes and GPU do, omits what they cannot report, and never disturbs the run.

There is no GPU here: the real pynvml calls a fake NVML library, so its functions and structures are real.
"""

import subprocess
import sys
import threading
from collections.abc import Callable
from types import SimpleNamespace

import pynvml
import pytest
import torch

from workshop.hardware import processes
from workshop.profiling import monitor as monitor_module
from workshop.profiling.monitor import Monitor

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
UUID = "3b5d8a5e-0c1d-4f5e-9a43-6b1f0f3c2d10"
CPU_QUANTITIES = {"cpu_percent", "rss_bytes", "system_memory_bytes"}
GPM = {
    pynvml.NVML_GPM_METRIC_SM_UTIL: 81.5,
    pynvml.NVML_GPM_METRIC_SM_OCCUPANCY: 40.25,
    pynvml.NVML_GPM_METRIC_ANY_TENSOR_UTIL: 12.5,
    pynvml.NVML_GPM_METRIC_DRAM_BW_UTIL: 33.0,
}
OLD_GPU = {
    "gpu_utilization_percent": 97.0,
    "gpu_memory_bytes": 5e9,
    "gpu_power_watts": 312.5,
    "gpu_temperature_celsius": 61.0,
}
HOPPER = OLD_GPU | {
    "gpu_sm_activity_percent": 81.5,
    "gpu_sm_occupancy_percent": 40.25,
    "gpu_tensor_activity_percent": 12.5,
    "gpu_memory_bandwidth_percent": 33.0,
}


class FakeNvml:
    """The functions of libnvidia-ml that the monitor needs; ctypes' ``byref(x)._obj`` is ``x``."""

    def __init__(self) -> None:
        self.hopper = True
        self.uuids = [f"GPU-{UUID}"]
        self.unsupported: set[str | int] = set()
        """functions and GPM metrics that answer "Not Supported" """
        self.lost = False

    def __getattr__(self, name: str) -> Callable[..., int]:
        """Return the C function of this name."""
        answer = getattr(type(self), f"_{name}", None)
        if answer is None:
            raise AttributeError(name)

        def function(*arguments: object) -> int:
            if self.lost:
                return pynvml.NVML_ERROR_GPU_IS_LOST
            if name in self.unsupported:
                return pynvml.NVML_ERROR_NOT_SUPPORTED
            return answer(self, *arguments) or pynvml.NVML_SUCCESS

        return function

    def _nvmlInitWithFlags(self, flags: int) -> None: ...

    def _nvmlDeviceGetHandleByUUID(self, uuid: SimpleNamespace, handle: object) -> int:
        return pynvml.NVML_SUCCESS if uuid.value.decode() in self.uuids else pynvml.NVML_ERROR_NOT_FOUND

    def _nvmlDeviceGetUtilizationRates(self, handle: object, rates: SimpleNamespace) -> None:
        rates._obj.gpu = 97

    def _nvmlDeviceGetMemoryInfo(self, handle: object, memory: SimpleNamespace) -> None:
        memory._obj.used = 5_000_000_000

    def _nvmlDeviceGetPowerUsage(self, handle: object, milliwatts: SimpleNamespace) -> None:
        milliwatts._obj.value = 312_500

    def _nvmlDeviceGetTemperature(self, handle: object, sensor: object, celsius: SimpleNamespace) -> None:
        celsius._obj.value = 61

    def _nvmlGpmQueryDeviceSupport(self, handle: object, support: SimpleNamespace) -> None:
        assert support._obj.version == pynvml.NVML_GPM_SUPPORT_VERSION
        support._obj.isSupportedDevice = int(self.hopper)

    def _nvmlGpmSampleAlloc(self, sample: object) -> None: ...

    def _nvmlGpmSampleGet(self, handle: object, sample: object) -> None:
        assert isinstance(sample, pynvml.c_nvmlGpmSample_t)

    def _nvmlGpmMetricsGet(self, reference: SimpleNamespace) -> None:
        request = reference._obj
        assert request.version == pynvml.NVML_GPM_METRICS_GET_VERSION
        for metric in request.metrics[: request.numMetrics]:
            if metric.metricId in self.unsupported:
                metric.nvmlReturn = pynvml.NVML_ERROR_NOT_SUPPORTED
            else:
                metric.value = GPM[metric.metricId]


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    library = FakeNvml()
    monkeypatch.setattr(pynvml, "nvmlLib", library)
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
    fake_gpus(monkeypatch, [(UUID, 2**20)])
    return library


def fake_gpus(patch: pytest.MonkeyPatch, gpus: list[tuple[str, int]]) -> None:
    """GPUs by their uuid, and the bytes that this process has on each."""
    patch.setattr(torch.cuda, "device_count", lambda: len(gpus))
    patch.setattr(torch.cuda, "get_device_properties", lambda number: SimpleNamespace(uuid=gpus[number][0]))
    patch.setattr(torch.cuda, "memory_reserved", lambda number: gpus[number][1])


def summary_of_a_short_run(device: torch.device) -> dict:
    with Monitor(device) as monitor:
        pass
    return monitor.summary()


def means(summary: dict, without: set[str] = CPU_QUANTITIES) -> dict[str, float]:
    return {name: values["mean"] for name, values in summary["quantities"].items() if name not in without}


def test_without_a_gpu_a_run_shorter_than_the_interval_gets_one_sample() -> None:
    added = {}
    with Monitor(CPU, lambda name, value, seconds: added.update({name: (value, seconds)}), interval=1000) as monitor:
        pass
    summary = monitor.summary()
    assert (summary["samples"], summary["left_out"], summary["failure"]) == (1, {}, None)
    assert set(summary["quantities"]) == CPU_QUANTITIES == set(added)
    assert 1e7 < summary["quantities"]["rss_bytes"]["mean"] < 1e12
    assert 1e7 < summary["quantities"]["system_memory_bytes"]["max"] < 1e13
    assert added["rss_bytes"][1] > 0
    assert "monitor" not in {thread.name for thread in threading.enumerate()}


def test_child_processes_count() -> None:
    cpu_seconds, rss = processes()
    code = "content = b'x' * 10**8; print(flush=True); input()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen([sys.executable, "-c", code], **pipes) as child:
        child.stdout.readline()
        with_child = processes()
        child.stdin.close()
    assert with_child[0] > cpu_seconds
    assert with_child[1] - rss > 0.9e8


@pytest.mark.parametrize(
    ("cpu_seconds", "percent"),
    [((5.0, 5.5), 25), ((5.0, 3.0), 0), ((5.0, 1e9), 400)],
    ids=["busy", "a child that ended was left out", "or was counted twice"],
)
def test_the_share_of_the_cpus(cpu_seconds: tuple, percent: float, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds, used = iter((10.0, 11.0)), iter(cpu_seconds)
    monkeypatch.setattr(monitor_module, "time", SimpleNamespace(perf_counter=lambda: next(seconds), sleep=lambda _: 0))
    monkeypatch.setattr(monitor_module, "processes", lambda: (next(used), 1))
    monkeypatch.setattr(monitor_module, "available_cpus", lambda: 2)
    monkeypatch.setattr(monitor_module.psutil, "cpu_count", lambda: 8)
    assert means(summary_of_a_short_run(CPU), set())["cpu_percent"] == pytest.approx(percent)


def test_mean_and_max(monkeypatch: pytest.MonkeyPatch) -> None:
    values = iter([1e9, 6e9, 2e9])

    def stop_after_two(name: str, value: float, seconds: float) -> None:
        if value == 6e9:
            monitor._stop.set()  # the third sample is that at the end

    monitor = Monitor(CPU, stop_after_two, interval=0.001)
    # Of this monitor alone: the thread of an earlier test's may still be taking its last sample.
    monkeypatch.setattr(monitor, "_read_cpus", lambda: {"rss_bytes": next(values)})
    with monitor:
        monitor._thread.join()
    assert monitor.summary()["quantities"]["rss_bytes"] == {"mean": 3e9, "max": 6e9}
    assert monitor.table().splitlines()[1].split() == ["rss_GB", "3.00", "6.00"]


def test_a_hopper_gpu_reports_everything(nvml: FakeNvml) -> None:
    summary = summary_of_a_short_run(CUDA)
    assert means(summary) == HOPPER
    assert set(summary["quantities"]) == CPU_QUANTITIES | set(HOPPER)
    assert summary["left_out"] == {}


@pytest.mark.parametrize("old", ["GPU", "driver"])
def test_an_older_gpu_or_driver_lacks_the_gpm_counters(nvml: FakeNvml, old: str) -> None:
    nvml.hopper = old != "GPU"
    nvml.unsupported = {"nvmlGpmQueryDeviceSupport"} if old == "driver" else set()
    summary = summary_of_a_short_run(CUDA)
    assert means(summary) == OLD_GPU
    assert set(summary["left_out"]) == set(HOPPER) - set(OLD_GPU)
    assert ("Hopper" if old == "GPU" else "Not Supported") in summary["left_out"]["gpu_sm_activity_percent"]


def test_every_gpu_that_the_process_uses_is_monitored(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = [("one", 0), ("two", 2**20), ("three", 0), ("four", 2**20)]
    nvml.uuids = [f"GPU-{uuid}" for uuid, _ in gpus[:3]] + ["MIG-four"]  # the last is a part of a GPU
    fake_gpus(monkeypatch, gpus)
    another = {f"gpu3_{name.removeprefix('gpu_')}": value for name, value in HOPPER.items()}
    assert means(summary_of_a_short_run(CUDA)) == HOPPER | another


def test_what_is_not_supported_is_omitted_with_the_reason(nvml: FakeNvml, capsys: pytest.CaptureFixture) -> None:
    nvml.unsupported = {"nvmlDeviceGetPowerUsage", pynvml.NVML_GPM_METRIC_SM_OCCUPANCY}
    missing = {"gpu_power_watts", "gpu_sm_occupancy_percent"}
    summary = summary_of_a_short_run(CUDA)
    assert set(summary["quantities"]) == (CPU_QUANTITIES | set(HOPPER)) - missing
    assert summary["left_out"] == dict.fromkeys(missing, "Not Supported")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("missing", ["GPU", "library"])
def test_without_nvml_the_cpus_are_monitored(
    nvml: FakeNvml, missing: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    nvml.uuids = []
    if missing == "library":
        monkeypatch.setitem(sys.modules, "pynvml", None)
    summary = summary_of_a_short_run(CUDA)
    assert set(summary["quantities"]) == CPU_QUANTITIES
    assert set(summary["left_out"]) == {"gpu"}
    assert capsys.readouterr().err == ""


def test_a_failure_ends_the_monitoring_and_not_the_run(nvml: FakeNvml, capsys: pytest.CaptureFixture) -> None:
    def lose_the_gpu(*_: object) -> None:
        nvml.lost = True

    with Monitor(CUDA, lose_the_gpu, interval=0.001) as monitor:
        monitor._thread.join()
    assert capsys.readouterr().err == (
        "warning: monitoring has ended, training goes on: NVMLError_GpuIsLost: GPU is lost\n"
    )
    summary = monitor.summary()
    assert summary["failure"] == "NVMLError_GpuIsLost: GPU is lost"
    assert (summary["samples"], means(summary)) == (1, HOPPER)


def test_a_hanging_library_does_not_hold_up_the_run_or_its_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(monitor_module, "TIMEOUT", 0.01)
    answered = threading.Event()
    monitor = Monitor(CPU, lambda name, value, seconds: answered.wait())
    with pytest.raises(ValueError, match="diverged"), monitor:
        raise ValueError("diverged")
    assert "no answer" in monitor.summary()["failure"]
    assert len(capsys.readouterr().err.splitlines()) == 1
    answered.set()
    monitor._thread.join()
