// What stands between the two products of a tile: scores of a few rows become weights, and the rows' maxima and sums go
// on.
//
// Weights are powers of two: a score times `factor` (its scale times log2 e), less the row's maximum so far. Rows of
// scores and weights are kKeyTile apart; whole vectors of 16 keys are read and written.
#pragma once
#include <algorithm>
#include <limits>

#include "cpu/attention.h"
#include "cpu/vector_math.h"

namespace pagedllm {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kLog2E = 1.44269504f;

// 2^(from - to) for the maxima of two sets of scores; a set of none has -infinity and weighs nothing.
inline float decay_between(float from, float to) {
  if (from == to) return from == -kInfinity ? 0.0f : 1.0f;
  float lanes[16];
  store(lanes, exp2_of_negative(f32x16::broadcast(from - to)));
  return lanes[0];
}

// score = softcap * tanh(scale * score / softcap)
inline void cap_scores(int num_rows, int num_vectors, float scale, float softcap, float* scores) {
  const f32x16 cap = f32x16::broadcast(softcap), factor = f32x16::broadcast(scale);
  for (int r = 0; r < num_rows; ++r) {
    for (int v = 0; v < num_vectors; ++v) {
      float* at = scores + r * kKeyTile + 16 * v;
      store(at, cap * tanh(load(at) * factor / cap));
    }
  }
}

// Of the vectors in which keys begin .. end lie, what is beside these becomes -infinity; begin < 16.
inline void hide_scores(int num_rows, int begin, int end, float* scores) {
  const f32x16 hidden = f32x16::broadcast(-kInfinity);
  for (int r = 0; r < num_rows; ++r) {
    float *first = scores + r * kKeyTile, *last = first + end / 16 * 16;
    if (begin > 0) store(first, select_first(begin, hidden, load(first)));
    if (end % 16 > 0) store(last, select_first(end % 16, load(last), hidden));
  }
}

// Row r's scores become weights; max[r] and sum_lanes[r][16], the sum of its weights, go on. What was summed with
// earlier weights is to be multiplied by decay[r]. At most 16 rows; V vectors of keys. Row after row twice, so that the
// powers of all decays are one vector.
template <class T, int V>
void weigh_rows(int num_rows, float factor, const float* scores, float* max, float* sum_lanes, T* weights,
                float* decay) {
  const f32x16 factors = f32x16::broadcast(factor);
  alignas(64) float new_max[16] = {}, old_max[16] = {};
  for (int r = 0; r < num_rows; ++r) {
    f32x16 most = load(scores + r * kKeyTile);
#pragma GCC unroll 8
    for (int v = 1; v < V; ++v) most = pagedllm::max(most, load(scores + r * kKeyTile + 16 * v));
    old_max[r] = max[r];
    new_max[r] = max[r] = std::max(old_max[r], reduce_max(most) * factor);
  }
  store(decay, exp2_of_negative(load(old_max) - load(new_max)));
  for (int r = 0; r < num_rows; ++r) {
    if (new_max[r] == -kInfinity) decay[r] = 0.0f;  // neither before nor now is there a key
    const f32x16 reference = f32x16::broadcast(new_max[r] == -kInfinity ? 0.0f : new_max[r]);
    f32x16 sum = f32x16::zero();
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) {
      const f32x16 weight = exp2_of_negative(load(scores + r * kKeyTile + 16 * v) * factors - reference);
      store(weights + r * kKeyTile + 16 * v, weight);
      sum = sum + weight;
    }
    store(sum_lanes + 16 * r, fma(load(sum_lanes + 16 * r), f32x16::broadcast(decay[r]), sum));
  }
}

}  // namespace pagedllm
