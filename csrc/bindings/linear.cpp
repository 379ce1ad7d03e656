#include "cpu/linear.h"

#include "bindings/checks.h"
#include "bindings/packing.h"
#include "bindings/registration.h"
#include "bindings/tape.h"
#include "bindings/threads.h"

namespace pagedllm {
namespace {

template <class T, class Out>
void packed_linear_of(const Tensor& out_tensor, const Tensor& x_tensor, const Tensor& weight_tensor,
                      const std::optional<Tensor>& bias_tensor, const std::optional<Tensor>& residual_tensor,
                      int64_t activation) {
  const char* op = "packed_linear";
  const Argument out(op, "out", out_tensor), x(op, "x", x_tensor), weight(op, "weight", weight_tensor);
  const int64_t num_rows = x.size(0), k = x.size(1), num_panels = check_packed<T>(weight, k);
  const Activation checked = check_activation(op, activation, Activation::kNone, Activation::kClampedSwish);
  out.rows();
  const int64_t num_columns = out.size(1);
  out.shape({num_rows, num_columns});
  const int64_t columns_per_panel = checked == Activation::kNone ? kPanel : kGatedHalf;
  if ((num_columns + columns_per_panel - 1) / columns_per_panel != num_panels) {
    out.fail("must have as many columns as " + std::to_string(num_panels) + " panels of " +
             std::to_string(columns_per_panel) + " hold");
  }
  if (num_rows == 0 || num_columns == 0) return;
  PackedLinearParams<T, Out> params{};
  params.out = out.data<Out>();
  params.x = x.data<const T>();
  params.weight = weight.data<const T>();
  if (bias_tensor) {
    const Argument bias(op, "bias", *bias_tensor);
    params.bias = bias.type(ScalarType::Float).shape({num_panels * kPanel}).contiguous().data<const float>();
  }
  if (residual_tensor) {
    const Argument residual(op, "residual", *residual_tensor);
    params.residual = residual.type(x.type()).shape({num_rows, num_columns}).rows().data<const T>();
    params.residual_stride = residual.stride(0);
  }
  params.out_stride = out.stride(0);
  params.x_stride = x.stride(0);
  params.num_rows = num_rows;
  params.k = k;
  params.num_columns = num_columns;
  params.num_panels = num_panels;
  params.activation = checked;
  params.parallel = torch_threads();
  run_kernel([params] { packed_linear(params); });
}

void packed_linear_op(const Tensor& out, const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
                      const std::optional<Tensor>& residual, int64_t activation) {
  const Argument x_argument("packed_linear", "x", x);
  x_argument.rows();
  dispatch(x_argument, [&](auto element) {
    using T = decltype(element);
    if (out.scalar_type() == ScalarType::Float) {
      return packed_linear_of<T, float>(out, x, weight, bias, residual, activation);
    }
    Argument("packed_linear", "out", out).type(x.scalar_type());
    packed_linear_of<T, T>(out, x, weight, bias, residual, activation);
  });
}

template <class T>
void packed_argmax_of(const Tensor& ids_tensor, const Tensor& x_tensor, const Tensor& weight_tensor,
                      int64_t num_columns, double scale, double softcap) {
  const char* op = "packed_argmax";
  const Argument ids(op, "token_ids", ids_tensor), x(op, "x", x_tensor), weight(op, "weight", weight_tensor);
  const int64_t num_rows = x.size(0), k = x.size(1), num_panels = check_packed<T>(weight, k);
  ids.type(ScalarType::Int).shape({num_rows}).contiguous();
  if ((num_columns + kPanel - 1) / kPanel != num_panels) {
    fail(op, "num_columns must be what " + std::to_string(num_panels) + " panels of 64 hold, got " +
                 std::to_string(num_columns));
  }
  check_softcap(op, softcap);
  if (num_rows == 0) return;
  PackedArgmaxParams<T> params{};
  params.token_ids = ids.data<int32_t>();
  params.x = x.data<const T>();
  params.weight = weight.data<const T>();
  params.x_stride = x.stride(0);
  params.num_rows = num_rows;
  params.k = k;
  params.num_columns = num_columns;
  params.num_panels = num_panels;
  params.scale = static_cast<float>(scale);
  params.softcap = static_cast<float>(softcap);
  params.parallel = torch_threads();
  run_kernel([params] { packed_argmax(params); });
}

void packed_argmax_op(const Tensor& token_ids, const Tensor& x, const Tensor& weight, int64_t num_columns, double scale,
                      double softcap) {
  const Argument x_argument("packed_argmax", "x", x);
  x_argument.rows();
  dispatch(x_argument, [&](auto element) {
    packed_argmax_of<decltype(element)>(token_ids, x, weight, num_columns, scale, softcap);
  });
}

}  // namespace
}  // namespace pagedllm

STABLE_TORCH_LIBRARY_IMPL(pagedllm, CPU, library) {
  using namespace pagedllm;
  PAGEDLLM_IMPLEMENT(library, packed_linear_op,
                     "packed_linear(Tensor(a!) out, Tensor x, Tensor weight, Tensor? bias, Tensor? residual, "
                     "int activation) -> ()");
  PAGEDLLM_IMPLEMENT(library, packed_argmax_op,
                     "packed_argmax(Tensor(a!) token_ids, Tensor x, Tensor weight, int num_columns, "
                     "float scale, float softcap) -> ()");
}
