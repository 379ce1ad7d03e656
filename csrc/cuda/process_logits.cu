// A block a row; mask, bias and penalties one after another. Only the mask touches the whole row.
#include "cuda/elementwise.cuh"
#include "cuda/sampling.h"

namespace pagedllm {

constexpr int kEditThreads = 512;

__global__ void __launch_bounds__(kEditThreads)
    process_logits_kernel(const __grid_constant__ DeviceProcessLogitsParams p) {
  const int64_t row = blockIdx.x;
  float* logits = p.logits + row * p.logits_stride;
  const int thread = static_cast<int>(threadIdx.x);
  if (p.bitmask != nullptr) {
    const int32_t* bits = p.bitmask + row * ((p.vocab_size + 31) / 32);
    for (int id = thread; id < p.vocab_size; id += kEditThreads) {
      if ((bits[id / 32] >> (id % 32) & 1) == 0) logits[id] = -INFINITY;
    }
    __syncthreads();
  }
  if (p.bias_offsets != nullptr) {
    // every thread reads the whole list and adds what falls to it, so that an id that stands twice is added in order
    for (int n = p.bias_offsets[row]; n < p.bias_offsets[row + 1]; ++n) {
      const int id = p.bias_ids[n];
      if (id % kEditThreads == thread) logits[id] = __fadd_rn(logits[id], p.bias_values[n]);
    }
    __syncthreads();
  }
  if (p.penalties != nullptr) {
    const float repetition = p.penalties[3 * row], presence = p.penalties[3 * row + 1],
                frequency = p.penalties[3 * row + 2];
    for (int n = p.penalty_offsets[row] + thread; n < p.penalty_offsets[row + 1]; n += kEditThreads) {
      float& logit = logits[p.penalty_ids[n]];
      const int count = p.penalty_counts[n];
      const float z = logit > 0.f ? __fdiv_rn(logit, repetition) : __fmul_rn(logit, repetition);
      const float after_frequency = __fsub_rn(z, __fmul_rn(frequency, static_cast<float>(count)));
      logit = __fsub_rn(after_frequency, count > 0 ? presence : 0.f);
    }
  }
}

int process_logits(const DeviceProcessLogitsParams& p, void* stream) {
  if (p.num_rows == 0) return 0;
  return launch(process_logits_kernel, dim3(static_cast<unsigned>(p.num_rows)), dim3(kEditThreads), 0, stream, p);
}

}  // namespace pagedllm
