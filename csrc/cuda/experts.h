// Products of runs of rows, each run with the weight of its expert. pagedllm/ops/moe.py says what the operator means.
// No torch here.
#pragma once
#include <cstdint>

namespace pagedllm {

struct GroupedDenseParams {
  void* out;                     // [num_rows, width]
  const void *x, *weights;       // [num_rows, k]; [num_experts, width, k], or [num_experts, 2 width, k]: gate, then up
  const void* biases;            // [num_experts, width or 2 width], or null
  const int32_t* bounds;         // [num_experts + 1]: where each expert's rows begin, and where the last one's end
  int64_t out_stride, x_stride;  // elements
  int32_t num_rows, num_experts, k, width;
  int32_t activation;  // 0: no gate; else as in cuda/rows.h
  int32_t is_bf16;     // else float16
};

constexpr int kMaxExperts = 1024;

int grouped_dense(const GroupedDenseParams& params, void* stream);

}  // namespace pagedllm
