// Calls the library from several threads, and from two processes over NCCL, with a clock: the sanitizers of
// test_sanitizers.py watch. Exit status 0 if all calls succeed.
#include <cuda_runtime_api.h>
#include <nccl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include <thread>
#include <vector>

#define CHECK(call)                                                          \
  do {                                                                       \
    if (int code = (int)(call)) {                                            \
      fprintf(stderr, "%s:%d: %s is %d\n", __FILE__, __LINE__, #call, code); \
      exit(1);                                                               \
    }                                                                        \
  } while (0)

constexpr int THREADS = 4, ROUNDS = 200;
constexpr size_t BYTES = 1 << 16;

extern "C" void nullgpu_operation_begins();
extern "C" int nullgpu_operation_ends();
extern "C" void nullgpu_operation_lasts(double seconds, const char* name);
extern "C" double nullgpu_end(void* stream);
extern "C" void nullgpu_spans(const char* file);

static void launch(cudaStream_t stream) {
  static int kernel;
  nullgpu_operation_begins();
  CHECK(cudaLaunchKernel(&kernel, dim3(1), dim3(32), nullptr, 0, stream));
  nullgpu_operation_ends();
  nullgpu_operation_lasts(1e-6, "a kernel");
  CHECK(cudaLaunchKernel(&kernel, dim3(1), dim3(32), nullptr, 0, stream));  // its duration is looked up
}

// What a thread of a training does: it computes on one stream, copies on another, and each waits for the other.
static void work(int number, cudaStream_t shared) {
  CHECK(cudaSetDevice(number % 2));
  cudaStream_t computing, copying;
  cudaEvent_t copied, computed;
  CHECK(cudaStreamCreateWithFlags(&computing, cudaStreamNonBlocking));
  CHECK(cudaStreamCreateWithPriority(&copying, cudaStreamNonBlocking, -1));
  CHECK(cudaEventCreate(&copied));
  CHECK(cudaEventCreateWithFlags(&computed, cudaEventDisableTiming));
  void *on_gpu, *pinned;
  CHECK(cudaMalloc(&on_gpu, BYTES));
  CHECK(cudaMallocHost(&pinned, BYTES));
  std::vector<char> pageable(BYTES);
  for (int round = 0; round < ROUNDS; ++round) {
    CHECK(cudaMemcpyAsync(on_gpu, round % 8 ? pinned : pageable.data(), BYTES, cudaMemcpyDefault, copying));
    CHECK(cudaEventRecord(copied, copying));
    CHECK(cudaStreamWaitEvent(computing, copied, 0));
    CHECK(cudaStreamWaitEvent(shared, copied, 0));
    launch(computing);
    launch(shared);
    CHECK(cudaEventRecord(computed, computing));
    CHECK(cudaStreamWaitEvent(copying, computed, 0));
    CHECK(cudaMemsetAsync(on_gpu, 0, BYTES, computing));
    cudaEventQuery(copied);
    if (round % 50 == 0) CHECK(cudaStreamSynchronize(computing));
    nullgpu_end(computing);
  }
  CHECK(cudaDeviceSynchronize());
  CHECK(cudaFree(on_gpu));
  CHECK(cudaFreeHost(pinned));
  CHECK(cudaEventDestroy(copied));
  CHECK(cudaEventDestroy(computed));
  CHECK(cudaStreamDestroy(computing));
  CHECK(cudaStreamDestroy(copying));
}

// The capture of a graph, beside the work of other threads, and its replays.
static void capture() {
  cudaStream_t stream;
  cudaGraph_t graph;
  cudaGraphExec_t executable;
  CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  for (int i = 0; i < 10; ++i) launch(stream);
  CHECK(cudaStreamEndCapture(stream, &graph));
  CHECK(cudaGraphInstantiate(&executable, graph, 0));
  for (int i = 0; i < ROUNDS; ++i) CHECK(cudaGraphLaunch(executable, stream));
  CHECK(cudaStreamSynchronize(stream));
  CHECK(cudaStreamDestroy(stream));
}

// An all-reduce of two ranks, each in a process and on a GPU of its own.
static void reduce(int rank, ncclUniqueId id) {
  CHECK(cudaSetDevice(rank));
  ncclComm_t comm;
  CHECK(ncclCommInitRank(&comm, 2, id, rank));
  float* numbers;
  CHECK(cudaMalloc((void**)&numbers, 64));
  for (int i = 0; i < 16; ++i) numbers[i] = (float)(rank + 1);
  for (int i = 0; i < 10; ++i) CHECK(ncclAllReduce(numbers, numbers, 16, ncclFloat, ncclSum, comm, nullptr));
  if (numbers[15] != 3 * 512) exit(3);
  CHECK(cudaFree(numbers));
}

int main() {
  ncclUniqueId id;
  CHECK(ncclGetUniqueId(&id));
  pid_t other = fork();
  reduce(other ? 0 : 1, id);
  if (!other) _exit(0);
  int status;
  waitpid(other, &status, 0);
  if (status) return 2;

  cudaStream_t shared;
  CHECK(cudaStreamCreate(&shared));
  std::vector<std::thread> threads;
  for (int number = 0; number < THREADS; ++number) threads.emplace_back(work, number, shared);
  threads.emplace_back(capture);
  for (std::thread& thread : threads) thread.join();
  nullgpu_spans("/dev/null");
  puts("done");
  return 0;
}
