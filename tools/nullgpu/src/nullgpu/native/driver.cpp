// libcuda: what PyTorch, Triton and libraries with the CUDA runtime linked into them ask the driver for.
#include "gpu.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include <mutex>
#include <set>

using namespace nullgpu;

static CUresult driver(cudaError_t code) { return (CUresult)code; }  // the numbers of both are the same
static const CUcontext CONTEXT = reinterpret_cast<CUcontext>(8);  // one for all: which device it is, the thread knows

// ---- devices and contexts

EXPORT CUresult cuInit(unsigned) { return devices().count ? CUDA_SUCCESS : CUDA_ERROR_NO_DEVICE; }
EXPORT CUresult cuDriverGetVersion(int* version) { return driver(cudaDriverGetVersion(version)); }
EXPORT CUresult cuDeviceGetCount(int* number) {
  *number = devices().count;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  if (ordinal < 0 || ordinal >= devices().count) return CUDA_ERROR_INVALID_DEVICE;
  *device = ordinal;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuDeviceGetName(char* text, int size, CUdevice) {
  snprintf(text, (size_t)size, "null GPU (sm_%d)", settings().sm);
  return CUDA_SUCCESS;
}
EXPORT CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
  return driver(cudaDeviceGetAttribute(value, (cudaDeviceAttr)attribute, device));
}
EXPORT CUresult cuDeviceGetUuid(CUuuid* uuid, CUdevice device) {
  memcpy(uuid, uuid_of(devices().gpu[device]).data(), sizeof *uuid);
  return CUDA_SUCCESS;
}
EXPORT CUresult cuDeviceTotalMem(size_t* bytes, CUdevice) {
  *bytes = settings().memory;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuMemGetInfo(size_t* left, size_t* total) { return driver(cudaMemGetInfo(left, total)); }
EXPORT CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned* flags, int* active) {
  *flags = 0, *active = 1;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice) {
  *context = CONTEXT;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuDevicePrimaryCtxRelease(CUdevice) { return CUDA_SUCCESS; }
EXPORT CUresult cuCtxGetCurrent(CUcontext* context) {
  *context = CONTEXT;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuCtxSetCurrent(CUcontext) { return CUDA_SUCCESS; }
EXPORT CUresult cuCtxPushCurrent(CUcontext) { return CUDA_SUCCESS; }
EXPORT CUresult cuCtxPopCurrent(CUcontext* context) { return cuCtxGetCurrent(context); }
EXPORT CUresult cuCtxGetDevice(CUdevice* device) {
  *device = current_device();
  return CUDA_SUCCESS;
}
EXPORT CUresult cuCtxGetLimit(size_t* value, CUlimit) {
  *value = 1024;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuCtxSetLimit(CUlimit, size_t) { return CUDA_SUCCESS; }
EXPORT CUresult cuCtxSynchronize() { return driver(cudaDeviceSynchronize()); }
EXPORT CUresult cuStreamGetCtx(CUstream, CUcontext* context) { return cuCtxGetCurrent(context); }
EXPORT CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus* status) {
  return driver(cudaStreamIsCapturing(stream, reinterpret_cast<cudaStreamCaptureStatus*>(status)));
}
EXPORT CUresult cuStreamSynchronize(CUstream stream) { return driver(cudaStreamSynchronize(stream)); }
EXPORT CUresult cuGetErrorString(CUresult code, const char** text) {
  *text = cudaGetErrorString((cudaError_t)code);
  return CUDA_SUCCESS;
}
EXPORT CUresult cuGetErrorName(CUresult code, const char** text) {
  *text = cudaGetErrorName((cudaError_t)code);
  return CUDA_SUCCESS;
}

// ---- kernels: those that Triton and PyTorch compile at run time

EXPORT CUresult cuModuleLoadData(CUmodule* module, const void*) {
  *module = static_cast<CUmodule>(calloc(1, 8));
  return CUDA_SUCCESS;
}
EXPORT CUresult cuModuleLoadDataEx(CUmodule* module, const void* image, unsigned, CUjit_option*, void**) {
  return cuModuleLoadData(module, image);
}
EXPORT CUresult cuModuleLoad(CUmodule* module, const char*) { return cuModuleLoadData(module, nullptr); }
EXPORT CUresult cuModuleUnload(CUmodule) { return CUDA_SUCCESS; }
EXPORT CUresult cuModuleGetFunction(CUfunction* function, CUmodule, const char* name) {
  *function = reinterpret_cast<CUfunction>(strdup(name));
  return CUDA_SUCCESS;
}
EXPORT CUresult cuLinkCreate(unsigned, CUjit_option*, void**, CUlinkState* state) {
  *state = static_cast<CUlinkState>(calloc(1, 8));
  return CUDA_SUCCESS;
}
EXPORT CUresult cuLinkAddData(CUlinkState, CUjitInputType, void*, size_t, const char*, unsigned, CUjit_option*,
                              void**) {
  return CUDA_SUCCESS;
}
EXPORT CUresult cuLinkComplete(CUlinkState, void** image, size_t* size) {
  *image = calloc(1, 8), *size = 8;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuLinkDestroy(CUlinkState) { return CUDA_SUCCESS; }
EXPORT CUresult cuFuncGetAttribute(int* value, CUfunction_attribute attribute, CUfunction) {
  switch (attribute) {
    case CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
      *value = 1024;
      break;
    case CU_FUNC_ATTRIBUTE_NUM_REGS:
      *value = 32;
      break;
    case CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES:
      *value = settings().shared_memory_of_block << 10;
      break;
    case CU_FUNC_ATTRIBUTE_BINARY_VERSION:
    case CU_FUNC_ATTRIBUTE_PTX_VERSION:
      *value = settings().sm;
      break;
    default:
      *value = 0;
  }
  return CUDA_SUCCESS;
}
EXPORT CUresult cuKernelGetAttribute(int* value, CUfunction_attribute attribute, CUkernel, CUdevice) {
  return cuFuncGetAttribute(value, attribute, nullptr);
}
EXPORT CUresult cuFuncSetAttribute(CUfunction, CUfunction_attribute, int) { return CUDA_SUCCESS; }
EXPORT CUresult cuFuncSetCacheConfig(CUfunction, CUfunc_cache) { return CUDA_SUCCESS; }
EXPORT CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, CUfunction, int, size_t) {
  *blocks = 2;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuOccupancyMaxActiveClusters(int* clusters, CUfunction, const CUlaunchConfig*) {
  *clusters = 1;
  return CUDA_SUCCESS;
}
static CUresult launch_function(CUfunction function, unsigned x, unsigned y, unsigned z, unsigned threads,
                                CUstream stream) {
  launch(reinterpret_cast<const char*>(function), stream, mix(mix(mix(mix(0, x), y), z), threads),
         (double)x * y * z * threads);
  return CUDA_SUCCESS;
}
EXPORT CUresult cuLaunchKernel(CUfunction function, unsigned x, unsigned y, unsigned z, unsigned block_x,
                               unsigned block_y, unsigned block_z, unsigned, CUstream stream, void**, void**) {
  return launch_function(function, x, y, z, block_x * block_y * block_z, stream);
}
EXPORT CUresult cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction function, void**, void**) {
  return launch_function(function, config->gridDimX, config->gridDimY, config->gridDimZ,
                         config->blockDimX * config->blockDimY * config->blockDimZ, config->hStream);
}
EXPORT CUresult cuLaunchCooperativeKernel(CUfunction function, unsigned x, unsigned y, unsigned z, unsigned block_x,
                                          unsigned block_y, unsigned block_z, unsigned, CUstream stream, void**) {
  return launch_function(function, x, y, z, block_x * block_y * block_z, stream);
}
EXPORT CUresult cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                                       const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave,
                                       CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  memset(map, 0, sizeof *map);
  return CUDA_SUCCESS;
}

// ---- memory by pointer

EXPORT CUresult cuPointerGetAttribute(void* value, CUpointer_attribute attribute, CUdeviceptr pointer) {
  Block block{};
  bool known = find(reinterpret_cast<void*>(pointer), nullptr, &block);
  switch (attribute) {
    case CU_POINTER_ATTRIBUTE_CONTEXT:
      *static_cast<CUcontext*>(value) = CONTEXT;
      break;
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
      *static_cast<CUdeviceptr*>(value) = pointer;
      break;
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
      *static_cast<unsigned*>(value) = known && block.on_host ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE;
      break;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
      *static_cast<int*>(value) = block.device;
      break;
    default:
      *static_cast<int*>(value) = 0;
  }
  return known ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
EXPORT CUresult cuMemGetAddressRange(CUdeviceptr* start, size_t* size, CUdeviceptr pointer) {
  uintptr_t first;
  Block block{};
  if (!find(reinterpret_cast<void*>(pointer), &first, &block)) return CUDA_ERROR_NOT_FOUND;
  if (start) *start = first;
  if (size) *size = block.size;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuMemAlloc(CUdeviceptr* pointer, size_t bytes) {
  return driver(cudaMalloc(reinterpret_cast<void**>(pointer), bytes));
}
EXPORT CUresult cuMemFree(CUdeviceptr pointer) { return driver(cudaFree(reinterpret_cast<void*>(pointer))); }
EXPORT CUresult cuMemcpyDtoH(void* to, CUdeviceptr from, size_t bytes) {
  return driver(cudaMemcpy(to, reinterpret_cast<void*>(from), bytes, cudaMemcpyDefault));
}
EXPORT CUresult cuMemcpyHtoD(CUdeviceptr to, const void* from, size_t bytes) {
  return driver(cudaMemcpy(reinterpret_cast<void*>(to), from, bytes, cudaMemcpyDefault));
}
EXPORT CUresult cuMemsetD32Async(CUdeviceptr pointer, unsigned value, size_t number, CUstream stream) {
  if (!record(stream) && is_done(4 * number))
    for (size_t i = 0; i < number; ++i) reinterpret_cast<unsigned*>(pointer)[i] = value;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuMemsetD8Async(CUdeviceptr pointer, unsigned char value, size_t number, CUstream stream) {
  return driver(cudaMemsetAsync(reinterpret_cast<void*>(pointer), value, number, stream));
}

// ---- addresses first, memory later: what expandable segments of PyTorch's allocator use

struct Handle {
  size_t size;
  int device;
};
static std::mutex lock;
static std::set<Handle*> handles;
static std::map<CUdeviceptr, Handle*> mapped;
constexpr size_t GRANULARITY = 2 << 20;

EXPORT CUresult cuMemGetAllocationGranularity(size_t* bytes, const CUmemAllocationProp*,
                                              CUmemAllocationGranularity_flags) {
  *bytes = GRANULARITY;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuMemAddressReserve(CUdeviceptr* pointer, size_t size, size_t, CUdeviceptr, unsigned long long) {
  void* p = mmap(nullptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  *pointer = reinterpret_cast<CUdeviceptr>(p);
  return p == MAP_FAILED ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
}
EXPORT CUresult cuMemAddressFree(CUdeviceptr pointer, size_t size) {
  munmap(reinterpret_cast<void*>(pointer), size);
  return CUDA_SUCCESS;
}
EXPORT CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, size_t size, const CUmemAllocationProp* properties,
                            unsigned long long) {
  int device = properties->location.id;
  if (!fits(device, size)) return CUDA_ERROR_OUT_OF_MEMORY;
  charge(device, (int64_t)size);
  std::lock_guard<std::mutex> guard(lock);
  Handle* made = *handles.insert(new Handle{size, device}).first;
  *handle = reinterpret_cast<CUmemGenericAllocationHandle>(made);
  return CUDA_SUCCESS;
}
// Memory is given back when it is neither mapped nor held by its handle; PyTorch unmaps it first.
EXPORT CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  Handle* it = reinterpret_cast<Handle*>(handle);
  std::lock_guard<std::mutex> guard(lock);
  if (!handles.erase(it)) return CUDA_ERROR_INVALID_VALUE;
  charge(it->device, -(int64_t)it->size);
  delete it;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuMemMap(CUdeviceptr pointer, size_t size, size_t, CUmemGenericAllocationHandle handle,
                         unsigned long long) {
  Handle* it = reinterpret_cast<Handle*>(handle);
  std::lock_guard<std::mutex> guard(lock);
  mapped[pointer] = it;
  remember(reinterpret_cast<void*>(pointer), {size, it->device, false, false});
  return CUDA_SUCCESS;
}
EXPORT CUresult cuMemSetAccess(CUdeviceptr pointer, size_t size, const CUmemAccessDesc*, size_t) {
  return mprotect(reinterpret_cast<void*>(pointer), size, PROT_READ | PROT_WRITE) ? CUDA_ERROR_INVALID_VALUE
                                                                                  : CUDA_SUCCESS;
}
EXPORT CUresult cuMemUnmap(CUdeviceptr pointer, size_t size) {
  std::lock_guard<std::mutex> guard(lock);
  for (auto it = mapped.lower_bound(pointer); it != mapped.end() && it->first < pointer + size; it = mapped.erase(it))
    forget(reinterpret_cast<void*>(it->first));
  void* p = reinterpret_cast<void*>(pointer);
  madvise(p, size, MADV_DONTNEED);  // the pages are given back
  return mprotect(p, size, PROT_NONE) ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

// ---- what a library asks for that has the CUDA runtime linked into it: CuPy, DALI, ...

// The runtime takes all functions of the driver from here, some of them from tables that NVIDIA does not document. So
// such a library cannot work; its own error follows.
EXPORT CUresult cuGetExportTable(const void** table, const CUuuid*) {
  static bool said = false;
  if (!said) {
    Dl_info info{};
    dladdr(__builtin_return_address(0), &info);
    const char* file = info.dli_fname ? info.dli_fname : "a library";
    fprintf(
        stderr,
        "nullgpu: note: %s has the CUDA runtime linked into it, which needs NVIDIA's driver: what follows is its own "
        "error; run this part on the CPU, or on a real GPU\n",
        file);
    said = true;
  }
  *table = nullptr;
  return CUDA_ERROR_NOT_FOUND;
}
#undef cuGetProcAddress
EXPORT CUresult cuGetProcAddress(const char* name, void** function, int, cuuint64_t) {
  cudaDriverEntryPointQueryResult status;
  cudaGetDriverEntryPointByVersion(name, function, 0, 0, &status);
  return *function ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}
EXPORT CUresult cuGetProcAddress_v2(const char* name, void** function, int version, cuuint64_t flags,
                                    CUdriverProcAddressQueryResult* status) {
  CUresult result = cuGetProcAddress(name, function, version, flags);
  if (status) *status = result ? CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND : CU_GET_PROC_ADDRESS_SUCCESS;
  return result;
}
EXPORT CUresult cuLogsRegisterCallback(CUlogsCallback, void*, CUlogsCallbackHandle* handle) {
  *handle = nullptr;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuLogsUnregisterCallback(CUlogsCallbackHandle) { return CUDA_SUCCESS; }
