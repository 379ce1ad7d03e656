#include "cpu/moe.h"

#include "bindings/checks.h"
#include "bindings/packing.h"
#include "bindings/registration.h"
#include "bindings/tape.h"
#include "bindings/threads.h"

namespace pagedllm {
namespace {

void route_tokens_op(const Tensor& weights_tensor, const Tensor& places_tensor, const Tensor& tokens_tensor,
                     const Tensor& bounds_tensor, const Tensor& logits_tensor, bool is_normalized) {
  const char* op = "route_tokens";
  const Argument weights(op, "weights", weights_tensor), places(op, "places", places_tensor),
      tokens(op, "tokens", tokens_tensor), bounds(op, "bounds", bounds_tensor), logits(op, "logits", logits_tensor);
  const int64_t num_tokens = logits.type(ScalarType::Float).rows().size(0), num_experts = logits.size(1);
  const int64_t num_chosen = places.dim(2).size(1);
  if (num_chosen < 1 || num_chosen > num_experts || num_chosen > kMaxChosenExperts) {
    places.fail("must have from 1 to " + std::to_string(std::min<int64_t>(num_experts, kMaxChosenExperts)) +
                " columns");
  }
  RouteTokensParams params{};
  params.weights = weights.array(ScalarType::Float, {num_tokens, num_chosen}).data<float>();
  params.places = places.array(ScalarType::Int, {num_tokens, num_chosen}).data<int32_t>();
  params.tokens = tokens.array(ScalarType::Int, {num_tokens * num_chosen}).data<int32_t>();
  params.bounds = bounds.array(ScalarType::Int, {num_experts + 1}).data<int32_t>();
  params.logits = logits.data<const float>();
  params.logits_stride = logits.stride(0);
  params.num_tokens = num_tokens;
  params.num_experts = num_experts;
  params.num_chosen = num_chosen;
  params.is_normalized = is_normalized;
  params.parallel = torch_threads();
  run_kernel([params] { route_tokens(params); });
}

// Bounds rise from 0 to the number of rows.
const int32_t* check_bounds(const Argument& bounds, int64_t num_experts, int64_t num_rows) {
  const int32_t* values = bounds.shape({num_experts + 1}).indices(ScalarType::Int, 0, num_rows + 1).data<int32_t>();
  bool is_right = values[0] == 0 && values[num_experts] == num_rows;
  for (int64_t i = 0; i < num_experts; ++i) is_right = is_right && values[i] <= values[i + 1];
  if (!is_right) bounds.fail("must rise from 0 to the number of rows");
  return values;
}

template <class T>
void grouped_linear_of(const Argument& out, const Argument& x, const Argument& weights,
                       const std::optional<Tensor>& biases_tensor, const Argument& bounds, Activation activation) {
  const int64_t num_rows = x.size(0), k = x.size(1), num_columns = out.rows().size(1);
  if (k < 1) x.fail("must have one column or more");
  weights.dim(kPairing<T> == 1 ? 4 : 5);
  const int64_t num_experts = weights.size(0), num_panels = weights.size(1);
  if constexpr (kPairing<T> == 1) {
    weights.shape({num_experts, num_panels, k, kPanel});
  } else {
    weights.shape({num_experts, num_panels, (k + 1) / 2, kPanel, 2});
  }
  out.type(x.type()).shape({num_rows, num_columns});
  const int64_t columns_per_panel = activation == Activation::kNone ? kPanel : kGatedHalf;
  if ((num_columns + columns_per_panel - 1) / columns_per_panel != num_panels) {
    out.fail("must have as many columns as " + std::to_string(num_panels) + " panels of " +
             std::to_string(columns_per_panel) + " hold");
  }
  GroupedLinearParams<T> params{};
  params.out = out.data<T>();
  params.x = x.data<const T>();
  params.weights = weights.type(x.type()).contiguous().template data<const T>();
  if (biases_tensor) {
    const Argument biases("grouped_linear", "biases", *biases_tensor);
    params.biases = biases.array(ScalarType::Float, {num_experts, num_panels * kPanel}).data<const float>();
  }
  params.bounds = check_bounds(bounds, num_experts, num_rows);
  params.out_stride = out.stride(0);
  params.x_stride = x.stride(0);
  params.num_experts = num_experts;
  params.k = k;
  params.num_columns = num_columns;
  params.num_panels = num_panels;
  params.activation = activation;
  params.parallel = torch_threads();
  run_kernel([params] { grouped_linear(params); });
}

void grouped_linear_op(const Tensor& out_tensor, const Tensor& x_tensor, const Tensor& weights_tensor,
                       const std::optional<Tensor>& biases, const Tensor& bounds_tensor, int64_t activation) {
  const char* op = "grouped_linear";
  const Argument out(op, "out", out_tensor), x(op, "x", x_tensor), weights(op, "weights", weights_tensor),
      bounds(op, "bounds", bounds_tensor);
  const Activation checked = check_activation(op, activation, Activation::kNone, Activation::kClampedSwish);
  x.rows();
  dispatch(x, [&](auto element) { grouped_linear_of<decltype(element)>(out, x, weights, biases, bounds, checked); });
}

void combine_experts_op(const Tensor& out_tensor, const Tensor& rows_tensor, const Tensor& places_tensor,
                        const Tensor& weights_tensor, const std::optional<Tensor>& shared_tensor,
                        const std::optional<Tensor>& gates_tensor, const std::optional<Tensor>& residual_tensor) {
  const char* op = "combine_experts";
  const Argument out(op, "out", out_tensor), rows(op, "rows", rows_tensor), places(op, "places", places_tensor),
      weights(op, "weights", weights_tensor);
  const int64_t num_tokens = places.dim(2).size(0), num_chosen = places.size(1), hidden_size = out.rows().size(1);
  out.shape({num_tokens, hidden_size});
  rows.rows_of(out.type(), num_tokens * num_chosen, hidden_size);
  weights.array(ScalarType::Float, {num_tokens, num_chosen});
  places.indices(ScalarType::Int, 0, num_tokens * num_chosen);
  if (shared_tensor.has_value() != gates_tensor.has_value()) out.fail("needs both shared and shared_gates, or neither");
  dispatch(out, [&](auto element) {
    using T = decltype(element);
    CombineExpertsParams<T> params{};
    params.out = out.data<T>();
    params.rows = rows.data<const T>();
    params.places = places.data<const int32_t>();
    params.weights = weights.data<const float>();
    if (shared_tensor) {
      const Argument shared(op, "shared", *shared_tensor), gates(op, "shared_gates", *gates_tensor);
      params.shared = shared.rows_of(out.type(), num_tokens, hidden_size).template data<const T>();
      params.shared_stride = shared.stride(0);
      params.shared_gates = gates.array(ScalarType::Float, {num_tokens, 1}).data<const float>();
    }
    if (residual_tensor) {
      const Argument residual(op, "residual", *residual_tensor);
      params.residual = residual.rows_of(out.type(), num_tokens, hidden_size).template data<const T>();
      params.residual_stride = residual.stride(0);
    }
    params.out_stride = out.stride(0);
    params.rows_stride = rows.stride(0);
    params.num_tokens = num_tokens;
    params.num_chosen = num_chosen;
    params.hidden_size = hidden_size;
    params.parallel = torch_threads();
    run_kernel([params] { combine_experts(params); });
  });
}

}  // namespace
}  // namespace pagedllm

STABLE_TORCH_LIBRARY_IMPL(pagedllm, CPU, library) {
  using namespace pagedllm;
  PAGEDLLM_IMPLEMENT(library, route_tokens_op,
                     "route_tokens(Tensor(a!) weights, Tensor(b!) places, Tensor(c!) tokens, Tensor(d!) bounds, "
                     "Tensor logits, bool is_normalized) -> ()");
  PAGEDLLM_IMPLEMENT(library, grouped_linear_op,
                     "grouped_linear(Tensor(a!) out, Tensor x, Tensor weights, Tensor? biases, Tensor bounds, "
                     "int activation) -> ()");
  PAGEDLLM_IMPLEMENT(library, combine_experts_op,
                     "combine_experts(Tensor(a!) out, Tensor rows, Tensor places, Tensor weights, Tensor? shared, "
                     "Tensor? shared_gates, Tensor? residual) -> ()");
}
