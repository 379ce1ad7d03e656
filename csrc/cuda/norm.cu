// A block a row. What a thread reads in later passes it read (or wrote) itself in the first, so it comes from L1.
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

template <class T>
__global__ void __launch_bounds__(1024) layer_norm_kernel(const __grid_constant__ DeviceLayerNormParams p) {
  using V = Vector<T>;
  const int64_t row = blockIdx.x;
  const T* x = static_cast<const T*>(p.x) + row * p.x_stride;
  T* out = static_cast<T*>(p.out) + row * p.out_stride;
  const int step = static_cast<int>(blockDim.x) * V::kSize, first = static_cast<int>(threadIdx.x) * V::kSize;
  float* sums = shared_memory<float>(0);
  float *rests = sums + blockDim.x / 32, *squares = rests + blockDim.x / 32;

  float sum = 0.f;
  for (int i = first; i < p.hidden_size; i += step) {
    const V v = V::load(x + i);
#pragma unroll
    for (int e = 0; e < V::kSize; ++e) sum += to_float(v.elements[e]);
  }
  const float mean = block_sum(sum, sums) / static_cast<float>(p.hidden_size);
  // Of differences: a mean of squares minus the mean's square would cancel. `rest` is what the rounded mean lacks.
  float rest = 0.f, square = 0.f;
  for (int i = first; i < p.hidden_size; i += step) {
    const V v = V::load(x + i);
#pragma unroll
    for (int e = 0; e < V::kSize; ++e) {
      const float difference = to_float(v.elements[e]) - mean;
      rest += difference;
      square = __fmaf_rn(difference, difference, square);
    }
  }
  const float count = static_cast<float>(p.hidden_size), center = block_sum(rest, rests) / count;
  const float variance = block_sum(square, squares) / count - center * center;
  const float factor = rsqrtf(variance + p.eps);
  for (int i = first; i < p.hidden_size; i += step) {
    V v = V::load(x + i);
#pragma unroll
    for (int e = 0; e < V::kSize; ++e) {
      float value = (to_float(v.elements[e]) - mean - center) * factor * p.weight[i + e];
      if (p.bias != nullptr) value += p.bias[i + e];
      v.elements[e] = from_float<T>(value);
    }
    v.store(out + i);
  }
}

// Of a row's length only: so are its bits.
template <class T>
int norm_threads(int hidden_size) {
  const int vectors = hidden_size / Vector<T>::kSize;
  return vectors > 1024 ? 1024 : round_up(vectors, 32);
}

int rms_norm(const DeviceRmsNormParams& p, void* stream) {
  if (p.num_rows == 0) return 0;
  return dispatch_type(p.type, [&](auto element) {
    using T = decltype(element);
    const int threads = norm_threads<T>(p.hidden_size);
    const auto kernel = p.residual ? rms_norm_kernel<T, true> : rms_norm_kernel<T, false>;
    return launch(kernel, dim3(static_cast<unsigned>(p.num_rows)), dim3(static_cast<unsigned>(threads)),
                  sizeof(float) * static_cast<size_t>(threads / 32), stream, p);
  });
}

int layer_norm(const DeviceLayerNormParams& p, void* stream) {
  if (p.num_rows == 0) return 0;
  return dispatch_type(p.type, [&](auto element) {
    using T = decltype(element);
    const int threads = norm_threads<T>(p.hidden_size);
    return launch(layer_norm_kernel<T>, dim3(static_cast<unsigned>(p.num_rows)), dim3(static_cast<unsigned>(threads)),
                  3 * sizeof(float) * static_cast<size_t>(threads / 32), stream, p);
  });
}

}  // namespace pagedllm
