#include "cpu/kv_write.h"

#include <cstring>

#include "cpu/vector_math.h"

namespace pagedllm {
namespace {

// head *= weight / sqrt(mean of squares + eps)
void norm_head(float* head, const float* weight, int64_t head_dim, float eps) {
  f32x16 sum = f32x16::zero();
  for (int64_t i = 0; i < head_dim; i += 16) {
    const f32x16 v = load_partial(head + i, head_dim - i);
    sum = fma(v, v, sum);
  }
  const f32x16 scale = f32x16::broadcast(inverse_rms(reduce_add(sum), head_dim, eps));
  for (int64_t i = 0; i < head_dim; i += 16) {
    const int64_t count = head_dim - i;
    store_partial(head + i, load_partial(head + i, count) * scale * load_partial(weight + i, count), count);
  }
}

void rotate_halves(float* head, const float* cosines, int64_t num_pairs) {
  const float* sines = cosines + num_pairs;
  for (int64_t i = 0; i < num_pairs; i += 16) {
    const int64_t count = num_pairs - i;
    const f32x16 c = load_partial(cosines + i, count), s = load_partial(sines + i, count);
    const f32x16 a = load_partial(head + i, count), b = load_partial(head + num_pairs + i, count);
    store_partial(head + i, a * c - b * s, count);
    store_partial(head + num_pairs + i, b * c + a * s, count);
  }
}

void rotate_neighbours(float* head, const float* cosines, int64_t num_pairs) {
  const float* sines = cosines + num_pairs;
  for (int64_t i = 0; i < num_pairs; ++i) {
    const float a = head[2 * i], b = head[2 * i + 1];
    head[2 * i] = a * cosines[i] - b * sines[i];
    head[2 * i + 1] = b * cosines[i] + a * sines[i];
  }
}

template <class To, class From>
void convert(To* out, const From* x, int64_t size) {
  for (int64_t i = 0; i < size; i += 16) store_partial(out + i, load_partial(x + i, size - i), size - i);
}

// One head to its place in a block; k_block and v_block are this head's parts of the block.
void write_slot(float* k_block, float* v_block, int64_t offset, int64_t block_size, const float* k, const float* v,
                int64_t head_dim) {
  for (int64_t d = 0; d < head_dim; ++d) k_block[d * block_size + offset] = k[d];
  std::memcpy(v_block + offset * head_dim, v, static_cast<size_t>(head_dim) * sizeof(float));
}

void write_slot(bf16* k_block, bf16* v_block, int64_t offset, int64_t block_size, const bf16* k, const bf16* v,
                int64_t head_dim) {
  for (int64_t d = 0; d < head_dim; d += 2) std::memcpy(k_block + d * block_size + 2 * offset, k + d, 2 * sizeof(bf16));
  // a word of V is shared by two tokens, which may belong to two threads: only our half of it is written
  bf16* pairs = v_block + offset / 2 * head_dim * 2 + offset % 2;
  for (int64_t d = 0; d < head_dim; ++d) pairs[2 * d] = v[d];
}

template <class T>
void write_token(const RopeNormWriteKVParams<T>& p, int64_t token) {
  T* const row = p.qkv + token * p.qkv_stride;
  const float* cosines = p.rope_table ? p.rope_table + p.rope_rows[token] * p.rope_stride : nullptr;
  const int64_t slot = p.slot_mapping[token];
  const int64_t num_heads = p.num_q_heads + (slot >= 0 ? p.num_kv_heads : 0);
  for (int64_t h = 0; h < num_heads; ++h) {
    const bool is_query = h < p.num_q_heads;
    T* const head = row + h * p.head_dim;
    float wide[kMaxHeadDim];
    convert(wide, head, p.head_dim);
    if (const float* norm = is_query ? p.q_norm : p.k_norm) norm_head(wide, norm, p.head_dim, p.eps);
    if (cosines) (p.is_interleaved ? rotate_neighbours : rotate_halves)(wide, cosines, p.rotary_dim / 2);
    if (is_query) {
      convert(head, wide, p.head_dim);
      continue;
    }
    T k[kMaxHeadDim];
    convert(k, wide, p.head_dim);
    const int64_t block_head = slot / p.block_size * p.num_kv_heads + (h - p.num_q_heads);
    const int64_t begin = block_head * p.head_dim * p.block_size;
    write_slot(p.k_cache + begin, p.v_cache + begin, slot % p.block_size, p.block_size, k,
               head + p.num_kv_heads * p.head_dim, p.head_dim);
  }
}

}  // namespace

template <class T>
void rope_norm_write_kv(const RopeNormWriteKVParams<T>& p) {
  const int64_t values = (p.num_q_heads + 2 * p.num_kv_heads) * p.head_dim;
  p.parallel.ranges(p.num_tokens, 4 * values, [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) write_token(p, token);
  });
}

void copy_blocks(const CopyBlocksParams& p) {
  p.parallel.ranges(p.num_pairs, 4 * p.block_bytes, [&](int64_t begin, int64_t end) {
    for (int64_t pair = begin; pair < end; ++pair) {
      const int64_t from = p.pairs[2 * pair] * p.block_bytes, to = p.pairs[2 * pair + 1] * p.block_bytes;
      std::memcpy(p.k_cache + to, p.k_cache + from, static_cast<size_t>(p.block_bytes));
      std::memcpy(p.v_cache + to, p.v_cache + from, static_cast<size_t>(p.block_bytes));
    }
  });
}

template void rope_norm_write_kv(const RopeNormWriteKVParams<bf16>&);
template void rope_norm_write_kv(const RopeNormWriteKVParams<float>&);

}  // namespace pagedllm
