#include "bindings/cuda/caches.h"

namespace pagedllm {
namespace {

int32_t block_shift(const Argument& cache) {
  for (int32_t shift = 3; shift <= 7; ++shift) {
    if (cache.size(2) == int64_t{1} << shift) return shift;
  }
  cache.fail("must have a block size of 8, 16, 32, 64 or 128 in dimension 2");
}

}  // namespace

CacheLayout check_caches(const Argument& k_cache, const Argument& v_cache) {
  const int64_t num_kv_heads = k_cache.dim(4).size(1), head_dim = k_cache.size(3);
  if (head_dim != 64 && head_dim != 80 && head_dim != 96 && head_dim != 112 && head_dim != 128 && head_dim != 256)
    k_cache.fail("must have a head_dim of 64, 80, 96, 112, 128 or 256");
  element_type(k_cache, false);
  v_cache.type(k_cache.type()).shape({k_cache.size(0), num_kv_heads, k_cache.size(2), head_dim});
  for (const Argument* cache : {&k_cache, &v_cache}) {
    if (cache->stride(3) != 1 || cache->stride(2) != head_dim)
      cache->fail("must have the tokens of a block side by side");
    if (cache->stride(0) != k_cache.stride(0) || cache->stride(1) != k_cache.stride(1))
      cache->fail("must have the strides of k_cache");
    if (cache->stride(0) > INT32_MAX) cache->fail("must have strides below 2^31 elements");
    if (cache->stride(0) % 8 != 0 || cache->stride(1) % 8 != 0 ||
        reinterpret_cast<uintptr_t>(cache->data<void>()) % 16 != 0)
      cache->fail("must have heads that begin at multiples of 16 bytes");
  }
  return {static_cast<int32_t>(num_kv_heads), static_cast<int32_t>(head_dim), block_shift(k_cache), k_cache.stride(0),
          k_cache.stride(1)};
}

}  // namespace pagedllm
