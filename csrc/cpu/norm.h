// RMSNorm of rows, alone or after an addition to the residual stream, and LayerNorm. T is bf16 or float.
#pragma once
#include "cpu/parallel.h"
#include "cpu/types.h"

namespace pagedllm {

template <class T>
struct RmsNormParams {
  T* out;               // [num_rows, hidden_size]
  T* residual;          // [num_rows, hidden_size] or null: then x is normed, else residual += x first
  const T* x;           // [num_rows, hidden_size]
  const float* weight;  // [hidden_size]
  int64_t out_stride, residual_stride, x_stride;
  int64_t num_rows, hidden_size;
  float eps;
  Parallel parallel;
};

template <class T>
void rms_norm(const RmsNormParams<T>& params);

template <class T>
struct LayerNormParams {
  T* out;               // [num_rows, hidden_size]
  const T* x;           // [num_rows, hidden_size], may be `out`
  const float* weight;  // [num_heads * hidden_size]
  const float* bias;    // [hidden_size] or null; null where num_heads is not 1
  int64_t out_stride, x_stride;
  int64_t num_rows, hidden_size;
  int64_t num_heads = 1;  // parts of a row, of hidden_size each, that are normed by themselves
  float eps;
  Parallel parallel;
};

// The mean and then the squares of the differences from it: two passes over a row, no cancellation.
template <class T>
void layer_norm(const LayerNormParams<T>& params);

}  // namespace pagedllm
