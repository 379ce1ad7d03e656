#include "cpu/norm.h"

#include "cpu/vector_math.h"

namespace pagedllm {
namespace {

// Sum of squares in four chains of 16 lanes, so that additions do not wait for one another.
template <class T>
float sum_of_squares(const T* x, int64_t size) {
  f32x16 sums[4] = {f32x16::zero(), f32x16::zero(), f32x16::zero(), f32x16::zero()};
  int64_t i = 0;
  for (; i + 64 <= size; i += 64) {
    for (int chain = 0; chain < 4; ++chain) {
      const f32x16 v = load(x + i + 16 * chain);
      sums[chain] = fma(v, v, sums[chain]);
    }
  }
  for (int chain = 0; i < size; i += 16, ++chain) {
    const f32x16 v = load_partial(x + i, size - i);
    sums[chain] = fma(v, v, sums[chain]);
  }
  return reduce_add((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

template <class T>
void norm_row(T* out, const T* x, const float* weight, int64_t size, float eps) {
  const f32x16 scale = f32x16::broadcast(inverse_rms(sum_of_squares(x, size), size, eps));
  int64_t i = 0;
  for (; i + 16 <= size; i += 16) store(out + i, load(x + i) * scale * load(weight + i));
  if (i < size) {
    const int64_t rest = size - i;
    store_partial(out + i, load_partial(x + i, rest) * scale * load_partial(weight + i, rest), rest);
  }
}

template <class T>
void add_row(T* residual, const T* x, int64_t size) {
  int64_t i = 0;
  for (; i + 16 <= size; i += 16) store(residual + i, load(residual + i) + load(x + i));
  if (i < size) {
    const int64_t rest = size - i;
    store_partial(residual + i, load_partial(residual + i, rest) + load_partial(x + i, rest), rest);
  }
}

}  // namespace

template <class T>
void rms_norm(const RmsNormParams<T>& p) {
  const int64_t bytes_per_row = p.hidden_size * static_cast<int64_t>(sizeof(T)) * (p.residual ? 4 : 2);
  p.parallel.ranges(p.num_rows, bytes_per_row, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const T* x = p.x + row * p.x_stride;
      if (p.residual) {
        T* residual = p.residual + row * p.residual_stride;
        add_row(residual, x, p.hidden_size);
        x = residual;
      }
      norm_row(p.out + row * p.out_stride, x, p.weight, p.hidden_size, p.eps);
    }
  });
}

template void rms_norm(const RmsNormParams<bf16>&);
template void rms_norm(const RmsNormParams<float>&);

}  // namespace pagedllm
