// Products with packed weights, the lookup of embeddings in them, and what goes with both.
// pagedllm/ops/linear.py draws the packed layout: panels of 64 columns, in which K runs slowest.
#pragma once
#include "cpu/parallel.h"
#include "cpu/types.h"

namespace pagedllm {

constexpr int kPanel = 64;              // columns of a panel
constexpr int kGatedHalf = kPanel / 2;  // of which, in a gated product, so many are gates, and as many ups

// As in pagedllm.ops.linear.Activation.
enum class Activation : int { kNone = 0, kSilu = 1, kGeluTanh = 2, kGelu = 3 };

// T: type of x, weight and residual, bf16 or float. Out: T or float.
template <class T, class Out>
struct PackedLinearParams {
  Out* out;           // [num_rows, num_columns]
  const T* x;         // [num_rows, k]
  const T* weight;    // float [num_panels][k][64], bf16 [num_panels][ceil(k / 2)][64][2]
  const float* bias;  // [num_panels * 64] or null
  const T* residual;  // [num_rows, num_columns] or null; may be `out`
  int64_t out_stride, x_stride, residual_stride;
  int64_t num_rows, k, num_columns, num_panels;
  Activation activation;
  Parallel parallel;
};

// A row of the result depends on its row of x alone: each of its sums runs over k in order, in one accumulator,
// whatever num_rows, the row's place and the number of threads are.
template <class T, class Out>
void packed_linear(const PackedLinearParams<T, Out>& params);

template <class T>
struct EmbeddingParams {
  T* out;                    // [num_tokens, hidden_size]
  const int32_t* token_ids;  // [num_tokens]
  const T* weight;           // packed, num_columns = vocabulary, k = hidden_size
  int64_t out_stride;
  int64_t num_tokens, hidden_size;
  float scale;
  Parallel parallel;
};

template <class T>
void embedding(const EmbeddingParams<T>& params);

// out[i] = x[indices[i]], whole rows of row_bytes.
struct GatherRowsParams {
  char* out;
  const char* x;
  const int32_t* indices;                   // [num_rows]
  int64_t out_stride, x_stride, row_bytes;  // in bytes
  int64_t num_rows;
  Parallel parallel;
};

void gather_rows(const GatherRowsParams& params);

// out = activation(gate) * up, all [num_rows, width].
template <class T>
struct GatedActivationParams {
  T* out;
  const T* gate;
  const T* up;
  int64_t out_stride, gate_stride, up_stride;
  int64_t num_rows, width;
  Activation activation;
  Parallel parallel;
};

template <class T>
void gated_activation(const GatedActivationParams<T>& params);

}  // namespace pagedllm
