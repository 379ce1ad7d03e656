// One row of logits: its maximum, a cheap bound that finds its largest logits, and the exponentials.
//
// A row is read in blocks of 256. Logit i belongs to group i % 16 of its block; the maxima of the groups, 1/16 of the
// row, are kept: they tell which blocks can hold large logits, so that later passes touch few of them.
#pragma once
#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include "cpu/simd.h"

namespace pagedllm {

constexpr int64_t kGroups = 16;  // of a block
constexpr int64_t kBlock = 16 * kGroups;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

class LogitsRow {
 public:
  LogitsRow(const float* logits, int64_t size)
      : logits_(logits), size_(size), group_max_(static_cast<size_t>((size + kBlock - 1) / kBlock * kGroups)) {
    f32x16 row_max = f32x16::broadcast(-kInfinity), nan_or_not = f32x16::zero();
    for (int64_t block = 0; block < num_blocks(); ++block) {
      f32x16 max = f32x16::broadcast(-kInfinity);
      const float* z = logits_ + block * kBlock;
      for (int64_t left = block_size(block); left > 0; left -= kGroups, z += kGroups) {
        f32x16 logits = load_partial(z, left);
        if (left < kGroups) logits = select_first(left, logits, f32x16::broadcast(-kInfinity));
        max = pagedllm::max(logits, max);  // of what is not NaN
        // NaN, or between 0 and 1
        nan_or_not = nan_or_not + min(f32x16::broadcast(1.0f), pagedllm::max(f32x16::zero(), logits));
      }
      store(&group_max_[static_cast<size_t>(block * kGroups)], max);
      row_max = pagedllm::max(max, row_max);
    }
    max_ = reduce_max(row_max);
    const float sum = reduce_add(nan_or_not);
    has_nan_ = sum != sum;
  }

  float operator[](int64_t id) const { return logits_[id]; }
  int64_t size() const { return size_; }
  float max() const { return max_; }  // of what is not NaN
  bool has_nan() const { return has_nan_; }
  bool is_finite() const { return !has_nan_ && max_ < kInfinity && max_ > -kInfinity; }

  int64_t num_blocks() const { return (size_ + kBlock - 1) / kBlock; }
  int64_t block_size(int64_t block) const { return std::min(kBlock, size_ - block * kBlock); }
  const float* block(int64_t block) const { return logits_ + block * kBlock; }
  float block_max(int64_t block) const { return reduce_max(load(groups_of(block))); }

  // The lowest id of the largest logit.
  int32_t argmax() const {
    int64_t block = 0;
    while (block_max(block) != max_) ++block;
    const float* z = this->block(block);
    int64_t i = 0;
    while (z[i] != max_) ++i;
    return static_cast<int32_t>(block * kBlock + i);
  }

  // A bound that at least `count` logits reach, and not many more; never below `lowest`, even if fewer reach that.
  // The row has no NaN and no +inf.
  float bound(int64_t count, float lowest) const {
    float reached = std::max(lowest_group(), lowest), too_high = max_;
    if (num_groups_from(reached) < count) return lowest;
    for (int i = 0; i < 24; ++i) {
      const float middle = reached + (too_high - reached) / 2;
      const int64_t found = num_groups_from(middle);
      (found >= count ? reached : too_high) = middle;
      if (found >= count && found <= 2 * count) break;
    }
    return reached;
  }

  // Calls fn(id, logit), in order of ids, for every logit that is not below `bound` (so for NaN too).
  template <class F>
  void for_each_from(float bound, const F& fn) const {
    for (int64_t b = 0; b < num_blocks(); ++b) {
      if (block_max(b) < bound) continue;
      const float* z = block(b);
      uint32_t found[kBlock / kGroups] = {};  // bit g of row i: logit 16 i + g
      for (int64_t g = 0; g < kGroups; ++g) {
        if (groups_of(b)[g] < bound) continue;
        for (int64_t i = g; i < block_size(b); i += kGroups) found[i / kGroups] |= uint32_t{!(z[i] < bound)} << g;
      }
      for (int64_t i = 0; i < kBlock / kGroups; ++i) {
        for (uint32_t bits = found[i]; bits != 0; bits &= bits - 1) {
          const int64_t at = i * kGroups + __builtin_ctz(bits);
          fn(static_cast<int32_t>(b * kBlock + at), z[at]);
        }
      }
    }
  }

 private:
  const float* groups_of(int64_t block) const { return &group_max_[static_cast<size_t>(block * kGroups)]; }

  // The smallest maximum of a group above -inf.
  float lowest_group() const {
    const f32x16 none = f32x16::broadcast(-kInfinity);
    f32x16 lowest = f32x16::broadcast(max_);
    for (int64_t b = 0; b < num_blocks(); ++b) {
      const f32x16 max = load(groups_of(b));
      lowest = select_less(none, max, min(max, lowest), lowest);
    }
    return -reduce_max(f32x16::zero() - lowest);
  }

  int64_t num_groups_from(float bound) const {
    int32_t count = 0;
    for (const float max : group_max_) count += max >= bound;
    return count;
  }

  const float* logits_;
  int64_t size_;
  std::vector<float> group_max_;  // [num_blocks, 16]
  float max_;
  bool has_nan_;
};

}  // namespace pagedllm
