// Causal attention of new tokens over paged K and V. pagedllm/ops/attention.py says what the operator means and plans
// the work; T is bf16 or float, and with it goes the cache's layout (pagedllm/ops/kv_layout.py).
//
// Exactness: a row's keys are reduced in tiles of 64 absolute positions inside splits of 512, and splits are folded in
// order, whatever the block size, the other rows of its item, or the item's share of the splits. A tile or split of
// which a row sees nothing leaves the row as it is, so its bits depend on its own keys only. Keys that several items
// share are the same loop with rows inside and tiles outside.
#pragma once
#include "cpu/parallel.h"
#include "cpu/types.h"

namespace pagedllm {

constexpr int kKeyTile = 64;
constexpr int kKeySplit = 512;
constexpr int kMaxHeadDim = 256;
constexpr int kMaxRowsPerItem = 64;

// Rows first_row .. first_row + num_rows of a sequence, for each of its KV heads, over keys first_key .. end_key.
// Row r is token r / G, query head kv_head * G + r % G. first_key is a multiple of kKeySplit.
//
// Items of one split that follow each other may have keys first_key .. shared_end in common, whole tiles in the same
// blocks: those are read once for all of them, and each goes on with its own. The first such item counts them.
struct AttentionItem {
  int32_t seq, first_row, num_rows, first_key, end_key;
  int32_t merge;         // the merge that the item's split belongs to; -1: all splits are here
  int32_t num_together;  // items that share keys, from this one on; 1: it shares none; 0: counted by one before it
  int32_t shared_end;    // where several share keys
};

// All splits of some rows, from key 0 on: num_splits times num_rows places from first_slot on, where their partial
// results lie.
struct AttentionMerge {
  int32_t seq, first_row, first_slot, num_splits;
};

template <class T>
struct PagedAttentionParams {
  T* out;                        // [num_tokens, num_q_heads, head_dim]
  const T* q;                    // likewise
  int64_t out_stride, q_stride;  // of tokens, in elements
  const T* k_cache;              // bf16: [num_blocks, num_kv_heads, head_dim/2, block_size, 2]
  const T* v_cache;              // bf16: [num_blocks, num_kv_heads, block_size/2, head_dim, 2]
  const int32_t* block_table;    // [num_seqs, ...]
  int64_t block_table_stride;
  const int32_t* cu_seqlens_q;  // [num_seqs + 1]
  const int32_t* seq_lens;      // [num_seqs]
  const AttentionItem* items;
  const AttentionMerge* merges;
  int64_t num_items, num_merges;
  float* workspace;    // [places, num_kv_heads, head_dim + 2]: weighted sum of V, maximum, sum of weights
  const float* sinks;  // [num_q_heads] or null
  float scale, softcap;
  int32_t window;
  int32_t num_q_heads, num_kv_heads, head_dim, block_size;
  Parallel parallel;
};

template <class T>
void paged_attention(const PagedAttentionParams<T>& params);

}  // namespace pagedllm
