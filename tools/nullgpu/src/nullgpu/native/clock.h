// A clock for GPUs that compute nothing: how long they would have been busy, and what waits for them.
//
// Every stream is a queue. Work that is put on it begins when the host has put it there and the work before it has
// ended, and it lasts as long as somebody says: durations.cpp for kernels, which Python (clock.py) has told it in the
// first updates, copies and collectives here.
// The host's time is real. So what waits for the GPU really waits, and a loader's workers go on meanwhile.
#pragma once
#include "gpu.h"

namespace nullgpu {

bool has_clock();           // whether --clock was given
double simulated_now();     // seconds since the start of this process, without the time in which the clock stood
void pass(double seconds);  // let the host have needed so many seconds more
void pass_launch();         // the same, for a launch by the real driver

// What the streams of a GPU share: one that has work for it leaves half of it to another one that has, too.
enum Resource { NOTHING, MULTIPROCESSORS, LINK_WITHIN, LINK_BETWEEN };

// Put work on a stream. It does not begin before `earliest`. Kernels share the multiprocessors.
void put(Stream* stream, double seconds, Work kind, const char* name, double earliest = 0, Resource of = NOTHING);
const char* kept(const char* name);  // the same name, which stays
void put_kept(Stream* stream, double seconds, Work kind, const char* name, double earliest = 0,
              Resource of = NOTHING);                                              // with such a name
void put_launch(Stream* stream, const char* kernel, uint64_t sizes, double size);  // see durations.cpp
void put_copy(Stream* stream, const Way& way, size_t bytes);
void put_fill(Stream* stream, size_t bytes);
void put_graph(Stream* stream, const Graph* graph);
void forget(Stream* stream);  // before it is destroyed

// The end of all work that was put on a stream so far, which events remember.
struct Moment {
  double time = 0;
  int64_t span = -1;  // the work that ends then; -1: there was none left to wait for
};
double end_of(Stream* stream);
Moment moment_of(Stream* stream);
void wait_for(Stream* stream, const Moment& moment);  // let what is put on a stream from now on begin after it
void wait_until(double time, const char* what);       // the host waits

// A collective, or what a group of sends and receives moves one way; `between` nodes, or within one.
double seconds_of_collective(const char* name, size_t bytes, int ranks, bool between);
inline Resource link(bool between) { return between ? LINK_BETWEEN : LINK_WITHIN; }  // which collectives share
double seconds_of_transfers(size_t bytes, bool between);

// Ranks that are processes: where they meet, their clocks stand, because a real host would not wait there. Then a
// collective begins when the last rank's stream is ready.
class Standing {
 public:
  Standing();
  ~Standing();
};
double ready(Stream* stream);  // when work that is put on the stream now would begin
void put_after_ranks(Stream* stream, const char* name, double seconds, double own, double last, int slowest,
                     Resource of = NOTHING);

}  // namespace nullgpu
