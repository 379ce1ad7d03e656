#include "cuda/kv_write.h"

#include "bindings/cuda/caches.h"

namespace pagedllm {
namespace {

void rope_norm_write_kv_op(const Tensor& qkv_tensor, const Tensor& k_cache_tensor, const Tensor& v_cache_tensor,
                           const Tensor& slot_mapping_tensor, const std::optional<Tensor>& rope_table_tensor,
                           const std::optional<Tensor>& rope_rows_tensor, const std::optional<Tensor>& q_norm_tensor,
                           const std::optional<Tensor>& k_norm_tensor, double eps, int64_t num_q_heads,
                           int64_t num_kv_heads, bool is_interleaved) {
  constexpr const char* kOp = "rope_norm_write_kv";
  DeviceCall call(kOp, qkv_tensor);
  const Argument qkv = call.writes("qkv", qkv_tensor), slot_mapping = call.reads("slot_mapping", slot_mapping_tensor);
  const Argument k_cache = call.writes("k_cache", k_cache_tensor), v_cache = call.writes("v_cache", v_cache_tensor);
  const CacheLayout layout = check_caches(k_cache, v_cache);
  const int64_t num_tokens = qkv.dim(2).size(0), head_dim = layout.head_dim;
  qkv.type(k_cache.type()).shape({num_tokens, (num_q_heads + 2 * num_kv_heads) * head_dim});
  check_vector_rows(qkv, 2);
  if (layout.num_kv_heads != num_kv_heads) k_cache.fail("must have num_kv_heads in dimension 1");
  slot_mapping.type(ScalarType::Long).shape({num_tokens}).contiguous();
  if (rope_table_tensor.has_value() != rope_rows_tensor.has_value())
    fail(kOp, "rope_table and rope_rows go together: one of them is missing");

  DeviceKvWriteParams params{};
  params.rope_table = call.reads_optional<float>("rope_table", rope_table_tensor, [&](const Argument& table) {
    table.type(ScalarType::Float).dim(2).contiguous();
    if (table.size(1) % 4 != 0 || table.size(1) > head_dim)
      table.fail("must have a rotary_dim that is a multiple of 4 and at most head_dim");
    params.rotary_dim = static_cast<int32_t>(table.size(1));
  });
  params.rope_rows = call.reads_optional<int32_t>("rope_rows", rope_rows_tensor, [&](const Argument& rows) {
    rows.type(ScalarType::Int).shape({num_tokens}).contiguous();
  });
  const auto check_norm = [&](const Argument& norm) { norm.type(ScalarType::Float).shape({head_dim}).contiguous(); };
  params.q_norm = call.reads_optional<float>("q_norm", q_norm_tensor, check_norm);
  params.k_norm = call.reads_optional<float>("k_norm", k_norm_tensor, check_norm);
  params.qkv = qkv.data<void>();
  params.k_cache = k_cache.data<void>();
  params.v_cache = v_cache.data<void>();
  params.slot_mapping = slot_mapping.data<const int64_t>();
  params.qkv_stride = qkv.stride(0);
  params.cache_block_stride = layout.block_stride;
  params.cache_head_stride = layout.head_stride;
  params.num_tokens = static_cast<int32_t>(num_tokens);
  params.num_q_heads = static_cast<int32_t>(num_q_heads);
  params.num_kv_heads = static_cast<int32_t>(num_kv_heads);
  params.head_dim = layout.head_dim;
  params.block_shift = layout.block_shift;
  params.is_interleaved = is_interleaved;
  params.eps = static_cast<float>(eps);
  params.type = element_type(qkv, false);
  call.check(rope_norm_write_kv(params, call.stream()));
}

}  // namespace
}  // namespace pagedllm

PAGEDLLM_DEVICE_OPERATORS(library) {
  using namespace pagedllm;
  PAGEDLLM_IMPLEMENT(library, rope_norm_write_kv_op,
                     "rope_norm_write_kv(Tensor(a!) qkv, Tensor(b!) k_cache, Tensor(c!) v_cache, Tensor slot_mapping, "
                     "Tensor? rope_table, Tensor? rope_rows, Tensor? q_norm, Tensor? k_norm, float eps, "
                     "int num_q_heads, int num_kv_heads, bool is_interleaved) -> ()");
}
