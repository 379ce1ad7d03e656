// Kernels that move rows or blocks: activations (pagedllm/ops/linear.py), gathered rows, copied blocks
// (pagedllm/ops/kv_write.py). Rows begin at multiples of 16 bytes and are whole 16 bytes long.
#pragma once
#include "cuda/element_type.h"

namespace pagedllm {

struct ActivationParams {
  void* out;                                   // [num_rows, width], as the two below
  const void *gate, *up;                       // up: null where there is no gate, and `gate` is what is activated
  int64_t out_stride, gate_stride, up_stride;  // elements
  int32_t num_rows, width;
  int32_t activation;  // pagedllm.ops.linear.Activation: 1 silu, 2 gelu by tanh, 3 gelu, 4 clamped swish
  ElementType type;
};

struct GatherRowsParams {
  void* out;                     // [num_rows, ...]
  const void* x;                 // [num_tokens, ...]
  const int32_t* indices;        // [num_rows]
  int64_t out_stride, x_stride;  // bytes
  int32_t num_rows, row_bytes;
};

struct CopyBlocksParams {
  void *k_cache, *v_cache;
  const int32_t* pairs;        // [num_pairs, 2] of (from, to)
  int64_t k_stride, v_stride;  // bytes between blocks
  int32_t num_pairs, block_bytes;
};

int run_activation(const ActivationParams& params, void* stream);
int gather_rows(const GatherRowsParams& params, void* stream);
int copy_blocks(const CopyBlocksParams& params, void* stream);

}  // namespace pagedllm
