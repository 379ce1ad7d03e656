// What a model does to its logits, on 16 lanes; and the largest of a row while they come.
#pragma once
#include <algorithm>
#include <cstdint>
#include <limits>

#include "cpu/vector_math.h"

namespace pagedllm {

inline f32x16 finish_logit(f32x16 z, float scale, float softcap) {
  z = z * f32x16::broadcast(scale);
  if (softcap <= 0.0f) return z;
  const f32x16 cap = f32x16::broadcast(softcap);
  return cap * tanh(z / cap);
}

// The largest logit of some columns of a row, and its lowest column. Columns come in groups of 16, in ascending order;
// lane i keeps those that are i modulo 16. What is not finite but -infinity spoils the row.
struct LargestLogit {
  float value[16];   // -infinity at first
  float group[16];   // of the first with that value, a whole number below 2^24: exact
  float poison[16];  // 0, or NaN

  void clear() {
    std::fill_n(value, 16, -std::numeric_limits<float>::infinity());
    std::fill_n(group, 16, 0.0f);
    std::fill_n(poison, 16, 0.0f);
  }

  bool is_spoilt() const { return !(reduce_add(load(poison)) == 0.0f); }
  float largest() const { return reduce_max(load(value)); }
  // Where it is above -infinity.
  int32_t column() const {
    const float z = largest();
    int32_t lowest = std::numeric_limits<int32_t>::max();
    for (int32_t lane = 0; lane < 16; ++lane) {
      if (value[lane] == z) lowest = std::min(lowest, static_cast<int32_t>(group[lane]) * 16 + lane);
    }
    return lowest;
  }
};

// While a tile is looked at: a LargestLogit in registers.
struct LargestLanes {
  f32x16 value, group, poison;

  explicit LargestLanes(const LargestLogit& row)
      : value(load(row.value)), group(load(row.group)), poison(load(row.poison)) {}

  void take(f32x16 logits, float number) {
    const f32x16 zero = f32x16::zero();
    poison = fma(max(zero, logits), zero, poison);  // 0 x infinity and 0 x NaN are NaN
    group = select_less(value, logits, f32x16::broadcast(number), group);
    value = max(logits, value);  // `value` where a logit is NaN
  }

  void save(LargestLogit& row) const {
    store(row.value, value);
    store(row.group, group);
    store(row.poison, poison);
  }
};

}  // namespace pagedllm
