// Between the qkv product and attention: q/k norm, rotation, K and V into their blocks (pagedllm/ops/kv_write.py).
#pragma once
#include "cuda/element_type.h"

namespace pagedllm {

struct DeviceKvWriteParams {
  void* qkv;                     // [num_tokens, (num_q_heads + 2 num_kv_heads) * head_dim]; the q part is written
  void *k_cache, *v_cache;       // [num_blocks, num_kv_heads, block_size, head_dim]
  const int64_t* slot_mapping;   // [num_tokens], -1: no slot
  const float* rope_table;       // [.., rotary_dim]: cosines, then sines; or null
  const int32_t* rope_rows;      // [num_tokens]
  const float *q_norm, *k_norm;  // [head_dim] or null
  int64_t qkv_stride, cache_block_stride, cache_head_stride;  // elements
  int32_t num_tokens, num_q_heads, num_kv_heads, head_dim, rotary_dim, block_shift;
  int32_t is_interleaved;
  float eps;
  ElementType type;  // bfloat16 or float16
};

// 0, or an error of launch(); -1 for a head_dim that was not compiled.
int rope_norm_write_kv(const DeviceKvWriteParams& params, void* stream);

}  // namespace pagedllm
