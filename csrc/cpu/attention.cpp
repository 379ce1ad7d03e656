#include "cpu/attention.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <vector>

#include "cpu/attention_blocks.h"
#include "cpu/attention_softmax.h"
#include "cpu/attention_tile.h"

namespace pagedllm {
namespace {

constexpr int kRowsTogether = 48;  // of items that share keys, in one task

// Unnormalized softmax of a row over some keys. Scores are times log2 e, so that weights are powers of two.
struct Partial {
  const float* values;  // [head_dim]: sum of 2^(score - max) * v
  float max, sum;       // sum of 2^(score - max)
};

// Items that are computed together, for one KV head.
struct Task {
  const AttentionItem* items;
  int num_items;
  int kv_head;
};

// Tiles of keys first_tile .. end_key in the blocks of `item`.
struct Keys {
  const AttentionItem* item;
  int first_tile, end_key;
  bool is_empty() const { return first_tile >= end_key; }
};

// Runs tasks one after another, on one thread.
template <class T>
class Worker {
 public:
  explicit Worker(const PagedAttentionParams<T>& params)
      : p_(params),
        group_(params.num_q_heads / params.num_kv_heads),
        factor_((params.softcap > 0.0f ? 1.0f : params.scale) * kLog2E),
        keys_(params) {}

  // `next`, if any, is what will be run after this.
  void run(const Task& task, const Task* next) {
    begin(task);
    for (int key = task.items->first_key; key < task.items->end_key; key += kKeySplit) {
      clear();
      for (int part = 0; part <= task.num_items; ++part) {
        const Keys keys = keys_of(task, part, key);
        const int first_row = part == 0 ? 0 : first_row_[part - 1];
        const int end_row = part == 0 ? num_rows_ : first_row_[part];
        if (part == 0) begin_tails(keys);
        for (int tile = keys.first_tile; tile < keys.end_key; tile += kKeyTile) {
          if (num_tails_ == 0) look_ahead(task, part, key, tile + kKeyTile, next);
          run_tile(*keys.item, tile, std::min(tile + kKeyTile, keys.end_key), first_row, end_row);
          while (!lines_.is_empty()) lines_.ask();
        }
        num_tails_ = 0;
      }
      for (int i = 0; i < task.num_items; ++i) end_split(i, key / kKeySplit);
    }
    for (int i = 0; i < task.num_items; ++i) {
      if (task.items[i].merge < 0) finish(first_row_[i], first_row_[i + 1]);
    }
  }

  // Folds the splits of an item's rows, all of them computed, and writes `out`.
  void merge(const AttentionItem& item, int kv_head) {
    begin({&item, 1, kv_head});
    const AttentionMerge& merge = p_.merges[item.merge];
    for (int split = 0; split < merge.num_splits; ++split) {
      for (int r = 0; r < num_rows_; ++r) {
        const float* place = place_of(merge.first_slot + split * num_rows_ + r);
        fold_into_total(r, split == 0, {place, place[p_.head_dim], place[p_.head_dim + 1]});
      }
    }
    finish(0, num_rows_);
  }

 private:
  static constexpr int kRows = Step<T>::kRows;
  static constexpr int kRowsToLookAhead = 16;  // with more, arithmetic takes longer than memory, and tiles are shared

  // Position of the first new token of a sequence.
  int first_position(int seq) const { return p_.seq_lens[seq] - (p_.cu_seqlens_q[seq + 1] - p_.cu_seqlens_q[seq]); }
  int lowest_key(int position) const { return p_.window > 0 ? std::max(0, position + 1 - p_.window) : 0; }

  // Of the split that begins with `key`: part 0 are the keys that the task's items share, part i + 1 those that item i
  // has besides.
  Keys keys_of(const Task& task, int part, int key) const {
    const bool shares = task.num_items > 1;
    const int shared_end = shares ? task.items->shared_end : key;
    if (part == 0) return {task.items, key, shared_end};
    const AttentionItem& item = task.items[part - 1];
    // tiles that the first row's window has left behind are left behind by all rows
    const int lowest = lowest_key(first_position(item.seq) + item.first_row / group_);
    return {&item, std::max(shared_end, lowest / kKeyTile * kKeyTile), std::min(key + kKeySplit, item.end_key)};
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
    num_rows_ = 0;
    for (int i = 0; i < task.num_items; ++i) {
      first_row_[i] = num_rows_;
      begin(task.items[i], task.kv_head);
    }
    first_row_[task.num_items] = num_rows_;
  }

  void begin(const AttentionItem& item, int kv_head) {
    const int first_token = p_.cu_seqlens_q[item.seq], first = first_position(item.seq);
    int token = item.first_row / group_, head = item.first_row % group_;
    for (int end = num_rows_ + item.num_rows; num_rows_ < end; ++num_rows_) {
      const int r = num_rows_;
      token_[r] = first_token + token;
      head_[r] = kv_head * group_ + head;
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

  // Queues the lines of the tile that is to be computed after the present one: it begins at `tile` if that is still in
  // the same part, else it is the first one of the next part, split or task that has any.
  void look_ahead(Task task, int part, int key, int tile, const Task* next) {
    lines_ = {};
    Keys ahead = keys_of(task, part, key);
    ahead.first_tile = tile;
    while (ahead.is_empty()) {
      if (++part > task.num_items) {
        part = 0;
        key += kKeySplit;
      }
      if (key >= task.items->end_key) {
        if (!next) return;
        task = *next;
        key = task.items->first_key;
        next = nullptr;
      }
      ahead = keys_of(task, part, key);
    }
    if (ahead.item->num_rows * (part == 0 ? task.num_items : 1) > kRowsToLookAhead) return;
    lines_ = keys_.lines_of(blocks_of(*ahead.item), task.kv_head, ahead.first_tile,
                            std::min(ahead.first_tile + kKeyTile, ahead.end_key));
  }

  // Keys that many rows share take longer to compute than to read, and memory would be idle: meanwhile the tiles that
  // items have besides are asked for, spread evenly over the groups of rows (with a prefix of 480 tokens, 3 of the 55
  // ms of a decode step).
  void begin_tails(const Keys& shared) {
    num_tails_ = tail_credit_ = 0;
    if (num_rows_ <= kRowsToLookAhead || shared.is_empty()) return;
    tail_part_ = 0;
    tail_ = {};
    for (int part = 1; part <= task_.num_items; ++part) {
      const Keys tail = keys_of(task_, part, shared.first_tile);
      if (!tail.is_empty()) num_tails_ += (tail.end_key - tail.first_tile + kKeyTile - 1) / kKeyTile;
    }
    num_groups_ = (shared.end_key - shared.first_tile) / kKeyTile * ((num_rows_ + kRows - 1) / kRows);
  }

  void queue_tail() {
    tail_credit_ += num_tails_;
    if (tail_credit_ < num_groups_ || !lines_.is_empty()) return;
    while (tail_.is_empty()) {
      if (tail_part_ == task_.num_items) return;
      tail_ = keys_of(task_, ++tail_part_, task_.items->first_key);
    }
    lines_ = keys_.lines_of(blocks_of(*tail_.item), task_.kv_head, tail_.first_tile,
                            std::min(tail_.first_tile + kKeyTile, tail_.end_key));
    tail_.first_tile += kKeyTile;
    tail_credit_ -= num_groups_;
  }

  // Rows first .. last against a tile of the item's keys.
  void run_tile(const AttentionItem& item, int tile, int tile_end, int first, int last) {
    bool is_located = false;
    // Rows that see the same keys of the tile go together, and no others: a key that a row must not see gets the weight
    // 0, and if its V were NaN, 0 * NaN would be NaN.
    while (first < last) {
      const int begin = std::max(lowest_[first], tile), end = std::min(end_[first], tile_end);
      int stop = first + 1;
      while (stop < last && std::max(lowest_[stop], tile) == begin && std::min(end_[stop], tile_end) == end) ++stop;
      if (begin >= end) {
        first = stop;
        continue;
      }
      if (!is_located) keys_.locate(blocks_of(item), task_.kv_head, tile, tile_end);
      is_located = true;
      for (int groups = (stop - first + kRows - 1) / kRows; groups > 0; --groups) {
        const int count = (stop - first + groups - 1) / groups;  // groups of about the same size
        run_group(first, count, begin - tile, end - tile);
        first += count;
      }
    }
  }

  // A few rows against keys begin .. end of the tile, all of which they see.
  void run_group(int first, int count, int begin, int end) {
    if (num_tails_ > 0) queue_tail();
    const int first_vector = begin / 16, num_vectors = (end + 15) / 16 - first_vector;
    float* scores = scores_ + 16 * first_vector;
    score(count, num_vectors, q_ + first * kMaxHeadDim, keys_.k() + first_vector, keys_.k_stride(),
          p_.head_dim / Step<T>::kElements, scores, lines_);
    if (p_.softcap > 0.0f) cap_scores(count, num_vectors, p_.scale, p_.softcap, scores);
    hide_scores(count, begin - 16 * first_vector, end - 16 * first_vector, scores);
    alignas(64) float decay[16];
    with_constant<kKeyTile / 16>(num_vectors, [&](auto vectors) {
      weigh_rows<T, vectors()>(count, factor_, scores, max_ + first, sum_lanes_ + 16 * first,
                               weights_ + 16 * first_vector, decay);
    });
    Run<T> runs[KeyTile<T>::kMaxRuns];
    const int num_runs = keys_.cut_runs(begin, end, runs);
    accumulate(count, p_.head_dim, weights_, runs, num_runs, decay, values_ + first * p_.head_dim, lines_);
  }

  void end_split(int i, int split) {
    const AttentionItem& item = task_.items[i];
    for (int r = first_row_[i]; r < first_row_[i + 1]; ++r) {
      const Partial partial{values_ + r * p_.head_dim, max_[r], reduce_add(load(sum_lanes_ + 16 * r))};
      if (item.merge < 0) {
        fold_into_total(r, split == 0, partial);
        continue;
      }
      float* place = place_of(p_.merges[item.merge].first_slot + split * item.num_rows + r - first_row_[i]);
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
  void finish(int first, int last) {
    for (int r = first; r < last; ++r) {
      float factor = 1.0f, sum = total_sum_[r];
      if (p_.sinks) {
        const float sink = p_.sinks[head_[r]] * kLog2E;
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
  const int group_;     // query heads of a KV head
  const float factor_;  // what q.k, or its capped value, is multiplied by
  Task task_{};
  int num_rows_ = 0;
  KeyTile<T> keys_;
  LineQueue lines_{};
  // what is left of begin_tails
  int num_tails_ = 0, num_groups_ = 0, tail_credit_ = 0;
  int tail_part_ = 0;
  Keys tail_{};

  int first_row_[kMaxRowsPerItem + 1];  // of each item
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

// The work list as tasks. Items that share keys are cut into tasks of about equal size.
template <class T>
std::vector<Task> tasks_of(const PagedAttentionParams<T>& p) {
  std::vector<Task> tasks;
  tasks.reserve(p.num_items * p.num_kv_heads);
  for (int64_t i = 0; i < p.num_items; i += p.items[i].num_together) {
    const int num_items = p.items[i].num_together;
    const int most = std::max(1, kRowsTogether / p.items[i].num_rows), num_pieces = (num_items + most - 1) / most;
    for (int kv_head = 0; kv_head < p.num_kv_heads; ++kv_head) {
      for (int piece = 0; piece < num_pieces; ++piece) {
        const int first = num_items * piece / num_pieces, end = num_items * (piece + 1) / num_pieces;
        tasks.push_back({p.items + i + first, end - first, kv_head});
      }
    }
  }
  return tasks;
}

}  // namespace

template <class T>
void paged_attention(const PagedAttentionParams<T>& p) {
  const std::vector<Task> tasks = tasks_of(p);
  // splits still to come of each merge and KV head: the thread that computes the last one merges
  const int64_t num_merges = p.num_merges * p.num_kv_heads;
  const std::unique_ptr<std::atomic<int32_t>[]> missing(new std::atomic<int32_t>[num_merges]);
  for (int64_t i = 0; i < num_merges; ++i) missing[i] = p.merges[i / p.num_kv_heads].num_splits;

  // Threads draw runs of tasks, not tasks: within a run the next task is known, and its keys can be asked for early.
  constexpr int64_t kRunsPerThread = 32;
  const int64_t num_tasks = tasks.size(), num_runs = std::min(num_tasks, kRunsPerThread * p.parallel.num_threads());
  p.parallel(num_runs, [&](int64_t run) {
    Worker<T> worker(p);
    const int64_t end = num_tasks * (run + 1) / num_runs;
    for (int64_t i = num_tasks * run / num_runs; i < end; ++i) {
      const Task& task = tasks[i];
      worker.run(task, i + 1 < end ? &tasks[i + 1] : nullptr);
      for (const AttentionItem* item = task.items; item < task.items + task.num_items; ++item) {
        if (item->merge < 0) continue;
        if (missing[item->merge * p.num_kv_heads + task.kv_head].fetch_sub(1) == 1) worker.merge(*item, task.kv_head);
      }
    }
  });
}

template void paged_attention(const PagedAttentionParams<bf16>&);
template void paged_attention(const PagedAttentionParams<float>&);

}  // namespace pagedllm
