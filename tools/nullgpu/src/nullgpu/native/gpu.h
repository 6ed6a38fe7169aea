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

// Everything that replaces a function of NVIDIA's is exported under its C name; the rest stays inside of the library.
#define EXPORT extern "C" __attribute__((visibility("default")))

namespace nullgpu {

constexpr int MOST_GPUS = 64;

// ---- settings: environment variables that run.py sets; read once

struct Settings {
  int gpus;              // NULLGPU_GPUS, less where CUDA_VISIBLE_DEVICES shows fewer
  int number[MOST_GPUS]; // which GPU of the machine device 0, 1, ... is
  size_t memory;         // bytes of each GPU: NULLGPU_GB
  int sm;                // compute capability, 90 for 9.0: NULLGPU_SM
  bool values;           // NULLGPU_VALUES: the CPU computes the values (values.py), so copies and fills are real
  size_t largest_copy;   // without values, copies and fills of more bytes than this are not done
  int world;             // NULLGPU_WORLD: number of ranks; this process is rank 0, the others do not exist. Else 0
  double timeout;        // NULLGPU_TIMEOUT: seconds that a collective waits for the other ranks
  std::string host;      // names the node, so that GPU 0 of two nodes are two GPUs
};
const Settings& settings();

// What the hardware of a compute capability has. Sources: CUDA C++ Programming Guide, table "Technical Specifications
// per Compute Capability"; data sheets of T4, A100, L4, H100, B200 for the number of multiprocessors and the cache.
struct Hardware {
  const char* name;
  int sm, multiprocessors, threads_per_multiprocessor, blocks_per_multiprocessor;
  int shared_memory, shared_memory_of_block;  // KiB
  int l2_cache;                               // MiB
};
const Hardware& hardware();

// ---- counters, which Python reads: see counters() in library.py, which has the same order

struct Counters {
  int64_t launches;           // kernels, and calls of libraries that launch some
  int64_t waits;              // calls in which the CPU waits for the GPU
  int64_t copies_to_gpu, copies_from_gpu, copies_on_gpu;
  int64_t pageable_copies;    // of those to and from the GPU: the memory on the CPU's side was not pinned
  int64_t bytes_to_gpu, bytes_from_gpu;
  int64_t graph_launches;
  int64_t collectives, collective_bytes;
  int64_t errors;             // calls that returned an error
};
extern Counters counters;
inline void count(int64_t& counter, int64_t n = 1) { __atomic_fetch_add(&counter, n, __ATOMIC_RELAXED); }

// A function of Python's that is told of waits, copies and collectives in the thread in which they happen.
enum Kind { WAIT = 0, COPY = 1, COLLECTIVE = 2, MISSING = 3 };
void observe(Kind kind, const char* name, int64_t bytes, bool pageable);

// ---- memory

struct Block {
  size_t size;
  int device;
  bool on_host;
  bool mapped;  // made by mmap, here
};
cudaError_t allocate(void** pointer, size_t size, bool on_host);
cudaError_t release(void* pointer);
void remember(void* pointer, Block block);   // memory that somebody else has made: cudaHostRegister, cuMemMap
void forget(void* pointer);
bool find(const void* pointer, uintptr_t* start, Block* block);
void charge(int device, int64_t bytes);      // of the memory of a GPU
size_t used(int device);
bool fits(int device, size_t bytes);
void end_if_host_is_full(size_t bytes);      // with values: before this many more bytes of RAM are used
void* reserve(size_t size);

// Do a copy, or a fill: all of them with values, small ones without.
bool is_done(size_t bytes);
void copy(void* to, const void* from, size_t bytes);

// ---- devices, streams and captures

int& current_device();  // of this thread
cudaError_t error(cudaError_t code, const char* function);

struct Graph {
  unsigned long long id;
  size_t nodes;
  cudaStreamCaptureMode mode;
  unsigned long thread;
  bool invalid;
  double seconds;   // of a replay, with a clock
};
struct Stream {
  int device, priority;
  unsigned flags;
  Graph* capture;   // the graph that this stream is recorded into
  bool origin;      // the capture began in this stream
  double end = 0, blocked = 0;  // with a clock (clock.h): when its last work ends; until when it waits for another stream
  size_t put = 0;
  double queue[1000] = {};      // ends of the last pieces of work
};
Stream* stream_of(cudaStream_t stream);
bool forbidden_by_capture();         // a call that waits or allocates, which invalidates the captures of this thread
bool recorded(cudaStream_t stream);  // put on a stream that is captured: recorded, and not done now
void launch(const char* kernel, cudaStream_t stream);
void profile_launch(const char* kernel, int stream);  // for torch.profiler: cupti.cpp

// A function that this library does not have was called: say which, and end.
[[noreturn]] void missing(const char* name);

}  // namespace nullgpu
