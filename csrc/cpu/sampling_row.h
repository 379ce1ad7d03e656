// One row of logits: its maximum, a cheap bound that finds its largest logits, and the exponentials.
//
// A row is read in blocks of 256. Logit i belongs to group i % 16 of its block; the maxima of the groups, 1/16 of the
// row, are kept: they tell which blocks can hold large logits, so that later passes touch few of them.
// Loops are plain and of fixed length, for the compiler to vectorize; the build allows no contraction, so that
// exponentials have the same bits on every instruction set.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

namespace pagedllm {

constexpr int64_t kGroups = 16;  // of a block
constexpr int64_t kBlock = 16 * kGroups;
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr double kLog2E = 1.4426950408889634;

class LogitsRow {
 public:
  LogitsRow(const float* logits, int64_t size)
      : logits_(logits), size_(size), group_max_(static_cast<size_t>((size + kBlock - 1) / kBlock * kGroups)) {
    int32_t is_nan[kGroups] = {};
    float row_max[kGroups];
    std::fill_n(row_max, kGroups, -kInfinity);
    for (int64_t block = 0; block < num_blocks(); ++block) {
      float* max = &group_max_[static_cast<size_t>(block * kGroups)];
      std::fill_n(max, kGroups, -kInfinity);
      const float* z = logits_ + block * kBlock;
      const int64_t length = block_size(block);
      int64_t first = 0;
      for (; first + kGroups <= length; first += kGroups) fold(max, is_nan, z + first, kGroups);
      fold(max, is_nan, z + first, length - first);
      for (int64_t i = 0; i < kGroups; ++i) row_max[i] = max[i] > row_max[i] ? max[i] : row_max[i];
    }
    max_ = *std::max_element(row_max, row_max + kGroups);
    has_nan_ = std::any_of(is_nan, is_nan + kGroups, [](int32_t x) { return x != 0; });
  }

  float operator[](int64_t id) const { return logits_[id]; }
  int64_t size() const { return size_; }
  float max() const { return max_; }  // of what is not NaN
  bool has_nan() const { return has_nan_; }
  bool is_finite() const { return !has_nan_ && max_ < kInfinity && max_ > -kInfinity; }

  int64_t num_blocks() const { return (size_ + kBlock - 1) / kBlock; }
  int64_t block_size(int64_t block) const { return std::min(kBlock, size_ - block * kBlock); }
  const float* block(int64_t block) const { return logits_ + block * kBlock; }
  float block_max(int64_t block) const {
    const float* max = &group_max_[static_cast<size_t>(block * kGroups)];
    return *std::max_element(max, max + kGroups);
  }

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
    float reached = max_, too_high = max_;
    for (const float max : group_max_) reached = max > -kInfinity && max < reached ? max : reached;
    reached = std::max(reached, lowest);
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
      for (int64_t i = 0; i < block_size(b); ++i) {
        if (!(z[i] < bound)) fn(static_cast<int32_t>(b * kBlock + i), z[i]);
      }
    }
  }

 private:
  static void fold(float* max, int32_t* is_nan, const float* z, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
      max[i] = z[i] > max[i] ? z[i] : max[i];
      is_nan[i] |= z[i] != z[i];
    }
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

// 2^x of x in -126 .. 0 as mantissa * 2^(exponent - 23); EXP2_COEFFICIENTS of the twin, and its order of operations.
struct Power {
  int32_t mantissa;  // 2^23 .. 2^24
  int32_t exponent;  // floor(x)
};
inline Power exp2_parts(float x) {
  const int32_t truncated = static_cast<int32_t>(x);
  const int32_t exponent = truncated - (static_cast<float>(truncated) > x);
  const float f = x - static_cast<float>(exponent);
  float p = 0.00020829190907534212f;
  p = p * f + 0.0012689352734014392f;
  p = p * f + 0.009652440436184406f;
  p = p * f + 0.055495936423540115f;
  p = p * f + 0.24022722244262695f;
  p = p * f + 0.6931471824645996f;
  return {static_cast<int32_t>((p * f + 1.0f) * 8388608.0f), exponent};
}

}  // namespace pagedllm
