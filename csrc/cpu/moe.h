// Mixtures of experts: which tokens go where, the experts' products, and the sum of their results.
// pagedllm/ops/moe.py draws the order of rows.
#pragma once
#include "cpu/packing.h"
#include "cpu/parallel.h"
#include "cpu/types.h"

namespace pagedllm {

constexpr int kMaxChosenExperts = 64;  // of a token

struct RouteTokensParams {
  float* weights;       // [num_tokens, num_chosen], by ascending expert
  int32_t* places;      // [num_tokens, num_chosen]
  int32_t* tokens;      // [num_tokens * num_chosen], of each place
  int32_t* bounds;      // [num_experts + 1]
  const float* logits;  // [num_tokens, num_experts]
  int64_t logits_stride;
  int64_t num_tokens, num_experts, num_chosen;
  bool is_normalized;  // a token's weights add up to 1
  Parallel parallel;
};

void route_tokens(const RouteTokensParams& params);

// packed_linear (linear.h) of rows bounds[e] .. bounds[e + 1] - 1 with the weight of expert e, without residual.
template <class T>
struct GroupedLinearParams {
  T* out;                 // [num_rows, num_columns]
  const T* x;             // [num_rows, k]
  const T* weights;       // [num_experts] packed weights, one after the other
  const float* biases;    // [num_experts][num_panels * 64] or null
  const int32_t* bounds;  // [num_experts + 1]
  int64_t out_stride, x_stride;
  int64_t num_experts, k, num_columns, num_panels;
  Activation activation;
  Parallel parallel;
};

template <class T>
void grouped_linear(const GroupedLinearParams<T>& params);

// out[t] = sum over c of weights[t, c] * rows[places[t, c]] + sigmoid(shared_gates[t]) * shared[t] + residual[t].
template <class T>
struct CombineExpertsParams {
  T* out;                     // [num_tokens, hidden_size]
  const T* rows;              // [num_tokens * num_chosen, hidden_size]
  const int32_t* places;      // [num_tokens, num_chosen]
  const float* weights;       // [num_tokens, num_chosen]
  const T* shared;            // [num_tokens, hidden_size] or null
  const float* shared_gates;  // [num_tokens] or null, as shared
  const T* residual;          // [num_tokens, hidden_size] or null; may be `out`
  int64_t out_stride, rows_stride, shared_stride, residual_stride;
  int64_t num_tokens, num_chosen, hidden_size;
  Parallel parallel;
};

template <class T>
void combine_experts(const CombineExpertsParams<T>& params);

}  // namespace pagedllm
