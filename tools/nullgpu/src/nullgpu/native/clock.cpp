// The clock: see clock.h. Figures of the hardware come from run.py as environment variables (nullgpu/gpus/*.yaml).
#include "clock.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <algorithm>
#include <set>
#include <vector>

namespace nullgpu {

static double figure(const char* name, double otherwise) {
  const char* text = getenv(name);
  return text && *text ? atof(text) : otherwise;
}
static const struct Figures {
  bool on = getenv("NULLGPU_CLOCK") && *getenv("NULLGPU_CLOCK");
  double host = figure("NULLGPU_HOST_SPEED", 1);            // 1.5: a host that is 1.5 times as fast as this one
  double launch = figure("NULLGPU_LAUNCH", 4e-6);           // seconds of the host in the driver, for each launch
  double pinned = figure("NULLGPU_PINNED", 25e9), pageable = figure("NULLGPU_PAGEABLE", 6e9);  // bytes per second
  double memory = figure("NULLGPU_BANDWIDTH", 1.5e12);
  double latency[2] = {figure("NULLGPU_LATENCY_INSIDE", 1e-5), figure("NULLGPU_LATENCY_BETWEEN", 2e-5)};
  double network[2] = {figure("NULLGPU_NETWORK_INSIDE", 2e11), figure("NULLGPU_NETWORK_BETWEEN", 1e11)};
} figures;

struct Span {
  double start, end, blocked;  // blocked: until when another stream, for which this one waits, was busy
  int stream;
  Work kind;
  const char* name;
};
static const size_t MOST_SPANS = 400000, MOST_IN_QUEUE = 1000;
static std::mutex lock;
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

bool has_clock() { return figures.on; }

static double now_locked() { return ((stops ? stopped_at : real_now()) - started - paused) / figures.host + passed; }

double simulated_now() {
  std::lock_guard<std::mutex> guard(lock);
  return now_locked();
}
void pass(double seconds) {
  std::lock_guard<std::mutex> guard(lock);
  passed += seconds;
}
static const char* kept(const char* name) { return names.insert(name).first->c_str(); }

static void note(const Span& span) {
  if (spans.size() < MOST_SPANS) spans.push_back(span);
}
static int number_of(Stream* stream) { return (int)((uintptr_t)stream >> 4 & 0xffffff); }

double end_of(Stream* stream) {
  std::lock_guard<std::mutex> guard(lock);
  return stream->end;
}

void wait_until(double time, const char* what) {
  double began = simulated_now(), left;
  while ((left = time - simulated_now()) > 0) {
    double real = left * figures.host;
    timespec t = {(time_t)real, (long)(1e9 * (real - floor(real)))};
    nanosleep(&t, nullptr);
  }
  std::lock_guard<std::mutex> guard(lock);
  note({began, now_locked(), 0, 0, HOST_WAITS, kept(what)});
}

void put(cudaStream_t stream, double seconds, Work kind, const char* name, double earliest) {
  Stream* it = stream_of(stream);
  double oldest = 0;
  {
    std::lock_guard<std::mutex> guard(lock);
    if (it->capture) {  // it takes its time at each replay
      it->capture->seconds += seconds;
      return;
    }
    double start = std::max({it->end, now_locked(), earliest});
    note({start, start + seconds, it->blocked, number_of(it), kind, kept(name)});
    it->end = start + seconds;
    it->blocked = 0;
    double& slot = it->queue[it->put++ % MOST_IN_QUEUE];
    oldest = slot, slot = it->end;
  }
  if (oldest > simulated_now()) wait_until(oldest, "a full queue");  // the driver takes about a thousand launches
}

void launched(cudaStream_t) { pass(figures.launch); }

void put_copy(cudaStream_t stream, bool to_gpu, bool from_gpu, bool pageable, size_t bytes) {
  if (to_gpu && from_gpu) return put(stream, 2 * (double)bytes / figures.memory, KERNEL, "copy on the GPU");
  put(stream, 1e-5 + (double)bytes / (pageable ? figures.pageable : figures.pinned), TRANSFER,
      to_gpu ? (pageable ? "pageable copy to the GPU" : "copy to the GPU") : "copy from the GPU");
  // From pageable memory, the driver copies to a buffer of its own first, while the host waits; to it, until all is there.
  if (pageable && (from_gpu || bytes > 65536)) wait_until(end_of(stream_of(stream)), "a pageable copy");
}

double seconds_of_collective(const char* name, size_t bytes, int ranks) {
  if (ranks < 2) return 0;
  bool between = ranks > settings().gpus;
  double n = ranks, share = (n - 1) / n * (strcmp(name, "AllReduce") ? 1 : 2);  // as in NCCL's "bus bandwidth"
  return figures.latency[between] * ceil(log2(n)) + share * (double)bytes / figures.network[between];
}
double seconds_of_transfers(size_t bytes, bool between) {
  return figures.latency[between] + (double)bytes / figures.network[between];
}

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

double ready(cudaStream_t stream) {
  std::lock_guard<std::mutex> guard(lock);
  return std::max(stream_of(stream)->end, now_locked());
}
void put_after_ranks(cudaStream_t stream, const char* name, double seconds, double own, double last, int slowest) {
  if (last > own) {
    std::lock_guard<std::mutex> guard(lock);
    note({own, last, 0, number_of(stream_of(stream)), WAITS_FOR_RANK, kept(("waits for rank " + std::to_string(slowest)).c_str())});
  }
  put(stream, seconds, NETWORK, name, last);
}

}  // namespace nullgpu

using namespace nullgpu;

// ---- for clock.py

EXPORT double nullgpu_now() { return simulated_now(); }
EXPORT void nullgpu_stop() { stop(); }  // the clock stands, while Python works out how long an operation takes
EXPORT void nullgpu_go(double too_much) { go(too_much); }  // seconds of this host: the way to Python and back
EXPORT void nullgpu_go_back(double seconds) {
  std::lock_guard<std::mutex> guard(lock);
  paused += seconds;
}
EXPORT void nullgpu_put(void* stream, double seconds, const char* name) {
  put(static_cast<cudaStream_t>(stream), seconds, KERNEL, name);
}
EXPORT double nullgpu_end(void* stream) {  // when all work of a stream will have ended
  double end = end_of(stream_of(static_cast<cudaStream_t>(stream)));
  return std::max(end, simulated_now());
}

// ---- for line_profiler, which reads the clock with these two: its lines show simulated time, too

__attribute__((visibility("default"))) long long hpTimer() {
  return (long long)(1e9 * (has_clock() ? simulated_now() : real_now()));
}
__attribute__((visibility("default"))) double hpTimerUnit() { return 1e-9; }

// ---- for timeline.py

EXPORT void nullgpu_spans(const char* file) {  // a line for each: start, end, blocked until, stream, kind, name
  std::lock_guard<std::mutex> guard(lock);
  FILE* out = fopen(file, "w");
  if (!out) return;
  for (const Span& it : spans)
    fprintf(out, "%.9f\t%.9f\t%.9f\t%d\t%d\t%s\n", it.start, it.end, it.blocked, it.stream, it.kind, it.name);
  fclose(out);
}
