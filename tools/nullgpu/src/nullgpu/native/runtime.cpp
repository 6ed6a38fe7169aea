// libcudart: devices, launches, memory and errors. Streams, events and graphs are in streams.cpp.
#include "clock.h"
#include "gpu.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <unordered_map>
#include <utility>

namespace nullgpu {

static thread_local cudaError_t last_error = cudaSuccess;

int& current_device() {
  static thread_local int device = 0;
  return device;
}

cudaError_t error(cudaError_t code, const char* function) {
  last_error = code;
  count(counters.errors);
  if (getenv("NULLGPU_VERBOSE")) fprintf(stderr, "nullgpu: %s returns %s\n", function, cudaGetErrorString(code));
  return code;
}

void launch(const char* kernel, cudaStream_t stream, uint64_t sizes, double size) {
  count(counters.launches);
  bool is_recorded = record(stream);
  if (has_clock()) {
    if (!is_recorded) pass_launch();
    put_launch(stream_of(stream), kernel, sizes, size);
  }
  if (is_recorded) return;
  profile_launch(kernel, number_of(stream_of(stream)));
}

}  // namespace nullgpu

using namespace nullgpu;

// ---- what the compiler of CUDA puts into each library: its kernels and variables, and a launch with <<<...>>>

static std::mutex lock;
static std::unordered_map<const void*, const char*> kernels;                 // their names, by their address on the CPU
static std::unordered_map<const void*, std::pair<void*, size_t>> variables;  // on the GPU, by their address on the CPU
static thread_local struct {
  dim3 grid, block;
  size_t shared;
  cudaStream_t stream;
} pushed;

EXPORT void** __cudaRegisterFatBinary(void*) { return static_cast<void**>(calloc(1, 64)); }
EXPORT void __cudaRegisterFatBinaryEnd(void**) {}
EXPORT void __cudaUnregisterFatBinary(void**) {}
EXPORT void __cudaRegisterFunction(void**, const char* function, char*, const char* name, int, void*, void*, void*,
                                   void*, int*) {
  std::lock_guard<std::mutex> guard(lock);
  kernels[function] = name;
}
EXPORT char __cudaInitModule(void**) { return 1; }
EXPORT void __cudaRegisterVar(void**, char* variable, char*, const char*, int, size_t size, int, int) {
  std::lock_guard<std::mutex> guard(lock);
  variables[variable] = {calloc(1, size + 8), size};
}
EXPORT unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, cudaStream_t stream) {
  pushed = {grid, block, shared, stream};
  return 0;
}
EXPORT cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  *grid = pushed.grid, *block = pushed.block, *shared = pushed.shared;
  *static_cast<cudaStream_t*>(stream) = pushed.stream;
  return cudaSuccess;
}
EXPORT cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(function));
  return cudaSuccess;
}

static const char* name_of(const void* kernel) {
  std::lock_guard<std::mutex> guard(lock);
  auto found = kernels.find(kernel);
  return found == kernels.end() ? "a kernel" : found->second;
}

// As a GPU does: a grid or a block that is empty or too large is refused.
static cudaError_t checked_launch(const void* function, dim3 grid, dim3 block, size_t shared, cudaStream_t stream) {
  uint64_t threads = (uint64_t)block.x * block.y * block.z;
  if (!threads || threads > 1024 || block.z > 64 || !grid.x || !grid.y || !grid.z || grid.y > 65535 || grid.z > 65535)
    return error(cudaErrorInvalidConfiguration, "cudaLaunchKernel");
  uint64_t sizes = 0;
  for (uint64_t number : {(uint64_t)grid.x, (uint64_t)grid.y, (uint64_t)grid.z, threads, (uint64_t)shared})
    sizes = mix(sizes, number);
  launch(name_of(function), stream, sizes, (double)grid.x * grid.y * grid.z * (double)threads);
  return cudaSuccess;
}
EXPORT cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void**, size_t shared,
                                      cudaStream_t stream) {
  return checked_launch(reinterpret_cast<const void*>(kernel), grid, block, shared, stream);
}
EXPORT cudaError_t cudaLaunchKernel(const void* function, dim3 grid, dim3 block, void**, size_t shared,
                                    cudaStream_t stream) {
  return checked_launch(function, grid, block, shared, stream);
}
EXPORT cudaError_t cudaLaunchCooperativeKernel(const void* function, dim3 grid, dim3 block, void**, size_t shared,
                                               cudaStream_t stream) {
  return checked_launch(function, grid, block, shared, stream);
}
EXPORT cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* function, void**) {
  return checked_launch(function, config->gridDim, config->blockDim, config->dynamicSmemBytes, config->stream);
}
EXPORT cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  memset(attributes, 0, sizeof *attributes);
  attributes->maxThreadsPerBlock = 1024;
  attributes->numRegs = 32;
  // PyTorch has no code for compute capability 8.9 alone: such a GPU runs that for 8.6, and CUB asks which one it is.
  attributes->binaryVersion = attributes->ptxVersion = settings().sm == 89 ? 86 : settings().sm;
  attributes->maxDynamicSharedSizeBytes = settings().shared_memory_of_block << 10;
  return cudaSuccess;
}
EXPORT cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int, size_t) {
  *blocks = 2;
  return cudaSuccess;
}
EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int, size_t,
                                                                          unsigned) {
  *blocks = 2;
  return cudaSuccess;
}
EXPORT cudaError_t cudaGetSymbolAddress(void** pointer, const void* variable) {
  std::lock_guard<std::mutex> guard(lock);
  auto found = variables.find(variable);
  *pointer = found == variables.end() ? const_cast<void*>(variable) : found->second.first;
  return cudaSuccess;
}
EXPORT cudaError_t cudaMemcpyToSymbol(const void* variable, const void* from, size_t bytes, size_t at, cudaMemcpyKind) {
  std::lock_guard<std::mutex> guard(lock);
  auto found = variables.find(variable);
  if (found != variables.end()) memcpy(static_cast<char*>(found->second.first) + at, from, bytes);
  return cudaSuccess;
}

// ---- devices

static cudaError_t no_device(const char* function) { return error(cudaErrorNoDevice, function); }
EXPORT cudaError_t cudaGetDeviceCount(int* number) {
  *number = devices().count;
  return *number ? cudaSuccess : no_device("cudaGetDeviceCount");
}
EXPORT cudaError_t cudaGetDevice(int* device) {
  *device = current_device();
  return devices().count ? cudaSuccess : no_device("cudaGetDevice");
}
EXPORT cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= devices().count) return error(cudaErrorInvalidDevice, "cudaSetDevice");
  current_device() = device;
  return cudaSuccess;
}
EXPORT cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
EXPORT cudaError_t cudaRuntimeGetVersion(int* version) { return cudaDriverGetVersion(version); }
EXPORT cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int device) {
  if (device < 0 || device >= devices().count) return error(cudaErrorInvalidDevice, "cudaGetDeviceProperties");
  memset(p, 0, sizeof *p);
  const Settings& it = settings();
  snprintf(p->name, sizeof p->name, "null GPU (sm_%d)", it.sm);
  memcpy(&p->uuid, uuid_of(devices().gpu[device]).data(), sizeof p->uuid);
  p->totalGlobalMem = settings().memory;
  p->major = settings().sm / 10, p->minor = settings().sm % 10;
  p->warpSize = 32, p->maxThreadsPerBlock = 1024, p->regsPerBlock = p->regsPerMultiprocessor = 65536;
  p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024, p->maxThreadsDim[2] = 64;
  p->maxGridSize[0] = 2147483647, p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->multiProcessorCount = it.multiprocessors;
  p->maxThreadsPerMultiProcessor = it.threads_per_multiprocessor;
  p->maxBlocksPerMultiProcessor = it.blocks_per_multiprocessor;
  p->sharedMemPerBlock = 48 << 10;
  p->sharedMemPerBlockOptin = (size_t)it.shared_memory_of_block << 10;
  p->sharedMemPerMultiprocessor = (size_t)it.shared_memory << 10;
  p->l2CacheSize = it.l2_cache << 20;
  p->memPitch = 2147483647, p->totalConstMem = 65536, p->textureAlignment = 512;
  p->memoryBusWidth = it.memory_bus_width;
  p->concurrentKernels = p->unifiedAddressing = p->managedMemory = p->canMapHostMemory = p->cooperativeLaunch = 1;
  p->asyncEngineCount = 3;
  p->pciBusID = 1 + devices().gpu[device];
  return cudaSuccess;
}
EXPORT cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  cudaDeviceProp p;
  if (cudaError_t failed = cudaGetDeviceProperties(&p, device)) return failed;
  switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock:
      *value = p.maxThreadsPerBlock;
      break;
    case cudaDevAttrMaxBlockDimX:
    case cudaDevAttrMaxBlockDimY:
      *value = 1024;
      break;
    case cudaDevAttrMaxBlockDimZ:
      *value = 64;
      break;
    case cudaDevAttrMaxGridDimX:
      *value = 2147483647;
      break;
    case cudaDevAttrMaxGridDimY:
    case cudaDevAttrMaxGridDimZ:
      *value = 65535;
      break;
    case cudaDevAttrWarpSize:
      *value = 32;
      break;
    case cudaDevAttrMultiProcessorCount:
      *value = p.multiProcessorCount;
      break;
    case cudaDevAttrMaxThreadsPerMultiProcessor:
      *value = p.maxThreadsPerMultiProcessor;
      break;
    case cudaDevAttrMaxBlocksPerMultiprocessor:
      *value = p.maxBlocksPerMultiProcessor;
      break;
    case cudaDevAttrMaxSharedMemoryPerBlock:
      *value = (int)p.sharedMemPerBlock;
      break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = (int)p.sharedMemPerBlockOptin;
      break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
      *value = (int)p.sharedMemPerMultiprocessor;
      break;
    case cudaDevAttrMaxRegistersPerBlock:
    case cudaDevAttrMaxRegistersPerMultiprocessor:
      *value = 65536;
      break;
    case cudaDevAttrComputeCapabilityMajor:
      *value = p.major;
      break;
    case cudaDevAttrComputeCapabilityMinor:
      *value = p.minor;
      break;
    case cudaDevAttrL2CacheSize:
      *value = p.l2CacheSize;
      break;
    case cudaDevAttrPciBusId:
      *value = p.pciBusID;
      break;
    case cudaDevAttrMemoryPoolsSupported:
    case cudaDevAttrUnifiedAddressing:
    case cudaDevAttrCooperativeLaunch:
    case cudaDevAttrManagedMemory:
    case cudaDevAttrCanMapHostMemory:
    case cudaDevAttrConcurrentKernels:
      *value = 1;
      break;
    case cudaDevAttrClockRate:
      *value = (int)(1e3 * settings().clock_rate);
      break;                          // kHz
    case cudaDevAttrMemoryClockRate:  // kHz; data moves twice in a cycle
      *value = (int)(settings().bandwidth * 8 / 2 / settings().memory_bus_width / 1e3);
      break;
    case cudaDevAttrGlobalMemoryBusWidth:
      *value = p.memoryBusWidth;
      break;
    default:
      *value = 0;
  }
  return cudaSuccess;
}
EXPORT cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
  *can = 1;
  return cudaSuccess;
}
EXPORT cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return cudaSuccess; }
EXPORT cudaError_t cudaDeviceGetPCIBusId(char* text, int size, int device) {
  snprintf(text, (size_t)size, "%s", pci_id(devices().gpu[device]).c_str());
  return cudaSuccess;
}
EXPORT cudaError_t cudaDeviceGetStreamPriorityRange(int* low, int* high) {
  if (low) *low = 0;
  if (high) *high = -5;
  return cudaSuccess;
}
EXPORT cudaError_t cudaProfilerStart() { return cudaSuccess; }
EXPORT cudaError_t cudaProfilerStop() { return cudaSuccess; }

// ---- errors; the texts are CUDA's, because programs look for words in them

static const struct {
  cudaError_t code;
  const char *name, *text;
} ERRORS[] = {
    {cudaSuccess, "cudaSuccess", "no error"},
    {cudaErrorInvalidValue, "cudaErrorInvalidValue", "invalid argument"},
    {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory"},
    {cudaErrorInvalidConfiguration, "cudaErrorInvalidConfiguration", "invalid configuration argument"},
    {cudaErrorNoDevice, "cudaErrorNoDevice", "no CUDA-capable device is detected"},
    {cudaErrorInvalidDevice, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {cudaErrorInvalidResourceHandle, "cudaErrorInvalidResourceHandle", "invalid resource handle"},
    {cudaErrorIllegalState, "cudaErrorIllegalState", "the operation cannot be performed in the present state"},
    {cudaErrorNotReady, "cudaErrorNotReady", "device not ready"},
    {cudaErrorNotSupported, "cudaErrorNotSupported", "operation not supported"},
    {cudaErrorStreamCaptureUnsupported, "cudaErrorStreamCaptureUnsupported",
     "operation not permitted when stream is capturing"},
    {cudaErrorStreamCaptureInvalidated, "cudaErrorStreamCaptureInvalidated",
     "operation failed due to a previous error during capture"},
    {cudaErrorStreamCaptureMerge, "cudaErrorStreamCaptureMerge",
     "operation would result in a merge of separate capture sequences"},
    {cudaErrorStreamCaptureIsolation, "cudaErrorStreamCaptureIsolation",
     "dependency created on uncaptured work in another stream"},
    {cudaErrorStreamCaptureImplicit, "cudaErrorStreamCaptureImplicit",
     "operation would make the legacy stream depend on a capturing blocking stream"},
    {cudaErrorCapturedEvent, "cudaErrorCapturedEvent",
     "operation not permitted on an event last recorded in a capturing stream"},
};
EXPORT const char* cudaGetErrorName(cudaError_t code) {
  for (auto& it : ERRORS)
    if (it.code == code) return it.name;
  return "cudaErrorUnknown";
}
EXPORT const char* cudaGetErrorString(cudaError_t code) {
  for (auto& it : ERRORS)
    if (it.code == code) return it.text;
  return "unknown error";
}
EXPORT cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }
EXPORT cudaError_t cudaPeekAtLastError() { return last_error; }

// ---- memory

EXPORT cudaError_t cudaMalloc(void** pointer, size_t bytes) {
  if (invalidate_captures()) return error(cudaErrorStreamCaptureUnsupported, "cudaMalloc");
  return allocate(pointer, bytes, false);
}
EXPORT cudaError_t cudaMallocAsync(void** pointer, size_t bytes, cudaStream_t) {
  return allocate(pointer, bytes, false);
}
EXPORT cudaError_t cudaMallocManaged(void** pointer, size_t bytes, unsigned) { return allocate(pointer, bytes, false); }
EXPORT cudaError_t cudaMallocHost(void** pointer, size_t bytes) { return allocate(pointer, bytes, true); }
EXPORT cudaError_t cudaHostAlloc(void** pointer, size_t bytes, unsigned) { return allocate(pointer, bytes, true); }
EXPORT cudaError_t cudaFree(void* pointer) {
  if (invalidate_captures()) return error(cudaErrorStreamCaptureUnsupported, "cudaFree");
  return release(pointer);
}
EXPORT cudaError_t cudaFreeAsync(void* pointer, cudaStream_t) { return release(pointer); }
EXPORT cudaError_t cudaFreeHost(void* pointer) { return release(pointer); }
EXPORT cudaError_t cudaHostRegister(void* pointer, size_t bytes, unsigned) {
  remember(pointer, {bytes, current_device(), true, false});
  return cudaSuccess;
}
EXPORT cudaError_t cudaHostUnregister(void* pointer) {
  forget(pointer);
  return cudaSuccess;
}
EXPORT cudaError_t cudaHostGetDevicePointer(void** device, void* host, unsigned) {
  *device = host;
  return cudaSuccess;
}
EXPORT cudaError_t cudaMemGetInfo(size_t* left, size_t* total) {
  *total = settings().memory;
  *left = *total - used(current_device());
  return cudaSuccess;
}
EXPORT cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
  memset(attributes, 0, sizeof *attributes);
  Block block{};
  bool known = find(pointer, nullptr, &block);
  attributes->type = !known ? cudaMemoryTypeUnregistered : block.on_host ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
  attributes->device = known ? block.device : -2;
  attributes->devicePointer = const_cast<void*>(pointer);
  attributes->hostPointer = known && !block.on_host ? nullptr : const_cast<void*>(pointer);
  return cudaSuccess;
}
EXPORT cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  if (invalidate_captures()) return error(cudaErrorStreamCaptureImplicit, "cudaMemcpy");
  Way way = way_of(to, from);
  copy(to, from, bytes, way);
  count(counters.waits);
  observe(WAIT, "cudaMemcpy", (int64_t)bytes, false);
  if (has_clock()) {
    put_copy(stream_of(nullptr), way, bytes);
    wait_until(end_of(stream_of(nullptr)), "cudaMemcpy");
  }
  return cudaSuccess;
}
EXPORT cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
  Way way = way_of(to, from);
  if (!record(stream)) copy(to, from, bytes, way);
  if (has_clock()) put_copy(stream_of(stream), way, bytes);
  return cudaSuccess;
}
EXPORT cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t bytes, cudaStream_t stream) {
  return cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream);
}
EXPORT cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width,
                                     size_t height, cudaMemcpyKind, cudaStream_t stream) {
  Way way = way_of(to, from);
  if (has_clock()) put_copy(stream_of(stream), way, width * height);
  if (record(stream)) return cudaSuccess;
  for (size_t row = 0; row < height; ++row)
    copy(static_cast<char*>(to) + row * to_pitch, static_cast<const char*>(from) + row * from_pitch, width, way);
  return cudaSuccess;
}
EXPORT cudaError_t cudaMemsetAsync(void* pointer, int value, size_t bytes, cudaStream_t stream) {
  bool is_recorded = record(stream);
  if (has_clock()) put_fill(stream_of(stream), bytes);
  if (!is_recorded && is_done(bytes)) memset(pointer, value, bytes);
  return cudaSuccess;
}
EXPORT cudaError_t cudaMemset(void* pointer, int value, size_t bytes) {
  return cudaMemsetAsync(pointer, value, bytes, nullptr);
}

// ---- pools of memory: cudaMallocAsync above takes memory as cudaMalloc does, so a pool is empty

EXPORT cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* pool, int) {
  static char it[64];
  *pool = reinterpret_cast<cudaMemPool_t>(it);
  return cudaSuccess;
}
EXPORT cudaError_t cudaDeviceGetGraphMemAttribute(int, cudaGraphMemAttributeType, void* value) {
  *static_cast<unsigned long long*>(value) = 0;
  return cudaSuccess;
}
EXPORT cudaError_t cudaDeviceSetGraphMemAttribute(int, cudaGraphMemAttributeType, void*) { return cudaSuccess; }
EXPORT cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t, cudaMemPoolAttr, void* value) {
  *static_cast<unsigned long long*>(value) = 0;
  return cudaSuccess;
}
EXPORT cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t, cudaMemPoolAttr, void*) { return cudaSuccess; }
EXPORT cudaError_t cudaMemPoolSetAccess(cudaMemPool_t, const cudaMemAccessDesc*, size_t) { return cudaSuccess; }
EXPORT cudaError_t cudaMemPoolTrimTo(cudaMemPool_t, size_t) { return cudaSuccess; }

// ---- functions of the driver by their name

EXPORT cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long,
                                                    cudaDriverEntryPointQueryResult* status) {
  *function = nullptr;
  for (const char* version : {"", "_v2", "_v3", "_v4"}) {
    *function = dlsym(RTLD_DEFAULT, (std::string(name) + version).c_str());
    if (*function) break;
  }
  if (status) *status = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}
#undef cudaGetDriverEntryPoint
EXPORT cudaError_t cudaGetDriverEntryPoint(const char* name, void** function, unsigned long long flags,
                                           cudaDriverEntryPointQueryResult* status) {
  return cudaGetDriverEntryPointByVersion(name, function, 0, flags, status);
}
