// Settings, counters and memory of the null GPUs.
#include "gpu.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

namespace nullgpu {

Counters counters{};

// ---- settings

// The number of a setting in NULLGPU_SETTINGS, which is JSON without spaces: "gpus":2, "values":true.
static double number(const char* name) {
  const char* text = getenv("NULLGPU_SETTINGS");
  const char* found = text ? strstr(text, ("\"" + std::string(name) + "\":").c_str()) : nullptr;
  if (!found) return 0;
  found += strlen(name) + 3;
  return *found == 't' ? 1 : atof(found);
}

// Which GPUs CUDA_VISIBLE_DEVICES shows: numbers, in order; the list ends at the first one that does not exist.
static void choose_gpus(Settings& s) {
  const char* visible = getenv("CUDA_VISIBLE_DEVICES");
  if (!visible) {
    for (int i = 0; i < s.gpus; ++i) s.number[s.visible++] = i;
    return;
  }
  while (*visible && s.visible < MOST_GPUS) {
    char* end;
    long n = strtol(visible, &end, 10);
    if (!strncmp(visible, "GPU-", 4)) {  // the identifier of a GPU: its last two characters are its number
      end = const_cast<char*>(visible) + strcspn(visible, ",");
      n = end - visible > 2 ? strtol(end - 2, nullptr, 16) : -1;
    } else if (end == visible) {
      return;
    }
    if (n < 0 || n >= s.gpus) return;
    s.number[s.visible++] = (int)n;
    visible = *end == ',' ? end + 1 : end;
  }
}

static std::string name_of_host() {
  for (const char* name : {"NCCL_HOSTID", "SLURMD_NODENAME", "GROUP_RANK"})
    if (const char* value = getenv(name)) return value;
  return "";
}

const Settings& settings() {
  static const Settings all = [] {
    Settings s{};
    read(s, number);
    choose_gpus(s);
    s.memory = (size_t)(s.gb * (1 << 30));
    s.largest_copy = 1 << 20;
    s.host = name_of_host();
    return s;
  }();
  return all;
}

// ---- what Python reads and sets

using Observer = void (*)(int kind, const char* name, int64_t bytes, int pageable);
static std::atomic<Observer> observer{nullptr};
static std::atomic<int> observed{0};         // a bit for each kind
static thread_local bool observing = false;  // the observer itself may wait or copy

void observe(Notice notice, const char* name, int64_t bytes, bool pageable) {
  Observer call = observer;
  if (!call || observing || !(observed & 1 << notice)) return;
  observing = true;
  call(notice, name, bytes, pageable);
  observing = false;
}

EXPORT Counters* nullgpu_counters() { return &counters; }
EXPORT void nullgpu_observe(Observer call, int kinds) {
  observed = 0;
  observer = call;
  observed = kinds;
}
EXPORT int nullgpu_gpus() { return settings().visible; }

void missing(const char* name) {
  observe(MISSING, name, 0, false);
  fprintf(stderr,
          "nullgpu: error: %s was called, which the null GPU does not have (nullgpu's README says how to add it)\n",
          name);
  fflush(stderr);
  _exit(70);
}

// ---- memory

static std::mutex lock;
static std::map<uintptr_t, Block> blocks;
static int64_t charged[MOST_GPUS];

void* reserve(size_t size) {
  void* p = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return p == MAP_FAILED ? nullptr : p;
}

void charge(int device, int64_t bytes) { __atomic_fetch_add(&charged[device], bytes, __ATOMIC_RELAXED); }
size_t used(int device) { return (size_t)__atomic_load_n(&charged[device], __ATOMIC_RELAXED); }
bool fits(int device, size_t bytes) { return used(device) + bytes <= settings().memory; }

static unsigned long long from_proc(const char* path, const char* format) {  // the number in the first line that fits
  FILE* file = fopen(path, "r");
  char line[128];
  unsigned long long number = ~0ull;
  while (file && fgets(line, sizeof line, file))
    if (sscanf(line, format, &number) == 1) break;
  if (file) fclose(file);
  return number;
}

// With values, the memory of the GPUs is in RAM. Linux kills a process that uses more than there is, without a message.
// Memory that is allocated but not yet written to still counts as available, so it is added to what is needed.
void end_if_host_is_full(size_t bytes) {
  static std::atomic<size_t> since_check{0};
  constexpr size_t CHECK_EACH = 64 << 20, RESERVE = 256 << 20;
  if (!settings().values || (since_check += bytes) < CHECK_EACH) return;
  since_check = 0;
  size_t left = (size_t)from_proc("/proc/meminfo", "MemAvailable: %llu") << 10;
  size_t resident = (size_t)from_proc("/proc/self/status", "VmRSS: %llu") << 10, allocated = 0;
  for (int device = 0; device < settings().visible; ++device) allocated += used(device);
  size_t needed = bytes + (allocated > resident ? allocated - resident : 0);
  if (needed + RESERVE < left) return;
  fprintf(stderr,
          "nullgpu: error: with --values the memory of the GPUs is memory of this machine, which has %.1f GB left, "
          "and %.1f GB more are needed: take a smaller model or batch, or leave out --values\n",
          (double)left / 1e9, (double)needed / 1e9);
  fflush(stderr);
  _exit(2);
}

cudaError_t allocate(void** pointer, size_t size, bool on_host) {
  *pointer = nullptr;
  int device = current_device();
  if (size == 0) return cudaSuccess;
  if (!on_host && !fits(device, size)) return error(cudaErrorMemoryAllocation, "cudaMalloc");
  if (!on_host) end_if_host_is_full(size);
  if (!(*pointer = reserve(size))) return error(cudaErrorMemoryAllocation, "mmap");
  remember(*pointer, {size, device, on_host, true});
  if (!on_host) charge(device, (int64_t)size);
  return cudaSuccess;
}

cudaError_t release(void* pointer) {
  if (!pointer) return cudaSuccess;
  std::lock_guard<std::mutex> guard(lock);
  auto found = blocks.find((uintptr_t)pointer);
  if (found == blocks.end()) return error(cudaErrorInvalidValue, "cudaFree");
  Block block = found->second;
  blocks.erase(found);
  if (block.mapped) munmap(pointer, block.size);
  if (!block.on_host) charge(block.device, -(int64_t)block.size);
  return cudaSuccess;
}

void remember(void* pointer, Block block) {
  std::lock_guard<std::mutex> guard(lock);
  blocks[(uintptr_t)pointer] = block;
}

void forget(void* pointer) {
  std::lock_guard<std::mutex> guard(lock);
  blocks.erase((uintptr_t)pointer);
}

bool find(const void* pointer, uintptr_t* start, Block* block) {
  std::lock_guard<std::mutex> guard(lock);
  auto after = blocks.upper_bound((uintptr_t)pointer);
  if (after == blocks.begin()) return false;
  auto& [first, found] = *std::prev(after);
  if ((uintptr_t)pointer >= first + found.size) return false;
  if (start) *start = first;
  if (block) *block = found;
  return true;
}

bool is_done(size_t bytes) { return bytes && (settings().values || bytes <= settings().largest_copy); }

Way way_of(const void* to, const void* from) {
  Block source{}, target{};
  bool known_source = find(from, nullptr, &source), known_target = find(to, nullptr, &target);
  bool from_gpu = known_source && !source.on_host, to_gpu = known_target && !target.on_host;
  return {from_gpu, to_gpu, from_gpu != to_gpu && !(known_source && known_target)};
}

void copy(void* to, const void* from, size_t bytes, const Way& way) {
  if (way.from_gpu && way.to_gpu) {
    count(counters.copies_on_gpu);
  } else if (way.to_gpu) {
    count(counters.copies_to_gpu), count(counters.bytes_to_gpu, (int64_t)bytes);
  } else if (way.from_gpu) {
    count(counters.copies_from_gpu), count(counters.bytes_from_gpu, (int64_t)bytes);
  }
  if (way.pageable) count(counters.pageable_copies);
  if (way.from_gpu != way.to_gpu) observe(COPY, way.to_gpu ? "to" : "from", (int64_t)bytes, way.pageable);
  if (is_done(bytes) || (!way.to_gpu && bytes)) memmove(to, from, bytes);  // what the CPU reads is always real: zeros
}

}  // namespace nullgpu
