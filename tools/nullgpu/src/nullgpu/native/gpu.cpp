// Settings, counters and memory of the null GPUs.
#include "gpu.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>

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

static std::string name_of_host() {
  for (const char* name : {"NCCL_HOSTID", "SLURMD_NODENAME", "GROUP_RANK"})
    if (const char* value = getenv(name)) return value;
  return "";
}

const Settings& settings() {
  static const Settings all = [] {
    Settings s{};
    read(s, number);
    s.memory = (size_t)(s.gb * (1 << 30));
    s.largest_copy = 1 << 20;
    s.host = name_of_host();
    return s;
  }();
  return all;
}

// ---- the GPUs that this process sees

std::string uuid_of(int gpu) {  // its first bytes differ, because people name a GPU by the beginning
  std::string bytes(16, '\0');
  bytes[0] = 'N', bytes[1] = (char)gpu;
  return bytes;
}

std::string uuid_text(int gpu) {  // as nvidia-smi -L and CUDA_VISIBLE_DEVICES have it
  std::string text = "GPU-";
  char two[3];
  int at = 0;
  for (char byte : uuid_of(gpu)) {
    if (at == 4 || at == 6 || at == 8 || at == 10) text += '-';
    snprintf(two, sizeof two, "%02x", (unsigned char)byte);
    text += two;
    ++at;
  }
  return text;
}

std::string pci_id(int gpu) {
  char text[16];
  snprintf(text, sizeof text, "0000:%02X:00.0", 1 + gpu);
  return text;
}

// The GPU that an entry of CUDA_VISIBLE_DEVICES names; -1: none. Only the beginning of a number counts: "1st" is 1.
static int named(const std::string& entry, bool by_uuid) {
  if (!by_uuid) {
    char* end;
    long gpu = strtol(entry.c_str(), &end, 10);
    return end == entry.c_str() || gpu < 0 || gpu >= settings().gpus ? -1 : (int)gpu;
  }
  int found = -1;
  if (entry.compare(0, 4, "GPU-")) return -1;
  for (int gpu = 0; gpu < settings().gpus; ++gpu)
    if (!uuid_text(gpu).compare(0, entry.size(), entry)) {
      if (found >= 0) return -1;  // the beginning of more than one
      found = gpu;
    }
  return found;
}

// Numbers, or UUIDs or their beginnings, in order. The list ends at an entry that names no GPU. An entry that comes
// twice hides all of them. https://docs.nvidia.com/cuda/cuda-programming-guide, CUDA Environment Variables
static Devices choose_devices() {
  Devices chosen{};
  const char* variable = getenv("CUDA_VISIBLE_DEVICES");
  if (!variable) {
    for (int gpu = 0; gpu < settings().gpus; ++gpu) chosen.gpu[chosen.count++] = gpu;
    return chosen;
  }
  std::string list = variable;
  bool by_uuid = !list.compare(0, 4, "GPU-");
  for (size_t start = 0; start <= list.size();) {
    size_t end = std::min(list.find(',', start), list.size());
    int gpu = named(list.substr(start, end - start), by_uuid);
    if (gpu < 0) break;
    for (int i = 0; i < chosen.count; ++i)
      if (chosen.gpu[i] == gpu) return {};
    chosen.gpu[chosen.count++] = gpu;
    start = end + 1;
  }
  return chosen;
}

const Devices& devices() {
  static const Devices all = choose_devices();
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
EXPORT int nullgpu_gpus() { return choose_devices().count; }  // as things are now

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
static int64_t charged[MOST_GPUS];  // of each GPU of the machine, by this process

void* reserve(size_t size) {
  void* p = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return p == MAP_FAILED ? nullptr : p;
}

void charge(int device, int64_t bytes) { __atomic_fetch_add(&charged[devices().gpu[device]], bytes, __ATOMIC_RELAXED); }
size_t used_of(int gpu) { return (size_t)__atomic_load_n(&charged[gpu], __ATOMIC_RELAXED); }
size_t used(int device) { return used_of(devices().gpu[device]); }

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
static bool host_has(size_t bytes) {
  static std::atomic<size_t> since_check{0}, refused{0};
  constexpr size_t CHECK_EACH = 64 << 20, RESERVE = 256 << 20;
  if (!settings().values || (since_check += bytes) < CHECK_EACH) return true;
  size_t left = (size_t)from_proc("/proc/meminfo", "MemAvailable: %llu") << 10;
  size_t resident = (size_t)from_proc("/proc/self/status", "VmRSS: %llu") << 10, allocated = 0;
  for (int device = 0; device < devices().count; ++device) allocated += used(device);
  size_t needed = bytes + (allocated > resident ? allocated - resident : 0);
  if (needed + RESERVE < left) {
    since_check = 0;
    return true;
  }
  if (refused.exchange(bytes) != bytes)  // PyTorch frees what it can spare, and asks again
    fprintf(stderr,
            "nullgpu: note: out of memory, because with --values the memory of the GPUs is memory of this machine, "
            "which has %.1f GB left, and %.1f GB more are needed: take a smaller model or batch, or leave out "
            "--values\n",
            (double)left / 1e9, (double)needed / 1e9);
  return false;
}

bool fits(int device, size_t bytes) { return used(device) + bytes <= settings().memory && host_has(bytes); }

cudaError_t allocate(void** pointer, size_t size, bool on_host) {
  *pointer = nullptr;
  int device = current_device();
  if (size == 0) return cudaSuccess;
  if (!on_host && !fits(device, size)) return error(cudaErrorMemoryAllocation, "cudaMalloc");
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
