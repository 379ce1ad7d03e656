#include "cuda/sampling.h"

#include "bindings/cuda/device_call.h"

namespace pagedllm {
namespace {

void check_logits(const Argument& logits) { logits.type(ScalarType::Float).rows(); }

template <class T>
const T* row_values(DeviceCall& call, const char* name, const Tensor& tensor, ScalarType type, int64_t num_rows) {
  const Argument argument = call.reads(name, tensor);
  argument.type(type).shape({num_rows}).contiguous();
  return argument.data<const T>();
}

void process_logits_op(const Tensor& logits_tensor, const std::optional<Tensor>& bitmask,
                       const std::optional<Tensor>& bias_offsets, const std::optional<Tensor>& bias_ids,
                       const std::optional<Tensor>& bias_values, const std::optional<Tensor>& penalties,
                       const std::optional<Tensor>& penalty_offsets, const std::optional<Tensor>& penalty_ids,
                       const std::optional<Tensor>& penalty_counts) {
  constexpr const char* kOp = "process_logits";
  DeviceCall call(kOp, logits_tensor);
  const Argument logits = call.writes("logits", logits_tensor);
  check_logits(logits);
  const int64_t num_rows = logits.size(0), vocab_size = logits.size(1);
  if (bias_offsets.has_value() != bias_ids.has_value() || bias_offsets.has_value() != bias_values.has_value())
    fail(kOp, "bias_offsets, bias_ids and bias_values go together: one of them is missing");
  if (penalties.has_value() != penalty_offsets.has_value() || penalties.has_value() != penalty_ids.has_value() ||
      penalties.has_value() != penalty_counts.has_value())
    fail(kOp, "penalties, penalty_offsets, penalty_ids and penalty_counts go together: one of them is missing");
  const auto is_list = [](ScalarType type) {
    return [type](const Argument& list) { list.type(type).dim(1).contiguous(); };
  };
  const auto is_offsets = [&](const Argument& offsets) {
    offsets.type(ScalarType::Int).shape({num_rows + 1}).contiguous();
  };
  DeviceProcessLogitsParams params{};
  params.logits = logits.data<float>();
  params.logits_stride = logits.stride(0);
  params.num_rows = static_cast<int32_t>(num_rows);
  params.vocab_size = static_cast<int32_t>(vocab_size);
  params.bitmask = call.reads_optional<int32_t>("bitmask", bitmask, [&](const Argument& mask) {
    mask.type(ScalarType::Int).shape({num_rows, (vocab_size + 31) / 32}).contiguous();
  });
  params.bias_offsets = call.reads_optional<int32_t>("bias_offsets", bias_offsets, is_offsets);
  params.bias_ids = call.reads_optional<int32_t>("bias_ids", bias_ids, is_list(ScalarType::Int));
  params.bias_values = call.reads_optional<float>("bias_values", bias_values, is_list(ScalarType::Float));
  params.penalties = call.reads_optional<float>("penalties", penalties, [&](const Argument& penalty) {
    penalty.type(ScalarType::Float).shape({num_rows, 3}).contiguous();
  });
  params.penalty_offsets = call.reads_optional<int32_t>("penalty_offsets", penalty_offsets, is_offsets);
  params.penalty_ids = call.reads_optional<int32_t>("penalty_ids", penalty_ids, is_list(ScalarType::Int));
  params.penalty_counts = call.reads_optional<int32_t>("penalty_counts", penalty_counts, is_list(ScalarType::Int));
  call.check(process_logits(params, call.stream()));
}

void sample_op(const Tensor& token_ids_tensor, const Tensor& logits_tensor, const Tensor& temperature,
               const Tensor& top_k, const Tensor& top_p, const Tensor& min_p, const Tensor& seed,
               const Tensor& counter_tensor) {
  DeviceCall call("sample", logits_tensor);
  const Argument token_ids = call.writes("token_ids", token_ids_tensor), logits = call.reads("logits", logits_tensor);
  const Argument counter = call.reads("counter", counter_tensor);
  check_logits(logits);
  const int64_t num_rows = logits.size(0);
  token_ids.type(ScalarType::Int).shape({num_rows}).contiguous();
  counter.type(ScalarType::Int).shape({num_rows, 2}).contiguous();
  DeviceSampleParams params{};
  params.token_ids = token_ids.data<int32_t>();
  params.logits = logits.data<const float>();
  params.logits_stride = logits.stride(0);
  params.num_rows = static_cast<int32_t>(num_rows);
  params.vocab_size = static_cast<int32_t>(logits.size(1));
  params.temperature = row_values<float>(call, "temperature", temperature, ScalarType::Float, num_rows);
  params.top_k = row_values<int32_t>(call, "top_k", top_k, ScalarType::Int, num_rows);
  params.top_p = row_values<float>(call, "top_p", top_p, ScalarType::Float, num_rows);
  params.min_p = row_values<float>(call, "min_p", min_p, ScalarType::Float, num_rows);
  params.seed = row_values<int64_t>(call, "seed", seed, ScalarType::Long, num_rows);
  params.counter = counter.data<const int32_t>();
  call.check(sample(params, call.stream()));
}

void top_logprobs_op(const Tensor& top_ids_tensor, const Tensor& top_values_tensor, const Tensor& token_values_tensor,
                     const Tensor& token_ranks_tensor, const Tensor& logits_tensor, const Tensor& token_ids) {
  DeviceCall call("top_logprobs", logits_tensor);
  const Argument top_ids = call.writes("top_ids", top_ids_tensor),
                 top_values = call.writes("top_values", top_values_tensor);
  const Argument token_values = call.writes("token_values", token_values_tensor);
  const Argument token_ranks = call.writes("token_ranks", token_ranks_tensor),
                 logits = call.reads("logits", logits_tensor);
  check_logits(logits);
  const int64_t num_rows = logits.size(0), k = top_ids.dim(2).size(1);
  top_ids.type(ScalarType::Int).shape({num_rows, k}).contiguous();
  top_values.type(ScalarType::Float).shape({num_rows, k}).contiguous();
  token_values.type(ScalarType::Float).shape({num_rows}).contiguous();
  token_ranks.type(ScalarType::Int).shape({num_rows}).contiguous();
  if (k > logits.size(1)) top_ids.fail("must have at most vocab_size columns");
  DeviceTopLogprobsParams params{};
  params.top_ids = top_ids.data<int32_t>();
  params.top_values = top_values.data<float>();
  params.token_values = token_values.data<float>();
  params.token_ranks = token_ranks.data<int32_t>();
  params.logits = logits.data<const float>();
  params.logits_stride = logits.stride(0);
  params.num_rows = static_cast<int32_t>(num_rows);
  params.vocab_size = static_cast<int32_t>(logits.size(1));
  params.k = static_cast<int32_t>(k);
  params.token_ids = row_values<int32_t>(call, "token_ids", token_ids, ScalarType::Int, num_rows);
  call.check(top_logprobs(params, call.stream()));
}

}  // namespace
}  // namespace pagedllm

PAGEDLLM_DEVICE_OPERATORS(library) {
  using namespace pagedllm;
  PAGEDLLM_IMPLEMENT(
      library, process_logits_op,
      "process_logits(Tensor(a!) logits, Tensor? bitmask, Tensor? bias_offsets, Tensor? bias_ids, Tensor? bias_values, "
      "Tensor? penalties, Tensor? penalty_offsets, Tensor? penalty_ids, Tensor? penalty_counts) -> ()");
  PAGEDLLM_IMPLEMENT(
      library, sample_op,
      "sample(Tensor(a!) token_ids, Tensor logits, Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p, "
      "Tensor seed, Tensor counter) -> ()");
  PAGEDLLM_IMPLEMENT(
      library, top_logprobs_op,
      "top_logprobs(Tensor(a!) top_ids, Tensor(b!) top_values, Tensor(c!) token_values, Tensor(d!) token_ranks, "
      "Tensor logits, Tensor token_ids) -> ()");
}
