// Helpers of kernels that stream rows: choice of the element type, and a sum over a block.
#pragma once
#include "cuda/device.cuh"
#include "cuda/element_type.h"

namespace pagedllm {

// Calls fn with a value of the element type.
template <class F>
int dispatch_type(ElementType type, const F& fn) {
  switch (type) {
    case ElementType::kFloat32:
      return fn(float{});
    case ElementType::kBFloat16:
      return fn(bf16{});
    default:
      return fn(half{});
  }
}

constexpr int round_up(int n, int multiple) { return (n + multiple - 1) / multiple * multiple; }
inline dim3 grid_of(int64_t x, int64_t y) { return dim3(static_cast<unsigned>(x), static_cast<unsigned>(y)); }

// The sum over all threads, in an order that only the size of the block decides; `partials` is shared memory for a
// float a warp, free again after the next barrier.
__device__ __forceinline__ float block_sum(float x, float* partials) {
  const int num_warps = static_cast<int>(blockDim.x) / 32;
  x = warp_sum(x);
  if (threadIdx.x % 32 == 0) partials[threadIdx.x / 32] = x;
  __syncthreads();
  float sum = 0.f;
  for (int warp = 0; warp < num_warps; ++warp) sum += partials[warp];
  return sum;
}

}  // namespace pagedllm
