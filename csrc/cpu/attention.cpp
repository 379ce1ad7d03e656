#include "cpu/attention.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <memory>

#include "cpu/attention_tile.h"
#include "cpu/vector_math.h"

namespace pagedllm {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr int kVectorsPerTile = kKeyTile / 16;
constexpr int kMaxBlocksPerTile = kKeyTile / 8;

// exp(from - to) for the maxima of two sets of scores; a set of none has -infinity and weighs nothing.
float decay_between(float from, float to) {
  if (from == to) return from == -kInfinity ? 0.0f : 1.0f;
  float lanes[16];
  store(lanes, exp(f32x16::broadcast(from - to)));
  return lanes[0];
}

// Unnormalized softmax over some keys: sum of exp(score - max) * value, and of exp(score - max).
struct Partial {
  float* values;  // [head_dim]
  float max, sum;
};

// Adds `other`, whose keys come after ours.
void fold(Partial& total, const Partial& other, int head_dim) {
  const float max = std::max(total.max, other.max);
  const float ours = decay_between(total.max, max), theirs = decay_between(other.max, max);
  for (int d = 0; d < head_dim; d += 16) {
    const f32x16 scaled = load(other.values + d) * f32x16::broadcast(theirs);
    store(total.values + d, fma(load(total.values + d), f32x16::broadcast(ours), scaled));
  }
  total.sum = total.sum * ours + other.sum * theirs;
  total.max = max;
}

// One item for one KV head.
template <class T>
class ItemKernel {
 public:
  ItemKernel(const PagedAttentionParams<T>& params) : p_(params), group_(params.num_q_heads / params.num_kv_heads) {}

  void run(const AttentionItem& item, int kv_head) {
    begin(item, kv_head);
    for (int key = item.first_key; key < item.end_key; key += kKeySplit) {
      clear();
      const int end = std::min(key + kKeySplit, item.end_key);
      // tiles that the first row's window has left behind are left behind by all
      const int first = std::max(key, lowest_[0] / kKeyTile * kKeyTile);
      for (int tile = first; tile < end; tile += kKeyTile) run_tile(tile, std::min(tile + kKeyTile, end));
      end_split(item, kv_head, (key - item.first_key) / kKeySplit);
    }
    if (item.slot < 0) finish(item, kv_head);
  }

  // Folds the splits of an item's rows, all of them computed, and writes `out`.
  void merge(const AttentionItem& item, int kv_head) {
    const AttentionMerge& splits = p_.merges[item.merge];
    begin_rows(item);
    for (int split = 0; split < splits.num_splits; ++split) {
      for (int r = 0; r < item.num_rows; ++r) {
        const float* place = workspace(splits.first_slot + split * item.num_rows + r, kv_head);
        const Partial other{const_cast<float*>(place), place[p_.head_dim], place[p_.head_dim + 1]};
        if (split == 0) {
          set_total(r, other);
        } else {
          fold_into_total(r, other);
        }
      }
    }
    finish(item, kv_head);
  }

 private:
  static constexpr int kElements = Step<T>::kElements;

  const T* q_row(int64_t packed_row, int64_t first_token, int kv_head) const {
    return p_.q + (first_token + packed_row / group_) * p_.q_stride +
           (int64_t{kv_head} * group_ + packed_row % group_) * p_.head_dim;
  }
  float* workspace(int64_t place, int kv_head) const {
    return p_.workspace + (place * p_.num_kv_heads + kv_head) * (p_.head_dim + 2);
  }

  void begin_rows(const AttentionItem& item) {
    num_rows_ = item.num_rows;
    const int first_new = p_.seq_lens[item.seq] - (p_.cu_seqlens_q[item.seq + 1] - p_.cu_seqlens_q[item.seq]);
    for (int r = 0; r < num_rows_; ++r) {
      end_[r] = first_new + (item.first_row + r) / group_ + 1;
      lowest_[r] = p_.window > 0 ? std::max(0, end_[r] - p_.window) : 0;
    }
  }

  void begin(const AttentionItem& item, int kv_head) {
    begin_rows(item);
    blocks_ = p_.block_table + item.seq * p_.block_table_stride;
    kv_head_ = kv_head;
    for (int r = 0; r < num_rows_; ++r) {
      std::copy_n(q_row(item.first_row + r, p_.cu_seqlens_q[item.seq], kv_head), p_.head_dim, q_ + r * kMaxHeadDim);
    }
  }

  void clear() {
    std::fill_n(values_, num_rows_ * p_.head_dim, 0.0f);
    std::fill_n(max_, num_rows_, -kInfinity);
    std::fill_n(sum_lanes_, 16 * num_rows_, 0.0f);
  }

  // Where the tile's keys lie: k_[v] holds 16 of them a step, runs of V begin at v_[block].
  void locate(int tile, int end) {
    const int64_t block_elements = int64_t{p_.head_dim} * p_.block_size;
    const int num_blocks = (end - tile + p_.block_size - 1) / p_.block_size;
    const T* k_blocks[kMaxBlocksPerTile];
    const int offset = tile % p_.block_size;  // not 0 where a block holds several tiles
    for (int b = 0; b < num_blocks; ++b) {
      const int64_t block = blocks_[tile / p_.block_size + b];
      const int64_t at = (block * p_.num_kv_heads + kv_head_) * block_elements;
      k_blocks[b] = p_.k_cache + at + offset * kElements;
      v_[b] = p_.v_cache + at + int64_t{offset} * p_.head_dim;
    }
    if (p_.block_size < 16) {
      gather_keys(k_blocks, num_blocks);
      return;
    }
    k_stride_ = int64_t{p_.block_size} * kElements;
    for (int v = 0; v * 16 < end - tile; ++v) {
      k_[v] = k_blocks[v * 16 / p_.block_size] + v * 16 % p_.block_size * kElements;
    }
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
    for (int v = 0; v < kVectorsPerTile; ++v) k_[v] = gathered_ + 16 * v * kElements;
  }

  void run_tile(int tile, int end) {
    int first = 0, last = num_rows_;  // rows that see a key of the tile lie together
    while (first < last && end_[first] <= tile) ++first;
    while (first < last && lowest_[last - 1] >= end) --last;
    if (first == last) return;
    locate(tile, end);
    int groups = (last - first + Step<T>::kRows - 1) / Step<T>::kRows;
    for (; groups > 0; --groups) {
      const int count = (last - first + groups - 1) / groups;
      run_group(first, count, tile, end);
      first += count;
    }
  }

  // A few rows against the keys of the tile that any of them sees.
  void run_group(int first, int count, int tile, int tile_end) {
    const int begin = std::max(lowest_[first] - tile, 0);
    const int end = std::min(end_[first + count - 1], tile_end) - tile;
    const int first_vector = begin / 16, end_vector = (end + 15) / 16;
    score(count, end_vector - first_vector, q_ + first * kMaxHeadDim, kMaxHeadDim, k_ + first_vector, k_stride_,
          p_.head_dim / kElements, scores_ + 16 * first_vector);
    float decay[Step<T>::kRows];
    for (int r = 0; r < count; ++r) {
      decay[r] = weigh(first + r, scores_ + r * kKeyTile, weights_ + r * kKeyTile, tile, first_vector, end_vector);
    }
    Run<T> runs[kMaxBlocksPerTile + 2];
    const int num_runs = cut_runs(begin, end, runs);
    accumulate(count, p_.head_dim, weights_, runs, num_runs, decay, values_ + first * p_.head_dim);
  }

  // Scores of a row become weights exp(score - max); returns what earlier weights are to be multiplied by.
  float weigh(int row, const float* scores, T* weights, int tile, int first_vector, int end_vector) {
    f32x16 s[kVectorsPerTile];
    f32x16 max = f32x16::broadcast(-kInfinity);
    const int begin = lowest_[row] - tile, end = end_[row] - tile;  // of the keys the row sees
    for (int v = first_vector; v < end_vector; ++v) {
      s[v] = load(scores + 16 * v) * f32x16::broadcast(p_.scale);
      if (p_.softcap > 0.0f) {
        s[v] = f32x16::broadcast(p_.softcap) * tanh(s[v] / f32x16::broadcast(p_.softcap));
      }
      const f32x16 none = f32x16::broadcast(-kInfinity);
      if (end < 16 * (v + 1)) s[v] = select_first(std::max(end - 16 * v, 0), s[v], none);
      if (begin > 16 * v) s[v] = select_first(begin - 16 * v, none, s[v]);
      max = pagedllm::max(max, s[v]);
    }
    const float new_max = std::max(max_[row], reduce_max(max));
    const float decay = decay_between(max_[row], new_max);
    const f32x16 reference = f32x16::broadcast(new_max == -kInfinity ? 0.0f : new_max);
    f32x16 sums[kVectorsPerTile];
    for (int v = 0; v < kVectorsPerTile; ++v) {
      sums[v] = f32x16::zero();
      if (v >= first_vector && v < end_vector) {
        sums[v] = exp(s[v] - reference);
        store(weights + 16 * v, sums[v]);
      }
    }
    float* lanes = sum_lanes_ + 16 * row;
    const f32x16 tile_sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    store(lanes, fma(load(lanes), f32x16::broadcast(decay), tile_sum));
    max_[row] = new_max;
    return decay;
  }

  // V of keys begin .. end of the tile, as runs within blocks. Where a pair of keys is cut in two, the half outside may
  // hold anything, and 0 * NaN is NaN: it is replaced by zeros.
  int cut_runs(int begin, int end, Run<T>* runs) {
    int count = 0;
    const int keys_per_run = std::min(p_.block_size, kKeyTile);
    const auto value_at = [&](int key) {
      return v_[key / keys_per_run] + int64_t{key % keys_per_run} / kElements * kElements * p_.head_dim;
    };
    if constexpr (kElements == 2) {
      if (begin % 2) {
        runs[count++] = {half_pair(value_at(begin - 1), 1, edges_), begin / 2, 1};
        ++begin;
      }
    }
    const int whole = end / kElements * kElements;
    while (begin < whole) {
      const int stop = std::min(whole, (begin / keys_per_run + 1) * keys_per_run);
      runs[count++] = {value_at(begin), begin / kElements, (stop - begin) / kElements};
      begin = stop;
    }
    if constexpr (kElements == 2) {
      if (end % 2 && begin < end) {
        runs[count++] = {half_pair(value_at(end - 1), 0, edges_ + kMaxHeadDim * 2), end / 2, 1};
      }
    }
    return count;
  }

  // A copy of the V of a pair of keys, with zeros for the one that is not kept.
  const T* half_pair(const T* pair, int kept, T* copy) const {
    for (int d = 0; d < p_.head_dim; ++d) {
      copy[2 * d + kept] = pair[2 * d + kept];
      copy[2 * d + 1 - kept] = T{};
    }
    return copy;
  }

  void end_split(const AttentionItem& item, int kv_head, int split) {
    for (int r = 0; r < num_rows_; ++r) {
      const Partial partial{values_ + r * p_.head_dim, max_[r], reduce_add(load(sum_lanes_ + 16 * r))};
      if (item.slot >= 0) {
        float* place = workspace(item.slot + split * num_rows_ + r, kv_head);
        std::copy_n(partial.values, p_.head_dim, place);
        place[p_.head_dim] = partial.max;
        place[p_.head_dim + 1] = partial.sum;
      } else if (split == 0) {
        set_total(r, partial);
      } else {
        fold_into_total(r, partial);
      }
    }
  }

  void set_total(int row, const Partial& partial) {
    std::copy_n(partial.values, p_.head_dim, total_values_ + row * p_.head_dim);
    total_max_[row] = partial.max;
    total_sum_[row] = partial.sum;
  }

  void fold_into_total(int row, const Partial& partial) {
    Partial total{total_values_ + row * p_.head_dim, total_max_[row], total_sum_[row]};
    fold(total, partial, p_.head_dim);
    total_max_[row] = total.max;
    total_sum_[row] = total.sum;
  }

  // Normalizes and writes `out`. A sink is a key of no value.
  void finish(const AttentionItem& item, int kv_head) {
    for (int r = 0; r < num_rows_; ++r) {
      const int64_t row = item.first_row + r, head = int64_t{kv_head} * group_ + row % group_;
      float sum = total_sum_[r], factor = 1.0f;
      if (p_.sinks) {
        const float max = std::max(total_max_[r], p_.sinks[head]);
        factor = decay_between(total_max_[r], max);
        sum = sum * factor + decay_between(p_.sinks[head], max);
      }
      const f32x16 scale = f32x16::broadcast(factor / sum);
      T* out = p_.out + (p_.cu_seqlens_q[item.seq] + row / group_) * p_.out_stride + head * p_.head_dim;
      for (int d = 0; d < p_.head_dim; d += 16) {
        // + 0: where a sum is zero, its sign may depend on how many zeros were added
        store(out + d, load(total_values_ + r * p_.head_dim + d) * scale + f32x16::zero());
      }
    }
  }

  const PagedAttentionParams<T>& p_;
  const int group_;  // query heads of a KV head
  const int32_t* blocks_ = nullptr;
  int kv_head_ = 0, num_rows_ = 0;
  const T* k_[kVectorsPerTile];
  const T* v_[kMaxBlocksPerTile];
  int64_t k_stride_ = 0;

  int lowest_[kMaxRowsPerItem], end_[kMaxRowsPerItem];  // a row sees keys lowest .. end
  float max_[kMaxRowsPerItem], total_max_[kMaxRowsPerItem], total_sum_[kMaxRowsPerItem];
  alignas(64) float sum_lanes_[kMaxRowsPerItem * 16];
  alignas(64) T q_[kMaxRowsPerItem * kMaxHeadDim];
  alignas(64) float scores_[Step<T>::kRows * kKeyTile];
  alignas(64) T weights_[Step<T>::kRows * kKeyTile];
  alignas(64) float values_[kMaxRowsPerItem * kMaxHeadDim];
  alignas(64) float total_values_[kMaxRowsPerItem * kMaxHeadDim];
  alignas(64) T edges_[2 * kMaxHeadDim * 2];
  alignas(64) T gathered_[kKeyTile * kMaxHeadDim];
};

}  // namespace

template <class T>
void paged_attention(const PagedAttentionParams<T>& p) {
  const int64_t num_tasks = p.num_items * p.num_kv_heads;
  // splits still to come, for each merge and KV head: the thread that computes the last one merges
  std::unique_ptr<std::atomic<int32_t>[]> missing(new std::atomic<int32_t>[p.num_merges * p.num_kv_heads]);
  for (int64_t i = 0; i < p.num_merges * p.num_kv_heads; ++i) missing[i] = p.merges[i / p.num_kv_heads].num_splits;

  constexpr int64_t kRunsPerThread = 32;
  const int64_t num_runs = std::min(num_tasks, kRunsPerThread * p.parallel.num_threads());
  p.parallel(num_runs, [&](int64_t run) {
    ItemKernel<T> kernel(p);
    const int64_t end = num_tasks * (run + 1) / num_runs;
    for (int64_t task = num_tasks * run / num_runs; task < end; ++task) {
      const AttentionItem& item = p.items[task / p.num_kv_heads];
      const int kv_head = static_cast<int>(task % p.num_kv_heads);
      kernel.run(item, kv_head);
      if (item.merge >= 0 && missing[item.merge * p.num_kv_heads + kv_head].fetch_sub(1) == 1) {
        kernel.merge(item, kv_head);
      }
    }
  });
}

template void paged_attention(const PagedAttentionParams<bf16>&);
template void paged_attention(const PagedAttentionParams<float>&);

}  // namespace pagedllm
