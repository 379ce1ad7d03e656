// The two products of a tile of keys, q.k and p.v, for a few rows at a time.
//
// Both have one form: a row's operand is walked in steps (a pair of bf16, or one float), each step multiplies 16
// columns at once and adds to float32 accumulators that stay in registers. q.k walks head_dim, its columns are keys;
// p.v walks keys, its columns are features. An accumulator's order is the order of steps, whatever the number of rows
// and columns that are taken together.
#pragma once
#include <cstdint>
#include <type_traits>

#include "cpu/attention.h"
#include "cpu/simd.h"

namespace pagedllm {

// What one step reads of a row and of 16 columns.
template <class T>
struct Step;
template <>
struct Step<bf16> {
  static constexpr int kElements = 2;
#if defined(PAGEDLLM_ISA_AVX512_BF16)
  static constexpr int kRows = 6, kVectors = 4;  // 24 of 32 registers accumulate
#elif defined(PAGEDLLM_ISA_AVX512)
  static constexpr int kRows = 6, kVectors = 2;  // widened pairs take registers too
#elif defined(PAGEDLLM_ISA_AVX2)
  static constexpr int kRows = 4, kVectors = 1;
#else
  static constexpr int kRows = 2, kVectors = 1;
#endif
  static bf16x32 columns(const bf16* p) { return load_pairs(p); }
  static bf16x32 row(const bf16* p) { return broadcast_pair(read_pair(p)); }
  static f32x16 multiply(bf16x32 a, bf16x32 b, f32x16 sum) { return dot_pairs(a, b, sum); }
};
template <>
struct Step<float> {
  static constexpr int kElements = 1;
#if defined(PAGEDLLM_ISA_AVX512)
  static constexpr int kRows = 6, kVectors = 4;
#elif defined(PAGEDLLM_ISA_AVX2)
  static constexpr int kRows = 6, kVectors = 1;
#else
  static constexpr int kRows = 2, kVectors = 1;
#endif
  static f32x16 columns(const float* p) { return load(p); }
  static f32x16 row(const float* p) { return f32x16::broadcast(*p); }
  static f32x16 multiply(f32x16 a, f32x16 b, f32x16 sum) { return fma(a, b, sum); }
};

// Steps that lie at a fixed stride in memory.
template <class T>
struct Run {
  const T* columns;
  int first_step, num_steps;  // of the row's operand
};

// Calls fn with n as a constant; 1 <= n <= Max.
template <int Max, class F>
inline void with_constant(int n, const F& fn) {
  if constexpr (Max > 1) {
    if (n < Max) return with_constant<Max - 1>(n, fn);
  }
  fn(std::integral_constant<int, Max>{});
}

// Memory that will be needed soon, as stretches of it. Asking for a few lines with every step lets them arrive behind
// the arithmetic; asked for at once they would fill the CPU's miss queues and hold up its next loads.
struct Stretch {
  const char *begin, *end;  // a whole number of asks
};
struct LineQueue {
  // Bytes: a tile of bf16 is one ask for each step of q.k and, for head_dim 64, one for each step of p.v.
  static constexpr int64_t kPerAsk = 256;
  const Stretch *next, *last;
  Stretch present;
  bool is_empty() const { return present.begin == present.end && next == last; }
  void ask() {
    if (present.begin == present.end) {
      if (next == last) return;
      present = *next++;
    }
    for (int64_t i = 0; i < kPerAsk; i += 64) __builtin_prefetch(present.begin + i);
    present.begin += kPerAsk;
  }
};

// scores[r][16 v ..] = q[r] . keys, V vectors of 16 keys that begin at k[v].
template <class T, int R, int V>
void score_rows(const T* q, const T* const* k, int64_t k_stride, int num_steps, float* scores, LineQueue& queue) {
  LineQueue lines = queue;  // a local, for registers
  f32x16 sum[R][V];
  const T* keys[V];
  for (int v = 0; v < V; ++v) {
    keys[v] = k[v];
    for (int r = 0; r < R; ++r) sum[r][v] = f32x16::zero();
  }
  for (int step = 0; step < num_steps; ++step) {
    lines.ask();
    decltype(Step<T>::columns(keys[0])) columns[V];
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) columns[v] = Step<T>::columns(keys[v] + step * k_stride);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const auto row = Step<T>::row(q + r * kMaxHeadDim + step * Step<T>::kElements);
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) sum[r][v] = Step<T>::multiply(row, columns[v], sum[r][v]);
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int v = 0; v < V; ++v) store(scores + r * kKeyTile + 16 * v, sum[r][v]);
  }
  queue = lines;
}

// sums[r] = sums[r] * decay[r] + weights[r] . values for 16 V features; steps of `values` are v_stride apart.
template <class T, int R, int V>
void accumulate_rows(const T* weights, const Run<T>* runs, int num_runs, int64_t column, int64_t v_stride,
                     const float* decay, float* sums, int64_t sums_stride, LineQueue& queue) {
  LineQueue lines = queue;  // a local, for registers
  f32x16 sum[R][V];
  for (int r = 0; r < R; ++r) {
    for (int v = 0; v < V; ++v) {
      sum[r][v] = load(sums + r * sums_stride + 16 * v) * f32x16::broadcast(decay[r]);
    }
  }
  for (const Run<T>* run = runs; run < runs + num_runs; ++run) {
    const T* values = run->columns + column;
    const T* row_weights = weights + run->first_step * Step<T>::kElements;
    for (int step = 0; step < run->num_steps; ++step, values += v_stride, row_weights += Step<T>::kElements) {
      lines.ask();
      decltype(Step<T>::columns(values)) columns[V];
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) columns[v] = Step<T>::columns(values + 16 * Step<T>::kElements * v);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const auto row = Step<T>::row(row_weights + r * kKeyTile);
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) sum[r][v] = Step<T>::multiply(row, columns[v], sum[r][v]);
      }
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int v = 0; v < V; ++v) store(sums + r * sums_stride + 16 * v, sum[r][v]);
  }
  queue = lines;
}

// score_rows for num_rows <= Step::kRows and up to 4 vectors.
template <class T>
void score(int num_rows, int num_vectors, const T* q, const T* const* k, int64_t k_stride, int num_steps, float* scores,
           LineQueue& queue) {
  constexpr int kVectors = Step<T>::kVectors;
  with_constant<Step<T>::kRows>(num_rows, [&](auto rows) {
    for (int v = 0; v < num_vectors; v += kVectors) {
      with_constant<kVectors>(num_vectors - v < kVectors ? num_vectors - v : kVectors, [&](auto vectors) {
        score_rows<T, rows(), vectors()>(q, k + v, k_stride, num_steps, scores + 16 * v, queue);
      });
    }
  });
}

// accumulate_rows for num_rows <= Step::kRows and all features.
template <class T>
void accumulate(int num_rows, int head_dim, const T* weights, const Run<T>* runs, int num_runs, const float* decay,
                float* sums, LineQueue& queue) {
  constexpr int kVectors = Step<T>::kVectors, kElements = Step<T>::kElements;
  int left = head_dim / 16;
  int passes = (left + kVectors - 1) / kVectors;
  with_constant<Step<T>::kRows>(num_rows, [&](auto rows) {
    for (int column = 0; left > 0; --passes) {
      const int count = (left + passes - 1) / passes;  // passes of about the same width
      with_constant<kVectors>(count, [&](auto vectors) {
        accumulate_rows<T, rows(), vectors()>(weights, runs, num_runs, int64_t{column} * kElements,
                                              int64_t{head_dim} * kElements, decay, sums + column, head_dim, queue);
      });
      column += 16 * count;
      left -= count;
    }
  });
}

}  // namespace pagedllm
