// Included first in every file: keeps out NVIDIA's headers of 16-bit and 8-bit formats. They are for kernels, take
// seconds to compile, and need a package (CCCL) that not every version of PyTorch brings.
#pragma once
#define __CUDA_FP16_H__
#define __CUDA_BF16_H__
#define __CUDA_FP8_H__
#define __CUDA_FP6_H__
#define __CUDA_FP4_H__
struct __half;
struct __half2;
struct __nv_bfloat16;
