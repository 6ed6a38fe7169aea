// libnccl: data really move between the ranks of one machine. Each call blocks until all ranks have made it.
//
// Real NCCL waits on the GPU, and the CPU goes on. If ranks call different collectives, real NCCL hangs; here they get
// an error that names both calls.
#include <nccl.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <functional>
#include <optional>

#include "clock.h"
#include "gpu.h"
#include "reduce.h"
#include "shared.h"

using namespace nullgpu;

// The ranks of a communicator of one process (DataParallel): a call is done when the last of them has made it.
struct Clique {
  std::vector<const char*> from;
  std::vector<char*> to;
  size_t calls = 0;
};

struct ncclComm {
  int ranks, rank, device;
  std::string id;
  Shared* shared = nullptr;  // ranks that are processes of this machine
  Clique* clique = nullptr;  // ranks of this process
  bool imaginary = false;    // with --world: the other ranks do not exist, and count as copies of this one
  bool between = false;      // its ranks are on several nodes
  int splits = 0;
  std::string error = {};
  struct {
    bool open;
    cudaStream_t stream;
    size_t bytes;
  } timed = {};  // with a clock: the collective that is being called, until exchange() knows when it begins
};

static thread_local std::string last_error;
static std::vector<Operation> own_operations;
static std::mutex lock;

static ncclResult_t fail(ncclComm_t comm, ncclResult_t code, const std::string& why) {
  last_error = why;
  if (comm) comm->error = why;
  fprintf(stderr, "nullgpu: NCCL: %s\n", why.c_str());
  return code;
}

static Operation operation(ncclRedOp_t op) {
  if (op < ncclNumOps) return {op, false, 1};
  std::lock_guard<std::mutex> guard(lock);
  return own_operations[(size_t)op - (size_t)ncclNumOps];
}

// ---- communicators

// All ranks leave with the same time: that of the last one, for which the others have waited.
static bool set_clocks(Shared* shared, int ranks, int rank) {
  Standing standing;
  double own = simulated_now(), last = own;
  shared->header().clock[rank] = own;
  if (!shared->barrier("joining")) return false;
  for (int other = 0; other < ranks; ++other) last = std::max(last, shared->header().clock[other]);
  pass(last - own);
  return true;
}

static ncclResult_t join(ncclComm_t* comm, int ranks, const std::string& id, int rank) {
  auto* made = new ncclComm{ranks, rank, current_device(), id};
  made->between = ranks > settings().gpus;
  if (settings().world) {
    made->imaginary = ranks > 1;
  } else if (ranks > 1) {
    std::string why;
    long gpu = (long)(std::hash<std::string>()(settings().host) << 8 >> 1) + devices().gpu[current_device()];
    made->shared = Shared::open(id.c_str(), ranks, rank, gpu, &why);
    if (!made->shared) return fail(nullptr, ncclSystemError, why);
    for (int other = 0; other < ranks; ++other)
      if (other != rank && made->shared->header().gpu[other] == gpu) {
        char text[128];
        snprintf(text, sizeof text, "Duplicate GPU detected : rank %d and rank %d both on CUDA device %x000", rank,
                 other, 1 + devices().gpu[current_device()]);
        return fail(nullptr, ncclInvalidUsage, text);
      }
    if (has_clock() && !set_clocks(made->shared, ranks, rank))
      return fail(nullptr, ncclSystemError, made->shared->why());
  }
  *comm = made;
  return ncclSuccess;
}
EXPORT ncclResult_t ncclGetVersion(int* version) {
  *version = NCCL_VERSION_CODE;
  return ncclSuccess;
}
EXPORT ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  static std::atomic<int> number{0};
  timespec t;
  clock_gettime(CLOCK_REALTIME, &t);
  memset(id, 0, sizeof *id);
  snprintf(id->internal, sizeof id->internal, "%d_%ld_%d", getpid(), t.tv_nsec, ++number);
  return ncclSuccess;
}
EXPORT ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int ranks, ncclUniqueId id, int rank, ncclConfig_t*) {
  return join(comm, ranks, id.internal, rank);
}
EXPORT ncclResult_t ncclCommInitRank(ncclComm_t* comm, int ranks, ncclUniqueId id, int rank) {
  return join(comm, ranks, id.internal, rank);
}
EXPORT ncclResult_t ncclCommInitRankScalable(ncclComm_t* comm, int ranks, int rank, int, ncclUniqueId* ids,
                                             ncclConfig_t*) {
  return join(comm, ranks, ids[0].internal, rank);
}
EXPORT ncclResult_t ncclCommInitAll(ncclComm_t* comms, int number, const int* devices) {
  auto* clique = new Clique{std::vector<const char*>((size_t)number), std::vector<char*>((size_t)number)};
  for (int i = 0; i < number; ++i) {
    comms[i] = new ncclComm{number, i, devices ? devices[i] : i, ""};
    comms[i]->clique = clique;
  }
  return ncclSuccess;
}
EXPORT ncclResult_t ncclCommCount(const ncclComm_t comm, int* ranks) {
  *ranks = comm->ranks;
  return ncclSuccess;
}
EXPORT ncclResult_t ncclCommUserRank(const ncclComm_t comm, int* rank) {
  *rank = comm->rank;
  return ncclSuccess;
}
EXPORT ncclResult_t ncclCommCuDevice(const ncclComm_t comm, int* device) {
  *device = comm->device;
  return ncclSuccess;
}
EXPORT ncclResult_t ncclCommGetAsyncError(ncclComm_t, ncclResult_t* error) {
  *error = ncclSuccess;
  return ncclSuccess;
}
EXPORT ncclResult_t ncclCommAbort(ncclComm_t comm) {
  if (comm->shared) comm->shared->abort();
  return ncclSuccess;
}
EXPORT ncclResult_t ncclCommDestroy(ncclComm_t) { return ncclSuccess; }
EXPORT ncclResult_t ncclCommFinalize(ncclComm_t) { return ncclSuccess; }
EXPORT ncclResult_t ncclCommRegister(const ncclComm_t, void*, size_t, void** handle) {
  *handle = nullptr;
  return ncclSuccess;
}
EXPORT ncclResult_t ncclCommDeregister(const ncclComm_t, void*) { return ncclSuccess; }
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 30, 0)
EXPORT ncclResult_t ncclCommMemStats(ncclComm_t, ncclCommMemStat_t, uint64_t* value) {
  *value = 0;
  return ncclSuccess;
}
#endif
EXPORT const char* ncclGetErrorString(ncclResult_t code) {
  switch (code) {
    case ncclSuccess:
      return "no error";
    case ncclSystemError:
      return "unhandled system error (run with NCCL_DEBUG=INFO for details)";
    case ncclInvalidUsage:
      return "invalid usage (run with NCCL_DEBUG=WARN for details)";
    case ncclRemoteError:
      return "remote process exited or there was a network error";
    default:
      return "internal error - please report this issue to the NCCL developers";
  }
}
EXPORT const char* ncclGetLastError(const ncclComm_t comm) {
  return comm && !comm->error.empty() ? comm->error.c_str() : last_error.c_str();
}
EXPORT ncclResult_t ncclMemAlloc(void** pointer, size_t bytes) {
  return cudaMalloc(pointer, bytes) ? ncclUnhandledCudaError : ncclSuccess;
}
EXPORT ncclResult_t ncclMemFree(void* pointer) { return cudaFree(pointer) ? ncclUnhandledCudaError : ncclSuccess; }

EXPORT ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t* op, void* scalar, ncclDataType_t type, ncclScalarResidence_t,
                                             ncclComm_t) {
  Operation made{ncclSum, true, 1};
  switch (type) {
    case ncclFloat32:
      made.factor = *static_cast<float*>(scalar);
      break;
    case ncclFloat64:
      made.factor = *static_cast<double*>(scalar);
      break;
    case ncclFloat16:
      made.factor = (double)*static_cast<Float16*>(scalar);
      break;
    case ncclBfloat16:
      made.factor = (float)*static_cast<Bfloat16*>(scalar);
      break;
    default:
      return fail(nullptr, ncclInvalidArgument, "a sum of numbers times a factor is for floating point only");
  }
  std::lock_guard<std::mutex> guard(lock);
  own_operations.push_back(made);
  *op = (ncclRedOp_t)((size_t)ncclNumOps + own_operations.size() - 1);
  return ncclSuccess;
}
EXPORT ncclResult_t ncclRedOpDestroy(ncclRedOp_t, ncclComm_t) { return ncclSuccess; }

// ---- collectives

// Describe a call to the other ranks, and let them describe theirs; `put` writes this rank's chunk into its slot, and
// `get` reads those of all. Without values there is nothing to move, if it is not small.
static ncclResult_t exchange(ncclComm_t comm, const Call& call, size_t bytes,
                             const std::function<void(size_t, size_t)>& put,
                             const std::function<void(size_t, size_t)>& get) {
  Shared* shared = comm->shared;
  std::optional<Standing> standing;
  if (has_clock()) standing.emplace();
  double own = comm->timed.open ? ready(stream_of(comm->timed.stream)) : 0, last = own;
  int slowest = comm->rank;
  shared->header().call[comm->rank] = call;
  shared->header().call[comm->rank].ready = own;
  if (!is_done(bytes)) bytes = 0;
  for (size_t at = 0; at < bytes || at == 0; at += CHUNK) {
    size_t n = std::min(CHUNK, bytes - at);
    if (n) put(at, n);
    if (!shared->barrier(call.name)) return fail(comm, ncclRemoteError, shared->why());
    for (int rank = 0; at == 0 && rank < comm->ranks; ++rank) {
      const Call& other = shared->header().call[rank];
      if (other.ready > last) last = other.ready, slowest = rank;
      if (!strcmp(other.name, call.name) && other.bytes == call.bytes && other.type == call.type &&
          other.root == call.root)
        continue;
      char text[256];
      snprintf(text, sizeof text,
               "the ranks differ: rank %d calls %s with %zu bytes of %s (root %d), rank %d %s with %zu bytes of %s "
               "(root %d)",
               comm->rank, call.name, call.bytes, name_of((ncclDataType_t)call.type), call.root, rank, other.name,
               other.bytes, name_of((ncclDataType_t)other.type), other.root);
      return fail(comm, ncclInvalidUsage, text);
    }
    if (n) get(at, n);
    if (!shared->barrier(call.name)) return fail(comm, ncclRemoteError, shared->why());
  }
  standing.reset();
  if (comm->timed.open)
    put_after_ranks(stream_of(comm->timed.stream), call.name,
                    seconds_of_collective(call.name, comm->timed.bytes, comm->ranks, comm->between), own, last, slowest,
                    link(comm->between));
  comm->timed.open = false;
  return ncclSuccess;
}

static Call describe(const char* name, size_t bytes, ncclDataType_t type, int root = 0) {
  Call call{};
  snprintf(call.name, sizeof call.name, "%s", name);
  call.bytes = bytes, call.type = type, call.root = root;
  return call;
}

// Count a collective; whether it is only recorded into a graph.
static bool begin(ncclComm_t comm, const char* name, size_t bytes, cudaStream_t stream, bool is_transfer = false) {
  count(counters.collectives), count(counters.collective_bytes, (int64_t)bytes);
  observe(COLLECTIVE, name, (int64_t)bytes, false);
  bool only_recorded = record(stream);
  if (has_clock() && comm->ranks > 1 && !is_transfer) {
    if (comm->shared && !only_recorded)
      comm->timed = {true, stream, bytes};
    else
      put(stream_of(stream), seconds_of_collective(name, bytes, comm->ranks, comm->between), NETWORK, name, 0,
          link(comm->between));
  }
  if (!only_recorded) profile_launch((std::string("ncclDevKernel_") + name).c_str(), number_of(stream_of(stream)));
  return only_recorded;
}

static std::vector<const char*> slots(ncclComm_t comm) {
  std::vector<const char*> all;
  for (int rank = 0; rank < comm->ranks; ++rank) all.push_back(comm->shared->slot(rank));
  return all;
}
static void move(void* to, const void* from, size_t bytes) {
  if (to != from && is_done(bytes)) memmove(to, from, bytes);
}
static thread_local int group_depth = 0;
static thread_local struct {
  const char* from;
  size_t bytes;
} sent_in_group = {};  // by the broadcasts of this rank
// In a communicator of one process: note the pointers; true when all ranks have called.
static bool complete(ncclComm_t comm, const void* from, void* to) {
  comm->clique->from[(size_t)comm->rank] = static_cast<const char*>(from);
  comm->clique->to[(size_t)comm->rank] = static_cast<char*>(to);
  return ++comm->clique->calls % (size_t)comm->ranks == 0;
}
// The reduction of `from`, if all ranks of an imaginary world have the same.
static void reduce_copies(ncclComm_t comm, void* to, const void* from, size_t n, ncclDataType_t type, ncclRedOp_t op) {
  if (is_done(n * size_of(type)))
    reduce(static_cast<char*>(to), std::vector<const char*>((size_t)comm->ranks, static_cast<const char*>(from)), n,
           type, operation(op));
}

static ncclResult_t all_reduce(const char* name, const void* from, void* to, size_t n, ncclDataType_t type,
                               ncclRedOp_t op, int root, ncclComm_t comm,
                               cudaStream_t stream) {  // root: the only one that gets the result; -1: all
  size_t bytes = n * size_of(type);
  if (begin(comm, name, bytes, stream)) return ncclSuccess;
  if (comm->imaginary || comm->ranks == 1) return reduce_copies(comm, to, from, n, type, op), ncclSuccess;
  if (comm->clique) {
    if (!complete(comm, from, to)) return ncclSuccess;
    Clique& all = *comm->clique;
    std::vector<char> result(is_done(bytes) ? bytes : 0);
    if (!result.empty()) reduce(result.data(), all.from, n, type, operation(op));
    for (size_t rank = 0; rank < all.to.size(); ++rank)
      if (!result.empty() && (root < 0 || (int)rank == root)) memcpy(all.to[rank], result.data(), bytes);
    return ncclSuccess;
  }
  return exchange(
      comm, describe(name, bytes, type, root), bytes,
      [&](size_t at, size_t part) {
        memcpy(comm->shared->slot(comm->rank), static_cast<const char*>(from) + at, part);
      },
      [&](size_t at, size_t part) {
        if (root < 0 || root == comm->rank)
          reduce(static_cast<char*>(to) + at, slots(comm), part / size_of(type), type, operation(op));
      });
}
EXPORT ncclResult_t ncclAllReduce(const void* from, void* to, size_t n, ncclDataType_t type, ncclRedOp_t op,
                                  ncclComm_t comm, cudaStream_t stream) {
  return all_reduce("AllReduce", from, to, n, type, op, -1, comm, stream);
}
EXPORT ncclResult_t ncclReduce(const void* from, void* to, size_t n, ncclDataType_t type, ncclRedOp_t op, int root,
                               ncclComm_t comm, cudaStream_t stream) {
  return all_reduce("Reduce", from, to, n, type, op, root, comm, stream);
}
EXPORT ncclResult_t ncclBroadcast(const void* from, void* to, size_t n, ncclDataType_t type, int root, ncclComm_t comm,
                                  cudaStream_t stream) {
  size_t bytes = n * size_of(type);
  if (begin(comm, "Broadcast", bytes, stream)) return ncclSuccess;
  if (comm->imaginary || comm->ranks == 1) {
    if (comm->rank == root) sent_in_group = {static_cast<const char*>(from), bytes};
    // The new backend of torch 2.15 gathers by a group of broadcasts, one from each rank: the others send the same.
    if (comm->rank == root || (group_depth && sent_in_group.bytes == bytes)) move(to, sent_in_group.from, bytes);
    return ncclSuccess;
  }
  if (comm->clique) {
    if (complete(comm, from, to))
      for (char* target : comm->clique->to) move(target, comm->clique->from[(size_t)root], bytes);
    return ncclSuccess;
  }
  return exchange(
      comm, describe("Broadcast", bytes, type, root), bytes,
      [&](size_t at, size_t part) {
        if (comm->rank == root) memcpy(comm->shared->slot(root), static_cast<const char*>(from) + at, part);
      },
      [&](size_t at, size_t part) { memmove(static_cast<char*>(to) + at, comm->shared->slot(root), part); });
}
EXPORT ncclResult_t ncclBcast(void* data, size_t n, ncclDataType_t type, int root, ncclComm_t comm,
                              cudaStream_t stream) {
  return ncclBroadcast(data, data, n, type, root, comm, stream);
}
EXPORT ncclResult_t ncclAllGather(const void* from, void* to, size_t n, ncclDataType_t type, ncclComm_t comm,
                                  cudaStream_t stream) {
  size_t bytes = n * size_of(type);
  char* target = static_cast<char*>(to);
  if (begin(comm, "AllGather", bytes * (size_t)comm->ranks, stream)) return ncclSuccess;
  if (comm->imaginary || comm->ranks == 1) {
    for (size_t rank = 0; is_done(bytes * (size_t)comm->ranks) && rank < (size_t)comm->ranks; ++rank)
      move(target + rank * bytes, from, bytes);
    return ncclSuccess;
  }
  if (comm->clique) {
    if (complete(comm, from, to))
      for (char* one : comm->clique->to)
        for (size_t rank = 0; rank < (size_t)comm->ranks; ++rank)
          move(one + rank * bytes, comm->clique->from[rank], bytes);
    return ncclSuccess;
  }
  return exchange(
      comm, describe("AllGather", bytes, type), bytes,
      [&](size_t at, size_t part) {
        memcpy(comm->shared->slot(comm->rank), static_cast<const char*>(from) + at, part);
      },
      [&](size_t at, size_t part) {
        for (size_t rank = 0; rank < (size_t)comm->ranks; ++rank)
          memcpy(target + rank * bytes + at, comm->shared->slot((int)rank), part);
      });
}
EXPORT ncclResult_t ncclReduceScatter(const void* from, void* to, size_t n, ncclDataType_t type, ncclRedOp_t op,
                                      ncclComm_t comm, cudaStream_t stream) {
  size_t bytes = n * size_of(type), own = (size_t)comm->rank * bytes;
  const char* source = static_cast<const char*>(from);
  if (begin(comm, "ReduceScatter", bytes * (size_t)comm->ranks, stream)) return ncclSuccess;
  if (comm->imaginary || comm->ranks == 1) return reduce_copies(comm, to, source + own, n, type, op), ncclSuccess;
  if (comm->clique) return fail(comm, ncclInvalidUsage, "ReduceScatter in one process is not emulated");
  std::vector<char> mine(is_done(bytes) ? bytes : 0);  // the result may lie within what is sent
  for (int part_of = 0; part_of < comm->ranks; ++part_of) {
    ncclResult_t failed = exchange(
        comm, describe("ReduceScatter", bytes, type), bytes,
        [&](size_t at, size_t part) {
          memcpy(comm->shared->slot(comm->rank), source + (size_t)part_of * bytes + at, part);
        },
        [&](size_t at, size_t part) {
          if (part_of == comm->rank) reduce(mine.data() + at, slots(comm), part / size_of(type), type, operation(op));
        });
    if (failed) return failed;
    if (mine.empty()) break;  // nothing is moved: the ranks have met
  }
  if (!mine.empty()) memcpy(to, mine.data(), bytes);
  return ncclSuccess;
}

// With --world the other ranks do not say whether they are in the same group, so Python says how many are, and which is
// the last: of a color that it knows, or, with -1, of the group that it is making; 0 ranks end that.
struct Group {
  int ranks, last;
};
static std::map<int, Group> groups_of_colors;
EXPORT void nullgpu_group(int color, int ranks, int last) {
  std::lock_guard<std::mutex> guard(lock);
  groups_of_colors[color] = {ranks, last};
}
static Group group_of(int color, const ncclComm* all) {
  std::lock_guard<std::mutex> guard(lock);
  auto known = groups_of_colors.find(color);
  if (known == groups_of_colors.end()) known = groups_of_colors.find(-1);
  return known == groups_of_colors.end() || !known->second.ranks ? Group{all->ranks, all->ranks - 1} : known->second;
}

EXPORT ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t* made, ncclConfig_t*) {
  struct Choice {
    int color, key;
  };
  std::vector<Choice> all((size_t)comm->ranks, Choice{color, key});
  *made = nullptr;
  if (comm->shared) {
    ncclResult_t failed = exchange(
        comm, describe("CommSplit", sizeof(Choice), ncclInt8), sizeof(Choice),
        [&](size_t, size_t) { memcpy(comm->shared->slot(comm->rank), &all[(size_t)comm->rank], sizeof(Choice)); },
        [&](size_t, size_t) {
          for (int rank = 0; rank < comm->ranks; ++rank)
            memcpy(&all[(size_t)rank], comm->shared->slot(rank), sizeof(Choice));
        });
    if (failed) return failed;
  }
  int ranks = 0, rank = 0;
  for (int other = 0; other < comm->ranks; ++other) {
    const Choice& its = all[(size_t)other];
    if (its.color != color) continue;
    ++ranks;
    rank += its.key < key || (its.key == key && other < comm->rank);
  }
  Group group{ranks, 0};
  if (comm->imaginary) group = group_of(color, comm), rank = 0;  // this is rank 0, also of each of its groups
  std::string id = comm->id + "_" + std::to_string(++comm->splits) + "_" + std::to_string(color);
  if (color < 0) return ncclSuccess;  // NCCL_SPLIT_NOCOLOR is -1
  ncclResult_t failed = join(made, group.ranks, id, rank);
  if (!failed && comm->imaginary) (*made)->between = group.last >= settings().gpus;
  return failed;
}

// ---- from one rank to another: kept until the group ends, so that sends and receives cannot wait for one another

struct Transfer {
  ncclComm_t comm;
  bool is_send;
  char* data;
  size_t bytes, done;
  int peer;
  cudaStream_t stream;
  double sender_ready = 0;  // with a clock, of a receive
};
static thread_local std::vector<Transfer> transfers;

// Move what can be moved now; whether something was.
static bool progress(Transfer& it) {
  int rank = it.comm->rank;
  Shared* shared = it.comm->shared;
  Mail& mail = it.is_send ? shared->mail(rank, it.peer) : shared->mail(it.peer, rank);
  char* letter = it.is_send ? shared->letter(rank, it.peer) : shared->letter(it.peer, rank);
  if (it.is_send == (mail.full != 0)) return false;
  size_t n = is_done(it.bytes) ? std::min(MAIL, it.bytes - it.done) : it.bytes;
  if (it.is_send) {
    if (is_done(it.bytes)) memcpy(letter, it.data + it.done, n);
    mail.bytes = n;
    if (has_clock()) mail.ready = ready(stream_of(it.stream));
    mail.full = 1;
  } else {
    n = mail.bytes;
    if (!it.done) it.sender_ready = mail.ready;
    if (is_done(it.bytes)) memcpy(it.data + it.done, letter, std::min(n, it.bytes - it.done));
    mail.full = 0;
  }
  it.done += n;
  return true;
}

// The time of a group: what it moves in a stream is one kernel, which sends and receives at once. It begins when this
// rank and those that send to it are ready. (A real send also waits for a receiver, if it does not fit into buffers.)
struct Kernel {
  ncclComm_t comm;
  cudaStream_t stream;
  size_t sent, received;
  double own, last;
  int slowest;
};
static std::vector<Kernel> kernels_of(const std::vector<Transfer>& all) {
  std::vector<Kernel> made;
  for (const Transfer& it : all) {
    if (it.peer == it.comm->rank) continue;
    Kernel* kernel = nullptr;
    for (Kernel& other : made)
      if (other.comm == it.comm && other.stream == it.stream) kernel = &other;
    if (!kernel) {
      double own = ready(stream_of(it.stream));
      made.push_back({it.comm, it.stream, 0, 0, own, own, it.comm->rank});
      kernel = &made.back();
    }
    (it.is_send ? kernel->sent : kernel->received) += it.bytes;
    if (it.sender_ready > kernel->last) kernel->last = it.sender_ready, kernel->slowest = it.peer;
  }
  return made;
}

static ncclResult_t finish_transfers() {
  std::optional<Standing> standing;
  if (has_clock()) standing.emplace();
  std::vector<Transfer> open = std::move(transfers);
  transfers.clear();
  for (size_t i = 0; i < open.size(); ++i)  // a rank that sends to itself
    for (size_t j = 0; j < open.size(); ++j) {
      Transfer &send = open[i], &receive = open[j];
      if (!send.is_send || receive.is_send || send.comm != receive.comm || send.peer != send.comm->rank ||
          receive.peer != send.peer)
        continue;
      if (send.done == send.bytes || receive.done == receive.bytes) continue;
      move(receive.data, send.data, send.bytes);
      send.done = send.bytes, receive.done = receive.bytes;
    }
  double started = now();
  while (true) {
    bool moved = false, left = false;
    std::vector<std::pair<ncclComm_t, std::pair<bool, int>>>
        busy;  // in order: one letter at a time for each pair of ranks
    for (Transfer& it : open) {
      if (it.done >= it.bytes || !it.comm->shared) continue;
      left = true;
      auto lane = std::make_pair(it.comm, std::make_pair(it.is_send, it.peer));
      bool waits = false;
      for (auto& other : busy) waits |= other == lane;
      busy.push_back(lane);
      if (!waits && progress(it)) moved = true;
    }
    if (!left) break;
    if (moved) {
      started = now();
      continue;
    }
    const Transfer* first = nullptr;
    for (const Transfer& it : open)
      if (it.done < it.bytes && it.comm->shared) {
        first = &it;
        break;
      }
    if (!first->comm->shared->pause(first->is_send ? "Send" : "Recv", started, {first->peer}))
      return fail(first->comm, ncclRemoteError, first->comm->shared->why());
  }
  if (!has_clock()) return ncclSuccess;
  std::vector<Kernel> kernels = kernels_of(open);
  standing.reset();
  for (const Kernel& it : kernels)
    put_after_ranks(stream_of(it.stream), it.sent ? (it.received ? "SendRecv" : "Send") : "Recv",
                    seconds_of_transfers(std::max(it.sent, it.received), it.comm->between), it.own, it.last,
                    it.slowest);
  return ncclSuccess;
}

static ncclResult_t transfer(bool is_send, const void* data, size_t n, ncclDataType_t type, int peer, ncclComm_t comm,
                             cudaStream_t stream) {
  size_t bytes = n * size_of(type);
  if (begin(comm, is_send ? "Send" : "Recv", bytes, stream, true)) {
    if (has_clock() && peer != comm->rank)
      put(stream_of(stream), seconds_of_transfers(bytes, comm->between), NETWORK, is_send ? "Send" : "Recv");
    return ncclSuccess;
  }
  transfers.push_back({comm, is_send, static_cast<char*>(const_cast<void*>(data)), bytes, 0, peer, stream});
  return group_depth ? ncclSuccess : finish_transfers();
}
EXPORT ncclResult_t ncclSend(const void* data, size_t n, ncclDataType_t type, int peer, ncclComm_t comm,
                             cudaStream_t stream) {
  return transfer(true, data, n, type, peer, comm, stream);
}
EXPORT ncclResult_t ncclRecv(void* data, size_t n, ncclDataType_t type, int peer, ncclComm_t comm,
                             cudaStream_t stream) {
  return transfer(false, data, n, type, peer, comm, stream);
}
EXPORT ncclResult_t ncclGroupStart() {
  if (!group_depth++) sent_in_group = {};
  return ncclSuccess;
}
EXPORT ncclResult_t ncclGroupEnd() { return --group_depth > 0 ? ncclSuccess : finish_transfers(); }

// What NCCL has functions for since 2.28, made of transfers, as PyTorch did before.
EXPORT ncclResult_t ncclAlltoAll(const void* from, void* to, size_t n, ncclDataType_t type, ncclComm_t comm,
                                 cudaStream_t stream) {
  size_t bytes = n * size_of(type);
  ncclGroupStart();
  for (int peer = 0; peer < comm->ranks; ++peer) {
    transfer(true, static_cast<const char*>(from) + (size_t)peer * bytes, n, type, peer, comm, stream);
    transfer(false, static_cast<char*>(to) + (size_t)peer * bytes, n, type, peer, comm, stream);
  }
  return ncclGroupEnd();
}
EXPORT ncclResult_t ncclGather(const void* from, void* to, size_t n, ncclDataType_t type, int root, ncclComm_t comm,
                               cudaStream_t stream) {
  size_t bytes = n * size_of(type);
  ncclGroupStart();
  transfer(true, from, n, type, root, comm, stream);
  for (int peer = 0; comm->rank == root && peer < comm->ranks; ++peer)
    transfer(false, static_cast<char*>(to) + (size_t)peer * bytes, n, type, peer, comm, stream);
  return ncclGroupEnd();
}
EXPORT ncclResult_t ncclScatter(const void* from, void* to, size_t n, ncclDataType_t type, int root, ncclComm_t comm,
                                cudaStream_t stream) {
  size_t bytes = n * size_of(type);
  ncclGroupStart();
  for (int peer = 0; comm->rank == root && peer < comm->ranks; ++peer)
    transfer(true, static_cast<const char*>(from) + (size_t)peer * bytes, n, type, peer, comm, stream);
  transfer(false, to, n, type, root, comm, stream);
  return ncclGroupEnd();
}
