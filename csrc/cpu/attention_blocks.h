// Where a tile of 64 keys lies in the blocks of a paged cache: the only part of attention that knows block sizes.
//
//   K, bf16, block of 16, one KV head:   step 0:        k0[0] k0[1]  k1[0] k1[1] ... k15[0] k15[1]     a step is a pair
//   [head_dim/2][block_size][2]          step 1:        k0[2] k0[3]  k1[2] k1[3] ...                   of features
//   V, bf16, [block_size/2][head_dim][2] keys 0 and 1:  v0[0] v1[0]  v0[1] v1[1] ...                   a step is a pair
//                                        keys 2 and 3:  v2[0] v3[0]  v2[1] v3[1] ...                   of keys
// In float32 a step is one feature of K, one key of V.
#pragma once
#include <algorithm>
#include <cstring>

#include "cpu/attention_tile.h"

namespace pagedllm {

template <class T>
class KeyTile {
 public:
  static constexpr int kElements = Step<T>::kElements;
  static constexpr int kMaxBlocks = kKeyTile / 8;
  static constexpr int kMaxRuns = kMaxBlocks + 2;

  KeyTile(const PagedAttentionParams<T>& params) : p_(params) {}

  // The tile's keys first .. end of a sequence with these blocks; nothing past `end` is looked up.
  void locate(const int32_t* blocks, int kv_head, int first, int end) {
    const T* k_blocks[kMaxBlocks];
    const int offset = first % p_.block_size;  // not 0 where a block holds several tiles
    const int num_blocks = (end - first + p_.block_size - 1) / p_.block_size;
    for (int b = 0; b < num_blocks; ++b) {
      const int64_t at = element_of(blocks[first / p_.block_size + b], kv_head);
      k_blocks[b] = p_.k_cache + at + offset * kElements;
      v_[b] = p_.v_cache + at + int64_t{offset} * p_.head_dim;
    }
    if (p_.block_size < 16) {
      gather_keys(k_blocks, num_blocks);
      return;
    }
    k_stride_ = int64_t{p_.block_size} * kElements;
    for (int v = 0; v * 16 < end - first; ++v) {
      k_[v] = k_blocks[v * 16 / p_.block_size] + v * 16 % p_.block_size * kElements;
    }
  }

  // k()[v] holds keys 16 v .. of the tile, a step every k_stride() elements.
  const T* const* k() const { return k_; }
  int64_t k_stride() const { return k_stride_; }

  // V of keys begin .. end, counted in the tile, as runs within blocks; returns their number. Where a pair of keys is
  // cut in two, the half outside may hold anything, and 0 * NaN is NaN: it is replaced by zeros.
  int cut_runs(int begin, int end, Run<T>* runs) {
    int count = 0;
    if constexpr (kElements == 2) {
      if (begin % 2) {
        runs[count++] = {half_pair(value_at(begin - 1), 1, edges_), begin / 2, 1};
        ++begin;
      }
    }
    const int keys_per_run = std::min(p_.block_size, kKeyTile), whole = end / kElements * kElements;
    while (begin < whole) {
      const int stop = std::min(whole, (begin / keys_per_run + 1) * keys_per_run);
      runs[count++] = {value_at(begin), begin / kElements, (stop - begin) / kElements};
      begin = stop;
    }
    if constexpr (kElements == 2) {
      if (begin < end) runs[count++] = {half_pair(value_at(begin), 0, edges_ + 2 * kMaxHeadDim), begin / 2, 1};
    }
    return count;
  }

  // A tile's memory, to be asked for while another one is computed.
  LineQueue lines_of(const int32_t* blocks, int kv_head, int first, int end) {
    constexpr int64_t kSize = sizeof(T);
    const int64_t keys = std::min(p_.block_size, kKeyTile), offset = first % p_.block_size;
    Stretch* next = stretches_;
    for (int key = first; key < end; key += p_.block_size) {
      const int64_t at = element_of(blocks[key / p_.block_size], kv_head);
      const T* k = p_.k_cache + at + offset * kElements;
      if (p_.block_size <= kKeyTile) {
        *next++ = stretch(k, keys * p_.head_dim * kSize);
      } else {
        for (int step = 0; step < p_.head_dim / kElements; ++step) {
          *next++ = stretch(k + int64_t{step} * p_.block_size * kElements, keys * kElements * kSize);
        }
      }
      *next++ = stretch(p_.v_cache + at + offset * p_.head_dim, keys * p_.head_dim * kSize);
    }
    return {stretches_, next, {}};
  }

 private:
  int64_t element_of(int64_t block, int kv_head) const {
    return (block * p_.num_kv_heads + kv_head) * p_.block_size * p_.head_dim;
  }

  const T* value_at(int key) const {
    const int keys_per_run = std::min(p_.block_size, kKeyTile);
    return v_[key / keys_per_run] + int64_t{key % keys_per_run} / kElements * kElements * p_.head_dim;
  }

  // Blocks of 8 keys are copied into a tile of 64.
  void gather_keys(const T* const* k_blocks, int num_blocks) {
    const int64_t width = int64_t{p_.block_size} * kElements;
    k_stride_ = kKeyTile * kElements;
    for (int b = 0; b < num_blocks; ++b) {
      for (int step = 0; step < p_.head_dim / kElements; ++step) {
        std::copy_n(k_blocks[b] + step * width, width, gathered_ + step * k_stride_ + b * width);
      }
    }
    for (int v = 0; v < kKeyTile / 16; ++v) k_[v] = gathered_ + 16 * v * kElements;
  }

  // A copy of the V of a pair of keys, with zeros for the one that is not kept.
  const T* half_pair(const T* pair, int kept, T* copy) const {
    uint32_t words[kMaxHeadDim];
    const size_t size = static_cast<size_t>(p_.head_dim) * sizeof(uint32_t);
    std::memcpy(words, pair, size);
    for (int d = 0; d < p_.head_dim; ++d) words[d] &= kept ? 0xFFFF0000 : 0x0000FFFF;
    std::memcpy(copy, words, size);
    return copy;
  }

  // At least `bytes` of them.
  static Stretch stretch(const T* from, int64_t bytes) {
    const auto* begin = reinterpret_cast<const char*>(from);
    return {begin, begin + (bytes + LineQueue::kPerAsk - 1) / LineQueue::kPerAsk * LineQueue::kPerAsk};
  }

  const PagedAttentionParams<T>& p_;
  const T* k_[kKeyTile / 16];
  const T* v_[kMaxBlocks];
  int64_t k_stride_ = 0;
  alignas(64) T edges_[2 * 2 * kMaxHeadDim];
  alignas(64) T gathered_[kKeyTile * kMaxHeadDim];
  // K of a block is one, or one for each step where a block holds more than a tile; V is one
  Stretch stretches_[std::max(2 * kMaxBlocks, kMaxHeadDim / kElements + 1)];
};

}  // namespace pagedllm
