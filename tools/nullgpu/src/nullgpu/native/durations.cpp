// How long each launch lasts. In the first updates Python tells it (clock.py), because it sees operations with their
// shapes. Afterwards the duration is looked up here by what the library sees, in any thread, and Python sees nothing:
// so it takes no time of the host.
//
// What the library sees may not say all: a kernel with a fixed grid works on tensors of any size. So a launch is looked
// up together with the launches before it in its thread, and only if it never came after these, alone. A key that
// stands for several durations has their mean, so their sum is right.
#include <cxxabi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <map>
#include <unordered_map>
#include <vector>

#include "clock.h"

namespace nullgpu {

struct Launch {
  Stream* stream;
  const char* kernel;  // its name; each kernel and each function of a library has its own address
  double size;         // grows like its work; 0: not known
  uint64_t keys[3];    // alone, after the one before it, and after several
};
constexpr int KEYS = 3, LONG = 4;

// What this thread has launched.
static thread_local struct {
  uint64_t before[LONG] = {};  // the last launches, the newest first
  bool in_operation = false;
  std::vector<Launch> of_operation;
} here;

struct Mean {
  double seconds = 0;
  int64_t times = 0;
  const char* name = nullptr;  // of the operation
};
struct Kernel {  // its largest launch so far, for launches of other sizes
  double seconds = 0, size = 0;
  const char* name = nullptr;
  bool is_known = false;
};
static std::mutex lock;  // protects all below
static std::unordered_map<uint64_t, Mean> means;
static std::unordered_map<const char*, Kernel> kernels;
static std::map<std::string, int64_t> unknown;
static int64_t looked_up, scaled;

static Launch seen(Stream* stream, const char* kernel, uint64_t sizes, double size) {
  uint64_t alone = mix(mix(1, (uint64_t)(uintptr_t)kernel), sizes);
  uint64_t after_one = mix(mix(2, alone), here.before[0]), after_all = mix(3, alone);
  for (uint64_t one : here.before) after_all = mix(after_all, one);
  memmove(here.before + 1, here.before, sizeof here.before - sizeof *here.before);
  here.before[0] = alone;
  return {stream, kernel, size, {alone, after_one, after_all}};
}

// Remember that a launch takes so long.
static void learn(const Launch& it, double seconds, const char* name) {
  std::lock_guard<std::mutex> guard(lock);
  for (uint64_t key : it.keys) {
    Mean& mean = means[key];
    mean.seconds += seconds, ++mean.times, mean.name = name;
  }
  Kernel& kernel = kernels[it.kernel];
  if (!kernel.is_known || it.size >= kernel.size) kernel = {seconds, it.size, name, true};
}

// A kernel of which nothing is known: each thread reads and writes a vector of 16 bytes, as PyTorch's kernels for
// elements do.
static double guessed(const Launch& it) { return settings().shortest + 32 * it.size / settings().bandwidth; }

// The name of a kernel in C++, without its scope and its arguments.
static std::string readable(const char* kernel) {
  int failed = 0;
  char* text = abi::__cxa_demangle(kernel, nullptr, nullptr, &failed);
  std::string name = text ? text : kernel;
  free(text);
  name = name.substr(0, name.find('<'));
  size_t scope = name.rfind("::");
  return scope == std::string::npos ? name : name.substr(scope + 2);
}

static std::pair<double, const char*> look_up(const Launch& it) {
  std::lock_guard<std::mutex> guard(lock);
  ++looked_up;
  for (int i = KEYS; i-- > 0;)
    if (auto found = means.find(it.keys[i]); found != means.end())
      return {found->second.seconds / (double)found->second.times, found->second.name};
  Kernel& kernel = kernels[it.kernel];
  if (!kernel.name) kernel.name = kept(readable(it.kernel).c_str());
  if (!kernel.is_known) {
    ++unknown[kernel.name];
    return {guessed(it), kernel.name};
  }
  ++scaled;
  double shortest = std::min(kernel.seconds, settings().shortest), ratio = kernel.size ? it.size / kernel.size : 1;
  return {shortest + (kernel.seconds - shortest) * ratio, kernel.name};
}

void put_launch(Stream* stream, const char* kernel, uint64_t sizes, double size) {
  Launch it = seen(stream, kernel, sizes, size);
  if (here.in_operation) {
    here.of_operation.push_back(it);
    return;
  }
  auto [seconds, name] = look_up(it);
  put_kept(stream, seconds, KERNEL, name);
}

}  // namespace nullgpu

using namespace nullgpu;

// ---- for clock.py: an operation of this thread begins; how many launches it has made; and how long they last together

EXPORT void nullgpu_operation_begins() {
  here.of_operation.clear();
  here.in_operation = true;
}
EXPORT int nullgpu_operation_ends() {
  here.in_operation = false;
  return (int)here.of_operation.size();
}
EXPORT void nullgpu_operation_lasts(double seconds, const char* name) {
  const char* its = kept(name);
  double each = seconds / (double)std::max<size_t>(here.of_operation.size(), 1);
  for (const Launch& it : here.of_operation) {
    learn(it, each, its);
    put_kept(it.stream, each, KERNEL, its);
  }
  here.of_operation.clear();
}

EXPORT int nullgpu_known_kernels() {  // the number of kernels that have been launched, whatever is known of them
  std::lock_guard<std::mutex> guard(lock);
  return (int)kernels.size();
}
EXPORT void nullgpu_count_launches(int64_t* all, int64_t* of_other_sizes) {  // those that were looked up
  std::lock_guard<std::mutex> guard(lock);
  *all = looked_up, *of_other_sizes = scaled;
}
EXPORT void nullgpu_forget_counts() {  // of launches that were looked up
  std::lock_guard<std::mutex> guard(lock);
  looked_up = scaled = 0;
  unknown.clear();
}
EXPORT void nullgpu_unknown(const char* file) {  // a line for each kernel of which nothing was known
  std::lock_guard<std::mutex> guard(lock);
  FILE* out = fopen(file, "w");
  if (!out) return;
  for (const auto& [name, times] : unknown) fprintf(out, "%lld\t%s\n", (long long)times, name.c_str());
  fclose(out);
}
