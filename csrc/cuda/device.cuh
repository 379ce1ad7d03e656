// What kernels share: the instructions that C++ does not have, each once, and vectors of 16-bit floats. Kernels hold no
// inline assembly. The emulator gives the same functions another body (simt/instructions.h).
#pragma once
#include <cstdint>

#ifdef PAGEDLLM_SIMT
#include "simt/instructions.h"
#else
#include "cuda/instructions.cuh"
#endif

namespace pagedllm {

using bf16 = __nv_bfloat16;
using half = __half;

constexpr unsigned kAllLanes = 0xffffffffu;
constexpr float kLog2E = 1.4426950408889634f;

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(bf16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float to_float(half x) { return __half2float(x); }
template <class T>
__device__ __forceinline__ T from_float(float x);
template <>
__device__ __forceinline__ float from_float<float>(float x) {
  return x;
}
template <>
__device__ __forceinline__ bf16 from_float<bf16>(float x) {
  return __float2bfloat16_rn(x);
}
template <>
__device__ __forceinline__ half from_float<half>(float x) {
  return __float2half_rn(x);
}

// 16 bytes of T, moved as one access.
template <class T>
struct alignas(16) Vector {
  static constexpr int kSize = 16 / sizeof(T);
  T elements[kSize];

  __device__ __forceinline__ static Vector load(const T* source) {
    const uint4 bits = *reinterpret_cast<const uint4*>(source);
    return *reinterpret_cast<const Vector*>(&bits);
  }
  __device__ __forceinline__ void store(T* target) const {
    *reinterpret_cast<uint4*>(target) = *reinterpret_cast<const uint4*>(this);
  }
};

// Division of small numbers by a constant of the launch without an integer division: exact for n < 2^32 / divisor.
struct FastDivisor {
  uint32_t divisor, magic;  // magic = ceil(2^32 / divisor), 0 for 1

  __device__ __forceinline__ int divide(int n) const {
    return divisor == 1 ? n : static_cast<int>(__umulhi(static_cast<uint32_t>(n), magic));
  }
};
inline FastDivisor make_fast_divisor(uint32_t divisor) {
  return {divisor, divisor == 1
                       ? 0u
                       : static_cast<uint32_t>((uint64_t{1} << 32) / divisor + ((uint64_t{1} << 32) % divisor != 0))};
}

template <int WIDTH = 32>
__device__ __forceinline__ float warp_sum(float x) {  // over WIDTH neighbouring lanes, the same bits in each
#pragma unroll
  for (int lanes = WIDTH / 2; lanes > 0; lanes /= 2) x += __shfl_xor_sync(kAllLanes, x, lanes, WIDTH);
  return x;
}

}  // namespace pagedllm
