// Memory that the ranks of a communicator share: a file in /dev/shm, which rank 0 removes when all have opened it.
#pragma once
#include <nccl.h>
#include <sys/types.h>

#include <atomic>
#include <cstddef>
#include <string>
#include <vector>

#include "interface.h"

namespace nullgpu {

constexpr size_t CHUNK = 1 << 20, MAIL = 256 << 10;

// What a rank does, for the others to compare with.
struct Call {
  char name[24];
  size_t bytes;
  int type, operation, root;
  double ready;  // with a clock: when its stream is
};

struct Mail {  // from one rank to another: a chunk at a time
  std::atomic<int> full;
  size_t bytes;
  double ready;  // with a clock: when the stream of the sender was
};

struct SharedHeader {
  std::atomic<int> arrived, round, aborted;
  pid_t process[MOST_RANKS];
  long gpu[MOST_RANKS];
  double clock[MOST_RANKS];
  Call call[MOST_RANKS];
  Mail mail[MOST_RANKS * MOST_RANKS];
};

class Shared {
 public:
  // Wait until all ranks are here. On failure, why() says why.
  static Shared* open(const char* id, int ranks, int rank, long gpu, std::string* why);

  char* slot(int rank) { return slots_ + (size_t)rank * CHUNK; }
  Mail& mail(int from, int to) { return header_->mail[from * MOST_RANKS + to]; }
  char* letter(int from, int to) { return letters_ + ((size_t)from * ranks_ + to) * MAIL; }
  SharedHeader& header() { return *header_; }

  // Wait for all ranks; false if one is gone, or does not come in time. `doing` is for the message.
  bool barrier(const char* doing);
  // Wait a moment; false if there is no use in waiting any longer.
  bool pause(const char* doing, double started, const std::vector<int>& waited_for);
  void abort() { header_->aborted = 1; }
  const std::string& why() const { return why_; }

 private:
  SharedHeader* header_;
  char *letters_, *slots_;
  int ranks_, rank_;
  std::string why_;
};

double now();  // in seconds

}  // namespace nullgpu
