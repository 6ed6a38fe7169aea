// libnvidia-ml, which nvidia-smi and monitors ask: memory is what this process uses, and everything else is idle.
//
// Declared here, because NVIDIA's packages for Python come without nvml.h. Source of names and layouts:
// https://docs.nvidia.com/deploy/nvml-api
#include "gpu.h"

#include <stdio.h>
#include <string.h>

using namespace nullgpu;

enum { SUCCESS = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6 };

static int device_of(void* handle) { return (int)(reinterpret_cast<uintptr_t>(handle) - 1); }
static int give(void** handle, int device) {
  if (device < 0 || device >= settings().visible) return NOT_FOUND;
  *handle = reinterpret_cast<void*>((uintptr_t)device + 1);
  return SUCCESS;
}
static int text(char* to, unsigned size, const char* from) {
  snprintf(to, size, "%s", from);
  return SUCCESS;
}

EXPORT int nvmlInit_v2() { return SUCCESS; }
EXPORT int nvmlInit() { return SUCCESS; }
EXPORT int nvmlInitWithFlags(unsigned) { return SUCCESS; }
EXPORT int nvmlShutdown() { return SUCCESS; }
EXPORT const char* nvmlErrorString(int code) {
  return code == SUCCESS         ? "Success"
         : code == NOT_SUPPORTED ? "Not Supported"
         : code == NOT_FOUND     ? "Not Found"
                                 : "Unknown Error";
}
EXPORT int nvmlSystemGetDriverVersion(char* to, unsigned size) { return text(to, size, "null GPU"); }
EXPORT int nvmlSystemGetCudaDriverVersion_v2(int* version) {
  *version = CUDART_VERSION;
  return SUCCESS;
}

// ---- GPUs

EXPORT int nvmlDeviceGetCount_v2(unsigned* number) {
  *number = (unsigned)settings().visible;
  return SUCCESS;
}
EXPORT int nvmlDeviceGetCount(unsigned* number) { return nvmlDeviceGetCount_v2(number); }
EXPORT int nvmlDeviceGetHandleByIndex_v2(unsigned index, void** handle) { return give(handle, (int)index); }
EXPORT int nvmlDeviceGetHandleByPciBusId_v2(const char* id, void** handle) {
  char own[16];
  for (int device = 0; device < settings().visible; ++device) {
    snprintf(own, sizeof own, "0000:%02X:00.0", 1 + settings().number[device]);
    if (strstr(id, own)) return give(handle, device);
  }
  return NOT_FOUND;
}
static void uuid_of(int device, char* to, size_t size) {  // as cudaGetDeviceProperties gives it: 'N', zeros, the number
  snprintf(to, size, "GPU-4e000000-0000-0000-0000-0000000000%02x", settings().number[device]);
}
EXPORT int nvmlDeviceGetHandleByUUID(const char* uuid, void** handle) {
  char own[48];
  for (int device = 0; device < settings().visible; ++device) {
    uuid_of(device, own, sizeof own);
    if (!strcmp(uuid, own)) return give(handle, device);
  }
  return NOT_FOUND;
}
EXPORT int nvmlDeviceGetUUID(void* handle, char* to, unsigned size) {
  uuid_of(device_of(handle), to, size);
  return SUCCESS;
}
EXPORT int nvmlDeviceGetIndex(void* handle, unsigned* index) {
  *index = (unsigned)device_of(handle);
  return SUCCESS;
}
EXPORT int nvmlDeviceGetName(void*, char* to, unsigned size) {
  char name[32];
  snprintf(name, sizeof name, "null GPU (sm_%d)", settings().sm);
  return text(to, size, name);
}

// ---- what they do: nothing

struct Utilization {
  unsigned gpu, memory;
};
struct Memory {
  unsigned long long total, free, used;
};
EXPORT int nvmlDeviceGetUtilizationRates(void*, Utilization* rates) {
  *rates = {0, 0};
  return SUCCESS;
}
EXPORT int nvmlDeviceGetMemoryInfo(void* handle, Memory* memory) {
  size_t taken = used(device_of(handle));
  *memory = {settings().memory, settings().memory - taken, taken};
  return SUCCESS;
}
EXPORT int nvmlDeviceGetPowerUsage(void*, unsigned* milliwatts) {
  *milliwatts = 0;
  return SUCCESS;
}
EXPORT int nvmlDeviceGetTemperature(void*, int, unsigned* celsius) {
  *celsius = 0;
  return SUCCESS;
}
EXPORT int nvmlDeviceGetClockInfo(void*, int, unsigned* megahertz) {
  *megahertz = 0;
  return SUCCESS;
}
EXPORT int nvmlDeviceGetComputeRunningProcesses_v3(void*, unsigned* number, void*) {
  *number = 0;
  return SUCCESS;
}
EXPORT int nvmlDeviceGetComputeRunningProcesses(void*, unsigned* number, void*) {
  *number = 0;
  return SUCCESS;
}
EXPORT int nvmlDeviceGetNvLinkRemoteDeviceType(void*, unsigned, int*) { return NOT_SUPPORTED; }
EXPORT int nvmlDeviceGetNvLinkRemotePciInfo_v2(void*, unsigned, void*) { return NOT_SUPPORTED; }
EXPORT int nvmlDeviceGetGpuFabricInfoV(void*, void*) { return SUCCESS; }  // the state stays 0: no such network
EXPORT int nvmlDeviceGetP2PStatus(void*, void*, int, int* status) {
  *status = 0;
  return SUCCESS;
}

// ---- GPM, the counters of Hopper and newer GPUs

struct Metric {
  unsigned id;
  int status;
  double value;
  const char *short_name, *long_name, *unit;
};
struct Metrics {
  unsigned version, number;
  void *first, *second;
  Metric metrics[1];  // as many as number says
};
struct Support {
  unsigned version, supported;
};
EXPORT int nvmlGpmQueryDeviceSupport(void*, Support* support) {
  support->supported = settings().sm >= 90;
  return SUCCESS;
}
EXPORT int nvmlGpmSampleAlloc(void** sample) {
  *sample = new char[8];
  return SUCCESS;
}
EXPORT int nvmlGpmSampleFree(void*) { return SUCCESS; }
EXPORT int nvmlGpmSampleGet(void*, void*) { return SUCCESS; }
EXPORT int nvmlGpmMetricsGet(Metrics* wanted) {
  for (unsigned i = 0; i < wanted->number; ++i) wanted->metrics[i].status = SUCCESS, wanted->metrics[i].value = 0;
  return SUCCESS;
}
