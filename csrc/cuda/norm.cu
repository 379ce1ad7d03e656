// A block a row. What a thread reads in the second pass it read (or wrote) itself in the first, so it comes from L1.
#include "cuda/elementwise.cuh"
#include "cuda/norm.h"

namespace pagedllm {

template <class T, bool ADDS>
__global__ void __launch_bounds__(1024) rms_norm_kernel(const __grid_constant__ DeviceRmsNormParams p) {
  using V = Vector<T>;
  const int64_t row = blockIdx.x;
  const T* x = static_cast<const T*>(p.x) + row * p.x_stride;
  T* residual = ADDS ? static_cast<T*>(p.residual) + row * p.residual_stride : nullptr;
  T* out = static_cast<T*>(p.out) + row * p.out_stride;
  const int step = static_cast<int>(blockDim.x) * V::kSize, first = static_cast<int>(threadIdx.x) * V::kSize;

  float sum = 0.f;
  for (int i = first; i < p.hidden_size; i += step) {
    V v = V::load(x + i);
    if (ADDS) {
      const V r = V::load(residual + i);
#pragma unroll
      for (int e = 0; e < V::kSize; ++e)
        v.elements[e] = from_float<T>(to_float(r.elements[e]) + to_float(v.elements[e]));
      v.store(residual + i);
    }
#pragma unroll
    for (int e = 0; e < V::kSize; ++e) sum = __fmaf_rn(to_float(v.elements[e]), to_float(v.elements[e]), sum);
  }
  const float mean = block_sum(sum, shared_memory<float>(0)) / static_cast<float>(p.hidden_size);
  const float factor = rsqrtf(mean + p.eps);
  for (int i = first; i < p.hidden_size; i += step) {
    V v = V::load((ADDS ? residual : x) + i);
#pragma unroll
    for (int j = 0; j < V::kSize; j += 4) {
      const float4 w = *reinterpret_cast<const float4*>(p.weight + i + j);
      v.elements[j] = from_float<T>(to_float(v.elements[j]) * factor * w.x);
      v.elements[j + 1] = from_float<T>(to_float(v.elements[j + 1]) * factor * w.y);
      v.elements[j + 2] = from_float<T>(to_float(v.elements[j + 2]) * factor * w.z);
      v.elements[j + 3] = from_float<T>(to_float(v.elements[j + 3]) * factor * w.w);
    }
    v.store(out + i);
  }
}

int rms_norm(const DeviceRmsNormParams& p, void* stream) {
  if (p.num_rows == 0) return 0;
  return dispatch_type(p.type, [&](auto element) {
    using T = decltype(element);
    const int vectors = p.hidden_size / Vector<T>::kSize;
    const int threads = vectors > 1024 ? 1024 : round_up(vectors, 32);  // of the row's length only: so are its bits
    const auto kernel = p.residual ? rms_norm_kernel<T, true> : rms_norm_kernel<T, false>;
    return launch(kernel, dim3(static_cast<unsigned>(p.num_rows)), dim3(static_cast<unsigned>(threads)),
                  sizeof(float) * static_cast<size_t>(threads / 32), stream, p);
  });
}

}  // namespace pagedllm
