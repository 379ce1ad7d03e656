#include "cpu/norm.h"

#include "bindings/checks.h"
#include "bindings/registration.h"
#include "bindings/tape.h"
#include "bindings/threads.h"

namespace pagedllm {
namespace {

// What all norms have, of rows of one type and shape.
template <class Params>
Params norm_params(const Argument& out, const Argument& x, const Argument& weight, double eps) {
  Params params{};
  params.out = out.data<std::remove_pointer_t<decltype(params.out)>>();
  params.x = x.data<std::remove_pointer_t<decltype(params.x)>>();
  params.weight = weight.data<const float>();
  params.out_stride = out.stride(0);
  params.x_stride = x.stride(0);
  params.num_rows = x.size(0);
  params.hidden_size = x.size(1);
  params.eps = static_cast<float>(eps);
  params.parallel = torch_threads();
  return params;
}

void run(const char* op, const Tensor& out_tensor, const Tensor* residual_tensor, const Tensor& x_tensor,
         const Tensor& weight_tensor, double eps) {
  const Argument x(op, "x", x_tensor), out(op, "out", out_tensor), weight(op, "weight", weight_tensor);
  x.rows();
  out.rows_of(x.type(), x.size(0), x.size(1));
  weight.array(ScalarType::Float, {x.size(1)});
  dispatch(x, [&](auto element) {
    using T = decltype(element);
    auto params = norm_params<RmsNormParams<T>>(out, x, weight, eps);
    if (residual_tensor) {
      const Argument residual(op, "residual", *residual_tensor);
      params.residual = residual.rows_of(x.type(), x.size(0), x.size(1)).template data<T>();
      params.residual_stride = residual.stride(0);
    }
    run_kernel([params] { pagedllm::rms_norm(params); });
  });
}

void rms_norm_op(const Tensor& out, const Tensor& x, const Tensor& weight, double eps) {
  run("rms_norm", out, nullptr, x, weight, eps);
}

void add_rms_norm_op(const Tensor& out, const Tensor& residual, const Tensor& x, const Tensor& weight, double eps) {
  run("add_rms_norm", out, &residual, x, weight, eps);
}

void layer_norm_heads_op(const Tensor& out_tensor, const Tensor& x_tensor, const Tensor& weight_tensor, double eps) {
  const char* op = "layer_norm_heads";
  const Argument x(op, "x", x_tensor), out(op, "out", out_tensor), weight(op, "weight", weight_tensor);
  const int64_t num_heads = weight.dim(2).size(0), head_dim = weight.size(1);
  const int64_t num_rows = x.rows().size(0);
  x.shape({num_rows, num_heads * head_dim});
  out.rows_of(x.type(), num_rows, num_heads * head_dim);
  weight.type(ScalarType::Float).contiguous();
  dispatch(x, [&](auto element) {
    auto params = norm_params<LayerNormParams<decltype(element)>>(out, x, weight, eps);
    params.hidden_size = head_dim;
    params.num_heads = num_heads;
    run_kernel([params] { pagedllm::layer_norm(params); });
  });
}

void layer_norm_op(const Tensor& out_tensor, const Tensor& x_tensor, const Tensor& weight_tensor,
                   const std::optional<Tensor>& bias_tensor, double eps) {
  const char* op = "layer_norm";
  const Argument x(op, "x", x_tensor), out(op, "out", out_tensor), weight(op, "weight", weight_tensor);
  x.rows();
  out.rows_of(x.type(), x.size(0), x.size(1));
  weight.array(ScalarType::Float, {x.size(1)});
  dispatch(x, [&](auto element) {
    auto params = norm_params<LayerNormParams<decltype(element)>>(out, x, weight, eps);
    if (bias_tensor) {
      const Argument bias(op, "bias", *bias_tensor);
      params.bias = bias.array(ScalarType::Float, {x.size(1)}).template data<const float>();
    }
    run_kernel([params] { pagedllm::layer_norm(params); });
  });
}

}  // namespace
}  // namespace pagedllm

STABLE_TORCH_LIBRARY_IMPL(pagedllm, CPU, library) {
  using namespace pagedllm;
  PAGEDLLM_IMPLEMENT(library, rms_norm_op, "rms_norm(Tensor(a!) out, Tensor x, Tensor weight, float eps) -> ()");
  PAGEDLLM_IMPLEMENT(library, add_rms_norm_op,
                     "add_rms_norm(Tensor(a!) out, Tensor(b!) residual, Tensor x, Tensor weight, float eps) -> ()");
  PAGEDLLM_IMPLEMENT(library, layer_norm_op,
                     "layer_norm(Tensor(a!) out, Tensor x, Tensor weight, Tensor? bias, float eps) -> ()");
  PAGEDLLM_IMPLEMENT(library, layer_norm_heads_op,
                     "layer_norm_heads(Tensor(a!) out, Tensor x, Tensor weight, float eps) -> ()");
}
