// What a reduction of NCCL computes: sums, products, extremes and means of numbers in NCCL's formats.
#pragma once
#include <nccl.h>
#include <string.h>

#include <vector>

namespace nullgpu {

#ifdef __aarch64__
using Float16 = __fp16;
#else
using Float16 = _Float16;
#endif

inline size_t size_of(ncclDataType_t type) {
  switch (type) {
    case ncclInt8:
    case ncclUint8:
      return 1;
    case ncclFloat16:
    case ncclBfloat16:
      return 2;
    case ncclInt32:
    case ncclUint32:
    case ncclFloat32:
      return 4;
    case ncclInt64:
    case ncclUint64:
    case ncclFloat64:
      return 8;
    default:
      return 1;  // fp8: moved, but not reduced
  }
}
inline const char* name_of(ncclDataType_t type) {
  static const char* names[] = {"int8",   "uint8",   "int32",   "uint32",  "int64",
                                "uint64", "float16", "float32", "float64", "bfloat16"};
  return (unsigned)type < 10 ? names[type] : "fp8";
}

struct Bfloat16 {
  unsigned short bits;
  operator float() const {
    unsigned wide = (unsigned)bits << 16;
    float value;
    memcpy(&value, &wide, 4);
    return value;
  }
  Bfloat16(float value) {  // rounds to the nearest, ties to even
    unsigned wide;
    memcpy(&wide, &value, 4);
    bits = value != value ? 0x7fc0 : (unsigned short)((wide + 0x7fff + ((wide >> 16) & 1)) >> 16);
  }
};

// An operation: NCCL's own, or a sum of numbers that are multiplied by a factor first (ncclRedOpCreatePreMulSum).
struct Operation {
  ncclRedOp_t kind = ncclSum;
  bool scaled = false;
  double factor = 1;
};

// Number is the format in memory, Wide the one in which is computed.
template <class Number, class Wide>
void reduce(char* to, const std::vector<const char*>& from, size_t count, Operation op) {
  for (size_t i = 0; i < count; ++i) {
    Wide sum{};
    for (size_t r = 0; r < from.size(); ++r) {
      Wide value = (Wide) reinterpret_cast<const Number*>(from[r])[i];
      if (op.scaled) value = (Wide)(value * (Wide)op.factor);
      if (r == 0)
        sum = value;
      else if (op.kind == ncclProd)
        sum = (Wide)(sum * value);
      else if (op.kind == ncclMax)
        sum = sum < value ? value : sum;
      else if (op.kind == ncclMin)
        sum = value < sum ? value : sum;
      else
        sum = (Wide)(sum + value);
    }
    if (op.kind == ncclAvg) sum = (Wide)(sum / (Wide)from.size());
    reinterpret_cast<Number*>(to)[i] = (Number)sum;
  }
}

// Write the reduction of what `from` points to, one pointer for each rank. `to` may be one of them.
inline bool reduce(char* to, const std::vector<const char*>& from, size_t count, ncclDataType_t type, Operation op) {
  switch (type) {
    case ncclInt8:
      reduce<signed char, int>(to, from, count, op);
      break;
    case ncclUint8:
      reduce<unsigned char, int>(to, from, count, op);
      break;
    case ncclInt32:
      reduce<int, int>(to, from, count, op);
      break;
    case ncclUint32:
      reduce<unsigned, unsigned>(to, from, count, op);
      break;
    case ncclInt64:
      reduce<long, long>(to, from, count, op);
      break;
    case ncclUint64:
      reduce<unsigned long, unsigned long>(to, from, count, op);
      break;
    case ncclFloat16:
      reduce<Float16, float>(to, from, count, op);
      break;
    case ncclBfloat16:
      reduce<Bfloat16, float>(to, from, count, op);
      break;
    case ncclFloat32:
      reduce<float, float>(to, from, count, op);
      break;
    case ncclFloat64:
      reduce<double, double>(to, from, count, op);
      break;
    default:
      return false;
  }
  return true;
}

}  // namespace nullgpu
