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
  stream->queue.cause = moment.span;
  stream->queue.computes = false;
}

// A kernel fills a GPU, so the kernels of two streams take turns: those of the other streams, which were put there
// before, end as much later. The shortest time of a kernel is left out, in which hardly any part of the GPU works.
// Which stream goes first does not matter for the sum; the one that was asked last does, so that what it prepares for
// others (the input of a collective) is not late.
static std::set<Stream*> computing;  // streams that may have kernels left

static void give_way(const Stream* to, double start, double seconds) {
  double now = now_locked();
  for (auto it = computing.begin(); it != computing.end();) {
    Stream* stream = *it;
    Queue& queue = stream->queue;
    it = queue.end <= now ? computing.erase(it) : std::next(it);
    if (stream == to || stream->device != to->device || !queue.computes) continue;
    double both = std::min(start + seconds, queue.end) - std::max(start, queue.since);
    if (both <= 0) continue;
    note({queue.end, queue.end + both, -1, number_of(stream), GIVES_WAY, kept_locked("kernels of another stream")});
    queue.end += both;
  }
}
void forget(Stream* stream) {
  std::lock_guard<std::mutex> guard(lock);
  computing.erase(stream);
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

void put(Stream* stream, double seconds, Work kind, const char* name, double earliest) {
  put_kept(stream, seconds, kind, kept(name), earliest);
}
void put_kept(Stream* stream, double seconds, Work kind, const char* name, double earliest) {
  double oldest = 0;
  {
    std::lock_guard<std::mutex> guard(lock);
    if (Graph* graph = stream->capture) {  // it takes its time at each replay
      graph->seconds += kind == KERNEL ? std::max(seconds - settings().shortest, 0.0) + settings().in_graph : seconds;
      return;
    }
    Queue& queue = stream->queue;
    double start = std::max({queue.end, now_locked(), earliest});
    if (!queue.computes || start > queue.end) queue.since = start;
    if ((queue.computes = kind == KERNEL)) {
      give_way(stream, start, seconds - settings().shortest);
      computing.insert(stream);
    }
    queue.last = note({start, start + seconds, (int)queue.cause, number_of(stream), kind, name});
    queue.end = start + seconds;
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
void put_after_ranks(Stream* stream, const char* name, double seconds, double own, double last, int slowest) {
  if (last > own) {
    std::lock_guard<std::mutex> guard(lock);
    std::string what = "waits for rank " + std::to_string(slowest);
    note({own, last, -1, number_of(stream), WAITS_FOR_RANK, kept_locked(what.c_str())});
  }
  put(stream, seconds, NETWORK, name, last);
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
