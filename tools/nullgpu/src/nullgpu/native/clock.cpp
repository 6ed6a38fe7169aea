// The clock: see clock.h. The figures of the GPU are settings (gpus.py).
#include "clock.h"

#include <math.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include <algorithm>
#include <set>
#include <vector>

namespace nullgpu {

static std::mutex lock;  // protects all below, and the queues of the streams
static std::vector<Span> spans;
static std::set<std::string> names;
static double paused, passed, stopped_at;
static int stops;

static double real_now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}
static const double started = real_now();

bool has_clock() { return settings().clock; }

static double now_locked() {
  return ((stops ? stopped_at : real_now()) - started - paused) / settings().host_speed + passed;
}

double simulated_now() {
  std::lock_guard<std::mutex> guard(lock);
  return now_locked();
}
void pass(double seconds) {
  std::lock_guard<std::mutex> guard(lock);
  passed += seconds;
}
void pass_launch() { pass(settings().launch); }
static const char* kept_locked(const char* name) { return names.insert(name).first->c_str(); }
const char* kept(const char* name) {
  std::lock_guard<std::mutex> guard(lock);
  return kept_locked(name);
}

// Keep a span; return its number, or -1 if there are too many.
static int64_t note(const Span& span) {
  if (spans.size() >= (size_t)MOST_SPANS) return -1;
  spans.push_back(span);
  return (int64_t)spans.size() - 1;
}

double end_of(Stream* stream) {
  std::lock_guard<std::mutex> guard(lock);
  return stream->queue.end;
}
Moment moment_of(Stream* stream) {
  std::lock_guard<std::mutex> guard(lock);
  double now = now_locked();
  return stream->queue.end > now ? Moment{stream->queue.end, stream->queue.last} : Moment{now, -1};
}
void wait_for(Stream* stream, const Moment& moment) {
  std::lock_guard<std::mutex> guard(lock);
  if (moment.time <= stream->queue.end) return;
  stream->queue.end = moment.time;
  stream->queue.cause = stream->queue.last = moment.span;  // a third stream may wait for this one
  stream->queue.resource = NOTHING;
}

// Two kernels that fill a GPU take turns, and two collectives share the network: while two streams have some, each
// advances half as fast. So work ends later by what it shares, and so does what the other streams have left, which was
// put there before. The shortest time of a kernel is left out, in which hardly any part of the GPU works.
static std::set<Stream*> sharing;  // streams that may have such work left

static void takes_turns(Stream* stream, double seconds) {
  Queue& queue = stream->queue;
  bool computes = queue.resource == MULTIPROCESSORS;
  const char* name = kept_locked(computes ? "kernels of another stream" : "a collective of another stream");
  queue.last = note({queue.end, queue.end + seconds, -1, number_of(stream), computes ? GIVES_WAY : NETWORK, name});
  queue.end += seconds;
}
static double shared_with_others(const Stream* mine, double start, double seconds) {
  double now = now_locked(), shared = 0;
  for (auto it = sharing.begin(); it != sharing.end();) {
    Stream* other = *it;
    Queue& queue = other->queue;
    it = queue.end <= now ? sharing.erase(it) : std::next(it);
    if (other == mine || other->device != mine->device || queue.resource != mine->queue.resource) continue;
    double both = std::min(start + seconds, queue.end) - std::max(start, queue.since);
    if (both <= 0) continue;
    takes_turns(other, both);
    shared += both;
  }
  return shared;
}
void forget(Stream* stream) {
  std::lock_guard<std::mutex> guard(lock);
  sharing.erase(stream);
}

void wait_until(double time, const char* what) {
  double began = simulated_now(), left;
  while ((left = time - simulated_now()) > 0) {
    double real = left * settings().host_speed;
    timespec t = {(time_t)real, (long)(1e9 * (real - floor(real)))};
    nanosleep(&t, nullptr);
  }
  std::lock_guard<std::mutex> guard(lock);
  note({began, now_locked(), -1, 0, HOST_WAITS, kept_locked(what)});
}

void put(Stream* stream, double seconds, Work kind, const char* name, double earliest, Resource of) {
  put_kept(stream, seconds, kind, kept(name), earliest, of);
}
void put_kept(Stream* stream, double seconds, Work kind, const char* name, double earliest, Resource of) {
  if (kind == KERNEL) of = MULTIPROCESSORS;
  double oldest = 0;
  {
    std::lock_guard<std::mutex> guard(lock);
    if (Graph* graph = stream->capture) {  // it takes its time at each replay
      graph->seconds += kind == KERNEL ? std::max(seconds - settings().shortest, 0.0) + settings().in_graph : seconds;
      return;
    }
    Queue& queue = stream->queue;
    double start = std::max({queue.end, now_locked(), earliest});
    if (queue.resource != of || start > queue.end) queue.since = start;
    queue.resource = of;
    queue.last = note({start, start + seconds, (int)queue.cause, number_of(stream), kind, name});
    queue.end = start + seconds;
    if (of != NOTHING) {
      double shared =
          shared_with_others(stream, start, of == MULTIPROCESSORS ? seconds - settings().shortest : seconds);
      if (shared > 0) takes_turns(stream, shared);
      sharing.insert(stream);
    }
    queue.cause = -1;
    double& slot = queue.ends[queue.put++ % MOST_IN_QUEUE];
    oldest = slot, slot = queue.end;
  }
  if (oldest > simulated_now()) wait_until(oldest, "a full queue");  // the driver takes about a thousand launches
}

void put_copy(Stream* stream, const Way& way, size_t bytes) {
  if (way.to_gpu && way.from_gpu)
    return put(stream, settings().shortest + 2 * (double)bytes / settings().copied, KERNEL, "copy on the GPU");
  if (!way.to_gpu && !way.from_gpu) return;
  const char* name = !way.to_gpu ? "copy from the GPU" : way.pageable ? "pageable copy to the GPU" : "copy to the GPU";
  put(stream, 1e-5 + (double)bytes / (way.pageable ? settings().pageable : settings().pinned), TRANSFER, name);
  // From pageable memory, the driver copies to a buffer of its own first, while the host waits; to it, until all is
  // there.
  if (way.pageable && (way.from_gpu || bytes > 65536)) wait_until(end_of(stream), "a pageable copy");
}
void put_fill(Stream* stream, size_t bytes) {
  put(stream, settings().shortest + (double)bytes / settings().copied, KERNEL, "fill on the GPU");
}
void put_graph(Stream* stream, const Graph* graph) {
  double seconds;
  {
    std::lock_guard<std::mutex> guard(lock);
    seconds = graph->seconds;
  }
  put(stream, seconds, KERNEL, "a CUDA graph");
}

static double latency(bool between) { return between ? settings().latency_between : settings().latency_inside; }
static double network(bool between) { return between ? settings().network_between : settings().network_inside; }
double seconds_of_collective(const char* name, size_t bytes, int ranks, bool between) {
  if (ranks < 2) return 0;
  double n = ranks, share = (n - 1) / n * (strcmp(name, "AllReduce") ? 1 : 2);  // as in NCCL's "bus bandwidth"
  return latency(between) * ceil(log2(n)) + share * (double)bytes / network(between);
}
double seconds_of_transfers(size_t bytes, bool between) { return latency(between) + (double)bytes / network(between); }

static void stop() {
  std::lock_guard<std::mutex> guard(lock);
  if (!stops++) stopped_at = real_now();
}
static void go(double too_much) {
  std::lock_guard<std::mutex> guard(lock);
  if (!--stops) paused += real_now() - stopped_at;
  paused += too_much;
}
Standing::Standing() { stop(); }
Standing::~Standing() { go(0); }

double ready(Stream* stream) {
  std::lock_guard<std::mutex> guard(lock);
  return std::max(stream->queue.end, now_locked());
}
void put_after_ranks(Stream* stream, const char* name, double seconds, double own, double last, int slowest,
                     Resource of) {
  if (last > own) {
    std::lock_guard<std::mutex> guard(lock);
    std::string what = "waits for rank " + std::to_string(slowest);
    note({own, last, -1, number_of(stream), WAITS_FOR_RANK, kept_locked(what.c_str())});
  }
  put(stream, seconds, NETWORK, name, last, of);
}

}  // namespace nullgpu

using namespace nullgpu;

// ---- for clock.py

EXPORT double nullgpu_now() { return simulated_now(); }
EXPORT void nullgpu_stop() { stop(); }  // the clock stands, while Python works out how long an operation takes
EXPORT void nullgpu_go(double too_much) { go(too_much); }  // seconds of this host, which a real one would not need
EXPORT void nullgpu_leave_out(double seconds) {
  std::lock_guard<std::mutex> guard(lock);
  paused += seconds;
}

// ---- for line_profiler, which reads the clock with these two: its lines show simulated time, too

__attribute__((visibility("default"))) long long hpTimer() {
  return (long long)(1e9 * (has_clock() ? simulated_now() : real_now()));
}
__attribute__((visibility("default"))) double hpTimerUnit() { return 1e-9; }

// ---- for timeline.py

EXPORT void nullgpu_spans(const char* file) {  // a line for each
  std::lock_guard<std::mutex> guard(lock);
  FILE* out = fopen(file, "w");
  if (!out) return;
  for (const Span& it : spans) print(out, it);
  fclose(out);
}
