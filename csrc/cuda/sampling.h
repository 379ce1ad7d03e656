// From logits to tokens and logprobs. pagedllm/ops/sampling.py says what each operator means; draws equal its twins'
// (and so the CPU's) bit for bit. Arrays are contiguous but for the rows of logits, whose stride is in elements. What
// is null is left out.
#pragma once
#include <cstdint>

namespace pagedllm {

struct DeviceProcessLogitsParams {
  float* logits;  // [num_rows, vocab_size], edited in place
  int64_t logits_stride;
  int32_t num_rows, vocab_size;
  const int32_t* bitmask;       // [num_rows, ceil(vocab_size / 32)]
  const int32_t* bias_offsets;  // [num_rows + 1]
  const int32_t* bias_ids;
  const float* bias_values;
  const float* penalties;          // [num_rows, 3]: repetition, presence, frequency
  const int32_t* penalty_offsets;  // [num_rows + 1]
  const int32_t* penalty_ids;      // distinct within a row
  const int32_t* penalty_counts;
};

struct DeviceSampleParams {
  int32_t* token_ids;   // [num_rows]
  const float* logits;  // [num_rows, vocab_size]
  int64_t logits_stride;
  int32_t num_rows, vocab_size;
  const float* temperature;  // [num_rows], as the next four
  const int32_t* top_k;
  const float* top_p;
  const float* min_p;
  const int64_t* seed;
  const int32_t* counter;  // [num_rows, 2]: sample index, output position
};

struct DeviceTopLogprobsParams {
  int32_t* top_ids;      // [num_rows, k]
  float* top_values;     // [num_rows, k]
  float* token_values;   // [num_rows]
  int32_t* token_ranks;  // [num_rows]
  const float* logits;   // [num_rows, vocab_size]
  int64_t logits_stride;
  int32_t num_rows, vocab_size, k;
  const int32_t* token_ids;  // [num_rows], -1: none
};

int process_logits(const DeviceProcessLogitsParams& params, void* stream);
int sample(const DeviceSampleParams& params, void* stream);
int top_logprobs(const DeviceTopLogprobsParams& params, void* stream);

}  // namespace pagedllm
