// K and V on their way into the blocks, and copies of blocks. The layouts of a layer's cache, for bf16 and float:
//   bf16   K [num_blocks, num_kv_heads, head_dim/2, block_size, 2]   V [num_blocks, num_kv_heads, block_size/2,
//   head_dim, 2] float  K [num_blocks, num_kv_heads, head_dim, block_size]        V [num_blocks, num_kv_heads,
//   block_size, head_dim]
#pragma once
#include "cpu/parallel.h"
#include "cpu/types.h"

namespace pagedllm {

constexpr int kMaxHeadDim = 512;

// For each token: q = rotate(norm(q)) in place, k_cache[slot] = rotate(norm(k)), v_cache[slot] = v; in float32, rounded
// once.
template <class T>
struct RopeNormWriteKVParams {
  T* qkv;  // [num_tokens, (num_q_heads + 2 num_kv_heads) * head_dim]: q, k and v heads in turn
  T* k_cache;
  T* v_cache;
  const int64_t* slot_mapping;  // [num_tokens], block * block_size + offset; -1: write neither k nor v
  const float* rope_table;      // [rows, rotary_dim], cosines then sines; null: no rotation
  const int32_t* rope_rows;     // [num_tokens]
  const float* q_norm;          // [head_dim] or null
  const float* k_norm;          // [head_dim] or null
  int64_t qkv_stride, rope_stride;
  int64_t num_tokens, num_q_heads, num_kv_heads, head_dim, rotary_dim, block_size;
  float eps;
  bool is_interleaved;  // features 2i and 2i + 1 are a pair, else i and i + rotary_dim / 2
  Parallel parallel;
};

template <class T>
void rope_norm_write_kv(const RopeNormWriteKVParams<T>& params);

struct CopyBlocksParams {
  char* k_cache;
  char* v_cache;
  const int32_t* pairs;  // [num_pairs, 2]: from, to
  int64_t num_pairs;
  int64_t block_bytes;  // of K, and of V
  Parallel parallel;
};

void copy_blocks(const CopyBlocksParams& params);

}  // namespace pagedllm
