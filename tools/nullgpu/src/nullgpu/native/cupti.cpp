// libcupti, with which torch.profiler sees kernels: those that were launched, at the time of the launch.
//
// A kernel takes no time here; its record says 1,000 ticks of the profiler's clock, so that it is visible in a trace.
// Only the functions that PyTorch's profiler (Kineto) calls are here. Source of names and layouts: cupti_activity.h.
#include "cupti.h"

#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <set>
#include <unordered_set>
#include <vector>

#include "gpu.h"

namespace nullgpu {

static std::mutex lock;
static std::set<int> kinds;  // what is recorded
static std::unordered_set<std::string> kernel_names;
static std::vector<std::vector<char>> records;
static thread_local std::vector<std::pair<CUpti_ExternalCorrelationKind, uint64_t>> operations;
static CUpti_TimestampCallbackFunc clock_of_profiler = nullptr;
static CUpti_BuffersCallbackRequestFunc request = nullptr;
static CUpti_BuffersCallbackCompleteFunc deliver = nullptr;
static std::atomic<uint32_t> next_correlation{1};

// Where the profiler wants its records. As long as it has given no buffer, it does not ask for records either.
static struct {
  uint8_t* start = nullptr;
  size_t size = 0;
} buffer;

static uint64_t timestamp() {
  if (clock_of_profiler) return clock_of_profiler();
  timespec t;
  clock_gettime(CLOCK_REALTIME, &t);
  return (uint64_t)t.tv_sec * 1'000'000'000 + (uint64_t)t.tv_nsec;
}

template <class Record>
static void add(const Record& record) {
  const char* first = reinterpret_cast<const char*>(&record);
  records.emplace_back(first, first + sizeof record);
}

void profile_launch(const char* name, int stream) {
  std::unique_lock<std::mutex> guard(lock);
  if (kinds.empty()) return;
  if (!buffer.start && request) {
    size_t most = 0;
    guard.unlock();
    request(&buffer.start, &buffer.size, &most);
    guard.lock();
  }
  uint32_t correlation = next_correlation++;
  uint64_t now = timestamp();
  if (kinds.count(CUPTI_ACTIVITY_KIND_RUNTIME)) {
    CUpti_ActivityAPI call{};
    call.kind = CUPTI_ACTIVITY_KIND_RUNTIME;
    call.cbid = CUPTI_RUNTIME_TRACE_CBID_cudaLaunchKernel_v7000;
    call.start = now, call.end = now + 1;
    call.processId = (uint32_t)getpid(), call.threadId = (uint32_t)syscall(SYS_gettid);
    call.correlationId = correlation;
    add(call);
  }
  if (kinds.count(CUPTI_ACTIVITY_KIND_EXTERNAL_CORRELATION))
    for (auto kind : {CUPTI_EXTERNAL_CORRELATION_KIND_CUSTOM0, CUPTI_EXTERNAL_CORRELATION_KIND_CUSTOM1})
      for (auto it = operations.rbegin(); it != operations.rend(); ++it) {
        if (it->first != kind) continue;
        CUpti_ActivityExternalCorrelation link{};
        link.kind = CUPTI_ACTIVITY_KIND_EXTERNAL_CORRELATION;
        link.externalKind = kind, link.externalId = it->second, link.correlationId = correlation;
        add(link);
        break;
      }
  if (kinds.count(CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL)) {
    CUpti_ActivityKernel9 kernel{};
    kernel.kind = CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL;
    kernel.start = now, kernel.end = now + 1000;
    kernel.deviceId = (uint32_t)current_device(), kernel.contextId = 1, kernel.streamId = (uint32_t)stream;
    kernel.gridX = kernel.gridY = kernel.gridZ = kernel.blockX = kernel.blockY = kernel.blockZ = 1;
    kernel.correlationId = correlation;
    kernel.name = kernel_names.insert(name).first->c_str();
    add(kernel);
  }
}

static size_t size_of(CUpti_ActivityKind kind) {
  return kind == CUPTI_ACTIVITY_KIND_RUNTIME                ? sizeof(CUpti_ActivityAPI)
         : kind == CUPTI_ACTIVITY_KIND_EXTERNAL_CORRELATION ? sizeof(CUpti_ActivityExternalCorrelation)
                                                            : sizeof(CUpti_ActivityKernel9);
}

}  // namespace nullgpu

using namespace nullgpu;

EXPORT CUptiResult cuptiGetVersion(uint32_t* version) {
  *version = CUPTI_API_VERSION;
  return CUPTI_SUCCESS;
}
EXPORT CUptiResult cuptiGetResultString(CUptiResult, const char** text) {
  *text = "null GPU";
  return CUPTI_SUCCESS;
}
EXPORT CUptiResult cuptiGetCallbackName(CUpti_CallbackDomain, uint32_t, const char** name) {
  *name = "cudaLaunchKernel";
  return CUPTI_SUCCESS;
}
EXPORT CUptiResult cuptiActivityEnable(CUpti_ActivityKind kind) {
  std::lock_guard<std::mutex> guard(lock);
  kinds.insert(kind);
  return CUPTI_SUCCESS;
}
EXPORT CUptiResult cuptiActivityDisable(CUpti_ActivityKind kind) {
  std::lock_guard<std::mutex> guard(lock);
  kinds.erase(kind);
  return CUPTI_SUCCESS;
}
EXPORT CUptiResult cuptiActivityEnableCudaEventDeviceTimestamps(uint8_t) { return CUPTI_SUCCESS; }
EXPORT CUptiResult cuptiActivityEnableDriverApi(CUpti_CallbackId, uint8_t) { return CUPTI_SUCCESS; }
EXPORT CUptiResult cuptiActivityEnableRuntimeApi(CUpti_CallbackId, uint8_t) { return CUPTI_SUCCESS; }
EXPORT CUptiResult cuptiActivitySetAttribute(CUpti_ActivityAttribute, size_t*, void*) { return CUPTI_SUCCESS; }
EXPORT CUptiResult cuptiActivityRegisterTimestampCallback(CUpti_TimestampCallbackFunc function) {
  clock_of_profiler = function;
  return CUPTI_SUCCESS;
}
EXPORT CUptiResult cuptiActivityRegisterCallbacks(CUpti_BuffersCallbackRequestFunc requested,
                                                  CUpti_BuffersCallbackCompleteFunc completed) {
  request = requested, deliver = completed;
  return CUPTI_SUCCESS;
}
EXPORT CUptiResult cuptiActivityPushExternalCorrelationId(CUpti_ExternalCorrelationKind kind, uint64_t id) {
  operations.emplace_back(kind, id);
  return CUPTI_SUCCESS;
}
EXPORT CUptiResult cuptiActivityPopExternalCorrelationId(CUpti_ExternalCorrelationKind kind, uint64_t* id) {
  for (size_t i = operations.size(); i-- > 0;)
    if (operations[i].first == kind) {
      if (id) *id = operations[i].second;
      operations.erase(operations.begin() + (long)i);
      return CUPTI_SUCCESS;
    }
  return CUPTI_ERROR_QUEUE_EMPTY;
}
EXPORT CUptiResult cuptiActivityGetNumDroppedRecords(CUcontext, uint32_t, size_t* dropped) {
  *dropped = 0;
  return CUPTI_SUCCESS;
}
EXPORT CUptiResult cuptiActivityFlushAll(uint32_t) {
  std::vector<std::vector<char>> all;
  {
    std::lock_guard<std::mutex> guard(lock);
    all.swap(records);
  }
  for (size_t i = 0; request && deliver && i < all.size();) {
    size_t used = 0, most = 0;
    if (!buffer.start) request(&buffer.start, &buffer.size, &most);
    if (!buffer.start) return CUPTI_ERROR_OUT_OF_MEMORY;
    for (; i < all.size() && used + all[i].size() <= buffer.size; used += all[i].size(), ++i)
      memcpy(buffer.start + used, all[i].data(), all[i].size());
    uint8_t* full = buffer.start;
    buffer.start = nullptr;
    deliver(nullptr, 0, full, buffer.size, used);
    if (!used) break;
  }
  return CUPTI_SUCCESS;
}
EXPORT CUptiResult cuptiActivityGetNextRecord(uint8_t* buffer, size_t size, CUpti_Activity** record) {
  uint8_t* next = buffer;
  if (*record) next = reinterpret_cast<uint8_t*>(*record) + size_of((*record)->kind);
  if (next >= buffer + size) return CUPTI_ERROR_MAX_LIMIT_REACHED;
  *record = reinterpret_cast<CUpti_Activity*>(next);
  return CUPTI_SUCCESS;
}
EXPORT CUptiResult cuptiSubscribe(CUpti_SubscriberHandle* subscriber, CUpti_CallbackFunc, void*) {
  *subscriber = reinterpret_cast<CUpti_SubscriberHandle>(new char[8]);
  return CUPTI_SUCCESS;
}
EXPORT CUptiResult cuptiUnsubscribe(CUpti_SubscriberHandle) { return CUPTI_SUCCESS; }
EXPORT CUptiResult cuptiEnableCallback(uint32_t, CUpti_SubscriberHandle, CUpti_CallbackDomain, CUpti_CallbackId) {
  return CUPTI_SUCCESS;
}
EXPORT CUptiResult cuptiEnableDomain(uint32_t, CUpti_SubscriberHandle, CUpti_CallbackDomain) { return CUPTI_SUCCESS; }
EXPORT CUptiResult cuptiFinalize() { return CUPTI_SUCCESS; }
