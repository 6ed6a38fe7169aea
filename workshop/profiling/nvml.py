"""The counters that an NVIDIA GPU reports through NVML, the library behind ``nvidia-smi``.

Source of names, units and meanings: https://docs.nvidia.com/deploy/nvml-api. All figures are for the whole
GPU, including other processes.
"""

import math

GPM = {
    "gpu_sm_activity_percent": "NVML_GPM_METRIC_SM_UTIL",
    "gpu_sm_occupancy_percent": "NVML_GPM_METRIC_SM_OCCUPANCY",
    "gpu_tensor_activity_percent": "NVML_GPM_METRIC_ANY_TENSOR_UTIL",
    "gpu_memory_bandwidth_percent": "NVML_GPM_METRIC_DRAM_BW_UTIL",
}


class Gpu:
    """The counters of one GPU: `read` gives those that it has, ``left_out`` says why it lacks the others.

    - ``gpu_utilization_percent``: share of the time in which a kernel ran, even if it ran on only one of the GPU's
      many multiprocessors (SMs); over a period of the driver's choice, at most a second
    - ``gpu_memory_bytes``, ``gpu_power_watts``, ``gpu_temperature_celsius``
    - ``gpu_sm_activity_percent``: share of the SMs that were busy
    - ``gpu_sm_occupancy_percent``: warps in flight, as a share of the largest possible number
    - ``gpu_tensor_activity_percent``: share of the time in which the SMs computed on tensor cores
    - ``gpu_memory_bandwidth_percent``: traffic of the GPU's memory, as a share of the highest possible

    The last four come from GPM, the performance counters of Hopper GPUs and newer ones, and are means over the time
    since the `read` before, which must be 0.1 s or more.

    Args:
        uuid: as torch gives it. A number would not do: ``CUDA_VISIBLE_DEVICES`` renumbers GPUs for CUDA, not for NVML.

    Raises the errors of NVML, if it is missing or does not know the GPU.
    """

    def __init__(self, uuid: str) -> None:
        import pynvml as nvml  # here, as most machines without a GPU never need it

        nvml.nvmlInit()
        try:
            handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        except nvml.NVMLError_NotFound:  # a part of a GPU that MIG has split
            handle = nvml.nvmlDeviceGetHandleByUUID(f"MIG-{uuid}")
        self._nvml, self._handle = nvml, handle
        self._readers = {
            "gpu_utilization_percent": lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu,
            "gpu_memory_bytes": lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used,
            "gpu_power_watts": lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000,  # reported in mW
            "gpu_temperature_celsius": lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
        }
        self.left_out: dict[str, str] = {}
        self._gpm_sample = None
        try:
            if nvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice:
                self._gpm_sample, self._spare = nvml.nvmlGpmSampleAlloc(), nvml.nvmlGpmSampleAlloc()
                nvml.nvmlGpmSampleGet(handle, self._gpm_sample)
            else:
                self.left_out |= dict.fromkeys(GPM, "this GPU has no GPM counters (Hopper and newer ones have)")
        except (AttributeError, nvml.NVMLError) as error:  # the driver, or its library for Python, is too old
            self.left_out |= dict.fromkeys(GPM, str(error))

    def read(self) -> dict[str, float]:
        """Return the present value of every quantity that this GPU has; raise if it does not answer any more."""
        values = {}
        for name, read in self._readers.items():
            try:
                values[name] = float(read())
            except self._nvml.NVMLError_NotSupported as error:
                self.left_out[name] = str(error)
        return values | ({} if self._gpm_sample is None else self._read_gpm())

    def _read_gpm(self) -> dict[str, float]:
        """Take a new sample of all counters, and compare it with the sample before."""
        nvml = self._nvml
        nvml.nvmlGpmSampleGet(self._handle, self._spare)
        request = nvml.c_nvmlGpmMetricsGet_t()
        request.version = nvml.NVML_GPM_METRICS_GET_VERSION
        request.numMetrics = len(GPM)
        request.sample1, request.sample2 = self._gpm_sample, self._spare
        for slot, metric in enumerate(GPM.values()):
            request.metrics[slot].metricId = getattr(nvml, metric)
        nvml.nvmlGpmMetricsGet(request)
        self._gpm_sample, self._spare = self._spare, self._gpm_sample
        values = {}
        for answer, name in zip(request.metrics, GPM, strict=False):  # there is room for more of them
            if answer.nvmlReturn != nvml.NVML_SUCCESS:
                self.left_out[name] = str(nvml.NVMLError(answer.nvmlReturn))
            elif math.isfinite(answer.value):
                values[name] = answer.value
        return values
