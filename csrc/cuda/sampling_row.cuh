// What a block does with one row of logits: reductions, the weights of the draw, and a selection without sorting.
// A block has kRowThreads threads; shared memory is a RowScratch.
#pragma once
#include "cuda/elementwise.cuh"

namespace pagedllm {

constexpr int kSampleThreads = 1024;
constexpr int kSampleWarps = kSampleThreads / 32;
constexpr int kBins = 256;  // of a digit

struct RowScratch {
  uint64_t masses[kBins];
  uint64_t warp_values[kSampleWarps];
  uint64_t broadcast[2];
  uint32_t counts[kBins];
  float floats[kSampleWarps];
};

__device__ __forceinline__ RowScratch& row_scratch() { return *shared_memory<RowScratch>(0); }

template <class Combine>
__device__ __forceinline__ uint64_t warp_combine(uint64_t x, const Combine& combine) {
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) x = combine(x, __shfl_xor_sync(kAllLanes, x, lanes));
  return x;
}
// Over all threads; the result is every thread's. Barriers before and after it free the scratch.
template <class Combine>
__device__ __forceinline__ uint64_t block_combine(uint64_t x, const Combine& combine) {
  RowScratch& scratch = row_scratch();
  x = warp_combine(x, combine);
  __syncthreads();
  if (threadIdx.x % 32 == 0) scratch.warp_values[threadIdx.x / 32] = x;
  __syncthreads();
  x = scratch.warp_values[threadIdx.x % 32];
  return warp_combine(x, combine);
}
struct Sum {
  __device__ __forceinline__ uint64_t operator()(uint64_t a, uint64_t b) const { return a + b; }
};
struct Max {
  __device__ __forceinline__ uint64_t operator()(uint64_t a, uint64_t b) const { return a > b ? a : b; }
};

// Larger logits have larger keys; -0 and 0 have the same.
__device__ __forceinline__ uint32_t key_of(float logit) {
  const uint32_t bits = logit == 0.f ? 0u : static_cast<uint32_t>(__float_as_int(logit));
  return (bits >> 31) != 0 ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float logit_of(uint32_t key) {
  return __int_as_float(static_cast<int>((key >> 31) != 0 ? key & 0x7fffffffu : ~key));
}
// In order of (logit descending, id ascending), the larger the earlier.
__device__ __forceinline__ uint64_t rank_of(float logit, int id) {
  return static_cast<uint64_t>(key_of(logit)) << 32 | static_cast<uint32_t>(~id);
}
__device__ __forceinline__ int id_of(uint64_t rank) { return static_cast<int>(~static_cast<uint32_t>(rank)); }

// Fixed-point weights, exp2_weight() of pagedllm/ops/sampling.py operation by operation; nothing here may be fused.
struct RowWeights {
  float max, scale;
  uint64_t smallest;  // min_p: what is below counts nothing

  __device__ __forceinline__ RowWeights(float max_logit, float temperature, float min_p) : max(max_logit) {
    const double exact = 1.4426950408889634 / static_cast<double>(temperature);
    scale = static_cast<float>(exact < 3.4028234663852886e38 ? exact : 3.4028234663852886e38);
    smallest = static_cast<uint64_t>(ceil(__dmul_rn(static_cast<double>(min_p), 4294967296.0)));
  }
  __device__ __forceinline__ uint64_t of(float logit) const {
    const float x = __fmul_rn(__fsub_rn(logit, max), scale);
    if (!(x >= -33.f)) return 0;
    const float exponent = floorf(x), f = __fsub_rn(x, exponent);
    float p = 0.00020829190907534212f;
    p = __fadd_rn(__fmul_rn(p, f), 0.0012689352734014392f);
    p = __fadd_rn(__fmul_rn(p, f), 0.009652440436184406f);
    p = __fadd_rn(__fmul_rn(p, f), 0.055495936423540115f);
    p = __fadd_rn(__fmul_rn(p, f), 0.24022722244262695f);
    p = __fadd_rn(__fmul_rn(p, f), 0.6931471824645996f);
    const float power = __fadd_rn(__fmul_rn(p, f), 1.f);  // in [1, 2]
    const uint64_t mantissa = static_cast<uint64_t>(__fmul_rn(power, 8388608.f));
    const int shift = -static_cast<int>(exponent);
    const uint64_t rounding = (uint64_t{1} << shift) >> 1;
    const uint64_t weight = ((mantissa << 9) + rounding) >> shift;
    return weight < smallest ? 0 : weight;
  }
};

// Keeps what has a larger key, and the first `num_ties` ids of those that have this one.
struct Cut {
  uint32_t key;
  uint64_t num_ties, above;  // above: the measure of the larger keys
};

// The cut at which `measure(logit)`, summed in order (logit descending, id ascending), first reaches `target`, which is
// positive and at most the row's total. Four passes, each of which histograms 8 bits of the keys that share the bits
// found so far.
template <class Measure>
__device__ __forceinline__ Cut find_cut(const float* logits, int size, uint64_t target, const Measure& measure) {
  RowScratch& scratch = row_scratch();
  const int thread = static_cast<int>(threadIdx.x);
  uint32_t prefix = 0;
  uint64_t above = 0, at_key = 0, count_at_key = 0;
  for (int shift = 24; shift >= 0; shift -= 8) {
    __syncthreads();
    if (thread < kBins) {
      scratch.masses[thread] = 0;
      scratch.counts[thread] = 0;
    }
    __syncthreads();
    // neighbours in a thread's stride often share a bin: they are added up before they meet the other threads'
    uint32_t bin = 0, count = 0;
    uint64_t mass = 0;
    for (int id = thread; id < size; id += kSampleThreads) {
      const uint32_t key = key_of(logits[id]);
      if ((static_cast<uint64_t>(key) >> (shift + 8)) != prefix) continue;
      const uint64_t value = measure(logits[id]);
      const uint32_t its_bin = key >> shift & (kBins - 1);
      if (its_bin != bin && count > 0) {
        add_shared(&scratch.masses[bin], mass);
        add_shared(&scratch.counts[bin], count);
        mass = count = 0;
      }
      bin = its_bin;
      mass += value;
      ++count;
    }
    if (count > 0) {
      add_shared(&scratch.masses[bin], mass);
      add_shared(&scratch.counts[bin], count);
    }
    __syncthreads();
    int digit = kBins - 1;  // all threads walk alike
    while (digit > 0 && above + scratch.masses[digit] < target) above += scratch.masses[digit--];
    at_key = scratch.masses[digit];
    count_at_key = scratch.counts[digit];
    prefix = prefix << 8 | static_cast<uint32_t>(digit);
  }
  const uint64_t each = at_key / count_at_key;  // equal keys have equal measures
  return {prefix, (target - above + each - 1) / each, above};
}

}  // namespace pagedllm
