// Checks of KV caches in CUDA's layout, [num_blocks, num_kv_heads, block_size, head_dim], shared by the operators that
// read and write them.
#pragma once
#include "bindings/cuda/device_call.h"

namespace pagedllm {

struct CacheLayout {
  int32_t num_kv_heads, head_dim, block_shift;
  int64_t block_stride, head_stride;  // elements, the same for K and V
};

// Fails by name for a head_dim, block size or stride that the kernels cannot do.
CacheLayout check_caches(const Argument& k_cache, const Argument& v_cache);

}  // namespace pagedllm
