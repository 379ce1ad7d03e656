#include "cpu/kv_write.h"

#include "bindings/checks.h"
#include "bindings/registration.h"
#include "bindings/tape.h"
#include "bindings/threads.h"

namespace pagedllm {
namespace {

template <class T>
void check_cache(const Argument& k_cache, const Argument& v_cache, int64_t num_kv_heads, int64_t head_dim,
                 RopeNormWriteKVParams<T>* params) {
  const bool is_paired = sizeof(T) != sizeof(float);
  const int64_t num_blocks = k_cache.dim(is_paired ? 5 : 4).size(0), block_size = k_cache.size(3);
  if (is_paired) {
    if (head_dim % 2 || block_size % 2) k_cache.fail("must have an even head_dim and block_size");
    k_cache.shape({num_blocks, num_kv_heads, head_dim / 2, block_size, 2});
    v_cache.shape({num_blocks, num_kv_heads, block_size / 2, head_dim, 2});
  } else {
    k_cache.shape({num_blocks, num_kv_heads, head_dim, block_size});
    v_cache.shape({num_blocks, num_kv_heads, block_size, head_dim});
  }
  k_cache.contiguous();
  v_cache.contiguous();
  params->k_cache = k_cache.data<T>();
  params->v_cache = v_cache.data<T>();
  params->block_size = block_size;
}

template <class T>
void check_rope(const char* op, const Tensor& table_tensor, const Tensor& rows_tensor,
                RopeNormWriteKVParams<T>* params) {
  const Argument table(op, "rope_table", table_tensor), rows(op, "rope_rows", rows_tensor);
  const int64_t rotary_dim = table.type(ScalarType::Float).rows().size(1);
  if (rotary_dim % 2 || rotary_dim > params->head_dim) {
    table.fail("must have an even number of columns, at most head_dim " + std::to_string(params->head_dim));
  }
  rows.shape({params->num_tokens}).indices(ScalarType::Int, 0, table.size(0));
  params->rope_table = table.data<const float>();
  params->rope_rows = rows.data<const int32_t>();
  params->rope_stride = table.stride(0);
  params->rotary_dim = rotary_dim;
}

const float* check_norm(const char* op, const char* name, const std::optional<Tensor>& tensor, int64_t head_dim) {
  if (!tensor) return nullptr;
  return Argument(op, name, *tensor).type(ScalarType::Float).shape({head_dim}).contiguous().data<const float>();
}

void rope_norm_write_kv_op(const Tensor& qkv_tensor, const Tensor& k_tensor, const Tensor& v_tensor,
                           const Tensor& slot_tensor, const std::optional<Tensor>& rope_table,
                           const std::optional<Tensor>& rope_rows, const std::optional<Tensor>& q_norm,
                           const std::optional<Tensor>& k_norm, double eps, int64_t num_q_heads, int64_t num_kv_heads,
                           bool is_interleaved) {
  const char* op = "rope_norm_write_kv";
  const Argument qkv(op, "qkv", qkv_tensor), slots(op, "slot_mapping", slot_tensor);
  const Argument k_cache(op, "k_cache", k_tensor), v_cache(op, "v_cache", v_tensor);
  const int64_t num_tokens = qkv.rows().size(0), num_heads = num_q_heads + 2 * num_kv_heads;
  if (num_q_heads < 1 || num_kv_heads < 1 || qkv.size(1) % num_heads) {
    qkv.fail("must have columns for " + std::to_string(num_q_heads) + " + 2 * " + std::to_string(num_kv_heads) +
             " heads");
  }
  const int64_t head_dim = qkv.size(1) / num_heads;
  if (head_dim < 1 || head_dim > kMaxHeadDim) qkv.fail("must have heads of at most " + std::to_string(kMaxHeadDim));
  if (rope_table.has_value() != rope_rows.has_value()) fail(op, "rope_table and rope_rows must be given together");
  k_cache.type(qkv.type());
  v_cache.type(qkv.type());
  dispatch(qkv, [&](auto element) {
    using T = decltype(element);
    RopeNormWriteKVParams<T> params{};
    params.num_tokens = num_tokens;
    params.num_q_heads = num_q_heads;
    params.num_kv_heads = num_kv_heads;
    params.head_dim = head_dim;
    check_cache(k_cache, v_cache, num_kv_heads, head_dim, &params);
    slots.shape({num_tokens}).indices(ScalarType::Long, -1, k_cache.size(0) * params.block_size);
    if (rope_table) check_rope(op, *rope_table, *rope_rows, &params);
    params.qkv = qkv.data<T>();
    params.qkv_stride = qkv.stride(0);
    params.slot_mapping = slots.data<const int64_t>();
    params.q_norm = check_norm(op, "q_norm", q_norm, head_dim);
    params.k_norm = check_norm(op, "k_norm", k_norm, head_dim);
    params.eps = static_cast<float>(eps);
    params.is_interleaved = is_interleaved;
    params.parallel = torch_threads();
    run_kernel([params] { pagedllm::rope_norm_write_kv(params); });
  });
}

void copy_blocks_op(const Tensor& k_tensor, const Tensor& v_tensor, const Tensor& pairs_tensor) {
  const char* op = "copy_blocks";
  const Argument k_cache(op, "k_cache", k_tensor), v_cache(op, "v_cache", v_tensor), pairs(op, "pairs", pairs_tensor);
  const int64_t num_blocks = k_cache.contiguous().size(0), num_pairs = pairs.dim(2).size(0);
  v_cache.type(k_cache.type()).contiguous();
  if (v_cache.size(0) != num_blocks || v_tensor.numel() != k_tensor.numel()) {
    v_cache.fail("must have as many blocks and elements as k_cache");
  }
  pairs.shape({num_pairs, 2}).indices(ScalarType::Int, 0, num_blocks);
  if (num_pairs == 0) return;
  dispatch(k_cache, [&](auto element) {
    CopyBlocksParams params{};
    params.k_cache = k_cache.data<char>();
    params.v_cache = v_cache.data<char>();
    params.pairs = pairs.data<const int32_t>();
    params.num_pairs = num_pairs;
    params.block_bytes = k_tensor.numel() / num_blocks * static_cast<int64_t>(sizeof(element));
    params.parallel = torch_threads();
    run_kernel([params] { pagedllm::copy_blocks(params); });
  });
}

}  // namespace
}  // namespace pagedllm

STABLE_TORCH_LIBRARY_IMPL(pagedllm, CPU, library) {
  using namespace pagedllm;
  PAGEDLLM_IMPLEMENT(library, rope_norm_write_kv_op,
                     "rope_norm_write_kv(Tensor(a!) qkv, Tensor(b!) k_cache, Tensor(c!) v_cache, Tensor slot_mapping, "
                     "Tensor? rope_table, Tensor? rope_rows, Tensor? q_norm, Tensor? k_norm, float eps, "
                     "int num_q_heads, int num_kv_heads, bool is_interleaved) -> ()");
  PAGEDLLM_IMPLEMENT(library, copy_blocks_op,
                     "copy_blocks(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor pairs) -> ()");
}
