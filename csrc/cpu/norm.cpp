#include "cpu/norm.h"

#include "cpu/vector_math.h"

namespace pagedllm {
namespace {

// The sum over a row in four chains of 16 lanes, so that additions do not wait for one another. add(values, sum) gives
// the chain's new sum; of a row's last values add_rest(values, sum, count) does, which must not count the lanes past
// it.
template <class T, class Add, class AddRest>
float sum_row(const T* x, int64_t size, Add add, AddRest add_rest) {
  f32x16 sums[4] = {f32x16::zero(), f32x16::zero(), f32x16::zero(), f32x16::zero()};
  int64_t i = 0;
  for (; i + 64 <= size; i += 64) {
    for (int chain = 0; chain < 4; ++chain) sums[chain] = add(load(x + i + 16 * chain), sums[chain]);
  }
  for (int chain = 0; i < size; i += 16, ++chain) {
    sums[chain] = add_rest(load_partial(x + i, size - i), sums[chain], size - i);
  }
  return reduce_add((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

template <class T>
float sum_of_squares(const T* x, int64_t size) {
  const auto add = [](f32x16 v, f32x16 sum) { return fma(v, v, sum); };
  return sum_row(x, size, add, [&](f32x16 v, f32x16 sum, int64_t) { return add(v, sum); });
}

template <class T>
float mean_of(const T* x, int64_t size) {
  const auto add = [](f32x16 v, f32x16 sum) { return v + sum; };
  const float sum = sum_row(x, size, add, [&](f32x16 v, f32x16 total, int64_t) { return add(v, total); });
  return static_cast<float>(double{sum} / static_cast<double>(size));
}

template <class T>
float sum_of_squared_differences(const T* x, int64_t size, float mean) {
  const f32x16 center = f32x16::broadcast(mean);
  const auto add = [&](f32x16 v, f32x16 sum) { return fma(v - center, v - center, sum); };
  return sum_row(x, size, add, [&](f32x16 v, f32x16 sum, int64_t count) {
    alignas(64) float lanes[16] = {};
    store_partial(lanes, v - center, count);
    const f32x16 difference = load(lanes);
    return fma(difference, difference, sum);
  });
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
void layer_norm_row(const LayerNormParams<T>& p, T* out, const T* x, const float* weight) {
  const float mean = mean_of(x, p.hidden_size);
  const f32x16 center = f32x16::broadcast(mean);
  const f32x16 scale =
      f32x16::broadcast(inverse_rms(sum_of_squared_differences(x, p.hidden_size, mean), p.hidden_size, p.eps));
  for (int64_t i = 0; i < p.hidden_size; i += 16) {
    const int64_t count = p.hidden_size - i;
    f32x16 value = (load_partial(x + i, count) - center) * scale * load_partial(weight + i, count);
    if (p.bias) value = value + load_partial(p.bias + i, count);
    store_partial(out + i, value, count);
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

template <class T>
void layer_norm(const LayerNormParams<T>& p) {
  const int64_t bytes_per_row = 2 * p.num_heads * p.hidden_size * static_cast<int64_t>(sizeof(T));
  p.parallel.ranges(p.num_rows, bytes_per_row, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      for (int64_t at = 0; at < p.num_heads * p.hidden_size; at += p.hidden_size) {
        layer_norm_row(p, p.out + row * p.out_stride + at, p.x + row * p.x_stride + at, p.weight + at);
      }
    }
  });
}

template void rms_norm(const RmsNormParams<bf16>&);
template void rms_norm(const RmsNormParams<float>&);
template void layer_norm(const LayerNormParams<bf16>&);
template void layer_norm(const LayerNormParams<float>&);

}  // namespace pagedllm
