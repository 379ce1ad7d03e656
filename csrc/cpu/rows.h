// Operators that go row by row beside the products: embeddings, a choice of rows, activations.
#pragma once
#include "cpu/packing.h"
#include "cpu/parallel.h"
#include "cpu/types.h"

namespace pagedllm {

// out[i] = scale * row token_ids[i] of a packed weight.
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

// out = activation(x), both [num_rows, width].
template <class T>
struct UngatedActivationParams {
  T* out;
  const T* x;  // may be `out`
  int64_t out_stride, x_stride;
  int64_t num_rows, width;
  Activation activation;
  Parallel parallel;
};

template <class T>
void ungated_activation(const UngatedActivationParams<T>& params);

}  // namespace pagedllm
