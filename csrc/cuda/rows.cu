// A thread moves 16 bytes; rows are the grid's x, pieces of a row its y.
#include "cuda/activation.cuh"
#include "cuda/elementwise.cuh"
#include "cuda/rows.h"

namespace pagedllm {

constexpr int kRowThreads = 256;

template <class T, bool HAS_GATE>
__global__ void __launch_bounds__(kRowThreads) activation_kernel(const __grid_constant__ ActivationParams p) {
  using V = Vector<T>;
  const int64_t row = blockIdx.x;
  const int i = static_cast<int>(blockIdx.y * kRowThreads + threadIdx.x) * V::kSize;
  if (i >= p.width) return;
  V gate = V::load(static_cast<const T*>(p.gate) + row * p.gate_stride + i);
  V up{};
  if (HAS_GATE) up = V::load(static_cast<const T*>(p.up) + row * p.up_stride + i);
#pragma unroll
  for (int e = 0; e < V::kSize; ++e) {
    const float x = to_float(gate.elements[e]);
    gate.elements[e] =
        from_float<T>(HAS_GATE ? activate_gated(x, to_float(up.elements[e]), p.activation) : activate(x, p.activation));
  }
  gate.store(static_cast<T*>(p.out) + row * p.out_stride + i);
}

__global__ void __launch_bounds__(kRowThreads) gather_rows_kernel(const __grid_constant__ GatherRowsParams p) {
  const int64_t row = blockIdx.x, source = p.indices[row];
  const int i = static_cast<int>(blockIdx.y * kRowThreads + threadIdx.x) * 16;
  if (i >= p.row_bytes) return;
  const char* from = static_cast<const char*>(p.x) + source * p.x_stride + i;
  *reinterpret_cast<uint4*>(static_cast<char*>(p.out) + row * p.out_stride + i) = *reinterpret_cast<const uint4*>(from);
}

__global__ void __launch_bounds__(kRowThreads) copy_blocks_kernel(const __grid_constant__ CopyBlocksParams p) {
  const int64_t from = p.pairs[2 * blockIdx.x], to = p.pairs[2 * blockIdx.x + 1];
  char* cache = static_cast<char*>(blockIdx.z == 0 ? p.k_cache : p.v_cache);
  const int64_t stride = blockIdx.z == 0 ? p.k_stride : p.v_stride;
  const int i = static_cast<int>(blockIdx.y * kRowThreads + threadIdx.x) * 16;
  if (i >= p.block_bytes) return;
  *reinterpret_cast<uint4*>(cache + to * stride + i) = *reinterpret_cast<const uint4*>(cache + from * stride + i);
}

int pieces(int64_t bytes) { return static_cast<int>((bytes + 16 * kRowThreads - 1) / (16 * kRowThreads)); }

int run_activation(const ActivationParams& p, void* stream) {
  if (p.num_rows == 0) return 0;
  return dispatch_type(p.type, [&](auto element) {
    using T = decltype(element);
    return launch(p.up != nullptr ? activation_kernel<T, true> : activation_kernel<T, false>,
                  grid_of(p.num_rows, pieces(int64_t{p.width} * static_cast<int>(sizeof(T)))), dim3(kRowThreads), 0,
                  stream, p);
  });
}

int gather_rows(const GatherRowsParams& p, void* stream) {
  if (p.num_rows == 0) return 0;
  return launch(gather_rows_kernel, grid_of(p.num_rows, pieces(p.row_bytes)), dim3(kRowThreads), 0, stream, p);
}

int copy_blocks(const CopyBlocksParams& p, void* stream) {
  if (p.num_pairs == 0) return 0;
  dim3 grid_size = grid_of(p.num_pairs, pieces(p.block_bytes));
  grid_size.z = 2;
  return launch(copy_blocks_kernel, grid_size, dim3(kRowThreads), 0, stream, p);
}

}  // namespace pagedllm
