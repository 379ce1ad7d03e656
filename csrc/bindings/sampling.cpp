#include "cpu/sampling.h"

#include <cmath>

#include "bindings/checks.h"
#include "bindings/registration.h"
#include "bindings/threads.h"

namespace pagedllm {
namespace {

// An array of int32 or float32, or null where the optional tensor is none.
template <class T>
const T* optional_data(const char* op, const char* name, const std::optional<Tensor>& tensor,
                       std::initializer_list<int64_t> shape) {
  if (!tensor) return nullptr;
  const Argument argument(op, name, *tensor);
  argument.type(std::is_same_v<T, float> ? ScalarType::Float : ScalarType::Int).shape(shape).contiguous();
  return argument.data<const T>();
}

int64_t length_of(const std::optional<Tensor>& tensor) { return tensor && tensor->dim() == 1 ? tensor->size(0) : 0; }

// Token ids are written through and offsets are read through: both must stay inside.
void check_ids(const char* op, const char* name, const int32_t* ids, int64_t count, int64_t lowest,
               int64_t vocab_size) {
  for (int64_t i = 0; i < count; ++i) {
    if (ids[i] < lowest || ids[i] >= vocab_size) {
      fail(op, std::string(name) + " must be in " + std::to_string(lowest) + " .. " + std::to_string(vocab_size - 1) +
                   ", got " + std::to_string(ids[i]));
    }
  }
}

void check_offsets(const char* op, const char* name, const int32_t* offsets, int64_t num_rows, int64_t count) {
  bool is_valid = offsets[0] >= 0 && offsets[num_rows] <= count;
  for (int64_t row = 0; row < num_rows; ++row) is_valid = is_valid && offsets[row] <= offsets[row + 1];
  if (!is_valid) fail(op, std::string(name) + " must ascend within 0 .. " + std::to_string(count));
}

// Offsets, ids and values of rows; given together or not at all.
struct Ragged {
  const int32_t* offsets;
  const int32_t* ids;
};
template <size_t kNames>
Ragged ragged(const char* const (&names)[kNames], const std::optional<Tensor>& offsets,
              const std::optional<Tensor>& ids, bool is_given, int64_t num_rows, int64_t vocab_size) {
  constexpr const char* kOp = "process_logits";
  if (offsets.has_value() != is_given || ids.has_value() != is_given) {
    fail(kOp, std::string(names[0]) + " and " + names[1] + " must be given with their values, and only then");
  }
  if (!is_given) return {nullptr, nullptr};
  const int64_t count = length_of(ids);
  const auto* offset_data = optional_data<int32_t>(kOp, names[0], offsets, {num_rows + 1});
  const auto* id_data = optional_data<int32_t>(kOp, names[1], ids, {count});
  check_offsets(kOp, names[0], offset_data, num_rows, count);
  check_ids(kOp, names[1], id_data, count, 0, vocab_size);
  return {offset_data, id_data};
}

void process_logits_op(const Tensor& logits_tensor, const std::optional<Tensor>& bitmask,
                       const std::optional<Tensor>& bias_offsets, const std::optional<Tensor>& bias_ids,
                       const std::optional<Tensor>& bias_values, const std::optional<Tensor>& penalties,
                       const std::optional<Tensor>& penalty_offsets, const std::optional<Tensor>& penalty_ids,
                       const std::optional<Tensor>& penalty_counts) {
  constexpr const char* kOp = "process_logits";
  const Argument logits(kOp, "logits", logits_tensor);
  logits.type(ScalarType::Float).rows();
  const int64_t num_rows = logits.size(0), vocab_size = logits.size(1);
  const Ragged bias =
      ragged({"bias_offsets", "bias_ids"}, bias_offsets, bias_ids, bias_values.has_value(), num_rows, vocab_size);
  const Ragged penalty = ragged({"penalty_offsets", "penalty_ids"}, penalty_offsets, penalty_ids, penalties.has_value(),
                                num_rows, vocab_size);
  if (penalties.has_value() != penalty_counts.has_value()) {
    fail(kOp, "penalties and penalty_counts must be given together");
  }
  pagedllm::process_logits(ProcessLogitsParams{
      logits.data<float>(),
      logits.stride(0),
      num_rows,
      vocab_size,
      optional_data<int32_t>(kOp, "bitmask", bitmask, {num_rows, (vocab_size + 31) / 32}),
      bias.offsets,
      bias.ids,
      optional_data<float>(kOp, "bias_values", bias_values, {length_of(bias_ids)}),
      optional_data<float>(kOp, "penalties", penalties, {num_rows, 3}),
      penalty.offsets,
      penalty.ids,
      optional_data<int32_t>(kOp, "penalty_counts", penalty_counts, {length_of(penalty_ids)}),
      torch_threads(),
  });
}

void sample_op(const Tensor& token_ids_tensor, const Tensor& logits_tensor, const Tensor& temperature_tensor,
               const Tensor& top_k_tensor, const Tensor& top_p_tensor, const Tensor& min_p_tensor,
               const Tensor& seed_tensor, const Tensor& counter_tensor) {
  constexpr const char* kOp = "sample";
  const Argument token_ids(kOp, "token_ids", token_ids_tensor), logits(kOp, "logits", logits_tensor);
  const Argument temperature(kOp, "temperature", temperature_tensor), top_k(kOp, "top_k", top_k_tensor);
  const Argument top_p(kOp, "top_p", top_p_tensor), min_p(kOp, "min_p", min_p_tensor);
  const Argument seed(kOp, "seed", seed_tensor), counter(kOp, "counter", counter_tensor);
  logits.type(ScalarType::Float).rows();
  const int64_t num_rows = logits.size(0), vocab_size = logits.size(1);
  for (const Argument* a : {&temperature, &top_p, &min_p}) a->type(ScalarType::Float).shape({num_rows}).contiguous();
  for (const Argument* a : {&token_ids, &top_k}) a->type(ScalarType::Int).shape({num_rows}).contiguous();
  seed.type(ScalarType::Long).shape({num_rows}).contiguous();
  counter.type(ScalarType::Int).shape({num_rows, 2}).contiguous();
  for (int64_t row = 0; row < num_rows; ++row) {
    const float t = temperature.data<const float>()[row], p = min_p.data<const float>()[row];
    if (!(t >= 0.0f && std::isfinite(t))) fail(kOp, "temperature must be finite and >= 0, got " + std::to_string(t));
    if (!(p >= 0.0f && p <= 1.0f)) fail(kOp, "min_p must be in 0 .. 1, got " + std::to_string(p));
  }
  pagedllm::sample(SampleParams{
      token_ids.data<int32_t>(),
      logits.data<const float>(),
      logits.stride(0),
      num_rows,
      vocab_size,
      temperature.data<const float>(),
      top_k.data<const int32_t>(),
      top_p.data<const float>(),
      min_p.data<const float>(),
      seed.data<const int64_t>(),
      counter.data<const int32_t>(),
      torch_threads(),
  });
}

void top_logprobs_op(const Tensor& top_ids_tensor, const Tensor& top_values_tensor, const Tensor& token_values_tensor,
                     const Tensor& token_ranks_tensor, const Tensor& logits_tensor, const Tensor& token_ids_tensor) {
  constexpr const char* kOp = "top_logprobs";
  const Argument top_ids(kOp, "top_ids", top_ids_tensor), top_values(kOp, "top_values", top_values_tensor);
  const Argument token_values(kOp, "token_values", token_values_tensor);
  const Argument token_ranks(kOp, "token_ranks", token_ranks_tensor);
  const Argument logits(kOp, "logits", logits_tensor), token_ids(kOp, "token_ids", token_ids_tensor);
  logits.type(ScalarType::Float).rows();
  const int64_t num_rows = logits.size(0), vocab_size = logits.size(1);
  const int64_t k = top_ids.dim(2).size(1);
  if (k > vocab_size) top_ids.fail("must have at most " + std::to_string(vocab_size) + " columns");
  top_ids.type(ScalarType::Int).shape({num_rows, k}).contiguous();
  top_values.type(ScalarType::Float).shape({num_rows, k}).contiguous();
  token_values.type(ScalarType::Float).shape({num_rows}).contiguous();
  for (const Argument* a : {&token_ranks, &token_ids}) a->type(ScalarType::Int).shape({num_rows}).contiguous();
  check_ids(kOp, "token_ids", token_ids.data<const int32_t>(), num_rows, -1, vocab_size);
  pagedllm::top_logprobs(TopLogprobsParams{
      top_ids.data<int32_t>(),
      top_values.data<float>(),
      token_values.data<float>(),
      token_ranks.data<int32_t>(),
      logits.data<const float>(),
      logits.stride(0),
      num_rows,
      vocab_size,
      k,
      token_ids.data<const int32_t>(),
      torch_threads(),
  });
}

}  // namespace
}  // namespace pagedllm

STABLE_TORCH_LIBRARY_IMPL(pagedllm, CPU, library) {
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
