"""The counters that an NVIDIA GPU reports through NVML, the library behind ``nvidia-smi``.

Source of names, units and meanings: https://docs.nvidia.com/deploy/nvml-api. All figures are those of the whole GPU,
whoever uses it.
"""

import math
from collections.abc import Callable
from types import ModuleType
from typing import Any

MIB = 2**20


class Gpu:
    """The counters of one GPU: `read` gives those it has, ``left_out`` says why it lacks the others.

    - ``gpu_utilization_percent``: share of the time in which a kernel ran, even if it ran on only one of the GPU's
      many multiprocessors (SMs); over a period of the driver's choice, at most a second
    - ``gpu_memory_bytes``, ``gpu_power_watts``, ``gpu_temperature_celsius``
    - ``gpu_sm_activity_percent``: share of the SMs that were busy
    - ``gpu_sm_occupancy_percent``: warps in flight, as a share of the largest possible number
    - ``gpu_tensor_activity_percent``: share of the time in which the SMs computed on tensor cores
    - ``gpu_memory_bandwidth_percent``: traffic of the GPU's memory, as a share of the highest possible
    - ``pcie_rx_bytes_per_second``, ``pcie_tx_bytes_per_second``: traffic to and from the GPU

    The last six come from GPM, the performance counters of Hopper GPUs and newer ones, and are means over the time
    since the `read` before, which must be 0.1 s or more. Older GPUs report the PCIe traffic of 20 ms instead.

    Args:
        uuid: as torch gives it. A number would not do: ``CUDA_VISIBLE_DEVICES`` renumbers GPUs for CUDA, not for NVML.

    Raises whatever NVML raises, where it is missing or does not know the GPU.
    """

    def __init__(self, uuid: str) -> None:
        import pynvml  # here, as most machines without a GPU never need it

        self._nvml = pynvml
        self.left_out: dict[str, str] = {}
        pynvml.nvmlInit()
        handle = _find(pynvml, uuid)
        self._gpm = self._open_gpm(handle)
        self._readers = self._working(_readers(pynvml, handle, with_pcie=self._gpm is None))

    def read(self) -> dict[str, float]:
        """Return the present value of every quantity this GPU has; raise if a counter does not work any more."""
        values = {name: float(read()) for name, read in self._readers.items()}
        if self._gpm:
            readings = self._gpm.read()
            values |= {name: value for name, value in readings.items() if not isinstance(value, str)}
            self.left_out |= {name: reason for name, reason in readings.items() if isinstance(reason, str)}
        return values

    def close(self) -> None:
        """Close NVML."""
        if self._gpm:
            self._gpm.close()
        self._nvml.nvmlShutdown()

    def _open_gpm(self, handle: object) -> "_Gpm | None":
        try:
            if self._nvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice:
                return _Gpm(self._nvml, handle)
            reason = "this GPU has no GPM counters (Hopper and newer ones have)"
        except Exception as error:
            reason = str(error)
        self.left_out |= {name: reason for name in _Gpm.quantities(self._nvml) if not name.startswith("pcie")}
        return None

    def _working(self, readers: dict[str, Callable[[], float]]) -> dict[str, Callable[[], float]]:
        working = {}
        for name, read in readers.items():
            try:
                read()
                working[name] = read
            except Exception as error:
                self.left_out[name] = str(error)
        return working


class _Gpm:
    """GPM counters: each reading compares a new sample of them all with the sample before."""

    def __init__(self, nvml: ModuleType, handle: object) -> None:
        self.nvml = nvml
        self.handle = handle
        self.before, self.now = nvml.nvmlGpmSampleAlloc(), nvml.nvmlGpmSampleAlloc()
        nvml.nvmlGpmSampleGet(handle, self.before)

    @staticmethod
    def quantities(nvml: ModuleType) -> dict[str, tuple[int, float]]:
        """Return by name the number of the metric and what its unit is worth in ours."""
        return {
            "gpu_sm_activity_percent": (nvml.NVML_GPM_METRIC_SM_UTIL, 1),
            "gpu_sm_occupancy_percent": (nvml.NVML_GPM_METRIC_SM_OCCUPANCY, 1),
            "gpu_tensor_activity_percent": (nvml.NVML_GPM_METRIC_ANY_TENSOR_UTIL, 1),
            "gpu_memory_bandwidth_percent": (nvml.NVML_GPM_METRIC_DRAM_BW_UTIL, 1),
            "pcie_rx_bytes_per_second": (nvml.NVML_GPM_METRIC_PCIE_RX_PER_SEC, MIB),
            "pcie_tx_bytes_per_second": (nvml.NVML_GPM_METRIC_PCIE_TX_PER_SEC, MIB),
        }

    def read(self) -> dict[str, float | str]:
        """Return the value of each quantity, or why there is none."""
        quantities = self.quantities(self.nvml)
        self.nvml.nvmlGpmSampleGet(self.handle, self.now)
        request = self.nvml.c_nvmlGpmMetricsGet_t()
        request.version = self.nvml.NVML_GPM_METRICS_GET_VERSION
        request.numMetrics = len(quantities)
        request.sample1, request.sample2 = self.before, self.now
        for slot, (metric, _) in enumerate(quantities.values()):
            request.metrics[slot].metricId = metric
        self.nvml.nvmlGpmMetricsGet(request)
        self.before, self.now = self.now, self.before
        return {
            name: self._value(request.metrics[slot], unit) for slot, (name, (_, unit)) in enumerate(quantities.items())
        }

    def _value(self, metric: Any, unit: float) -> float | str:  # noqa: ANN401, a ctypes structure of pynvml
        if metric.nvmlReturn != self.nvml.NVML_SUCCESS:
            return str(self.nvml.NVMLError(metric.nvmlReturn))
        return metric.value * unit if math.isfinite(metric.value) else "not a number"

    def close(self) -> None:
        self.nvml.nvmlGpmSampleFree(self.before)
        self.nvml.nvmlGpmSampleFree(self.now)


def _find(nvml: ModuleType, uuid: str) -> object:
    """Return NVML's handle of a GPU, or of a part of one that MIG has split."""
    try:
        return nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
    except nvml.NVMLError_NotFound:
        return nvml.nvmlDeviceGetHandleByUUID(f"MIG-{uuid}")


def _readers(nvml: ModuleType, handle: object, with_pcie: bool) -> dict[str, Callable[[], float]]:
    readers = {
        "gpu_utilization_percent": lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu,
        "gpu_memory_bytes": lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used,
        "gpu_power_watts": lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000,  # reported in mW
        "gpu_temperature_celsius": lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
    }
    if with_pcie:  # reported in kB/s; each call takes the 20 ms it measures
        rx, tx = nvml.NVML_PCIE_UTIL_RX_BYTES, nvml.NVML_PCIE_UTIL_TX_BYTES
        readers["pcie_rx_bytes_per_second"] = lambda: 1000 * nvml.nvmlDeviceGetPcieThroughput(handle, rx)
        readers["pcie_tx_bytes_per_second"] = lambda: 1000 * nvml.nvmlDeviceGetPcieThroughput(handle, tx)
    return readers
