"""The monitor reports what processes and GPU do, omits what they cannot report, and never disturbs the run.

There is no GPU here: the real pynvml calls a fake NVML library, so its functions and structures are real.
"""

import ctypes
import multiprocessing
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pynvml
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

from workshop.hardware import available_cpus
from workshop.profiling import monitor as monitor_module
from workshop.profiling.monitor import Monitor
from workshop.profiling.nvml import Gpu

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
UUID = "3b5d8a5e-0c1d-4f5e-9a43-6b1f0f3c2d10"
CPU_QUANTITIES = {"cpu_percent", "rss_bytes", "pss_bytes", "system_memory_bytes"}
GPM = {  # metric -> value: percent, MiB/s
    pynvml.NVML_GPM_METRIC_SM_UTIL: 81.5,
    pynvml.NVML_GPM_METRIC_SM_OCCUPANCY: 40.25,
    pynvml.NVML_GPM_METRIC_ANY_TENSOR_UTIL: 12.5,
    pynvml.NVML_GPM_METRIC_DRAM_BW_UTIL: 33.0,
    pynvml.NVML_GPM_METRIC_PCIE_RX_PER_SEC: 2.0,
    pynvml.NVML_GPM_METRIC_PCIE_TX_PER_SEC: 1.0,
}
OLD_GPU = {
    "gpu_utilization_percent": 97.0,
    "gpu_memory_bytes": 5e9,
    "gpu_power_watts": 312.5,
    "gpu_temperature_celsius": 61.0,
    "pcie_rx_bytes_per_second": 7e6,
    "pcie_tx_bytes_per_second": 3e6,
}
HOPPER = OLD_GPU | {
    "gpu_sm_activity_percent": 81.5,
    "gpu_sm_occupancy_percent": 40.25,
    "gpu_tensor_activity_percent": 12.5,
    "gpu_memory_bandwidth_percent": 33.0,
    "pcie_rx_bytes_per_second": 2.0 * 2**20,
    "pcie_tx_bytes_per_second": 1.0 * 2**20,
}


class FakeNvml:
    """The functions of libnvidia-ml that the monitor needs, for one GPU; ctypes' ``byref(x)._obj`` is ``x``."""

    def __init__(self, hopper: bool = True) -> None:
        self.hopper = hopper
        self.uuids = [f"GPU-{UUID}"]
        self.unsupported: set[str | int] = set()
        """functions and GPM metrics that answer "Not Supported" """
        self.lost = False
        self.running = 0
        self.samples = 0

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

    def _nvmlInitWithFlags(self, flags: int) -> None:
        self.running += 1

    def _nvmlShutdown(self) -> None:
        self.running -= 1

    def _nvmlDeviceGetHandleByUUID(self, uuid: ctypes.c_char_p, handle: object) -> int | None:
        if uuid.value.decode() not in self.uuids:
            return pynvml.NVML_ERROR_NOT_FOUND
        return None

    def _nvmlDeviceGetUtilizationRates(self, handle: object, rates: object) -> None:
        rates._obj.gpu, rates._obj.memory = 97, 20

    def _nvmlDeviceGetMemoryInfo(self, handle: object, memory: object) -> None:
        memory._obj.total, memory._obj.used = 80_000_000_000, 5_000_000_000

    def _nvmlDeviceGetPowerUsage(self, handle: object, milliwatts: object) -> None:
        milliwatts._obj.value = 312_500

    def _nvmlDeviceGetTemperature(self, handle: object, sensor: ctypes.c_uint, celsius: object) -> None:
        celsius._obj.value = 61

    def _nvmlDeviceGetPcieThroughput(self, handle: object, counter: ctypes.c_uint, kilobytes: object) -> None:
        kilobytes._obj.value = {pynvml.NVML_PCIE_UTIL_RX_BYTES: 7000, pynvml.NVML_PCIE_UTIL_TX_BYTES: 3000}[
            counter.value
        ]

    def _nvmlGpmQueryDeviceSupport(self, handle: object, support: object) -> None:
        assert support._obj.version == pynvml.NVML_GPM_SUPPORT_VERSION
        support._obj.isSupportedDevice = int(self.hopper)

    def _nvmlGpmSampleAlloc(self, sample: object) -> None:
        self.samples += 1

    def _nvmlGpmSampleFree(self, sample: object) -> None:
        self.samples -= 1

    def _nvmlGpmSampleGet(self, handle: object, sample: object) -> None:
        assert isinstance(sample, pynvml.c_nvmlGpmSample_t)

    def _nvmlGpmMetricsGet(self, reference: object) -> None:
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


def means(monitor: Monitor) -> dict[str, float]:
    return {name: values["mean"] for name, values in monitor.summary()["quantities"].items()}


def wait_for_samples(monitor: Monitor, samples: int) -> None:
    while monitor.summary()["samples"] < samples:
        assert monitor._thread.is_alive()
        time.sleep(0.01)


def burn(cpu_seconds: float) -> None:
    while time.process_time() < cpu_seconds:
        pass


def test_the_work_of_child_processes_is_seen() -> None:
    logged: list[tuple[str, float, float]] = []
    worker = multiprocessing.get_context("spawn").Process(target=burn, args=(1.0,))
    with Monitor(CPU, lambda *sample: logged.append(sample), interval=0.2) as monitor:
        worker.start()
        worker.join()
    times = [0.0, *(seconds for name, _, seconds in logged if name == "cpu_percent")]
    percents = [value for name, value, _ in logged if name == "cpu_percent"]
    used = sum(
        percent / 100 * available_cpus() * (now - before)
        for percent, before, now in zip(percents, times, times[1:], strict=False)
    )
    assert used > 0.8  # whatever else this machine is doing
    summary = monitor.summary()
    assert summary["samples"] == len(percents) > 1
    assert set(summary["quantities"]) == CPU_QUANTITIES
    assert summary["left_out"] == {}
    assert summary["failure"] is None


def test_memory_is_plausible() -> None:
    with Monitor(CPU) as monitor:
        pass
    quantities = monitor.summary()["quantities"]
    assert 1e7 < quantities["rss_bytes"]["mean"] < 1e12
    assert 1e7 < quantities["system_memory_bytes"]["max"] < 1e13


def test_shared_memory_counts_once_in_proportional_memory() -> None:
    """Two processes share what was in memory before one of them was forked, until one of them writes to it."""
    content = np.ones(200 * 2**20, dtype=np.uint8)
    fork = multiprocessing.get_context("fork")
    ready, done = fork.Event(), fork.Event()

    def hold(write: bool) -> None:
        content[:: 4096 if write else len(content)] = 2
        ready.set()
        done.wait()

    pss = {}
    for write in (False, True):
        process = fork.Process(target=hold, args=(write,))
        process.start()
        assert ready.wait(60)
        pss[write] = monitor_module.ProcessTree().read()["pss_bytes"]
        done.set()
        process.join()
        ready.clear()
        done.clear()
    assert pss[True] - pss[False] == pytest.approx(len(content), rel=0.1)


def test_proportional_memory_is_left_out_where_it_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitor_module.psutil.Process, "memory_full_info", lambda _: SimpleNamespace(uss=1))
    with Monitor(CPU) as monitor:
        pass
    summary = monitor.summary()
    assert set(summary["quantities"]) == CPU_QUANTITIES - {"pss_bytes"}
    assert summary["left_out"] == {"pss_bytes": "this system does not show it"}


def test_reading_the_proportional_memory_takes_a_small_share_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(process: object) -> SimpleNamespace:
        time.sleep(0.05)
        return SimpleNamespace(pss=1e6)

    monkeypatch.setattr(monitor_module.psutil.Process, "memory_full_info", slow)
    tree = monitor_module.ProcessTree()
    assert tree.read()["pss_bytes"] >= 1e6
    assert "pss_bytes" not in tree.read()
    tree._pss_due = time.perf_counter()
    assert "pss_bytes" in tree.read()


def test_a_run_shorter_than_the_interval_gets_one_sample() -> None:
    with Monitor(CPU, interval=1000) as monitor:
        pass
    assert monitor.summary()["samples"] == 1
    assert not monitor._thread.is_alive()
    assert "monitor" not in {thread.name for thread in threading.enumerate()}


def test_mean_and_max(monkeypatch: pytest.MonkeyPatch) -> None:
    values = iter([10.0, 60.0, 20.0])
    monkeypatch.setattr(monitor_module.ProcessTree, "read", lambda tree: {"cpu_percent": next(values)})
    with Monitor(CPU, interval=0.1) as monitor:
        wait_for_samples(monitor, 2)
        monitor._stop.set()
    assert monitor.summary()["quantities"]["cpu_percent"] == {"mean": 30.0, "max": 60.0}
    assert monitor.table().splitlines()[1].split() == ["cpu_percent", "30.0", "60.0"]


def test_memory_is_shown_with_enough_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitor_module.ProcessTree, "read", lambda tree: {"pss_bytes": 1.234e9})
    with Monitor(CPU, interval=1000) as monitor:
        pass
    assert monitor.table().splitlines()[1].split() == ["pss_GB", "1.23", "1.23"]


def test_a_child_that_ends_meanwhile_makes_no_impossible_share(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([5.0, 3.0, 1e9])
    monkeypatch.setattr(monitor_module.ProcessTree, "_read_processes", lambda tree: (next(seconds), 1))
    monkeypatch.setattr(monitor_module, "available_cpus", lambda: 2)
    monkeypatch.setattr(monitor_module.psutil, "cpu_count", lambda: 8)
    tree = monitor_module.ProcessTree()
    assert tree.read()["cpu_percent"] == 0
    assert tree.read()["cpu_percent"] == pytest.approx(400)


def test_a_hopper_gpu_reports_everything(nvml: FakeNvml) -> None:
    with Monitor(CUDA) as monitor:
        pass
    assert {name: value for name, value in means(monitor).items() if name not in CPU_QUANTITIES} == HOPPER
    assert monitor.summary()["left_out"] == {}
    assert (nvml.running, nvml.samples) == (0, 0)  # all are released


def test_every_gpu_that_the_process_uses_is_monitored(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = [("one", 0), ("two", 2**20), ("three", 0), ("four", 2**20)]
    nvml.uuids = [f"GPU-{uuid}" for uuid, _ in gpus]
    fake_gpus(monkeypatch, gpus)
    with Monitor(CUDA) as monitor:
        pass
    another = {f"gpu3_{name.removeprefix('gpu_')}": value for name, value in HOPPER.items()}
    assert {name: value for name, value in means(monitor).items() if name not in CPU_QUANTITIES} == HOPPER | another
    assert (nvml.running, nvml.samples) == (0, 0)


def test_an_older_gpu_lacks_the_gpm_counters(nvml: FakeNvml) -> None:
    nvml.hopper = False
    with Monitor(CUDA) as monitor:
        pass
    assert {name: value for name, value in means(monitor).items() if name not in CPU_QUANTITIES} == OLD_GPU
    left_out = monitor.summary()["left_out"]
    assert set(left_out) == set(HOPPER) - set(OLD_GPU)
    assert all("Hopper" in reason for reason in left_out.values())


def test_what_is_not_supported_is_omitted_with_the_reason(nvml: FakeNvml, capsys: pytest.CaptureFixture) -> None:
    nvml.unsupported = {"nvmlDeviceGetPowerUsage", pynvml.NVML_GPM_METRIC_SM_OCCUPANCY}
    with Monitor(CUDA, interval=0.1) as monitor:
        wait_for_samples(monitor, 2)
    missing = {"gpu_power_watts", "gpu_sm_occupancy_percent"}
    assert set(means(monitor)) == (CPU_QUANTITIES | set(HOPPER)) - missing
    assert monitor.summary()["left_out"] == dict.fromkeys(missing, "Not Supported")
    assert capsys.readouterr().err == ""


def test_a_driver_too_old_for_gpm(nvml: FakeNvml) -> None:
    nvml.unsupported = {"nvmlGpmQueryDeviceSupport"}
    gpu = Gpu(UUID)
    assert gpu.read() == OLD_GPU
    assert gpu.left_out["gpu_sm_activity_percent"] == "Not Supported"


def test_a_part_of_a_gpu_is_found_too(nvml: FakeNvml) -> None:
    nvml.uuids = [f"MIG-{UUID}"]
    assert Gpu(UUID).read() == HOPPER


def test_without_nvml_the_cpus_are_monitored(nvml: FakeNvml, capsys: pytest.CaptureFixture) -> None:
    nvml.uuids = ["GPU-another"]
    with Monitor(CUDA) as monitor:
        pass
    assert set(means(monitor)) == CPU_QUANTITIES
    assert monitor.summary()["left_out"] == {"gpu": "Not Found"}
    assert capsys.readouterr().err == ""


def test_a_failure_ends_the_monitoring_and_not_the_run(nvml: FakeNvml, capsys: pytest.CaptureFixture) -> None:
    with Monitor(CUDA, interval=0.1) as monitor:
        wait_for_samples(monitor, 1)
        nvml.lost = True
        monitor._thread.join()
    (warning,) = capsys.readouterr().err.splitlines()
    assert warning == "warning: monitoring has ended, training goes on: NVMLError_GpuIsLost: GPU is lost"
    assert monitor.summary()["failure"] == "NVMLError_GpuIsLost: GPU is lost"
    assert set(means(monitor)) == CPU_QUANTITIES | set(HOPPER)


def test_a_hanging_library_does_not_hold_up_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(monitor_module, "TIMEOUT", 0.01)
    answered = threading.Event()
    with Monitor(CPU, lambda name, value, seconds: answered.wait()) as monitor:
        pass
    assert "no answer" in monitor.summary()["failure"]
    assert len(capsys.readouterr().err.splitlines()) == 1
    answered.set()
    monitor._thread.join()


def test_a_failure_at_the_start_does_not_stop_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def refuse() -> None:
        raise PermissionError("/proc is closed")

    monkeypatch.setattr(monitor_module, "ProcessTree", refuse)
    with Monitor(CPU) as monitor:
        pass
    assert monitor.summary()["failure"] == "PermissionError: /proc is closed"
    assert monitor.summary()["samples"] == 0
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_an_error_of_the_run_passes() -> None:
    with pytest.raises(ValueError, match="diverged"), Monitor(CPU) as monitor:
        raise ValueError("diverged")
    assert monitor.summary()["samples"] == 1


def test_samples_reach_tensorboard(tmp_path: Path) -> None:
    with SummaryWriter(tmp_path) as board:

        def log(name: str, value: float, seconds: float) -> None:
            board.add_scalar(f"monitor/{name}", value, round(seconds))

        with Monitor(CPU, log):
            pass
    (point,) = EventAccumulator(str(tmp_path)).Reload().Scalars("monitor/rss_bytes")
    assert point.value > 1e7
