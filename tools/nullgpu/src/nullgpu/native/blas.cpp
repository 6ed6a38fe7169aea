// cuBLAS: products are not computed. Functions that only compute are generated (symbols.py); those that return a value
// which PyTorch reads are here.
#include "gpu.h"

#include <cublasLt.h>
#include <cublas_v2.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

using namespace nullgpu;

namespace nullgpu {

// ---- for all libraries: what the clock is to know of a call

// A handle of a library is a piece of memory (symbols.py), whose first bytes are its stream.
void set_stream(void* handle, cudaStream_t stream) { memcpy(handle, &stream, sizeof stream); }
cudaStream_t stream_of_handle(const void* handle) {
  cudaStream_t stream;
  memcpy(&stream, handle, sizeof stream);
  return stream;
}

// What was described in this thread since the last call, because sizes are in descriptors, which are set before it.
static thread_local uint64_t described = 0;
void describe(uint64_t number) { described = mix(described, number); }
uint64_t mix_all(const uint64_t* numbers, int number) {  // for functions that are generated
  uint64_t hash = 0;
  for (int i = 0; i < number; ++i) hash = mix(hash, numbers[i]);
  return hash;
}
void launch_library(const char* name, const void* handle, uint64_t sizes, double size) {
  launch(name, handle ? stream_of_handle(handle) : nullptr, mix(sizes, described), size);
  described = 0;
}

}  // namespace nullgpu

EXPORT cublasStatus_t cublasSetStream_v2(cublasHandle_t handle, cudaStream_t stream) {
  set_stream(handle, stream);
  return CUBLAS_STATUS_SUCCESS;
}

// ---- the older interface has the sizes in its arguments (symbols.py); the newer one, in descriptors of matrices

struct Layout {
  double elements;
};
EXPORT cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* made, cudaDataType type, uint64_t rows,
                                                 uint64_t columns, int64_t) {
  void* memory = calloc(1, 256);
  static_cast<Layout*>(memory)->elements = (double)rows * (double)columns;
  for (uint64_t number : {(uint64_t)type, rows, columns}) describe(number);
  *made = static_cast<cublasLtMatrixLayout_t>(memory);
  return CUBLAS_STATUS_SUCCESS;
}
EXPORT cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t layout) {
  free(layout);
  return CUBLAS_STATUS_SUCCESS;
}
EXPORT cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t layout,
                                                       cublasLtMatrixLayoutAttribute_t attribute, const void* value,
                                                       size_t bytes) {
  int32_t batches = 0;
  if (attribute != CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT || bytes != sizeof batches) return CUBLAS_STATUS_SUCCESS;
  memcpy(&batches, value, bytes);
  reinterpret_cast<Layout*>(layout)->elements *= batches;
  describe((uint64_t)batches);
  return CUBLAS_STATUS_SUCCESS;
}
EXPORT cublasStatus_t cublasLtMatmul(cublasLtHandle_t, cublasLtMatmulDesc_t, const void*, const void*,
                                     cublasLtMatrixLayout_t a, const void*, cublasLtMatrixLayout_t b, const void*,
                                     const void*, cublasLtMatrixLayout_t, void*, cublasLtMatrixLayout_t d,
                                     const cublasLtMatmulAlgo_t*, void*, size_t, cudaStream_t stream) {
  double size = 1;  // m k, k n and m n: the root of their product is m n k
  for (cublasLtMatrixLayout_t layout : {a, b, d}) size *= sqrt(reinterpret_cast<Layout*>(layout)->elements);
  launch("cublasLtMatmul", stream, described, size);
  described = 0;
  return CUBLAS_STATUS_SUCCESS;
}

EXPORT cublasStatus_t cublasGetMathMode(cublasHandle_t, cublasMath_t* mode) {
  *mode = CUBLAS_DEFAULT_MATH;
  return CUBLAS_STATUS_SUCCESS;
}
EXPORT cublasStatus_t cublasGetPointerMode_v2(cublasHandle_t, cublasPointerMode_t* mode) {
  *mode = CUBLAS_POINTER_MODE_HOST;
  return CUBLAS_STATUS_SUCCESS;
}
EXPORT size_t cublasLtGetVersion() { return CUBLAS_VERSION; }
EXPORT cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t, cublasLtMatmulDesc_t, cublasLtMatrixLayout_t,
                                                     cublasLtMatrixLayout_t, cublasLtMatrixLayout_t,
                                                     cublasLtMatrixLayout_t, cublasLtMatmulPreference_t, int,
                                                     cublasLtMatmulHeuristicResult_t found[], int* number) {
  memset(found, 0, sizeof *found);  // one algorithm, which needs no workspace
  *number = 1;
  return CUBLAS_STATUS_SUCCESS;
}
EXPORT cublasStatus_t cublasLtMatmulAlgoCheck(cublasLtHandle_t, cublasLtMatmulDesc_t, cublasLtMatrixLayout_t,
                                              cublasLtMatrixLayout_t, cublasLtMatrixLayout_t, cublasLtMatrixLayout_t,
                                              const cublasLtMatmulAlgo_t*, cublasLtMatmulHeuristicResult_t* result) {
  memset(result, 0, sizeof *result);
  return CUBLAS_STATUS_SUCCESS;
}
EXPORT cublasStatus_t cublasLtMatmulAlgoConfigGetAttribute(const cublasLtMatmulAlgo_t*,
                                                           cublasLtMatmulAlgoConfigAttributes_t, void* value,
                                                           size_t size, size_t* written) {
  memset(value, 0, size);
  if (written) *written = size;
  return CUBLAS_STATUS_SUCCESS;
}
