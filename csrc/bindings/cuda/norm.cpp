#include "cuda/norm.h"

#include "bindings/cuda/device_call.h"

namespace pagedllm {
namespace {

// What all norms have: out and x, which may be the same, of one type and shape, and a weight a column.
template <class Params>
Params norm_params(DeviceCall& call, const Tensor& out_tensor, const Tensor& x_tensor, const Tensor& weight_tensor,
                   double eps) {
  const Argument out = call.writes("out", out_tensor), x = call.reads("x", x_tensor);
  const Argument weight = call.reads("weight", weight_tensor);
  const int64_t num_rows = x.dim(2).size(0), hidden_size = x.size(1);
  out.type(x.type()).shape({num_rows, hidden_size});
  Params params{};
  params.weight = weight.array(ScalarType::Float, {hidden_size}).data<const float>();
  params.type = element_type(x, true);
  check_vector_rows(x, element_bytes(params.type));
  check_vector_rows(out, element_bytes(params.type));
  params.out = out.data<void>();
  params.x = x.data<void>();
  params.out_stride = out.stride(0);
  params.x_stride = x.stride(0);
  params.num_rows = static_cast<int32_t>(num_rows);
  params.hidden_size = static_cast<int32_t>(hidden_size);
  params.eps = static_cast<float>(eps);
  return params;
}

void run(const char* op, const Tensor& out_tensor, const Tensor* residual_tensor, const Tensor& x_tensor,
         const Tensor& weight_tensor, double eps) {
  DeviceCall call(op, x_tensor);
  auto params = norm_params<DeviceRmsNormParams>(call, out_tensor, x_tensor, weight_tensor, eps);
  if (residual_tensor != nullptr) {
    const Argument residual = call.writes("residual", *residual_tensor);
    residual.type(x_tensor.scalar_type()).shape({params.num_rows, params.hidden_size});
    check_vector_rows(residual, element_bytes(params.type));
    params.residual = residual.data<void>();
    params.residual_stride = residual.stride(0);
  }
  call.check(rms_norm(params, call.stream()));
}

void rms_norm_op(const Tensor& out, const Tensor& x, const Tensor& weight, double eps) {
  run("rms_norm", out, nullptr, x, weight, eps);
}

void add_rms_norm_op(const Tensor& out, const Tensor& residual, const Tensor& x, const Tensor& weight, double eps) {
  run("add_rms_norm", out, &residual, x, weight, eps);
}

void layer_norm_op(const Tensor& out_tensor, const Tensor& x_tensor, const Tensor& weight_tensor,
                   const std::optional<Tensor>& bias_tensor, double eps) {
  DeviceCall call("layer_norm", x_tensor);
  auto params = norm_params<DeviceLayerNormParams>(call, out_tensor, x_tensor, weight_tensor, eps);
  params.bias = call.reads_optional<float>(
      "bias", bias_tensor, [&](const Argument& bias) { bias.array(ScalarType::Float, {params.hidden_size}); });
  call.check(layer_norm(params, call.stream()));
}

}  // namespace
}  // namespace pagedllm

PAGEDLLM_DEVICE_OPERATORS(library) {
  using namespace pagedllm;
  PAGEDLLM_IMPLEMENT(library, rms_norm_op, "rms_norm(Tensor(a!) out, Tensor x, Tensor weight, float eps) -> ()");
  PAGEDLLM_IMPLEMENT(library, add_rms_norm_op,
                     "add_rms_norm(Tensor(a!) out, Tensor(b!) residual, Tensor x, Tensor weight, float eps) -> ()");
  PAGEDLLM_IMPLEMENT(library, layer_norm_op,
                     "layer_norm(Tensor(a!) out, Tensor x, Tensor weight, Tensor? bias, float eps) -> ()");
}
