// What the files of this folder share: the settings, the memory of the null GPUs, streams, and the counters.
//
// A null GPU has memory, streams and errors, but computes nothing. Device memory is ordinary memory of the process:
// reserved with mmap, and not in RAM until somebody writes to it. Work that is put on a stream is done at once or not
// at all, so there is never anything to wait for; waits are counted.
#pragma once
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>

#include "interface.h"  // made by interface.py: settings, counters, notices, kinds of work, spans, limits

// Everything that replaces a function of NVIDIA's is exported under its C name; the rest stays inside of the library.
#define EXPORT extern "C" __attribute__((visibility("default")))

namespace nullgpu {

// ---- settings: those that interface.py declares, and what follows from them and from the environment; read once

struct Settings : DeclaredSettings {
  size_t memory;        // bytes of each GPU
  size_t largest_copy;  // without values, copies and fills of more bytes than this are not done
  std::string host;     // names the node, so that GPU 0 of two nodes are two GPUs
};
const Settings& settings();

// ---- the GPUs that this process sees, which CUDA_VISIBLE_DEVICES chooses among those of the machine

struct Devices {
  int count;
  int gpu[MOST_GPUS];  // which GPU of the machine device 0, 1, ... is
};
const Devices& devices();  // chosen when CUDA is first asked for a device: a script may set the variable before

std::string uuid_of(int gpu);  // 16 bytes, which name a GPU of the machine
std::string uuid_text(int gpu);
std::string pci_id(int gpu);

// ---- counters, which Python reads

extern Counters counters;
inline void count(int64_t& counter, int64_t n = 1) { __atomic_fetch_add(&counter, n, __ATOMIC_RELAXED); }

// Tell a function of Python's, in the thread in which it happens.
void observe(Notice notice, const char* name, int64_t bytes, bool pageable);

// ---- memory

struct Block {
  size_t size;
  int device;
  bool on_host;
  bool mapped;  // made by mmap, here
};
cudaError_t allocate(void** pointer, size_t size, bool on_host);
cudaError_t release(void* pointer);
void remember(void* pointer, Block block);  // memory that somebody else has made: cudaHostRegister, cuMemMap
void forget(void* pointer);
bool find(const void* pointer, uintptr_t* start, Block* block);
void charge(int device, int64_t bytes);  // of the memory of a GPU
size_t used(int device);
size_t used_of(int gpu);              // the same for a GPU of the machine
bool fits(int device, size_t bytes);  // into the memory of the GPU and, with values, into this machine's
void* reserve(size_t size);

// Whether a copy or a fill is really done: all of them with values, small ones without.
bool is_done(size_t bytes);
// Between which memories a copy goes.
struct Way {
  bool from_gpu, to_gpu, pageable;  // pageable: between CPU and GPU, and the memory on the CPU's side is not pinned
};
Way way_of(const void* to, const void* from);
void copy(void* to, const void* from, size_t bytes, const Way& way);

// ---- devices, streams and captures

int& current_device();  // of this thread
cudaError_t error(cudaError_t code, const char* function);

struct Graph {
  unsigned long long id;
  cudaStreamCaptureMode mode;
  unsigned long thread;
  std::atomic<size_t> nodes{0};
  std::atomic<bool> invalid{false};
  double seconds = 0;  // of a replay, with a clock, whose lock protects it
};
// What the clock knows of a stream; its lock (clock.cpp) protects it.
struct Queue {
  double end = 0;                   // when the last work ends
  int64_t last = -1;                // the span of the last work
  int64_t cause = -1;               // the span of another stream that the next work waits for
  int resource = 0;                 // what the last work shares with other streams, if nothing is waited for after it
  double since = 0;                 // then: since when such work has followed without a gap
  size_t put = 0;                   // number of pieces of work so far
  double ends[MOST_IN_QUEUE] = {};  // when the last of them end
};
struct Stream {
  int device = 0, priority = 0;
  unsigned flags = 0;
  std::atomic<Graph*> capture{nullptr};  // the graph that this stream is recorded into
  bool origin = false;                   // the capture began in this stream; protected by the lock of streams.cpp
  Queue queue;
};
Stream* stream_of(cudaStream_t stream);
inline int number_of(const Stream* stream) {
  return (int)((uintptr_t)stream >> 4 & 0xffffff);
}  // in reports and traces
// For calls that wait or allocate: invalidate the captures that forbid this; whether there is one.
bool invalidate_captures();
// Record work that is put on a stream if the stream is captured; whether it is. Otherwise it is to be done now.
bool record(cudaStream_t stream);
// Put a kernel, or a call of a library, on a stream. The clock tells launches of a kernel apart by `sizes`, a hash of
// what else is known of them (grid and block, the sizes of matrices), and scales by `size`, which grows like the work.
void launch(const char* kernel, cudaStream_t stream, uint64_t sizes = 0, double size = 0);
inline uint64_t mix(uint64_t hash, uint64_t number) {  // add a number to a hash
  hash = (hash ^ number) * 0x9e3779b97f4a7c15;
  return hash ^ hash >> 32;
}
// The same for calls of libraries: blas.cpp. `describe` adds a number to the sizes of this thread's next call.
void describe(uint64_t number);
uint64_t mix_all(const uint64_t* numbers, int number);
void launch_library(const char* name, const void* handle, uint64_t sizes = 0, double size = 0);
void set_stream(void* handle, cudaStream_t stream);
cudaStream_t stream_of_handle(const void* handle);
void profile_launch(const char* kernel, int stream);  // for torch.profiler: cupti.cpp

// A function that this library does not have was called: say which, and end.
[[noreturn]] void missing(const char* name);

}  // namespace nullgpu
