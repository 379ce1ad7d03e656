// Partial results of splits and how they are joined, in order, always with these operations: whether a row's splits
// were separate items or one after another in the same block, its bits are the same.
#pragma once
#include "cuda/attention_tile.cuh"

namespace pagedllm {

constexpr float kNoKey = -INFINITY;

// Running maximum and sum of a row; the maximum in units of log2.
struct RowState {
  float max, sum;
};

// Joins `next` to `state`: returns what to multiply either's accumulators with.
__device__ __forceinline__ float2 join(RowState& state, const RowState& next) {
  const float max = fmaxf(state.max, next.max);
  const float base = max == kNoKey ? 0.f : max;
  const float2 factors = make_float2(exp2_fast(state.max - base), exp2_fast(next.max - base));
  state.sum = __fmaf_rn(next.sum, factors.y, __fmul_rn(state.sum, factors.x));
  state.max = max;
  return factors;
}
__device__ __forceinline__ float join(float value, float next, const float2& factors) {
  return __fmaf_rn(next, factors.y, __fmul_rn(value, factors.x));
}

// What to multiply a row's accumulators with at the end. A sink is a key of no value. Rows without a key give 0.
__device__ __forceinline__ float normalizer(const RowState& state, float sink_log2) {
  const float max = fmaxf(state.max, sink_log2);
  if (max == kNoKey) return 0.f;
  const float factor = exp2_fast(state.max - max);
  return factor * reciprocal_fast(state.sum * factor + exp2_fast(sink_log2 - max));
}
__device__ __forceinline__ float sink_log2(const PagedAttentionParams& p, int q_head) {
  return p.sinks == nullptr ? kNoKey : p.sinks[q_head] * kLog2E;
}

// A slot of the workspace, of one KV head.
template <int D>
struct Partial {
  float* base;

  __device__ __forceinline__ Partial(const PagedAttentionParams& p, int slot, int kv_head)
      : base(p.workspace + (static_cast<int64_t>(slot) * p.num_kv_heads + kv_head) * (kSlotRows * (D + 2))) {}
  __device__ __forceinline__ float2* accumulators(int row, int column) const {
    return reinterpret_cast<float2*>(base + row * D + column);
  }
  __device__ __forceinline__ float2* state(int row) const {  // (max, sum)
    return reinterpret_cast<float2*>(base + kSlotRows * D + row * 2);
  }
};

template <class T, int D>
__global__ void __launch_bounds__(kThreads) merge_kernel(const __grid_constant__ PagedAttentionParams p) {
  const int num_items = reinterpret_cast<const int32_t*>(p.merge)[0];
  const int kv_head = static_cast<int>(blockIdx.y), group = p.group;
  const FastDivisor group_divisor{static_cast<uint32_t>(group), p.group_magic};
  for (int i = static_cast<int>(blockIdx.x); i < num_items; i += static_cast<int>(gridDim.x)) {
    const AttentionMerge item = p.merge[1 + i];
    if (item.num_splits == 0) continue;
    const int first_token = p.cu_seqlens_q[item.seq], end_token = p.cu_seqlens_q[item.seq + 1];
    const int rows_left = (end_token - first_token) * group - item.first_row;
    const int num_rows = rows_left < kSlotRows ? rows_left : kSlotRows;
    for (int pair = static_cast<int>(threadIdx.x); pair < num_rows * (D / 2); pair += kThreads) {
      const int row = pair / (D / 2), column = pair % (D / 2) * 2;
      const int token = group_divisor.divide(item.first_row + row);
      // splits before the window were not written
      const int window_begin = p.seq_lens[item.seq] - (end_token - first_token) + token - p.window + 1;
      const int first_split = p.window > 0 && window_begin > 0 ? window_begin / kSplitKeys : 0;
      const Partial<D> first(p, item.first_slot + first_split, kv_head);
      const float2 first_state = *first.state(row);
      RowState state{first_state.x, first_state.y};
      float2 sum = *first.accumulators(row, column);
      for (int split = first_split + 1; split < item.num_splits; ++split) {
        const Partial<D> partial(p, item.first_slot + split, kv_head);
        const float2 next_state = *partial.state(row), next = *partial.accumulators(row, column);
        const float2 factors = join(state, {next_state.x, next_state.y});
        sum = make_float2(join(sum.x, next.x, factors), join(sum.y, next.y, factors));
      }
      const int q_head = kv_head * group + item.first_row + row - token * group;
      const float factor = normalizer(state, sink_log2(p, q_head));
      T* out =
          static_cast<T*>(p.out) + (first_token + token) * p.out_stride + static_cast<int64_t>(q_head) * D + column;
      *reinterpret_cast<uint32_t*>(out) = pack<T>(sum.x * factor, sum.y * factor);
    }
  }
}

}  // namespace pagedllm
