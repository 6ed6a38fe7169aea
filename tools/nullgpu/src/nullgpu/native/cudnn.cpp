// cuDNN: convolutions, batch norm and attention are not computed. PyTorch uses two interfaces.
//
// The older one has a function for each operation. Functions that only compute are generated (symbols.py); those that
// return a value are here. The newer one ("backend", https://docs.nvidia.com/deeplearning/cudnn/backend/latest)
// describes everything by descriptors with attributes: this library stores the attributes that are set, and returns
// them on request.
#include "gpu.h"

#include <cudnn.h>
#include <cudnn_backend.h>
#include <string.h>

#include <algorithm>
#include <vector>

using namespace nullgpu;

static constexpr cudnnStatus_t OK = CUDNN_STATUS_SUCCESS;

EXPORT size_t cudnnGetVersion() { return CUDNN_VERSION; }
EXPORT size_t cudnnGetCudartVersion() { return CUDART_VERSION; }
EXPORT cudnnStatus_t cudnnGetProperty(libraryPropertyType type, int* value) {
  *value = type == MAJOR_VERSION ? CUDNN_MAJOR : type == MINOR_VERSION ? CUDNN_MINOR : CUDNN_PATCHLEVEL;
  return OK;
}
EXPORT const char* cudnnGetErrorString(cudnnStatus_t status) {
  return status ? "CUDNN_STATUS_NOT_SUPPORTED" : "CUDNN_STATUS_SUCCESS";
}
EXPORT void cudnnGetLastErrorString(char* message, size_t size) {
  if (size) *message = 0;
}
EXPORT cudnnStatus_t cudnnSetStream(cudnnHandle_t handle, cudaStream_t stream) {
  set_stream(handle, stream);
  return OK;
}
EXPORT cudnnStatus_t cudnnGetStream(cudnnHandle_t handle, cudaStream_t* stream) {
  *stream = stream_of_handle(handle);
  return OK;
}
// PyTorch describes the tensors of a call directly before it.
EXPORT cudnnStatus_t cudnnSetTensorNdDescriptor(cudnnTensorDescriptor_t, cudnnDataType_t type, int dimensions,
                                                const int sizes[], const int strides[]) {
  describe((uint64_t)type);
  for (int i = 0; i < dimensions; ++i) describe((uint64_t)sizes[i]), describe((uint64_t)strides[i]);
  return OK;
}
EXPORT cudnnStatus_t cudnnDropoutGetStatesSize(cudnnHandle_t, size_t* bytes) {
  *bytes = 64;
  return OK;
}

// ---- the older interface: one algorithm for each convolution, without a workspace

template <class Performance>
static cudnnStatus_t one_algorithm(int* number, Performance* found) {
  memset(found, 0, sizeof *found);
  found->algo = decltype(found->algo)(1);
  found->time = 1;
  found->determinism = CUDNN_DETERMINISTIC;
  *number = 1;
  return OK;
}
#define ALGORITHMS(PASS, FIRST, SECOND, RESULT, PERFORMANCE)                                                          \
  EXPORT cudnnStatus_t cudnnGetConvolution##PASS##Algorithm_v7(cudnnHandle_t, FIRST, SECOND,                          \
                                                               const cudnnConvolutionDescriptor_t, RESULT, const int, \
                                                               int* number, PERFORMANCE* found) {                     \
    return one_algorithm(number, found);                                                                              \
  }
ALGORITHMS(Forward, const cudnnTensorDescriptor_t, const cudnnFilterDescriptor_t, const cudnnTensorDescriptor_t,
           cudnnConvolutionFwdAlgoPerf_t)
ALGORITHMS(BackwardData, const cudnnFilterDescriptor_t, const cudnnTensorDescriptor_t, const cudnnTensorDescriptor_t,
           cudnnConvolutionBwdDataAlgoPerf_t)
ALGORITHMS(BackwardFilter, const cudnnTensorDescriptor_t, const cudnnTensorDescriptor_t, const cudnnFilterDescriptor_t,
           cudnnConvolutionBwdFilterAlgoPerf_t)

EXPORT cudnnStatus_t cudnnFindConvolutionForwardAlgorithmEx(cudnnHandle_t, const cudnnTensorDescriptor_t, const void*,
                                                            const cudnnFilterDescriptor_t, const void*,
                                                            const cudnnConvolutionDescriptor_t,
                                                            const cudnnTensorDescriptor_t, void*, const int,
                                                            int* number, cudnnConvolutionFwdAlgoPerf_t* found, void*,
                                                            size_t) {
  return one_algorithm(number, found);
}
EXPORT cudnnStatus_t cudnnFindConvolutionBackwardDataAlgorithmEx(cudnnHandle_t, const cudnnFilterDescriptor_t,
                                                                 const void*, const cudnnTensorDescriptor_t,
                                                                 const void*, const cudnnConvolutionDescriptor_t,
                                                                 const cudnnTensorDescriptor_t, void*, const int,
                                                                 int* number, cudnnConvolutionBwdDataAlgoPerf_t* found,
                                                                 void*, size_t) {
  return one_algorithm(number, found);
}
EXPORT cudnnStatus_t cudnnFindConvolutionBackwardFilterAlgorithmEx(
    cudnnHandle_t, const cudnnTensorDescriptor_t, const void*, const cudnnTensorDescriptor_t, const void*,
    const cudnnConvolutionDescriptor_t, const cudnnFilterDescriptor_t, void*, const int, int* number,
    cudnnConvolutionBwdFilterAlgoPerf_t* found, void*, size_t) {
  return one_algorithm(number, found);
}

// ---- the newer interface

struct Attribute {
  cudnnBackendAttributeType_t type;
  int64_t number;
  std::vector<char> bytes;
};
struct Descriptor {
  cudnnBackendDescriptorType_t type;
  std::map<int, Attribute> attributes;
  uint64_t hash = 0;  // of all that was set, the descriptors in it included: the same operation has the same hash
  size_t workspace = 0;
};
static Descriptor* descriptor_at(const void* values, int64_t i) {
  return static_cast<Descriptor*>(static_cast<const cudnnBackendDescriptor_t*>(values)[i]);
}

static size_t size_of(cudnnBackendAttributeType_t type) {
  switch (type) {
    case CUDNN_TYPE_CHAR:
    case CUDNN_TYPE_BOOLEAN:
      return 1;
    case CUDNN_TYPE_INT64:
    case CUDNN_TYPE_DOUBLE:
    case CUDNN_TYPE_HANDLE:
    case CUDNN_TYPE_VOID_PTR:
    case CUDNN_TYPE_BACKEND_DESCRIPTOR:
      return 8;
    default:
      return 4;  // an enumeration, an int32 or a float
  }
}

static std::vector<int64_t> numbers(const Descriptor& it, cudnnBackendAttributeName_t name) {
  auto found = it.attributes.find((int)name);
  if (found == it.attributes.end()) return {};
  const std::vector<char>& bytes = found->second.bytes;
  std::vector<int64_t> made(bytes.size() / sizeof(int64_t));
  memcpy(made.data(), bytes.data(), made.size() * sizeof(int64_t));
  return made;
}

// With channels first, cuDNN's kernels for matrix units need the tensors of a convolution with channels last: they are
// copied to the workspace, with channels filled up to a multiple of eight. So an H200 had 1.68 GB more in a U-Net.
static size_t workspace_of_convolution(const Descriptor& operation) {
  constexpr int64_t MULTIPLE = 8;
  size_t total = 0;
  bool has_kernel = false;  // larger than one element: the weights are the tensor of the least elements
  size_t least = SIZE_MAX;
  for (const auto& [name, attribute] : operation.attributes) {
    if (attribute.type != CUDNN_TYPE_BACKEND_DESCRIPTOR || attribute.bytes.empty()) continue;
    const Descriptor* tensor = descriptor_at(attribute.bytes.data(), 0);
    if (!tensor || tensor->type != CUDNN_BACKEND_TENSOR_DESCRIPTOR) continue;
    std::vector<int64_t> sizes = numbers(*tensor, CUDNN_ATTR_TENSOR_DIMENSIONS);
    std::vector<int64_t> strides = numbers(*tensor, CUDNN_ATTR_TENSOR_STRIDES);
    auto type = tensor->attributes.find(CUDNN_ATTR_TENSOR_DATA_TYPE);
    if (sizes.size() < 4 || strides.size() != sizes.size() || type == tensor->attributes.end()) return 0;
    bool channels_last = strides[1] == 1 && sizes[1] > 1;
    if (channels_last) return 0;
    cudnnDataType_t format;
    memcpy(&format, type->second.bytes.data(), sizeof format);
    size_t elements = (size_t)sizes[0] * (size_t)((sizes[1] + MULTIPLE - 1) / MULTIPLE * MULTIPLE), area = 1;
    for (size_t i = 2; i < sizes.size(); ++i) area *= (size_t)sizes[i];
    if (elements * area < least) least = elements * area, has_kernel = area > 1;
    total += elements * area * (format == CUDNN_DATA_FLOAT ? 4 : 2);
  }
  return has_kernel ? total : 0;
}

EXPORT cudnnStatus_t cudnnBackendCreateDescriptor(cudnnBackendDescriptorType_t type,
                                                  cudnnBackendDescriptor_t* descriptor) {
  *descriptor = new Descriptor{type, {}, (uint64_t)type};
  return OK;
}
EXPORT cudnnStatus_t cudnnBackendDestroyDescriptor(cudnnBackendDescriptor_t descriptor) {
  delete static_cast<Descriptor*>(descriptor);
  return OK;
}
EXPORT cudnnStatus_t cudnnBackendInitialize(cudnnBackendDescriptor_t) { return OK; }
EXPORT cudnnStatus_t cudnnBackendFinalize(cudnnBackendDescriptor_t descriptor) {
  Descriptor* it = static_cast<Descriptor*>(descriptor);
  if (it->type == CUDNN_BACKEND_OPERATION_CONVOLUTION_FORWARD_DESCRIPTOR ||
      it->type == CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_DATA_DESCRIPTOR ||
      it->type == CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_FILTER_DESCRIPTOR)
    it->workspace = workspace_of_convolution(*it);
  return OK;
}
EXPORT cudnnStatus_t cudnnBackendSetAttribute(cudnnBackendDescriptor_t descriptor, cudnnBackendAttributeName_t name,
                                              cudnnBackendAttributeType_t type, int64_t number, const void* values) {
  const char* first = static_cast<const char*>(values);
  size_t bytes = first ? (size_t)number * size_of(type) : 0;
  Descriptor* it = static_cast<Descriptor*>(descriptor);
  it->attributes[(int)name] = {type, number, {first, first + bytes}};
  if (type == CUDNN_TYPE_HANDLE || type == CUDNN_TYPE_VOID_PTR) return OK;
  it->hash = mix(it->hash, (uint64_t)name);
  for (size_t i = 0; i < bytes; ++i)
    if (type != CUDNN_TYPE_BACKEND_DESCRIPTOR) it->hash = mix(it->hash, (uint64_t)first[i]);
  for (int64_t i = 0; first && type == CUDNN_TYPE_BACKEND_DESCRIPTOR && i < number; ++i)
    if (Descriptor* part = descriptor_at(values, i)) {
      it->hash = mix(it->hash, part->hash);
      it->workspace = std::max(it->workspace, part->workspace);
    }
  return OK;
}
EXPORT cudnnStatus_t cudnnBackendGetAttribute(cudnnBackendDescriptor_t const descriptor,
                                              cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type,
                                              int64_t room, int64_t* number, void* values) {
  const Descriptor* it = static_cast<const Descriptor*>(descriptor);
  auto found = it->attributes.find((int)name);
  int64_t count = 0;
  if (found != it->attributes.end()) {
    count = found->second.number;
    size_t bytes = std::min((size_t)room * size_of(type), found->second.bytes.size());
    if (values && type != CUDNN_TYPE_BACKEND_DESCRIPTOR) memcpy(values, found->second.bytes.data(), bytes);
  } else if (type == CUDNN_TYPE_BACKEND_DESCRIPTOR) {
    count = name == CUDNN_ATTR_ENGINECFG_KNOB_CHOICES || name == CUDNN_ATTR_ENGINE_KNOB_INFO ? 0 : 1;  // one engine
    // The engine is the caller's descriptor, still empty: it stands for the operations that were asked about.
    if (values && room && count && descriptor_at(values, 0)) {
      descriptor_at(values, 0)->hash = it->hash;
      descriptor_at(values, 0)->workspace = it->workspace;
    }
  } else if (type == CUDNN_TYPE_INT64 || type == CUDNN_TYPE_INT32 || type == CUDNN_TYPE_BOOLEAN) {
    count = 1;  // numbers of engines, bytes of a workspace and of shared memory
    int64_t answer = name == CUDNN_ATTR_OPERATIONGRAPH_ENGINE_GLOBAL_COUNT ? 1
                     : name == CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE    ? (int64_t)it->workspace
                                                                           : 0;
    if (values && room) memcpy(values, &answer, size_of(type));
  }
  if (number) *number = count;  // of all others, such as notes on an engine, there are none
  return OK;
}
EXPORT cudnnStatus_t cudnnBackendExecute(cudnnHandle_t handle, cudnnBackendDescriptor_t plan,
                                         cudnnBackendDescriptor_t) {
  launch("cudnnBackendExecute", stream_of_handle(handle), static_cast<Descriptor*>(plan)->hash);
  return OK;
}
