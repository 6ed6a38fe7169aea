// Streams, events and the capture of CUDA graphs, with the rules that capturing has.
//
// Source of the rules: CUDA C++ Programming Guide, "Stream Capture", and CUDA Runtime API, "Stream Management".
#include "clock.h"
#include "gpu.h"

#include <pthread.h>
#include <time.h>

#include <algorithm>
#include <set>
#include <vector>

namespace nullgpu {

struct Event {
  int device;
  Graph* capture;  // recorded last in a stream that is captured into this graph
  timespec at;
  bool recorded;
  double time;      // with a clock: when all work before it in its stream has ended
};

static std::mutex lock;
static std::set<Stream*> streams;
static Stream defaults[MOST_GPUS];
static unsigned long long next_graph = 1;
static thread_local cudaStreamCaptureMode thread_mode = cudaStreamCaptureModeGlobal;

static unsigned long this_thread() { return (unsigned long)pthread_self(); }

Stream* stream_of(cudaStream_t stream) {
  if ((uintptr_t)stream > 2) return reinterpret_cast<Stream*>(stream);
  Stream* legacy = &defaults[current_device()];  // 0, 1 and 2 name the default stream
  legacy->device = current_device();
  return legacy;
}

bool forbidden_by_capture() {
  if (thread_mode == cudaStreamCaptureModeRelaxed) return false;
  std::lock_guard<std::mutex> guard(lock);
  for (Stream* stream : streams) {
    if (!stream->capture || !stream->origin) continue;
    bool everywhere = stream->capture->mode == cudaStreamCaptureModeGlobal;
    bool here = stream->capture->mode == cudaStreamCaptureModeThreadLocal && stream->capture->thread == this_thread();
    if (everywhere || here) return stream->capture->invalid = true;
  }
  return false;
}

bool recorded(cudaStream_t stream) {
  Stream* it = stream_of(stream);
  if (!it->capture) return false;
  ++it->capture->nodes;
  return true;
}

static cudaError_t wait(const char* function) {
  count(counters.waits);
  observe(WAIT, function, 0, false);
  return cudaSuccess;
}

static cudaError_t invalidate(Graph* graph, cudaError_t code, const char* function) {
  graph->invalid = true;
  return error(code, function);
}

}  // namespace nullgpu

using namespace nullgpu;

EXPORT cudaError_t cudaDeviceSynchronize() {
  if (forbidden_by_capture()) return error(cudaErrorStreamCaptureUnsupported, "cudaDeviceSynchronize");
  if (has_clock()) {
    double last = end_of(&defaults[current_device()]);
    std::vector<Stream*> all;
    {
      std::lock_guard<std::mutex> guard(lock);
      all.assign(streams.begin(), streams.end());
    }
    for (Stream* stream : all)
      if (stream->device == current_device()) last = std::max(last, end_of(stream));
    wait_until(last, "cudaDeviceSynchronize");
  }
  return wait("cudaDeviceSynchronize");
}

// ---- streams

static cudaError_t create(cudaStream_t* stream, unsigned flags, int priority) {
  Stream* made = new Stream{current_device(), priority, flags, nullptr, false};
  std::lock_guard<std::mutex> guard(lock);
  streams.insert(made);
  *stream = reinterpret_cast<cudaStream_t>(made);
  return cudaSuccess;
}
EXPORT cudaError_t cudaStreamCreate(cudaStream_t* stream) { return create(stream, 0, 0); }
EXPORT cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) { return create(stream, flags, 0); }
EXPORT cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int priority) {
  return create(stream, flags, priority);
}
EXPORT cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  std::lock_guard<std::mutex> guard(lock);
  streams.erase(reinterpret_cast<Stream*>(stream));
  return cudaSuccess;
}
EXPORT cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* priority) {
  *priority = stream_of(stream)->priority;
  return cudaSuccess;
}
EXPORT cudaError_t cudaStreamGetFlags(cudaStream_t stream, unsigned* flags) {
  *flags = stream_of(stream)->flags;
  return cudaSuccess;
}
EXPORT cudaError_t cudaStreamQuery(cudaStream_t stream) {
  if (Graph* graph = stream_of(stream)->capture) return invalidate(graph, cudaErrorStreamCaptureUnsupported, "cudaStreamQuery");
  if (has_clock() && end_of(stream_of(stream)) > simulated_now()) return cudaErrorNotReady;
  return cudaSuccess;
}
EXPORT cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  if (Graph* graph = stream_of(stream)->capture)
    return invalidate(graph, cudaErrorStreamCaptureUnsupported, "cudaStreamSynchronize");
  if (has_clock()) wait_until(end_of(stream_of(stream)), "cudaStreamSynchronize");
  return wait("cudaStreamSynchronize");
}
EXPORT cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  Event* it = reinterpret_cast<Event*>(event);
  Stream* waiting = stream_of(stream);
  if (it->capture) {  // the stream that waits joins the capture
    if (waiting->capture && waiting->capture != it->capture) return error(cudaErrorStreamCaptureMerge, "cudaStreamWaitEvent");
    if (!waiting->capture) waiting->capture = it->capture, waiting->origin = false;
  } else if (waiting->capture && it->recorded) {
    return error(cudaErrorStreamCaptureIsolation, "cudaStreamWaitEvent");
  } else if (has_clock() && it->recorded && it->time > end_of(waiting)) {
    waiting->end = waiting->blocked = it->time;
  }
  return cudaSuccess;
}
EXPORT cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
  if (!recorded(stream)) function(data);
  return cudaSuccess;
}
EXPORT cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t function, void* data, unsigned) {
  if (!recorded(stream)) function(stream, cudaSuccess, data);
  return cudaSuccess;
}

// ---- events

EXPORT cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = reinterpret_cast<cudaEvent_t>(new Event{current_device(), nullptr, {0, 0}, false, 0});
  return cudaSuccess;
}
EXPORT cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }
EXPORT cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete reinterpret_cast<Event*>(event);
  return cudaSuccess;
}
EXPORT cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  Event* it = reinterpret_cast<Event*>(event);
  it->recorded = true;
  it->capture = stream_of(stream)->capture;
  clock_gettime(CLOCK_MONOTONIC, &it->at);
  if (has_clock()) it->time = std::max(end_of(stream_of(stream)), simulated_now());
  return cudaSuccess;
}
EXPORT cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) { return cudaEventRecord(event, stream); }
EXPORT cudaError_t cudaEventQuery(cudaEvent_t event) {
  if (Graph* graph = reinterpret_cast<Event*>(event)->capture) return invalidate(graph, cudaErrorCapturedEvent, "cudaEventQuery");
  if (forbidden_by_capture()) return error(cudaErrorStreamCaptureUnsupported, "cudaEventQuery");
  if (has_clock() && reinterpret_cast<Event*>(event)->time > simulated_now()) return cudaErrorNotReady;
  return cudaSuccess;
}
EXPORT cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  if (Graph* graph = reinterpret_cast<Event*>(event)->capture)
    return invalidate(graph, cudaErrorCapturedEvent, "cudaEventSynchronize");
  if (has_clock()) wait_until(reinterpret_cast<Event*>(event)->time, "cudaEventSynchronize");
  return wait("cudaEventSynchronize");
}
EXPORT cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t end) {
  Event *a = reinterpret_cast<Event*>(start), *b = reinterpret_cast<Event*>(end);
  if (!a->recorded || !b->recorded) return error(cudaErrorInvalidResourceHandle, "cudaEventElapsedTime");
  if (has_clock()) {
    *milliseconds = 1e3f * (float)(b->time - a->time);
    return cudaSuccess;
  }
  *milliseconds = 1e3f * (float)(b->at.tv_sec - a->at.tv_sec) + 1e-6f * (float)(b->at.tv_nsec - a->at.tv_nsec);
  // What chooses between kernels by timing them (Triton's do_bench) repeats a kernel until some time has passed: with 0 ms
  // for ever. A millisecond is long enough for it.
  if (*milliseconds < 1) *milliseconds = 1;
  return cudaSuccess;
}

// ---- capture

EXPORT cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  Graph* graph = stream_of(stream)->capture;
  *status = !graph ? cudaStreamCaptureStatusNone
                   : graph->invalid ? cudaStreamCaptureStatusInvalidated : cudaStreamCaptureStatusActive;
  return cudaSuccess;
}

static cudaError_t capture_info(cudaStream_t stream, cudaStreamCaptureStatus* status, unsigned long long* id, cudaGraph_t* graph,
                                const cudaGraphNode_t** dependencies, size_t* number) {
  cudaStreamIsCapturing(stream, status);
  Graph* it = stream_of(stream)->capture;
  if (id) *id = it ? it->id : 0;
  if (graph) *graph = reinterpret_cast<cudaGraph_t>(it);
  if (dependencies) *dependencies = nullptr;
  if (number) *number = 0;
  return cudaSuccess;
}
#if CUDART_VERSION >= 13000
EXPORT cudaError_t cudaStreamGetCaptureInfo(cudaStream_t s, cudaStreamCaptureStatus* status, unsigned long long* id, cudaGraph_t* g,
                                            const cudaGraphNode_t** d, const cudaGraphEdgeData** edges, size_t* n) {
  if (edges) *edges = nullptr;
  return capture_info(s, status, id, g, d, n);
}
EXPORT cudaError_t cudaStreamUpdateCaptureDependencies(cudaStream_t, cudaGraphNode_t*, const cudaGraphEdgeData*, size_t, unsigned) {
  return cudaSuccess;
}
EXPORT cudaError_t cudaGraphNodeGetDependencies(cudaGraphNode_t, cudaGraphNode_t*, cudaGraphEdgeData*, size_t* n) {
  *n = 0;
  return cudaSuccess;
}
#else
#undef cudaStreamGetCaptureInfo
EXPORT cudaError_t cudaStreamGetCaptureInfo_v2(cudaStream_t s, cudaStreamCaptureStatus* status, unsigned long long* id,
                                               cudaGraph_t* g, const cudaGraphNode_t** d, size_t* n) {
  return capture_info(s, status, id, g, d, n);
}
EXPORT cudaError_t cudaStreamUpdateCaptureDependencies(cudaStream_t, cudaGraphNode_t*, size_t, unsigned) { return cudaSuccess; }
EXPORT cudaError_t cudaGraphNodeGetDependencies(cudaGraphNode_t, cudaGraphNode_t*, size_t* n) {
  *n = 0;
  return cudaSuccess;
}
#endif

EXPORT cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
  if ((uintptr_t)stream <= 1) return error(cudaErrorStreamCaptureUnsupported, "cudaStreamBeginCapture");
  std::lock_guard<std::mutex> guard(lock);
  Stream* it = reinterpret_cast<Stream*>(stream);
  it->capture = new Graph{next_graph++, 0, mode, this_thread(), false, 0};
  it->origin = true;
  return cudaSuccess;
}
EXPORT cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  Graph* it = stream_of(stream)->capture;
  *graph = nullptr;
  if (!it) return error(cudaErrorIllegalState, "cudaStreamEndCapture");
  {
    std::lock_guard<std::mutex> guard(lock);
    for (Stream* other : streams)
      if (other->capture == it) other->capture = nullptr, other->origin = false;
  }
  if (it->invalid) return error(cudaErrorStreamCaptureInvalidated, "cudaStreamEndCapture");
  *graph = reinterpret_cast<cudaGraph_t>(it);
  return cudaSuccess;
}
EXPORT cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  std::swap(*mode, thread_mode);
  return cudaSuccess;
}

// ---- graphs: what a graph computes is not kept here; values.py computes it again at each replay

EXPORT cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t*, size_t* number) {
  *number = graph ? reinterpret_cast<Graph*>(graph)->nodes : 0;
  return cudaSuccess;
}
EXPORT cudaError_t cudaGraphDebugDotPrint(cudaGraph_t, const char*, unsigned) { return error(cudaErrorNotSupported, "cudaGraphDebugDotPrint"); }
EXPORT cudaError_t cudaGraphDestroy(cudaGraph_t) { return cudaSuccess; }
EXPORT cudaError_t cudaGraphExecDestroy(cudaGraphExec_t) { return cudaSuccess; }
EXPORT cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t graph, unsigned long long) {
  *executable = reinterpret_cast<cudaGraphExec_t>(graph);
  return cudaSuccess;
}
EXPORT cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* executable, cudaGraph_t graph, unsigned long long flags) {
  return cudaGraphInstantiate(executable, graph, flags);
}
EXPORT cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream) {
  count(counters.graph_launches);
  if (has_clock()) put(stream, reinterpret_cast<Graph*>(executable)->seconds, KERNEL, "a CUDA graph");
  return cudaSuccess;
}
EXPORT cudaError_t cudaGraphRetainUserObject(cudaGraph_t, cudaUserObject_t, unsigned, unsigned) { return cudaSuccess; }
EXPORT cudaError_t cudaUserObjectCreate(cudaUserObject_t* object, void*, cudaHostFn_t, unsigned, unsigned) {
  *object = reinterpret_cast<cudaUserObject_t>(new char[8]);
  return cudaSuccess;
}
EXPORT cudaError_t cudaUserObjectRelease(cudaUserObject_t, unsigned) { return cudaSuccess; }
