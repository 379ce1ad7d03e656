// A block a row. The k largest are found one after another, each the largest below the last: k is small. Where k is the
// whole vocabulary the outputs themselves are sorted, by a bitonic network.
#include "cuda/sampling.h"
#include "cuda/sampling_row.cuh"

namespace pagedllm {

// The network in the form where all comparisons point the same way, so that a size that is no power of two needs no
// padding: what is past the end would stay there.
__device__ __forceinline__ void sort_in_place(int32_t* ids, float* logits, int size) {
  int half = 1;
  while (half < size) half *= 2;
  for (int run = 2; run / 2 < size; run *= 2) {
    for (int step = run / 2; step > 0; step /= 2) {
      __syncthreads();
      for (int i = static_cast<int>(threadIdx.x); i < half / 2; i += kSampleThreads) {
        const int low = i / step * (2 * step) + i % step;
        const int high =
            step == run / 2 ? (i / step + 1) * (2 * step) - 1 - i % step : low + step;  // first step: mirrored
        if (high >= size) continue;
        const uint64_t low_rank = rank_of(logits[low], ids[low]), high_rank = rank_of(logits[high], ids[high]);
        if (low_rank >= high_rank) continue;
        const int32_t id = ids[low];
        const float logit = logits[low];
        ids[low] = ids[high];
        logits[low] = logits[high];
        ids[high] = id;
        logits[high] = logit;
      }
    }
  }
  __syncthreads();
}

__global__ void __launch_bounds__(kSampleThreads, 1)
    top_logprobs_kernel(const __grid_constant__ DeviceTopLogprobsParams p) {
  const int64_t row = blockIdx.x;
  const float* logits = p.logits + row * p.logits_stride;
  const int size = p.vocab_size, thread = static_cast<int>(threadIdx.x);

  uint64_t best = 0;
  for (int id = thread; id < size; id += kSampleThreads) {
    const uint64_t rank = rank_of(logits[id], id);
    best = rank > best ? rank : best;
  }
  best = block_combine(best, Max());
  const float max = logit_of(static_cast<uint32_t>(best >> 32));

  const int token_id = p.token_ids[row];
  const float token_logit = token_id >= 0 ? logits[token_id] : 0.f;
  float sum = 0.f;
  uint64_t num_above = 0;
  for (int id = thread; id < size; id += kSampleThreads) {
    sum += expf(logits[id] - max);
    num_above += static_cast<uint64_t>(logits[id] > token_logit);
  }
  num_above = block_combine(num_above, Sum());
  const float log_sum = logf(block_sum(sum, row_scratch().floats));
  if (thread == 0) {
    p.token_values[row] = token_id >= 0 ? token_logit - max - log_sum : NAN;
    p.token_ranks[row] = token_id >= 0 ? static_cast<int32_t>(num_above) + 1 : 0;
  }

  int32_t* top_ids = p.top_ids + row * p.k;
  float* top_values = p.top_values + row * p.k;
  if (p.k == size) {
    for (int id = thread; id < size; id += kSampleThreads) {
      top_ids[id] = id;
      top_values[id] = logits[id];
    }
    sort_in_place(top_ids, top_values, size);
    for (int i = thread; i < size; i += kSampleThreads) top_values[i] = top_values[i] - max - log_sum;
    return;
  }
  for (int i = 0; i < p.k; ++i) {
    if (thread == 0) {
      top_ids[i] = id_of(best);
      top_values[i] = logit_of(static_cast<uint32_t>(best >> 32)) - max - log_sum;
    }
    uint64_t next = 0;
    for (int id = thread; id < size; id += kSampleThreads) {
      const uint64_t rank = rank_of(logits[id], id);
      next = rank < best && rank > next ? rank : next;
    }
    best = block_combine(next, Max());
  }
}

int top_logprobs(const DeviceTopLogprobsParams& p, void* stream) {
  if (p.num_rows == 0) return 0;
  return launch(top_logprobs_kernel, dim3(static_cast<unsigned>(p.num_rows)), dim3(kSampleThreads), sizeof(RowScratch),
                stream, p);
}

}  // namespace pagedllm
