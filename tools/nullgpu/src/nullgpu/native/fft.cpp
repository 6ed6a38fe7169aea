// cuFFT: transforms are not computed. Functions that only compute are generated (symbols.py); those that return a value
// which PyTorch reads are here.
#include "gpu.h"

#include <cufftXt.h>

static std::mutex lock;
static std::map<cufftHandle, cudaStream_t> stream_of_plan;

EXPORT cufftResult cufftCreate(cufftHandle* plan) {
  static std::atomic<int> next{1};
  *plan = next++;
  return CUFFT_SUCCESS;
}
EXPORT cufftResult cufftXtMakePlanMany(cufftHandle, int, long long*, long long*, long long, long long, cudaDataType,
                                       long long*, long long, long long, cudaDataType, long long, size_t* workspace,
                                       cudaDataType) {
  *workspace = 0;
  return CUFFT_SUCCESS;
}
EXPORT cufftResult cufftSetStream(cufftHandle plan, cudaStream_t stream) {
  std::lock_guard<std::mutex> guard(lock);
  stream_of_plan[plan] = stream;
  return CUFFT_SUCCESS;
}
EXPORT cufftResult cufftXtExec(cufftHandle plan, void*, void*, int) {
  cudaStream_t stream;
  {
    std::lock_guard<std::mutex> guard(lock);
    stream = stream_of_plan[plan];
  }
  nullgpu::launch("cufftXtExec", stream, (uint64_t)plan);  // PyTorch keeps a plan for each size
  return CUFFT_SUCCESS;
}
