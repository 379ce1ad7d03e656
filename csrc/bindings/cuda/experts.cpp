#include "cuda/experts.h"

#include "bindings/cuda/device_call.h"

namespace pagedllm {
namespace {

void grouped_dense_op(const Tensor& out_tensor, const Tensor& x_tensor, const Tensor& weights_tensor,
                      const std::optional<Tensor>& biases_tensor, const Tensor& bounds_tensor, int64_t activation) {
  constexpr const char* kOp = "grouped_dense";
  DeviceCall call(kOp, x_tensor);
  const Argument out = call.writes("out", out_tensor), x = call.reads("x", x_tensor);
  const Argument weights = call.reads("weights", weights_tensor), bounds = call.reads("bounds", bounds_tensor);
  const ElementType type = element_type(x, false);
  const int64_t bytes = element_bytes(type);
  check_vector_rows(x, bytes);
  check_vector_rows(out, bytes);
  check_range(kOp, "activation", activation, 0, 4);
  const int64_t num_rows = x.size(0), k = x.size(1), width = out.size(1);
  const int64_t weight_rows = activation != 0 ? 2 * width : width, num_experts = weights.dim(3).size(0);
  if (num_experts < 1 || num_experts > kMaxExperts)
    weights.fail("must be of 1 to " + std::to_string(kMaxExperts) + " experts");
  if (reinterpret_cast<uintptr_t>(weights.data<void>()) % 16 != 0) weights.fail("must begin at a multiple of 16 bytes");
  weights.type(x.type()).shape({num_experts, weight_rows, k}).contiguous();
  out.type(x.type()).shape({num_rows, width});
  bounds.type(ScalarType::Int).shape({num_experts + 1}).contiguous();
  GroupedDenseParams params{};
  params.biases = call.reads_optional<void>("biases", biases_tensor, [&](const Argument& biases) {
    biases.type(x.type()).shape({num_experts, weight_rows}).contiguous();
  });
  params.out = out.data<void>();
  params.x = x.data<void>();
  params.weights = weights.data<void>();
  params.bounds = bounds.data<const int32_t>();
  params.out_stride = out.stride(0);
  params.x_stride = x.stride(0);
  params.num_rows = static_cast<int32_t>(num_rows);
  params.num_experts = static_cast<int32_t>(num_experts);
  params.k = static_cast<int32_t>(k);
  params.width = static_cast<int32_t>(width);
  params.activation = static_cast<int32_t>(activation);
  params.is_bf16 = type == ElementType::kBFloat16;
  call.check(grouped_dense(params, call.stream()));
}

}  // namespace
}  // namespace pagedllm

PAGEDLLM_DEVICE_OPERATORS(library) {
  using namespace pagedllm;
  PAGEDLLM_IMPLEMENT(library, grouped_dense_op,
                     "grouped_dense(Tensor(a!) out, Tensor x, Tensor weights, Tensor? biases, Tensor bounds, "
                     "int activation) -> ()");
}
