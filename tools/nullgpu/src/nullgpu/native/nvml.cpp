// libnvidia-ml, which nvidia-smi and monitors ask: memory is what this process uses, and everything else is idle.
//
// NVML knows all GPUs of the machine, also those that CUDA_VISIBLE_DEVICES hides from CUDA.
//
// Declared here, because NVIDIA's packages for Python come without nvml.h. Source of names and layouts:
// https://docs.nvidia.com/deploy/nvml-api
#include "gpu.h"

#include <sched.h>
#include <stdio.h>
#include <string.h>

using namespace nullgpu;

enum { SUCCESS = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6 };

static int gpu_of(void* handle) { return (int)(reinterpret_cast<uintptr_t>(handle) - 1); }
static int give(void** handle, int gpu) {
  if (gpu < 0 || gpu >= settings().gpus) return INVALID_ARGUMENT;
  *handle = reinterpret_cast<void*>((uintptr_t)gpu + 1);
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
  return code == SUCCESS            ? "Success"
         : code == INVALID_ARGUMENT ? "Invalid Argument"
         : code == NOT_SUPPORTED    ? "Not Supported"
         : code == NOT_FOUND        ? "Not Found"
                                    : "Unknown Error";
}
EXPORT int nvmlSystemGetDriverVersion(char* to, unsigned size) { return text(to, size, "null GPU"); }
EXPORT int nvmlSystemGetCudaDriverVersion_v2(int* version) {
  *version = CUDART_VERSION;
  return SUCCESS;
}

EXPORT int nvmlSystemGetCudaDriverVersion(int* version) { return nvmlSystemGetCudaDriverVersion_v2(version); }
EXPORT int nvmlSystemGetNVMLVersion(char* to, unsigned size) { return text(to, size, "null GPU"); }
EXPORT int nvmlSystemGetProcessName(unsigned process, char* to, unsigned size) {
  char path[32], name[64] = "";
  snprintf(path, sizeof path, "/proc/%u/comm", process);
  FILE* file = fopen(path, "r");
  if (!file) return NOT_FOUND;
  if (fgets(name, sizeof name, file)) name[strcspn(name, "\n")] = 0;
  fclose(file);
  return text(to, size, name);
}

// An answer that is one number.
template <class Number, class Value>
static int answer(Number* to, Value value) {
  *to = (Number)value;
  return SUCCESS;
}

// ---- GPUs

EXPORT int nvmlDeviceGetCount_v2(unsigned* number) { return answer(number, settings().gpus); }
EXPORT int nvmlDeviceGetCount(unsigned* number) { return nvmlDeviceGetCount_v2(number); }
EXPORT int nvmlDeviceGetHandleByIndex_v2(unsigned index, void** handle) { return give(handle, (int)index); }
EXPORT int nvmlDeviceGetHandleByIndex(unsigned index, void** handle) { return give(handle, (int)index); }
EXPORT int nvmlDeviceGetHandleByPciBusId_v2(const char* id, void** handle) {
  for (int gpu = 0; gpu < settings().gpus; ++gpu)  // the domain may have more digits
    if (strstr(id, pci_id(gpu).c_str())) return give(handle, gpu);
  return NOT_FOUND;
}
EXPORT int nvmlDeviceGetHandleByPciBusId(const char* id, void** handle) {
  return nvmlDeviceGetHandleByPciBusId_v2(id, handle);
}
EXPORT int nvmlDeviceGetHandleByUUID(const char* uuid, void** handle) {
  for (int gpu = 0; gpu < settings().gpus; ++gpu)
    if (uuid_text(gpu) == uuid) return give(handle, gpu);
  return NOT_FOUND;
}
EXPORT int nvmlDeviceGetUUID(void* handle, char* to, unsigned size) {
  return text(to, size, uuid_text(gpu_of(handle)).c_str());
}
EXPORT int nvmlDeviceGetIndex(void* handle, unsigned* index) { return answer(index, gpu_of(handle)); }
EXPORT int nvmlDeviceGetMinorNumber(void* handle, unsigned* number) { return answer(number, gpu_of(handle)); }
EXPORT int nvmlDeviceGetName(void*, char* to, unsigned size) {
  char name[32];
  snprintf(name, sizeof name, "null GPU (sm_%d)", settings().sm);
  return text(to, size, name);
}
EXPORT int nvmlDeviceGetCudaComputeCapability(void*, int* major, int* minor) {
  *major = settings().sm / 10, *minor = settings().sm % 10;
  return SUCCESS;
}
EXPORT int nvmlDeviceGetArchitecture(void*, unsigned* architecture) {  // Turing is 6, and each younger one 1 more
  int sm = settings().sm;
  return answer(architecture, sm >= 100 ? 10 : sm >= 90 ? 9 : sm == 89 ? 8 : sm >= 80 ? 7 : 6);
}
struct PciInfo {
  char short_id[16];
  unsigned domain, bus, device, ids, subsystem_ids;
  char id[32];
};
EXPORT int nvmlDeviceGetPciInfo_v3(void* handle, PciInfo* info) {
  *info = {};
  info->bus = (unsigned)gpu_of(handle) + 1;
  snprintf(info->short_id, sizeof info->short_id, "%s", pci_id(gpu_of(handle)).c_str());
  snprintf(info->id, sizeof info->id, "0000%s", pci_id(gpu_of(handle)).c_str());
  return SUCCESS;
}
EXPORT int nvmlDeviceGetMemoryBusWidth(void*, unsigned* bits) { return answer(bits, settings().memory_bus_width); }

// ---- where they are: on one board, near all CPUs that this process may use

EXPORT int nvmlDeviceGetCpuAffinity(void*, unsigned words, unsigned long* set) {
  constexpr unsigned BITS = 8 * sizeof *set;
  cpu_set_t own;
  CPU_ZERO(&own);
  sched_getaffinity(0, sizeof own, &own);
  memset(set, 0, words * sizeof *set);
  for (unsigned cpu = 0; cpu < words * BITS && cpu < CPU_SETSIZE; ++cpu)
    if (CPU_ISSET(cpu, &own)) set[cpu / BITS] |= 1ul << cpu % BITS;
  return SUCCESS;
}
EXPORT int nvmlDeviceGetCpuAffinityWithinScope(void* handle, unsigned words, unsigned long* set, unsigned) {
  return nvmlDeviceGetCpuAffinity(handle, words, set);
}
EXPORT int nvmlDeviceSetCpuAffinity(void*) { return SUCCESS; }
EXPORT int nvmlDeviceClearCpuAffinity(void*) { return SUCCESS; }
EXPORT int nvmlDeviceGetMemoryAffinity(void*, unsigned words, unsigned long* set, unsigned) {
  memset(set, 0, words * sizeof *set);
  if (words) set[0] = 1;  // the memory of node 0
  return SUCCESS;
}
EXPORT int nvmlDeviceGetNumaNodeId(void*, unsigned* node) { return answer(node, 0); }
EXPORT int nvmlDeviceGetTopologyCommonAncestor(void* one, void* other, unsigned* level) {
  enum { THE_SAME_BOARD = 0, A_NODE = 40 };
  return answer(level, one == other ? THE_SAME_BOARD : A_NODE);
}
EXPORT int nvmlDeviceGetP2PStatus(void*, void*, int, int* status) { return answer(status, 0); }
EXPORT int nvmlDeviceGetGpuFabricInfoV(void*, void*) { return SUCCESS; }  // the state stays 0: no such network

// ---- what they do: nothing

struct Utilization {
  unsigned gpu, memory;
};
struct Memory {
  unsigned long long total, free, used;
};
struct Memory_v2 {
  unsigned version;
  unsigned long long total, reserved, free, used;
};
EXPORT int nvmlDeviceGetUtilizationRates(void*, Utilization* rates) {
  *rates = {0, 0};
  return SUCCESS;
}
EXPORT int nvmlDeviceGetMemoryInfo(void* handle, Memory* memory) {
  size_t taken = used_of(gpu_of(handle));
  *memory = {settings().memory, settings().memory - taken, taken};
  return SUCCESS;
}
EXPORT int nvmlDeviceGetMemoryInfo_v2(void* handle, Memory_v2* memory) {
  size_t taken = used_of(gpu_of(handle));
  *memory = {memory->version, settings().memory, 0, settings().memory - taken, taken};
  return SUCCESS;
}
EXPORT int nvmlDeviceGetBAR1MemoryInfo(void* handle, Memory* memory) {
  return nvmlDeviceGetMemoryInfo(handle, memory);  // all of it can be addressed
}
EXPORT int nvmlDeviceGetPowerUsage(void*, unsigned* milliwatts) { return answer(milliwatts, 0); }
EXPORT int nvmlDeviceGetTotalEnergyConsumption(void*, unsigned long long* millijoules) {
  return answer(millijoules, 0);
}
EXPORT int nvmlDeviceGetTemperature(void*, int, unsigned* celsius) { return answer(celsius, 0); }
EXPORT int nvmlDeviceGetClockInfo(void*, int, unsigned* megahertz) { return answer(megahertz, 0); }
EXPORT int nvmlDeviceGetMaxClockInfo(void*, int of, unsigned* megahertz) {
  enum { OF_MEMORY = 2 };  // whose data moves twice in a cycle
  const Settings& it = settings();
  return answer(megahertz, of == OF_MEMORY ? it.bandwidth * 8 / 2 / it.memory_bus_width / 1e6 : it.clock_rate);
}
EXPORT int nvmlDeviceGetBrand(void*, int* brand) { return answer(brand, 0); }
EXPORT int nvmlDeviceGetPerformanceState(void*, int* state) { return answer(state, 0); }
EXPORT int nvmlDeviceGetPersistenceMode(void*, int* mode) { return answer(mode, 1); }
EXPORT int nvmlDeviceGetComputeMode(void*, int* mode) { return answer(mode, 0); }
EXPORT int nvmlDeviceGetDisplayMode(void*, int* mode) { return answer(mode, 0); }
EXPORT int nvmlDeviceGetDisplayActive(void*, int* mode) { return answer(mode, 0); }
EXPORT int nvmlDeviceGetEncoderUtilization(void*, unsigned* percent, unsigned* microseconds) {
  return answer(microseconds, 1'000'000), answer(percent, 0);
}
EXPORT int nvmlDeviceGetDecoderUtilization(void*, unsigned* percent, unsigned* microseconds) {
  return answer(microseconds, 1'000'000), answer(percent, 0);
}
EXPORT int nvmlDeviceGetPcieThroughput(void*, int, unsigned* kilobytes) { return answer(kilobytes, 0); }
EXPORT int nvmlDeviceGetCurrentClocksEventReasons(void*, unsigned long long* reasons) {
  enum { IDLE = 1 };
  return answer(reasons, IDLE);
}
EXPORT int nvmlDeviceGetCurrentClocksThrottleReasons(void* handle, unsigned long long* reasons) {
  return nvmlDeviceGetCurrentClocksEventReasons(handle, reasons);
}
EXPORT int nvmlUnitGetCount(unsigned* number) { return answer(number, 0); }
EXPORT int nvmlDeviceIsMigDeviceHandle(void*, unsigned* is) { return answer(is, 0); }
EXPORT int nvmlDeviceGetMaxMigDeviceCount(void*, unsigned* number) { return answer(number, 0); }

// ---- lists of processes, which are empty

#define NO_PROCESSES(name) \
  EXPORT int name(void*, unsigned* number, void*) { return answer(number, 0); }
NO_PROCESSES(nvmlDeviceGetComputeRunningProcesses)
NO_PROCESSES(nvmlDeviceGetComputeRunningProcesses_v2)
NO_PROCESSES(nvmlDeviceGetComputeRunningProcesses_v3)
NO_PROCESSES(nvmlDeviceGetGraphicsRunningProcesses)
NO_PROCESSES(nvmlDeviceGetGraphicsRunningProcesses_v2)
NO_PROCESSES(nvmlDeviceGetGraphicsRunningProcesses_v3)
NO_PROCESSES(nvmlDeviceGetMPSComputeRunningProcesses)
NO_PROCESSES(nvmlDeviceGetMPSComputeRunningProcesses_v2)
NO_PROCESSES(nvmlDeviceGetMPSComputeRunningProcesses_v3)
#undef NO_PROCESSES

// ---- what this GPU does not have, as many GPUs do not have it: a monitor shows nothing for it

#define NOT_HERE(name) \
  EXPORT int name(...) { return NOT_SUPPORTED; }
NOT_HERE(nvmlDeviceGetAccountingMode)
NOT_HERE(nvmlDeviceGetApplicationsClock)
NOT_HERE(nvmlDeviceGetAttributes_v2)
NOT_HERE(nvmlDeviceGetAutoBoostedClocksEnabled)
NOT_HERE(nvmlDeviceGetBoardId)
NOT_HERE(nvmlDeviceGetBoardPartNumber)
NOT_HERE(nvmlDeviceGetBridgeChipInfo)
NOT_HERE(nvmlDeviceGetClock)
NOT_HERE(nvmlDeviceGetCurrPcieLinkGeneration)
NOT_HERE(nvmlDeviceGetCurrPcieLinkWidth)
NOT_HERE(nvmlDeviceGetDefaultApplicationsClock)
NOT_HERE(nvmlDeviceGetDetailedEccErrors)
NOT_HERE(nvmlDeviceGetDriverModel)
NOT_HERE(nvmlDeviceGetEccMode)
NOT_HERE(nvmlDeviceGetEncoderStats)
NOT_HERE(nvmlDeviceGetEnforcedPowerLimit)
NOT_HERE(nvmlDeviceGetFanSpeed)
NOT_HERE(nvmlDeviceGetFanSpeed_v2)
NOT_HERE(nvmlDeviceGetFieldValues)
NOT_HERE(nvmlDeviceGetGpuOperationMode)
NOT_HERE(nvmlDeviceGetGspFirmwareVersion)
NOT_HERE(nvmlDeviceGetInforomImageVersion)
NOT_HERE(nvmlDeviceGetInforomVersion)
NOT_HERE(nvmlDeviceGetMaxCustomerBoostClock)
NOT_HERE(nvmlDeviceGetMaxPcieLinkGeneration)
NOT_HERE(nvmlDeviceGetMaxPcieLinkWidth)
NOT_HERE(nvmlDeviceGetMemoryErrorCounter)
NOT_HERE(nvmlDeviceGetMigDeviceHandleByIndex)
NOT_HERE(nvmlDeviceGetMigMode)
NOT_HERE(nvmlDeviceGetMultiGpuBoard)
NOT_HERE(nvmlDeviceGetNumFans)
NOT_HERE(nvmlDeviceGetNumGpuCores)
NOT_HERE(nvmlDeviceGetNvLinkCapability)
NOT_HERE(nvmlDeviceGetNvLinkErrorCounter)
NOT_HERE(nvmlDeviceGetNvLinkRemoteDeviceType)
NOT_HERE(nvmlDeviceGetNvLinkRemotePciInfo_v2)
NOT_HERE(nvmlDeviceGetNvLinkState)
NOT_HERE(nvmlDeviceGetNvLinkVersion)
NOT_HERE(nvmlDeviceGetPowerManagementDefaultLimit)
NOT_HERE(nvmlDeviceGetPowerManagementLimit)
NOT_HERE(nvmlDeviceGetPowerManagementLimitConstraints)
NOT_HERE(nvmlDeviceGetPowerManagementMode)
NOT_HERE(nvmlDeviceGetPowerSource)
NOT_HERE(nvmlDeviceGetProcessUtilization)
NOT_HERE(nvmlDeviceGetRemappedRows)
NOT_HERE(nvmlDeviceGetRetiredPages)
NOT_HERE(nvmlDeviceGetSamples)
NOT_HERE(nvmlDeviceGetSerial)
NOT_HERE(nvmlDeviceGetSupportedClocksEventReasons)
NOT_HERE(nvmlDeviceGetSupportedClocksThrottleReasons)
NOT_HERE(nvmlDeviceGetSupportedEventTypes)
NOT_HERE(nvmlDeviceGetSupportedGraphicsClocks)
NOT_HERE(nvmlDeviceGetSupportedMemoryClocks)
NOT_HERE(nvmlDeviceGetTargetFanSpeed)
NOT_HERE(nvmlDeviceGetTemperatureThreshold)
NOT_HERE(nvmlDeviceGetTotalEccErrors)
NOT_HERE(nvmlDeviceGetVbiosVersion)
NOT_HERE(nvmlDeviceGetViolationStatus)
#undef NOT_HERE

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
