// cuBLAS: products are not computed. Functions that only compute are generated (symbols.py); those that return a value
// which PyTorch reads are here.
#include "gpu.h"

#include <cublasLt.h>
#include <cublas_v2.h>
#include <string.h>

using namespace nullgpu;

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
