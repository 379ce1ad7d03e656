// Paged attention of new tokens over their sequences' blocks. pagedllm/ops/attention.py says what the operator means,
// pagedllm/ops/cuda_attention.py how the work list is made. No torch here.
#pragma once
#include <cstdint>

namespace pagedllm {

// How items of a work list are laid out: the header counts items (all, of 128, of 64, of 16 rows), items of 128 rows
// come first, then those of 64, then of 16. Kernels run in that order.
struct AttentionWork {
  int32_t seq, first_row, num_rows;  // rows are (token, head in group) pairs
  int32_t first_key, end_key;        // multiples of 512 but for the last end, or where a shared prefix ends
  int32_t slot;         // of the rows' partial results, a slot for 16 rows; -1: the item reduces all its keys in one go
  int32_t slot_stride;  // between the slots of neighbouring groups of 16 rows
  int32_t flags;        // AttentionFlag
};
enum AttentionFlag : int32_t {
  kCarries = 1,    // the item walks all its splits and keeps in its slots what it has so far
  kContinues = 2,  // 16 rows: the item goes on from what a shared item left in its slot, within the first split
  // 64 rows: the item's tokens are the only ones of sequences that have these keys in common. `seq` is the first
  // one's place in the merge list, where the others follow; `slot` is the split, counted from each one's first slot;
  // slot_stride is the shortest of the sequences: it has all keys that a window leaves any of them.
  kShared = 4,
};
struct AttentionMerge {  // 16 rows
  int32_t seq, first_row, first_slot;
  int32_t num_splits;  // 0: nothing is merged, the entry is for shared items
};

struct PagedAttentionParams {
  void* out;                               // [num_tokens, num_kv_heads * group, head_dim]
  const void *q, *k_cache, *v_cache;       // caches [num_blocks, num_kv_heads, block_size, head_dim]
  const int32_t* block_table;              // [num_seqs, ...]
  const int32_t *cu_seqlens_q, *seq_lens;  // [num_seqs + 1], [num_seqs]
  const AttentionWork* work;               // a header row, then the items
  const AttentionMerge* merge;             // likewise
  float* workspace;              // [slots][num_kv_heads][16 rows * head_dim accumulators, then 16 * (max, sum)]
  const float* sinks;            // [num_kv_heads * group] or null
  int64_t q_stride, out_stride;  // elements between tokens
  int32_t cache_block_stride, cache_head_stride;  // elements
  int32_t block_table_stride;
  int32_t num_kv_heads, group;    // group: query heads of a KV head
  uint32_t group_magic;           // the group's FastDivisor; paged_attention() fills it in
  int32_t head_dim, block_shift;  // block_size = 1 << block_shift
  float scale, softcap;
  float tanh_scale;  // scale / softcap * 2 log2(e); paged_attention() fills it in
  int32_t window;
  int32_t max_work, max_merge;  // rows of work and merge without the headers
  int32_t most_rows;            // of an item that the list may hold: 128, 64 or 16
  int32_t is_bf16;              // else float16
};

// 0, or an error of launch(); -1 for a head_dim that was not compiled.
int paged_attention(PagedAttentionParams params, void* stream);

}  // namespace pagedllm
