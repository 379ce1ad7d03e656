#include "cpu/rows.h"

#include <cstring>

#include "cpu/activation.h"
#include "cpu/simd.h"

namespace pagedllm {
namespace {

float scaled(float x, float scale) { return x * scale; }
bf16 scaled(bf16 x, float scale) { return to_bf16(to_float(x) * scale); }

}  // namespace

template <class T>
void embedding(const EmbeddingParams<T>& p) {
  constexpr int kStep = kPanel * kPairing<T>;  // from a pair of a column to the column's next pair
  const int64_t panel_size = (p.hidden_size + kPairing<T> - 1) / kPairing<T> * kStep;
  // elements of a row lie a cache line or more apart: each pair costs a line
  p.parallel.ranges(p.num_tokens, p.hidden_size / kPairing<T> * 64, [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) {
      const int64_t id = p.token_ids[token];
      const T* column = p.weight + id / kPanel * panel_size + id % kPanel * kPairing<T>;
      T* out = p.out + token * p.out_stride;
      for (int64_t i = 0; i < p.hidden_size; ++i) {
        out[i] = scaled(column[i / kPairing<T> * kStep + i % kPairing<T>], p.scale);
      }
    }
  });
}

void gather_rows(const GatherRowsParams& p) {
  p.parallel.ranges(p.num_rows, 2 * p.row_bytes, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      std::memcpy(p.out + row * p.out_stride, p.x + p.indices[row] * p.x_stride, static_cast<size_t>(p.row_bytes));
    }
  });
}

template <class T>
void gated_activation(const GatedActivationParams<T>& p) {
  p.parallel.ranges(p.num_rows, 3 * p.width * static_cast<int64_t>(sizeof(T)), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      T* out = p.out + row * p.out_stride;
      const T* gate = p.gate + row * p.gate_stride;
      const T* up = p.up + row * p.up_stride;
      for (int64_t i = 0; i < p.width; i += 16) {
        const int64_t count = p.width - i;
        const f32x16 value = activate_gated(load_partial(gate + i, count), load_partial(up + i, count), p.activation);
        store_partial(out + i, value, count);
      }
    }
  });
}

template <class T>
void ungated_activation(const UngatedActivationParams<T>& p) {
  p.parallel.ranges(p.num_rows, 2 * p.width * static_cast<int64_t>(sizeof(T)), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      T* out = p.out + row * p.out_stride;
      const T* x = p.x + row * p.x_stride;
      for (int64_t i = 0; i < p.width; i += 16) {
        const int64_t count = p.width - i;
        store_partial(out + i, activate(load_partial(x + i, count), p.activation), count);
      }
    }
  });
}

template void embedding(const EmbeddingParams<bf16>&);
template void embedding(const EmbeddingParams<float>&);
template void gated_activation(const GatedActivationParams<bf16>&);
template void gated_activation(const GatedActivationParams<float>&);
template void ungated_activation(const UngatedActivationParams<bf16>&);
template void ungated_activation(const UngatedActivationParams<float>&);

}  // namespace pagedllm
