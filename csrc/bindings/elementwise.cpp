#include "cpu/elementwise.h"

#include "bindings/checks.h"
#include "bindings/registration.h"
#include "bindings/tape.h"
#include "bindings/threads.h"

namespace pagedllm {
namespace {

void finish_logits_op(const Tensor& logits_tensor, double scale, double softcap) {
  const Argument logits("finish_logits", "logits", logits_tensor);
  logits.type(ScalarType::Float).rows();
  check_softcap("finish_logits", softcap);
  FinishLogitsParams params{};
  params.logits = logits.data<float>();
  params.logits_stride = logits.stride(0);
  params.num_rows = logits.size(0);
  params.vocab_size = logits.size(1);
  params.scale = static_cast<float>(scale);
  params.softcap = static_cast<float>(softcap);
  params.parallel = torch_threads();
  run_kernel([params] { pagedllm::finish_logits(params); });
}

void add_rows_op(const Tensor& x_tensor, const Tensor& y_tensor) {
  const Argument x("add_rows", "x", x_tensor), y("add_rows", "y", y_tensor);
  x.rows();
  y.type(x.type()).shape({x.size(0), x.size(1)}).rows();
  dispatch(x, [&](auto element) {
    using T = decltype(element);
    AddRowsParams<T> params{};
    params.x = x.data<T>();
    params.y = y.data<const T>();
    params.x_stride = x.stride(0);
    params.y_stride = y.stride(0);
    params.num_rows = x.size(0);
    params.width = x.size(1);
    params.parallel = torch_threads();
    run_kernel([params] { pagedllm::add_rows(params); });
  });
}

void clamp_rows_op(const Tensor& x_tensor, double limit) {
  const Argument x("clamp_rows", "x", x_tensor);
  x.rows();
  if (!(limit > 0)) fail("clamp_rows", "limit must be above 0, got " + std::to_string(limit));
  dispatch(x, [&](auto element) {
    using T = decltype(element);
    ClampRowsParams<T> params{};
    params.x = x.data<T>();
    params.x_stride = x.stride(0);
    params.num_rows = x.size(0);
    params.width = x.size(1);
    params.limit = static_cast<float>(limit);
    params.parallel = torch_threads();
    run_kernel([params] { pagedllm::clamp_rows(params); });
  });
}

}  // namespace
}  // namespace pagedllm

STABLE_TORCH_LIBRARY_IMPL(pagedllm, CPU, library) {
  using namespace pagedllm;
  PAGEDLLM_IMPLEMENT(library, finish_logits_op, "finish_logits(Tensor(a!) logits, float scale, float softcap) -> ()");
  PAGEDLLM_IMPLEMENT(library, add_rows_op, "add_rows(Tensor(a!) x, Tensor y) -> ()");
  PAGEDLLM_IMPLEMENT(library, clamp_rows_op, "clamp_rows(Tensor(a!) x, float limit) -> ()");
}
