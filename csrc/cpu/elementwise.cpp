#include "cpu/elementwise.h"

#include "cpu/logits.h"
#include "cpu/simd.h"

namespace pagedllm {
namespace {

// x[row][i] = fn(x[row][i], row, i, columns from i on), 16 columns at a time; `streams` of its size are moved.
template <class T, class F>
void change_rows(const Parallel& parallel, T* x, int64_t stride, int64_t num_rows, int64_t width, int64_t streams,
                 const F& fn) {
  parallel.ranges(num_rows, streams * width * static_cast<int64_t>(sizeof(T)), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      T* at = x + row * stride;
      for (int64_t i = 0; i < width; i += 16) {
        const int64_t count = width - i;
        store_partial(at + i, fn(load_partial(at + i, count), row, i, count), count);
      }
    }
  });
}

}  // namespace

void finish_logits(const FinishLogitsParams& p) {
  // tanh costs what eight streams do
  change_rows(p.parallel, p.logits, p.logits_stride, p.num_rows, p.vocab_size, 8,
              [&](f32x16 z, int64_t, int64_t, int64_t) { return finish_logit(z, p.scale, p.softcap); });
}

template <class T>
void add_rows(const AddRowsParams<T>& p) {
  change_rows(p.parallel, p.x, p.x_stride, p.num_rows, p.width, 3,
              [&](f32x16 x, int64_t row, int64_t i, int64_t count) {
                return x + load_partial(p.y + row * p.y_stride + i, count);
              });
}

template <class T>
void clamp_rows(const ClampRowsParams<T>& p) {
  const f32x16 highest = f32x16::broadcast(p.limit), lowest = f32x16::broadcast(-p.limit);
  change_rows(p.parallel, p.x, p.x_stride, p.num_rows, p.width, 2, [&](f32x16 x, int64_t, int64_t, int64_t) {
    return max(lowest, min(highest, x));  // NaN passes: it is on the right
  });
}

template void add_rows(const AddRowsParams<bf16>&);
template void add_rows(const AddRowsParams<float>&);
template void clamp_rows(const ClampRowsParams<bf16>&);
template void clamp_rows(const ClampRowsParams<float>&);

}  // namespace pagedllm
