// A clock for GPUs that compute nothing: how long they would have been busy, and what waits for them.
//
// Every stream is a queue. Work that is put on it begins when the host has put it there and the work before it has
// ended, and it lasts as long as somebody says: Python for operations (clock.py), copies and collectives here.
// The host's time is real. So what waits for the GPU really waits, and a loader's workers go on meanwhile.
#pragma once
#include "gpu.h"

namespace nullgpu {

enum Work { KERNEL = 0, TRANSFER = 1, NETWORK = 2, HOST_WAITS = 3, WAITS_FOR_RANK = 4 };

bool has_clock();                  // NULLGPU_CLOCK
double simulated_now();            // seconds since the start of this process, without the time in which the clock stood
void pass(double seconds);         // of the host, which it would have needed: a launch by the real driver
void put(cudaStream_t stream, double seconds, Work kind, const char* name, double earliest = 0);
void wait_until(double time, const char* what);  // what the host waits for
double end_of(Stream* stream);
void launched(cudaStream_t stream);  // by the host, which the driver keeps busy for some microseconds
void put_copy(cudaStream_t stream, bool to_gpu, bool from_gpu, bool pageable, size_t bytes);
// A collective, or what a group of sends and receives moves one way; `between` nodes, or within one.
double seconds_of_collective(const char* name, size_t bytes, int ranks);
double seconds_of_transfers(size_t bytes, bool between);

// Ranks that are processes: where they meet, their clocks stand, because a real host would not wait there. Then a
// collective begins when the last rank's stream is ready.
class Standing {
 public:
  Standing();
  ~Standing();
};
double ready(cudaStream_t stream);  // when work that is put on the stream now would begin
void put_after_ranks(cudaStream_t stream, const char* name, double seconds, double own, double last, int slowest);

}  // namespace nullgpu
