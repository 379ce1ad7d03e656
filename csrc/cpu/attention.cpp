#include "cpu/attention.h"

#include <algorithm>
#include <atomic>
#include <limits>
#include <memory>

#include "cpu/attention_blocks.h"
#include "cpu/attention_tile.h"
#include "cpu/vector_math.h"

namespace pagedllm {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr int kVectors = kKeyTile / 16;  // of a tile's scores

// exp(from - to) for the maxima of two sets of scores; a set of none has -infinity and weighs nothing.
float decay_between(float from, float to) {
  if (from == to) return from == -kInfinity ? 0.0f : 1.0f;
  float lanes[16];
  store(lanes, exp(f32x16::broadcast(from - to)));
  return lanes[0];
}

// Unnormalized softmax of a row over some keys.
struct Partial {
  const float* values;  // [head_dim]: sum of exp(score - max) * v
  float max, sum;       // sum of exp(score - max)
};

struct Task {
  const AttentionItem* item;
  int kv_head;
};

// Runs tasks one after another, on one thread.
template <class T>
class Worker {
 public:
  explicit Worker(const PagedAttentionParams<T>& params)
      : p_(params), group_(params.num_q_heads / params.num_kv_heads), keys_(params) {}

  // `next`, if any, is what will be run after this.
  void run(const Task& task, const Task* next) {
    begin(task);
    const AttentionItem& item = *task.item;
    for (int key = item.first_key; key < item.end_key; key += kKeySplit) {
      clear();
      const int end = std::min(key + kKeySplit, item.end_key);
      for (int tile = std::max(key, first_tile(item)); tile < end; tile += kKeyTile) {
        look_ahead(task, tile + kKeyTile, next);
        run_tile(tile, std::min(tile + kKeyTile, end));
        while (!lines_.is_empty()) lines_.ask();
      }
      end_split((key - item.first_key) / kKeySplit);
    }
    if (item.slot < 0) finish();
  }

  // Folds the splits of an item's rows, all of them computed, and writes `out`.
  void merge(const Task& task) {
    begin(task);
    const AttentionMerge& merge = p_.merges[task.item->merge];
    for (int split = 0; split < merge.num_splits; ++split) {
      for (int r = 0; r < num_rows_; ++r) {
        const float* place = place_of(merge.first_slot + split * num_rows_ + r);
        fold_into_total(r, split == 0, {place, place[p_.head_dim], place[p_.head_dim + 1]});
      }
    }
    finish();
  }

 private:
  static constexpr int kRows = Step<T>::kRows;
  static constexpr int kRowsToLookAhead = 16;  // with more, arithmetic takes longer than memory, and tiles are shared

  // Position of the first new token of a sequence.
  int first_position(int seq) const { return p_.seq_lens[seq] - (p_.cu_seqlens_q[seq + 1] - p_.cu_seqlens_q[seq]); }
  int lowest_key(int position) const { return p_.window > 0 ? std::max(0, position + 1 - p_.window) : 0; }
  // Tiles that the first row's window has left behind are left behind by all rows.
  int first_tile(const AttentionItem& item) const {
    const int lowest = lowest_key(first_position(item.seq) + item.first_row / group_);
    return std::max(item.first_key, lowest / kKeyTile * kKeyTile);
  }
  const int32_t* blocks_of(const AttentionItem& item) const {
    return p_.block_table + item.seq * p_.block_table_stride;
  }
  float* place_of(int64_t place) const {
    return p_.workspace + (place * p_.num_kv_heads + task_.kv_head) * (p_.head_dim + 2);
  }
  // Offset of a row in q or out, whose tokens are `stride` apart.
  int64_t row_offset(int row, int64_t stride) const { return token_[row] * stride + int64_t{head_[row]} * p_.head_dim; }

  void begin(const Task& task) {
    task_ = task;
    num_rows_ = task.item->num_rows;
    const int first_token = p_.cu_seqlens_q[task.item->seq], first = first_position(task.item->seq);
    int token = task.item->first_row / group_, head = task.item->first_row % group_;
    for (int r = 0; r < num_rows_; ++r) {
      token_[r] = first_token + token;
      head_[r] = task.kv_head * group_ + head;
      lowest_[r] = lowest_key(first + token);
      end_[r] = first + token + 1;
      std::copy_n(p_.q + row_offset(r, p_.q_stride), p_.head_dim, q_ + r * kMaxHeadDim);
      if (++head == group_) {
        head = 0;
        ++token;
      }
    }
  }

  void clear() {
    std::fill_n(values_, num_rows_ * p_.head_dim, 0.0f);
    std::fill_n(max_, num_rows_, -kInfinity);
    std::fill_n(sum_lanes_, 16 * num_rows_, 0.0f);
  }

  // Queues the lines of what comes after the present tile: another one of this task, or the first of the next task.
  void look_ahead(const Task& task, int tile, const Task* next) {
    lines_ = {};
    const Task* ahead = &task;
    if (tile >= task.item->end_key) {
      if (!next) return;
      ahead = next;
      tile = first_tile(*next->item);
    }
    const AttentionItem& item = *ahead->item;
    if (item.num_rows > kRowsToLookAhead) return;
    lines_ = keys_.lines_of(blocks_of(item), ahead->kv_head, tile, std::min(tile + kKeyTile, item.end_key));
  }

  void run_tile(int tile, int tile_end) {
    int first = 0, last = num_rows_;  // rows that see a key of the tile lie together
    while (first < last && end_[first] <= tile) ++first;
    while (first < last && lowest_[last - 1] >= tile_end) --last;
    if (first == last) return;
    keys_.locate(blocks_of(*task_.item), task_.kv_head, tile, tile_end);
    // Rows that see the same keys of the tile go together, and no others: a key that a row must not see gets the weight
    // 0, and if its V were NaN, 0 * NaN would be NaN.
    while (first < last) {
      const int begin = std::max(lowest_[first], tile), end = std::min(end_[first], tile_end);
      int stop = first + 1;
      while (stop < last && std::max(lowest_[stop], tile) == begin && std::min(end_[stop], tile_end) == end) ++stop;
      for (int groups = (stop - first + kRows - 1) / kRows; groups > 0; --groups) {
        const int count = (stop - first + groups - 1) / groups;  // groups of about the same size
        run_group(first, count, begin - tile, end - tile);
        first += count;
      }
    }
  }

  // A few rows against keys begin .. end of the tile, all of which they see.
  void run_group(int first, int count, int begin, int end) {
    const int first_vector = begin / 16, end_vector = (end + 15) / 16;
    score(count, end_vector - first_vector, q_ + first * kMaxHeadDim, keys_.k() + first_vector, keys_.k_stride(),
          p_.head_dim / Step<T>::kElements, scores_ + 16 * first_vector, lines_);
    alignas(64) float decay[16];
    weigh(first, count, begin, end, decay);
    Run<T> runs[KeyTile<T>::kMaxRuns];
    const int num_runs = keys_.cut_runs(begin, end, runs);
    accumulate(count, p_.head_dim, weights_, runs, num_runs, decay, values_ + first * p_.head_dim, lines_);
  }

  // Scores become weights exp(score - max) of keys begin .. end; decay[r] is what earlier weights of a row are to be
  // multiplied by. Row after row twice, so that the exponentials of all decays are one.
  void weigh(int first, int count, int begin, int end, float* decay) {
    const int first_vector = begin / 16, end_vector = (end + 15) / 16;
    const f32x16 none = f32x16::broadcast(-kInfinity);
    alignas(64) float new_max[16] = {}, old_max[16] = {};
    for (int r = 0; r < count; ++r) {
      float* scores = scores_ + r * kKeyTile;
      f32x16 max = none;
      for (int v = first_vector; v < end_vector; ++v) {
        f32x16 s = load(scores + 16 * v) * f32x16::broadcast(p_.scale);
        if (p_.softcap > 0.0f) s = f32x16::broadcast(p_.softcap) * tanh(s / f32x16::broadcast(p_.softcap));
        if (end < 16 * (v + 1)) s = select_first(end - 16 * v, s, none);
        if (begin > 16 * v) s = select_first(begin - 16 * v, none, s);
        max = pagedllm::max(max, s);
        store(scores + 16 * v, s);
      }
      old_max[r] = max_[first + r];
      new_max[r] = max_[first + r] = std::max(old_max[r], reduce_max(max));
    }
    store(decay, exp(load(old_max) - load(new_max)));
    for (int r = 0; r < count; ++r) {
      if (new_max[r] == -kInfinity) decay[r] = 0.0f;  // neither before nor now is there a key
      const f32x16 reference = f32x16::broadcast(new_max[r] == -kInfinity ? 0.0f : new_max[r]);
      f32x16 sums[kVectors];
      for (int v = 0; v < kVectors; ++v) {
        sums[v] = f32x16::zero();
        if (v >= first_vector && v < end_vector) {
          sums[v] = exp(load(scores_ + r * kKeyTile + 16 * v) - reference);
          store(weights_ + r * kKeyTile + 16 * v, sums[v]);
        }
      }
      float* lanes = sum_lanes_ + 16 * (first + r);
      const f32x16 tile_sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
      store(lanes, fma(load(lanes), f32x16::broadcast(decay[r]), tile_sum));
    }
  }

  void end_split(int split) {
    for (int r = 0; r < num_rows_; ++r) {
      const Partial partial{values_ + r * p_.head_dim, max_[r], reduce_add(load(sum_lanes_ + 16 * r))};
      if (task_.item->slot < 0) {
        fold_into_total(r, split == 0, partial);
        continue;
      }
      float* place = place_of(task_.item->slot + split * num_rows_ + r);
      std::copy_n(partial.values, p_.head_dim, place);
      place[p_.head_dim] = partial.max;
      place[p_.head_dim + 1] = partial.sum;
    }
  }

  // Splits come in order of their keys.
  void fold_into_total(int row, bool is_first, const Partial& partial) {
    float* total = total_values_ + row * p_.head_dim;
    if (is_first) {
      std::copy_n(partial.values, p_.head_dim, total);
      total_max_[row] = partial.max;
      total_sum_[row] = partial.sum;
      return;
    }
    const float max = std::max(total_max_[row], partial.max);
    const float ours = decay_between(total_max_[row], max), theirs = decay_between(partial.max, max);
    for (int d = 0; d < p_.head_dim; d += 16) {
      const f32x16 scaled = load(partial.values + d) * f32x16::broadcast(theirs);
      store(total + d, fma(load(total + d), f32x16::broadcast(ours), scaled));
    }
    total_max_[row] = max;
    total_sum_[row] = total_sum_[row] * ours + partial.sum * theirs;
  }

  // Normalizes and writes `out`. A sink is a key of no value.
  void finish() {
    for (int r = 0; r < num_rows_; ++r) {
      float factor = 1.0f, sum = total_sum_[r];
      if (p_.sinks) {
        const float sink = p_.sinks[head_[r]];
        const float max = std::max(total_max_[r], sink);
        factor = decay_between(total_max_[r], max);
        sum = sum * factor + decay_between(sink, max);
      }
      const f32x16 scale = f32x16::broadcast(factor / sum);
      T* out = p_.out + row_offset(r, p_.out_stride);
      for (int d = 0; d < p_.head_dim; d += 16) {
        // + 0: a sum of -0 is 0 where a split without keys was folded before it
        store(out + d, load(total_values_ + r * p_.head_dim + d) * scale + f32x16::zero());
      }
    }
  }

  const PagedAttentionParams<T>& p_;
  const int group_;  // query heads of a KV head
  Task task_{};
  int num_rows_ = 0;
  KeyTile<T> keys_;
  LineQueue lines_{};

  // of each row
  int token_[kMaxRowsPerItem], head_[kMaxRowsPerItem];  // in q and out
  int lowest_[kMaxRowsPerItem], end_[kMaxRowsPerItem];  // the row sees keys lowest .. end
  float max_[kMaxRowsPerItem], total_max_[kMaxRowsPerItem], total_sum_[kMaxRowsPerItem];
  alignas(64) float sum_lanes_[kMaxRowsPerItem * 16];
  alignas(64) T q_[kMaxRowsPerItem * kMaxHeadDim];
  alignas(64) float values_[kMaxRowsPerItem * kMaxHeadDim];
  alignas(64) float total_values_[kMaxRowsPerItem * kMaxHeadDim];
  // of a group of rows
  alignas(64) float scores_[kRows * kKeyTile];
  alignas(64) T weights_[kRows * kKeyTile];
};

}  // namespace

template <class T>
void paged_attention(const PagedAttentionParams<T>& p) {
  const int64_t num_tasks = p.num_items * p.num_kv_heads, num_merges = p.num_merges * p.num_kv_heads;
  // splits still to come of each merge and KV head: the thread that computes the last one merges
  const std::unique_ptr<std::atomic<int32_t>[]> missing(new std::atomic<int32_t>[num_merges]);
  for (int64_t i = 0; i < num_merges; ++i) missing[i] = p.merges[i / p.num_kv_heads].num_splits;

  // Threads draw runs of tasks, not tasks: within a run the next task is known, and its keys can be asked for early.
  constexpr int64_t kRunsPerThread = 32;
  const int64_t num_runs = std::min(num_tasks, kRunsPerThread * p.parallel.num_threads());
  const auto task_at = [&](int64_t i) {
    return Task{&p.items[i / p.num_kv_heads], static_cast<int>(i % p.num_kv_heads)};
  };
  p.parallel(num_runs, [&](int64_t run) {
    Worker<T> worker(p);
    const int64_t end = num_tasks * (run + 1) / num_runs;
    for (int64_t i = num_tasks * run / num_runs; i < end; ++i) {
      const Task task = task_at(i), next = task_at(std::min(i + 1, end - 1));
      worker.run(task, i + 1 < end ? &next : nullptr);
      const int32_t merge = task.item->merge;
      if (merge >= 0 && missing[merge * p.num_kv_heads + task.kv_head].fetch_sub(1) == 1) worker.merge(task);
    }
  });
}

template void paged_attention(const PagedAttentionParams<bf16>&);
template void paged_attention(const PagedAttentionParams<float>&);

}  // namespace pagedllm
