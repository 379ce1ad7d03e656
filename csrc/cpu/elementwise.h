// Operators on each element of rows: what models do to logits, and additions and limits without a norm beside them.
#pragma once
#include "cpu/parallel.h"
#include "cpu/types.h"

namespace pagedllm {

// logits = softcap * tanh(scale * logits / softcap); softcap 0: scale * logits.
struct FinishLogitsParams {
  float* logits;  // [num_rows, vocab_size]
  int64_t logits_stride;
  int64_t num_rows, vocab_size;
  float scale, softcap;
  Parallel parallel;
};

void finish_logits(const FinishLogitsParams& params);

// x += y, both [num_rows, width].
template <class T>
struct AddRowsParams {
  T* x;
  const T* y;
  int64_t x_stride, y_stride;
  int64_t num_rows, width;
  Parallel parallel;
};

template <class T>
void add_rows(const AddRowsParams<T>& params);

// x = x within -limit .. limit, [num_rows, width]; NaN stays.
template <class T>
struct ClampRowsParams {
  T* x;
  int64_t x_stride;
  int64_t num_rows, width;
  float limit;
  Parallel parallel;
};

template <class T>
void clamp_rows(const ClampRowsParams<T>& params);

}  // namespace pagedllm
