#include "cpu/rows.h"

#include "bindings/checks.h"
#include "bindings/packing.h"
#include "bindings/registration.h"
#include "bindings/tape.h"
#include "bindings/threads.h"

namespace pagedllm {
namespace {

void embedding_op(const Tensor& out_tensor, const Tensor& ids_tensor, const Tensor& weight_tensor, double scale) {
  const char* op = "embedding";
  const Argument out(op, "out", out_tensor), ids(op, "token_ids", ids_tensor), weight(op, "weight", weight_tensor);
  const int64_t num_tokens = ids.dim(1).size(0), hidden_size = out.rows().size(1);
  out.type(weight.type()).shape({num_tokens, hidden_size});
  dispatch(weight, [&](auto element) {
    using T = decltype(element);
    const int64_t num_panels = check_packed<T>(weight, hidden_size);
    ids.indices(ScalarType::Int, 0, num_panels * kPanel);
    EmbeddingParams<T> params{};
    params.out = out.data<T>();
    params.token_ids = ids.data<const int32_t>();
    params.weight = weight.data<const T>();
    params.out_stride = out.stride(0);
    params.num_tokens = num_tokens;
    params.hidden_size = hidden_size;
    params.scale = static_cast<float>(scale);
    params.parallel = torch_threads();
    run_kernel([params] { pagedllm::embedding(params); });
  });
}

void gather_rows_op(const Tensor& out_tensor, const Tensor& x_tensor, const Tensor& indices_tensor) {
  const char* op = "gather_rows";
  const Argument out(op, "out", out_tensor), x(op, "x", x_tensor), indices(op, "indices", indices_tensor);
  const int64_t num_rows = indices.dim(1).size(0), width = x.rows().size(1);
  out.rows_of(x.type(), num_rows, width);
  indices.indices(ScalarType::Int, 0, x.size(0));
  dispatch(x, [&](auto element) {
    constexpr int64_t kBytes = sizeof(element);
    GatherRowsParams params{};
    params.out = out.data<char>();
    params.x = x.data<const char>();
    params.indices = indices.data<const int32_t>();
    params.out_stride = out.stride(0) * kBytes;
    params.x_stride = x.stride(0) * kBytes;
    params.row_bytes = width * kBytes;
    params.num_rows = num_rows;
    params.parallel = torch_threads();
    run_kernel([params] { pagedllm::gather_rows(params); });
  });
}

void gated_activation_op(const Tensor& out_tensor, const Tensor& gate_tensor, const Tensor& up_tensor,
                         int64_t activation) {
  const char* op = "gated_activation";
  const Argument out(op, "out", out_tensor), gate(op, "gate", gate_tensor), up(op, "up", up_tensor);
  const int64_t num_rows = gate.rows().size(0), width = gate.size(1);
  out.rows_of(gate.type(), num_rows, width);
  up.rows_of(gate.type(), num_rows, width);
  const Activation checked = check_activation(op, activation, Activation::kSilu, Activation::kClampedSwish);
  dispatch(gate, [&](auto element) {
    using T = decltype(element);
    GatedActivationParams<T> params{};
    params.out = out.data<T>();
    params.gate = gate.data<const T>();
    params.up = up.data<const T>();
    params.out_stride = out.stride(0);
    params.gate_stride = gate.stride(0);
    params.up_stride = up.stride(0);
    params.num_rows = num_rows;
    params.width = width;
    params.activation = checked;
    params.parallel = torch_threads();
    run_kernel([params] { pagedllm::gated_activation(params); });
  });
}

void ungated_activation_op(const Tensor& out_tensor, const Tensor& x_tensor, int64_t activation) {
  const char* op = "ungated_activation";
  const Argument out(op, "out", out_tensor), x(op, "x", x_tensor);
  const int64_t num_rows = x.rows().size(0), width = x.size(1);
  out.rows_of(x.type(), num_rows, width);
  const Activation checked = check_activation(op, activation, Activation::kSilu, Activation::kGelu);
  dispatch(x, [&](auto element) {
    using T = decltype(element);
    UngatedActivationParams<T> params{};
    params.out = out.data<T>();
    params.x = x.data<const T>();
    params.out_stride = out.stride(0);
    params.x_stride = x.stride(0);
    params.num_rows = num_rows;
    params.width = width;
    params.activation = checked;
    params.parallel = torch_threads();
    run_kernel([params] { pagedllm::ungated_activation(params); });
  });
}

}  // namespace
}  // namespace pagedllm

STABLE_TORCH_LIBRARY_IMPL(pagedllm, CPU, library) {
  using namespace pagedllm;
  PAGEDLLM_IMPLEMENT(library, embedding_op,
                     "embedding(Tensor(a!) out, Tensor token_ids, Tensor weight, float scale) -> ()");
  PAGEDLLM_IMPLEMENT(library, gather_rows_op, "gather_rows(Tensor(a!) out, Tensor x, Tensor indices) -> ()");
  PAGEDLLM_IMPLEMENT(library, gated_activation_op,
                     "gated_activation(Tensor(a!) out, Tensor gate, Tensor up, int activation) -> ()");
  PAGEDLLM_IMPLEMENT(library, ungated_activation_op,
                     "ungated_activation(Tensor(a!) out, Tensor x, int activation) -> ()");
}
