#include "cuda/attention.h"

#include "bindings/cuda/caches.h"

namespace pagedllm {
namespace {

void check_heads(const Argument& x) {  // [tokens, heads, head_dim] with heads and features side by side
  x.dim(3);
  if (x.stride(2) != 1 || x.stride(1) != x.size(2) || x.stride(0) % 8 != 0 ||
      reinterpret_cast<uintptr_t>(x.data<void>()) % 16 != 0)
    x.fail("must have contiguous heads and tokens that begin at multiples of 16 bytes");
}

void check_list(const Argument& list, int64_t columns) {  // a header row, then items
  list.type(ScalarType::Int).dim(2).contiguous();
  if (list.size(0) < 1 || list.size(1) != columns)
    list.fail("must be a header row and items of " + std::to_string(columns) + " columns");
}

void paged_attention_op(const Tensor& out_tensor, const Tensor& q_tensor, const Tensor& k_cache_tensor,
                        const Tensor& v_cache_tensor, const Tensor& block_table_tensor,
                        const Tensor& cu_seqlens_q_tensor, const Tensor& seq_lens_tensor, const Tensor& work_tensor,
                        const Tensor& merge_tensor, const Tensor& workspace_tensor,
                        const std::optional<Tensor>& sinks_tensor, double scale, double softcap, int64_t window) {
  constexpr const char* kOp = "paged_attention";
  DeviceCall call(kOp, q_tensor);
  const Argument q = call.reads("q", q_tensor), out = call.writes("out", out_tensor);
  const Argument k_cache = call.reads("k_cache", k_cache_tensor), v_cache = call.reads("v_cache", v_cache_tensor);
  const Argument block_table = call.reads("block_table", block_table_tensor),
                 seq_lens = call.reads("seq_lens", seq_lens_tensor);
  const Argument cu_seqlens_q = call.reads("cu_seqlens_q", cu_seqlens_q_tensor), work = call.reads("work", work_tensor);
  const Argument merge = call.reads("merge", merge_tensor), workspace = call.writes("workspace", workspace_tensor);

  check_heads(q);
  check_heads(out);
  const CacheLayout layout = check_caches(k_cache, v_cache);
  q.type(k_cache.type()).shape({q.size(0), q.size(1), layout.head_dim});
  out.type(q.type()).shape({q.size(0), q.size(1), layout.head_dim});
  if (layout.num_kv_heads == 0 || q.size(1) % layout.num_kv_heads != 0)
    q.fail("must have a multiple of the caches' KV heads");
  const int64_t num_seqs = seq_lens.size(0);
  block_table.type(ScalarType::Int).rows();
  if (block_table.size(0) < num_seqs) block_table.fail("must have a row for each sequence");
  cu_seqlens_q.type(ScalarType::Int).shape({num_seqs + 1}).contiguous();
  seq_lens.type(ScalarType::Int).dim(1).contiguous();
  check_list(work, 8);
  check_list(merge, 4);
  workspace.type(ScalarType::Float).dim(1).contiguous();
  if (!(scale > 0)) fail(kOp, "scale must be positive, got " + std::to_string(scale));
  if (softcap < 0) fail(kOp, "softcap must not be negative, got " + std::to_string(softcap));

  PagedAttentionParams params{};
  params.out = out.data<void>();
  params.q = q.data<void>();
  params.k_cache = k_cache.data<void>();
  params.v_cache = v_cache.data<void>();
  params.block_table = block_table.data<const int32_t>();
  params.cu_seqlens_q = cu_seqlens_q.data<const int32_t>();
  params.seq_lens = seq_lens.data<const int32_t>();
  params.work = work.data<const AttentionWork>();
  params.merge = merge.data<const AttentionMerge>();
  params.workspace = workspace.data<float>();
  params.sinks = call.reads_optional<float>("sinks", sinks_tensor, [&](const Argument& sinks) {
    sinks.type(ScalarType::Float).shape({q.size(1)}).contiguous();
  });
  params.q_stride = q.stride(0);
  params.out_stride = out.stride(0);
  params.cache_block_stride = static_cast<int32_t>(layout.block_stride);
  params.cache_head_stride = static_cast<int32_t>(layout.head_stride);
  params.block_table_stride = static_cast<int32_t>(block_table.stride(0));
  params.num_kv_heads = layout.num_kv_heads;
  params.group = static_cast<int32_t>(q.size(1) / layout.num_kv_heads);
  params.head_dim = layout.head_dim;
  params.block_shift = layout.block_shift;
  params.scale = static_cast<float>(scale);
  params.softcap = static_cast<float>(softcap);
  params.window = static_cast<int32_t>(window);
  params.max_work = static_cast<int32_t>(work.size(0) - 1);
  params.max_merge = static_cast<int32_t>(merge.size(0) - 1);
  // pagedllm/ops/cuda_attention.py: with a token a sequence all items have 16 rows but for shared ones, of 64, for
  // which the merge list has more places than there are sequences
  params.most_rows = q.size(0) > num_seqs || params.group > 16 ? 128 : params.max_merge > num_seqs ? 64 : 16;
  params.is_bf16 = element_type(q, false) == ElementType::kBFloat16;
  call.check(paged_attention(params, call.stream()));
}

}  // namespace
}  // namespace pagedllm

PAGEDLLM_DEVICE_OPERATORS(library) {
  using namespace pagedllm;
  PAGEDLLM_IMPLEMENT(
      library, paged_attention_op,
      "paged_attention(Tensor(a!) out, Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_table, "
      "Tensor cu_seqlens_q, Tensor seq_lens, Tensor work, Tensor merge, Tensor(b!) workspace, Tensor? sinks, "
      "float scale, float softcap, int window) -> ()");
}
