// Streams, events and the capture of CUDA graphs, with the rules that capturing has.
//
// Source of the rules: CUDA C++ Programming Guide, "Stream Capture", and CUDA Runtime API, "Stream Management".
#include "clock.h"
#include "gpu.h"

#include <pthread.h>
#include <time.h>

#include <algorithm>
#include <set>

namespace nullgpu {

// One thread may record an event while another one asks for it: what is recorded is copied under its lock.
struct Recorded {
  bool is = false;
  Graph* capture = nullptr;  // recorded in a stream that is captured into this graph
  timespec at = {};
  Moment moment;  // with a clock: when all work before it in its stream has ended
};
struct Event {
  Recorded recorded;
  std::mutex lock;
};
static Event* event_of(cudaEvent_t event) { return reinterpret_cast<Event*>(event); }
static Recorded recorded(cudaEvent_t event) {
  Event* it = event_of(event);
  std::lock_guard<std::mutex> guard(it->lock);
  return it->recorded;
}

static std::mutex lock;  // protects the set of streams, and where captures began
static std::set<Stream*> streams;
static Stream* default_of(int device) {
  static Stream all[MOST_GPUS];
  static const bool numbered = [] {
    for (int i = 0; i < MOST_GPUS; ++i) all[i].device = i;
    return true;
  }();
  (void)numbered;
  return &all[device];
}
static unsigned long long next_graph = 1;
static thread_local cudaStreamCaptureMode thread_mode = cudaStreamCaptureModeGlobal;

static unsigned long this_thread() { return (unsigned long)pthread_self(); }

Stream* stream_of(cudaStream_t stream) {
  // 0, 1 and 2 name the default stream
  return (uintptr_t)stream > 2 ? reinterpret_cast<Stream*>(stream) : default_of(current_device());
}

bool invalidate_captures() {
  if (thread_mode == cudaStreamCaptureModeRelaxed) return false;
  std::lock_guard<std::mutex> guard(lock);
  for (Stream* stream : streams) {
    Graph* graph = stream->capture;
    if (!graph || !stream->origin) continue;
    bool everywhere = graph->mode == cudaStreamCaptureModeGlobal;
    bool here = graph->mode == cudaStreamCaptureModeThreadLocal && graph->thread == this_thread();
    if (everywhere || here) return graph->invalid = true;
  }
  return false;
}

bool record(cudaStream_t stream) {
  Graph* graph = stream_of(stream)->capture;
  if (!graph) return false;
  ++graph->nodes;
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
  if (invalidate_captures()) return error(cudaErrorStreamCaptureUnsupported, "cudaDeviceSynchronize");
  if (has_clock()) {
    double last = end_of(default_of(current_device()));
    {
      std::lock_guard<std::mutex> guard(lock);
      for (Stream* stream : streams)
        if (stream->device == current_device()) last = std::max(last, end_of(stream));
    }
    wait_until(last, "cudaDeviceSynchronize");
  }
  return wait("cudaDeviceSynchronize");
}

// ---- streams

static cudaError_t create(cudaStream_t* stream, unsigned flags, int priority) {
  Stream* made = new Stream;
  made->device = current_device(), made->priority = priority, made->flags = flags;
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
  Stream* it = reinterpret_cast<Stream*>(stream);
  {
    std::lock_guard<std::mutex> guard(lock);
    if (!streams.erase(it)) return error(cudaErrorInvalidResourceHandle, "cudaStreamDestroy");
  }
  forget(it);
  delete it;
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
  if (Graph* graph = stream_of(stream)->capture)
    return invalidate(graph, cudaErrorStreamCaptureUnsupported, "cudaStreamQuery");
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
  Recorded it = recorded(event);
  Stream* waiting = stream_of(stream);
  if (it.capture) {  // the stream that waits joins the capture
    std::lock_guard<std::mutex> guard(lock);
    if (waiting->capture && waiting->capture != it.capture)
      return error(cudaErrorStreamCaptureMerge, "cudaStreamWaitEvent");
    if (!waiting->capture) waiting->capture = it.capture, waiting->origin = false;
  } else if (waiting->capture && it.is) {
    return error(cudaErrorStreamCaptureIsolation, "cudaStreamWaitEvent");
  } else if (has_clock() && it.is) {
    wait_for(waiting, it.moment);
  }
  return cudaSuccess;
}
EXPORT cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
  if (!record(stream)) function(data);
  return cudaSuccess;
}
EXPORT cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t function, void* data, unsigned) {
  if (!record(stream)) function(stream, cudaSuccess, data);
  return cudaSuccess;
}

// ---- events

EXPORT cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = reinterpret_cast<cudaEvent_t>(new Event);
  return cudaSuccess;
}
EXPORT cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }
EXPORT cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete event_of(event);
  return cudaSuccess;
}
EXPORT cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  Recorded now;
  now.is = true;
  now.capture = stream_of(stream)->capture;
  clock_gettime(CLOCK_MONOTONIC, &now.at);
  if (has_clock()) now.moment = moment_of(stream_of(stream));
  Event* it = event_of(event);
  std::lock_guard<std::mutex> guard(it->lock);
  it->recorded = now;
  return cudaSuccess;
}
EXPORT cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
  return cudaEventRecord(event, stream);
}
EXPORT cudaError_t cudaEventQuery(cudaEvent_t event) {
  Recorded it = recorded(event);
  if (it.capture) return invalidate(it.capture, cudaErrorCapturedEvent, "cudaEventQuery");
  if (invalidate_captures()) return error(cudaErrorStreamCaptureUnsupported, "cudaEventQuery");
  if (has_clock() && it.moment.time > simulated_now()) return cudaErrorNotReady;
  return cudaSuccess;
}
EXPORT cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  Recorded it = recorded(event);
  if (it.capture) return invalidate(it.capture, cudaErrorCapturedEvent, "cudaEventSynchronize");
  if (has_clock()) wait_until(it.moment.time, "cudaEventSynchronize");
  return wait("cudaEventSynchronize");
}
EXPORT cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t end) {
  Recorded a = recorded(start), b = recorded(end);
  if (!a.is || !b.is) return error(cudaErrorInvalidResourceHandle, "cudaEventElapsedTime");
  if (has_clock()) {
    *milliseconds = 1e3f * (float)(b.moment.time - a.moment.time);
    return cudaSuccess;
  }
  *milliseconds = 1e3f * (float)(b.at.tv_sec - a.at.tv_sec) + 1e-6f * (float)(b.at.tv_nsec - a.at.tv_nsec);
  // What chooses between kernels by timing them (Triton's do_bench) repeats a kernel until some time has passed: with 0
  // ms for ever. A millisecond is long enough for it.
  if (*milliseconds < 1) *milliseconds = 1;
  return cudaSuccess;
}

// ---- capture

EXPORT cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  Graph* graph = stream_of(stream)->capture;
  *status = !graph           ? cudaStreamCaptureStatusNone
            : graph->invalid ? cudaStreamCaptureStatusInvalidated
                             : cudaStreamCaptureStatusActive;
  return cudaSuccess;
}

static cudaError_t capture_info(cudaStream_t stream, cudaStreamCaptureStatus* status, unsigned long long* id,
                                cudaGraph_t* graph, const cudaGraphNode_t** dependencies, size_t* number) {
  cudaStreamIsCapturing(stream, status);
  Graph* it = stream_of(stream)->capture;
  if (id) *id = it ? it->id : 0;
  if (graph) *graph = reinterpret_cast<cudaGraph_t>(it);
  if (dependencies) *dependencies = nullptr;
  if (number) *number = 0;
  return cudaSuccess;
}
#if CUDART_VERSION >= 13000
EXPORT cudaError_t cudaStreamGetCaptureInfo(cudaStream_t s, cudaStreamCaptureStatus* status, unsigned long long* id,
                                            cudaGraph_t* g, const cudaGraphNode_t** d, const cudaGraphEdgeData** edges,
                                            size_t* n) {
  if (edges) *edges = nullptr;
  return capture_info(s, status, id, g, d, n);
}
EXPORT cudaError_t cudaStreamUpdateCaptureDependencies(cudaStream_t, cudaGraphNode_t*, const cudaGraphEdgeData*, size_t,
                                                       unsigned) {
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
EXPORT cudaError_t cudaStreamUpdateCaptureDependencies(cudaStream_t, cudaGraphNode_t*, size_t, unsigned) {
  return cudaSuccess;
}
EXPORT cudaError_t cudaGraphNodeGetDependencies(cudaGraphNode_t, cudaGraphNode_t*, size_t* n) {
  *n = 0;
  return cudaSuccess;
}
#endif

EXPORT cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
  if ((uintptr_t)stream <= 1) return error(cudaErrorStreamCaptureUnsupported, "cudaStreamBeginCapture");
  std::lock_guard<std::mutex> guard(lock);
  Stream* it = reinterpret_cast<Stream*>(stream);
  it->capture = new Graph{next_graph++, mode, this_thread()};
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
  *number = graph ? reinterpret_cast<Graph*>(graph)->nodes.load() : 0;
  return cudaSuccess;
}
EXPORT cudaError_t cudaGraphDebugDotPrint(cudaGraph_t, const char*, unsigned) {
  return error(cudaErrorNotSupported, "cudaGraphDebugDotPrint");
}
EXPORT cudaError_t cudaGraphDestroy(cudaGraph_t) { return cudaSuccess; }
EXPORT cudaError_t cudaGraphExecDestroy(cudaGraphExec_t) { return cudaSuccess; }
EXPORT cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t graph, unsigned long long) {
  *executable = reinterpret_cast<cudaGraphExec_t>(graph);
  return cudaSuccess;
}
EXPORT cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* executable, cudaGraph_t graph,
                                                 unsigned long long flags) {
  return cudaGraphInstantiate(executable, graph, flags);
}
EXPORT cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream) {
  count(counters.graph_launches);
  if (has_clock()) put_graph(stream_of(stream), reinterpret_cast<Graph*>(executable));
  return cudaSuccess;
}
EXPORT cudaError_t cudaGraphRetainUserObject(cudaGraph_t, cudaUserObject_t, unsigned, unsigned) { return cudaSuccess; }
EXPORT cudaError_t cudaUserObjectCreate(cudaUserObject_t* object, void*, cudaHostFn_t, unsigned, unsigned) {
  *object = reinterpret_cast<cudaUserObject_t>(new char[8]);
  return cudaSuccess;
}
EXPORT cudaError_t cudaUserObjectRelease(cudaUserObject_t, unsigned) { return cudaSuccess; }

// ---- for clock.py

EXPORT double nullgpu_end(void* stream) {  // when all work of a stream will have ended
  return moment_of(stream_of(static_cast<cudaStream_t>(stream))).time;
}
