// A block a row. All sums are of integers, so that neither their order nor the number of threads matters.
#include "cuda/sampling.h"
#include "cuda/sampling_row.cuh"

namespace pagedllm {

// 64 random bits: Philox 4x32-10 of Salmon et al., 2011.
__device__ __forceinline__ uint64_t random_bits(uint64_t seed, uint32_t sample_index, uint32_t output_position) {
  uint32_t c0 = output_position, c1 = sample_index, c2 = 0, c3 = 0;
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint32_t high0 = __umulhi(0xD2511F53u, c0), low0 = 0xD2511F53u * c0;
    const uint32_t high1 = __umulhi(0xCD9E8D57u, c2), low1 = 0xCD9E8D57u * c2;
    c0 = high1 ^ c1 ^ k0;
    c1 = low1;
    c2 = high0 ^ c3 ^ k1;
    c3 = low0;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return static_cast<uint64_t>(c1) << 32 | c0;
}

// How a warp's stretch of ids is walked: 32 ids at a time.
struct Stretch {
  int begin, end;

  __device__ __forceinline__ explicit Stretch(int size) {
    const int length = (size + kSampleThreads - 1) / kSampleThreads * 32, warp = static_cast<int>(threadIdx.x) / 32;
    begin = length * warp < size ? length * warp : size;
    end = begin + length < size ? begin + length : size;
  }
};

// The first id whose inclusive sum of kept weights exceeds the threshold, floor(random * total / 2^64).
__device__ __forceinline__ int draw(const float* logits, int size, const RowWeights& weights, const Cut& cut,
                                    uint64_t random) {
  RowScratch& scratch = row_scratch();
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const Stretch stretch(size);
  uint64_t above = 0, ties = 0;
  for (int id = stretch.begin + lane; id < stretch.end; id += 32) {
    const uint32_t key = key_of(logits[id]);
    above += key > cut.key ? weights.of(logits[id]) : 0;
    ties += key == cut.key;
  }
  above = warp_combine(above, Sum());
  ties = warp_combine(ties, Sum());
  __syncthreads();
  if (lane == 0) {
    scratch.masses[warp] = above;
    scratch.masses[kSampleWarps + warp] = ties;
  }
  __syncthreads();
  // every thread walks the warps' sums: which stretch holds the threshold, and what lies before it
  const uint64_t tie_weight = weights.of(logit_of(cut.key));
  const auto kept_ties = [&](uint64_t before, uint64_t here) {
    const uint64_t left = cut.num_ties > before ? cut.num_ties - before : 0;
    return here < left ? here : left;
  };
  uint64_t total = 0, ties_before = 0;
  for (int w = 0; w < kSampleWarps; ++w) {
    total += scratch.masses[w] + kept_ties(ties_before, scratch.masses[kSampleWarps + w]) * tie_weight;
    ties_before += scratch.masses[kSampleWarps + w];
  }
  uint64_t threshold = __umul64hi(random, total);
  ties_before = 0;
  int owner = 0;
  for (; owner < kSampleWarps - 1; ++owner) {
    const uint64_t mass =
        scratch.masses[owner] + kept_ties(ties_before, scratch.masses[kSampleWarps + owner]) * tie_weight;
    if (threshold < mass) break;
    threshold -= mass;
    ties_before += scratch.masses[kSampleWarps + owner];
  }
  if (warp == owner) {
    for (int first = stretch.begin; first < stretch.end; first += 32) {
      const int id = first + lane;
      const uint32_t key = id < stretch.end ? key_of(logits[id]) : 0;
      const unsigned tied = __ballot_sync(kAllLanes, id < stretch.end && key == cut.key);
      const uint64_t my_ties = ties_before + static_cast<uint64_t>(__popc(tied & ((1u << lane) - 1)));
      const bool is_kept = id < stretch.end && (key > cut.key || (key == cut.key && my_ties < cut.num_ties));
      uint64_t inclusive = is_kept ? weights.of(logits[id]) : 0;
#pragma unroll
      for (int lanes = 1; lanes < 32; lanes *= 2) {
        const uint64_t from_below = __shfl_up_sync(kAllLanes, inclusive, static_cast<unsigned>(lanes));
        inclusive += lane >= lanes ? from_below : 0;
      }
      const unsigned exceeding = __ballot_sync(kAllLanes, inclusive > threshold);
      if (exceeding != 0) {
        if (lane == __popc((exceeding & (0u - exceeding)) - 1)) scratch.broadcast[0] = static_cast<uint64_t>(id);
        break;
      }
      threshold -= __shfl_sync(kAllLanes, inclusive, 31);
      ties_before += static_cast<uint64_t>(__popc(tied));
    }
  }
  __syncthreads();
  return static_cast<int>(scratch.broadcast[0]);
}

__device__ __forceinline__ int sample_row(const DeviceSampleParams& p, int64_t row) {
  const float* logits = p.logits + row * p.logits_stride;
  const int size = p.vocab_size;
  uint64_t best = 0, is_nan = 0;
  for (int id = static_cast<int>(threadIdx.x); id < size; id += kSampleThreads) {
    const float logit = logits[id];
    is_nan |= static_cast<uint64_t>(logit != logit);
    const uint64_t rank = rank_of(logit, id);
    best = rank > best ? rank : best;
  }
  best = block_combine(best, Max());
  is_nan = block_combine(is_nan, Max());
  const float max = logit_of(static_cast<uint32_t>(best >> 32));
  if (is_nan != 0 || max == INFINITY || max == -INFINITY) return -1;
  if (p.temperature[row] == 0.f) return id_of(best);

  const RowWeights weights(max, p.temperature[row], p.min_p[row]);
  const uint64_t random = random_bits(static_cast<uint64_t>(p.seed[row]), static_cast<uint32_t>(p.counter[2 * row]),
                                      static_cast<uint32_t>(p.counter[2 * row + 1]));
  Cut cut{0, 0, 0};  // keeps all: no logit has key 0
  const int top_k = p.top_k[row];
  if (top_k > 0 && top_k < size)
    cut = find_cut(logits, size, static_cast<uint64_t>(top_k), [](float) { return uint64_t{1}; });
  const float top_p = p.top_p[row];
  if (top_p < 1.f) {
    uint64_t total = 0;
    for (int id = static_cast<int>(threadIdx.x); id < size; id += kSampleThreads)
      total += key_of(logits[id]) > cut.key ? weights.of(logits[id]) : 0;
    total = block_combine(total, Sum());
    if (cut.num_ties > 0) total += cut.num_ties * weights.of(logit_of(cut.key));
    const double wanted = ceil(__dmul_rn(static_cast<double>(top_p), static_cast<double>(total)));
    const uint64_t target = wanted < 1.0 ? 1 : static_cast<uint64_t>(wanted);
    // it cannot reach past top_k's cut, whose weight is `total`
    cut = find_cut(logits, size, target < total ? target : total, [&](float logit) { return weights.of(logit); });
  }
  return draw(logits, size, weights, cut, random);
}

__global__ void __launch_bounds__(kSampleThreads, 1) sample_kernel(const __grid_constant__ DeviceSampleParams p) {
  const int token_id = sample_row(p, blockIdx.x);
  if (threadIdx.x == 0) p.token_ids[blockIdx.x] = token_id;
}

int sample(const DeviceSampleParams& p, void* stream) {
  if (p.num_rows == 0) return 0;
  return launch(sample_kernel, dim3(static_cast<unsigned>(p.num_rows)), dim3(kSampleThreads), sizeof(RowScratch),
                stream, p);
}

}  // namespace pagedllm
