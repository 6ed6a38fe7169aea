// How the ranks of a communicator wait for one another.
#include "shared.h"

#include "gpu.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

namespace nullgpu {

double now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

Shared* Shared::open(const char* id, int ranks, int rank, long gpu, std::string* why) {
  if (ranks > MOST_RANKS) {
    *why = "more than " + std::to_string(MOST_RANKS) + " processes";
    return nullptr;
  }
  std::string path = std::string("/dev/shm/nullgpu_") + id;
  size_t letters = (size_t)ranks * ranks * MAIL, size = sizeof(SharedHeader) + letters + (size_t)ranks * CHUNK;
  int file = ::open(path.c_str(), O_RDWR | O_CREAT, 0600);
  void* memory = MAP_FAILED;
  if (file >= 0 && !ftruncate(file, (off_t)size))
    memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (file >= 0) close(file);
  if (memory == MAP_FAILED) {
    *why = path + " cannot be made: is /dev/shm full?";
    return nullptr;
  }
  Shared* it = new Shared;
  it->header_ = static_cast<SharedHeader*>(memory);
  it->letters_ = static_cast<char*>(memory) + sizeof(SharedHeader);
  it->slots_ = it->letters_ + letters;
  it->ranks_ = ranks, it->rank_ = rank;
  it->header_->process[rank] = getpid();
  it->header_->gpu[rank] = gpu;
  bool all_here = it->barrier("joining");
  if (rank == 0) unlink(path.c_str());
  if (!all_here) {
    *why = it->why_;
    return nullptr;
  }
  return it;
}

// Whether a process has ended; one whose parent has not waited for it yet (a zombie) has.
static bool has_ended(pid_t process) {
  if (kill(process, 0) && errno == ESRCH) return true;
  char path[32], state = 0;
  snprintf(path, sizeof path, "/proc/%d/stat", (int)process);
  FILE* file = fopen(path, "r");
  if (!file) return false;
  if (fscanf(file, "%*d (%*[^)]) %c", &state) != 1) state = 0;
  fclose(file);
  return state == 'Z';
}

bool Shared::pause(const char* doing, double started, const std::vector<int>& waited_for) {
  timespec moment{0, 50'000};
  nanosleep(&moment, nullptr);
  if (header_->aborted) {
    why_ = "the communicator was aborted";
    return false;
  }
  double seconds = now() - started;
  if (seconds < 0.2) return true;
  for (int rank : waited_for)
    if (header_->process[rank] && has_ended(header_->process[rank])) {
      why_ = "rank " + std::to_string(rank) + " has ended, while rank " + std::to_string(rank_) + " waits for it in " +
             doing;
      return false;
    }
  if (seconds < settings().timeout) return true;
  char text[200];
  snprintf(text, sizeof text, "rank %d has waited %.0f s in %s for other ranks, which do something else", rank_,
           seconds, doing);
  why_ = text;
  return false;
}

bool Shared::barrier(const char* doing) {
  int round = header_->round;
  if (++header_->arrived == ranks_) {
    header_->arrived = 0;
    ++header_->round;
    return true;
  }
  std::vector<int> others;
  for (int rank = 0; rank < ranks_; ++rank)
    if (rank != rank_) others.push_back(rank);
  double started = now();
  for (int spins = 0; header_->round == round; ++spins)
    if (spins > 200 && !pause(doing, started, others)) return false;
  return true;
}

}  // namespace nullgpu
