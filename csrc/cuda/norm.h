// RMSNorm of rows, alone or after an addition to the residual stream, and LayerNorm (pagedllm/ops/norm.py). Rows begin
// at multiples of 16 bytes and are whole 16 bytes long.
#pragma once
#include "cuda/element_type.h"

namespace pagedllm {

struct DeviceRmsNormParams {
  void* out;            // [num_rows, hidden_size]
  void* residual;       // [num_rows, hidden_size] or null: then x is normed, else residual += x first
  const void* x;        // [num_rows, hidden_size]
  const float* weight;  // [hidden_size]
  int64_t out_stride, residual_stride, x_stride;  // elements
  int32_t num_rows, hidden_size;
  float eps;
  ElementType type;
};

struct DeviceLayerNormParams {
  void* out;                     // [num_rows, hidden_size]; may be x
  const void* x;                 // [num_rows, hidden_size]
  const float *weight, *bias;    // [hidden_size], bias or null
  int64_t out_stride, x_stride;  // elements
  int32_t num_rows, hidden_size;
  float eps;
  ElementType type;
};

int rms_norm(const DeviceRmsNormParams& params, void* stream);
int layer_norm(const DeviceLayerNormParams& params, void* stream);

}  // namespace pagedllm
