#include "cpu/attention.h"

#include <algorithm>

#include "bindings/checks.h"
#include "bindings/registration.h"
#include "bindings/tape.h"
#include "bindings/threads.h"

namespace pagedllm {
namespace {

constexpr const char* kOp = "paged_attention";

struct Sizes {
  int64_t num_tokens, num_q_heads, num_kv_heads, head_dim, block_size, num_seqs;
};

Sizes check_tensors(const Argument& out, const Argument& q, const Argument& k_cache, const Argument& v_cache) {
  Sizes s{};
  s.num_tokens = q.dim(3).size(0);
  s.num_q_heads = q.size(1);
  s.head_dim = q.size(2);
  if (s.head_dim < 16 || s.head_dim > kMaxHeadDim || s.head_dim % 16 != 0) {
    q.fail("must have a head_dim that is a multiple of 16 up to " + std::to_string(kMaxHeadDim));
  }
  const bool is_paired = q.type() == ScalarType::BFloat16;
  if (!is_paired && q.type() != ScalarType::Float) q.fail("must be bfloat16 or float32");
  k_cache.type(q.type()).dim(is_paired ? 5 : 4).contiguous();
  const int64_t num_blocks = k_cache.size(0);
  s.num_kv_heads = k_cache.size(1);
  s.block_size = k_cache.size(3);
  if (s.block_size < 8 || s.block_size > 128 || (s.block_size & (s.block_size - 1)) != 0) {
    k_cache.fail("must have a block size of 8, 16, 32, 64 or 128");
  }
  v_cache.type(q.type()).contiguous();
  if (is_paired) {
    k_cache.shape({num_blocks, s.num_kv_heads, s.head_dim / 2, s.block_size, 2});
    v_cache.shape({num_blocks, s.num_kv_heads, s.block_size / 2, s.head_dim, 2});
  } else {
    k_cache.shape({num_blocks, s.num_kv_heads, s.head_dim, s.block_size});
    v_cache.shape({num_blocks, s.num_kv_heads, s.block_size, s.head_dim});
  }
  if (s.num_kv_heads == 0 || s.num_q_heads % s.num_kv_heads != 0) {
    q.fail("must have a multiple of " + std::to_string(s.num_kv_heads) + " heads");
  }
  out.type(q.type()).shape({s.num_tokens, s.num_q_heads, s.head_dim});
  for (const Argument* a : {&out, &q}) {
    if (a->stride(2) != 1 || (s.num_q_heads > 1 && a->stride(1) != s.head_dim)) {
      a->fail("must have heads and features that lie side by side");
    }
  }
  return s;
}

// The rows below the header, whose first element counts them.
template <class Row>
const Row* rows_of(const Argument& list, int64_t* count) {
  constexpr int64_t kColumns = sizeof(Row) / sizeof(int32_t);
  list.type(ScalarType::Int).dim(2).contiguous();
  if (list.size(1) != kColumns || list.size(0) < 1)
    list.fail("must have shape [1 + n, " + std::to_string(kColumns) + "]");
  const auto* rows = list.data<const int32_t>();
  *count = rows[0];
  if (*count < 0 || *count > list.size(0) - 1) {
    list.fail("must count its rows in its first element, which is " + std::to_string(*count));
  }
  return reinterpret_cast<const Row*>(rows + kColumns);
}

// A work list that was made for other lengths would read and write anywhere.
struct WorkCheck {
  const Sizes& s;
  const AttentionItem* items;
  int64_t num_items;
  const AttentionMerge* merges;
  int64_t num_merges;
  const int32_t *cu_seqlens_q, *seq_lens;
  int64_t most_keys, places;

  bool rows_and_keys_exist(const AttentionItem& item) const {
    if (item.seq < 0 || item.seq >= s.num_seqs) return false;
    const int64_t begin = cu_seqlens_q[item.seq], end = cu_seqlens_q[item.seq + 1], keys = seq_lens[item.seq];
    const int64_t group = s.num_q_heads / s.num_kv_heads;
    return begin >= 0 && end <= s.num_tokens && end - begin <= keys && keys <= most_keys &&  //
           item.first_row >= 0 && item.num_rows > 0 && item.num_rows <= kMaxRowsPerItem &&
           item.first_row + item.num_rows <= (end - begin) * group && item.first_key >= 0 &&
           item.first_key % kKeySplit == 0 && item.first_key < item.end_key && item.end_key <= keys;
  }

  bool places_exist(const AttentionItem& item) const {
    if (item.merge < 0) return item.first_key == 0;
    if (item.merge >= num_merges) return false;
    const AttentionMerge& merge = merges[item.merge];
    return merge.first_slot >= 0 && item.end_key <= int64_t{merge.num_splits} * kKeySplit &&
           merge.first_slot + int64_t{merge.num_splits} * item.num_rows <= places;
  }

  // Items that share keys have one split, as many rows each, and end where they share or later.
  bool is_together(const AttentionItem& first, const AttentionItem& item) const {
    return item.first_key == first.first_key && item.end_key <= first.first_key + kKeySplit &&
           item.num_rows == first.num_rows && item.shared_end == first.shared_end && item.shared_end > item.first_key &&
           item.shared_end <= item.end_key && item.shared_end % kKeyTile == 0;
  }

  void run(const Argument& work) const {
    int64_t first = 0, end = 0;  // items that share keys
    for (int64_t i = 0; i < num_items; ++i) {
      const AttentionItem& item = items[i];
      if (i == end) {
        first = i;
        end = i + item.num_together;
      }
      const bool is_counted = item.num_together == (i == first ? end - first : 0) && first < end && end <= num_items;
      if (!is_counted || !rows_and_keys_exist(item) || !places_exist(item) ||
          (end - first > 1 && !is_together(items[first], item))) {
        work.fail("item " + std::to_string(i) + " does not fit cu_seqlens_q, seq_lens, merge or workspace");
      }
    }
  }
};

void paged_attention_op(const Tensor& out_tensor, const Tensor& q_tensor, const Tensor& k_tensor,
                        const Tensor& v_tensor, const Tensor& block_table_tensor, const Tensor& cu_seqlens_q_tensor,
                        const Tensor& seq_lens_tensor, const Tensor& work_tensor, const Tensor& merge_tensor,
                        const Tensor& workspace_tensor, const std::optional<Tensor>& sinks_tensor, double scale,
                        double softcap, int64_t window) {
  const Argument out(kOp, "out", out_tensor), q(kOp, "q", q_tensor);
  const Argument k_cache(kOp, "k_cache", k_tensor), v_cache(kOp, "v_cache", v_tensor);
  const Argument block_table(kOp, "block_table", block_table_tensor), seq_lens(kOp, "seq_lens", seq_lens_tensor);
  const Argument cu_seqlens_q(kOp, "cu_seqlens_q", cu_seqlens_q_tensor), work(kOp, "work", work_tensor);
  const Argument merge(kOp, "merge", merge_tensor), workspace(kOp, "workspace", workspace_tensor);
  Sizes s = check_tensors(out, q, k_cache, v_cache);
  s.num_seqs = seq_lens.type(ScalarType::Int).dim(1).contiguous().size(0);
  cu_seqlens_q.type(ScalarType::Int).shape({s.num_seqs + 1}).contiguous();
  block_table.type(ScalarType::Int).rows();
  if (block_table.size(0) != s.num_seqs) block_table.fail("must have " + std::to_string(s.num_seqs) + " rows");
  workspace.type(ScalarType::Float).dim(1).contiguous();
  const float* sinks = nullptr;
  if (sinks_tensor) {
    const Argument argument(kOp, "sinks", *sinks_tensor);
    sinks = argument.type(ScalarType::Float).shape({s.num_q_heads}).contiguous().data<const float>();
  }
  if (window < 0) fail(kOp, "window must be >= 0, got " + std::to_string(window));
  if (!(scale > 0.0)) fail(kOp, "scale must be > 0, got " + std::to_string(scale));
  int64_t num_items = 0, num_merges = 0;
  const auto* items = rows_of<AttentionItem>(work, &num_items);
  const auto* merges = rows_of<AttentionMerge>(merge, &num_merges);
  WorkCheck{s,
            items,
            num_items,
            merges,
            num_merges,
            cu_seqlens_q.data<const int32_t>(),
            seq_lens.data<const int32_t>(),
            block_table.size(1) * s.block_size,
            workspace.size(0) / (s.num_kv_heads * (s.head_dim + 2))}
      .run(work);
  dispatch(q, [&](auto element) {
    using T = decltype(element);
    PagedAttentionParams<T> params{};
    params.out = out.data<T>();
    params.q = q.data<const T>();
    params.out_stride = out.stride(0);
    params.q_stride = q.stride(0);
    params.k_cache = k_cache.data<const T>();
    params.v_cache = v_cache.data<const T>();
    params.block_table = block_table.data<const int32_t>();
    params.block_table_stride = block_table.stride(0);
    params.cu_seqlens_q = cu_seqlens_q.data<const int32_t>();
    params.seq_lens = seq_lens.data<const int32_t>();
    params.items = items;
    params.merges = merges;
    params.workspace = workspace.data<float>();
    params.sinks = sinks;
    params.scale = static_cast<float>(scale);
    params.softcap = static_cast<float>(softcap);
    params.window = static_cast<int32_t>(std::min<int64_t>(window, INT32_MAX));
    params.num_q_heads = static_cast<int32_t>(s.num_q_heads);
    params.num_kv_heads = static_cast<int32_t>(s.num_kv_heads);
    params.head_dim = static_cast<int32_t>(s.head_dim);
    params.block_size = static_cast<int32_t>(s.block_size);
    params.parallel = torch_threads();
    const auto *work_header = work.data<const int32_t>(), *merge_header = merge.data<const int32_t>();
    run_kernel([params, work_header, merge_header]() mutable {
      params.num_items = *work_header;  // a tape's lists are refilled from step to step
      params.num_merges = *merge_header;
      pagedllm::paged_attention(params);
    });
  });
}

}  // namespace
}  // namespace pagedllm

STABLE_TORCH_LIBRARY_IMPL(pagedllm, CPU, library) {
  using namespace pagedllm;
  PAGEDLLM_IMPLEMENT(
      library, paged_attention_op,
      "paged_attention(Tensor(a!) out, Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_table, "
      "Tensor cu_seqlens_q, Tensor seq_lens, Tensor work, Tensor merge, Tensor(b!) workspace, Tensor? sinks, "
      "float scale, float softcap, int window) -> ()");
}
