// Products with packed weights.
// pagedllm/ops/linear.py draws the packed layout: panels of 64 columns, in which K runs slowest.
#pragma once
#include "cpu/packing.h"
#include "cpu/parallel.h"
#include "cpu/types.h"

namespace pagedllm {

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

// A row of the result depends on its row of x alone: each of its sums runs over k in order, in chunks that depend on k
// alone, whatever num_rows, the row's place and the number of threads are.
template <class T, class Out>
void packed_linear(const PackedLinearParams<T, Out>& params);

// The column of the largest logit of each row of a product, the lowest of equal ones, without the logits being written:
// argmax(finish(x W)), see logits.h; on the same sums as packed_linear's. -1 where a logit is NaN or +infinity,
// or none is above -infinity.
template <class T>
struct PackedArgmaxParams {
  int32_t* token_ids;  // [num_rows]
  const T* x;          // this and the rest as above
  const T* weight;
  int64_t x_stride;
  int64_t num_rows, k, num_columns, num_panels;
  float scale, softcap;
  Parallel parallel;
};

template <class T>
void packed_argmax(const PackedArgmaxParams<T>& params);

// What one of packed_linear's tasks does, on the calling thread: panels first_panel .. end_panel - 1 by rows first_row
// .. end_row - 1. next_panel is what this thread will most likely read next, and may lie past the last.
template <class T, class Out>
void multiply_panels(const PackedLinearParams<T, Out>& params, int64_t first_panel, int64_t end_panel,
                     int64_t first_row, int64_t end_row, int64_t next_panel);

}  // namespace pagedllm
