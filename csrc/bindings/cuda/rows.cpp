#include "cuda/rows.h"

#include "bindings/cuda/device_call.h"

namespace pagedllm {
namespace {

void activation_op(const char* op, const Tensor& out_tensor, const char* x_name, const Tensor& x_tensor,
                   const Tensor* up_tensor, int64_t activation) {
  DeviceCall call(op, out_tensor);
  const Argument out = call.writes("out", out_tensor), x = call.reads(x_name, x_tensor);
  ActivationParams params{};
  params.type = element_type(out, true);
  const int64_t num_rows = out.dim(2).size(0), width = out.size(1), most = up_tensor != nullptr ? 4 : 3;
  const auto check = [&](const Argument& argument) {
    argument.type(out.type()).shape({num_rows, width});
    check_vector_rows(argument, element_bytes(params.type));
  };
  check(out);
  check(x);
  check_range(op, "activation", activation, 1, most);
  if (up_tensor != nullptr) {
    const Argument up = call.reads("up", *up_tensor);
    check(up);
    params.up = up.data<void>();
    params.up_stride = up.stride(0);
  }
  params.out = out.data<void>();
  params.gate = x.data<void>();
  params.out_stride = out.stride(0);
  params.gate_stride = x.stride(0);
  params.num_rows = static_cast<int32_t>(num_rows);
  params.width = static_cast<int32_t>(width);
  params.activation = static_cast<int32_t>(activation);
  call.check(run_activation(params, call.stream()));
}

void gated_activation_op(const Tensor& out, const Tensor& gate, const Tensor& up, int64_t activation) {
  activation_op("gated_activation", out, "gate", gate, &up, activation);
}

void ungated_activation_op(const Tensor& out, const Tensor& x, int64_t activation) {
  activation_op("ungated_activation", out, "x", x, nullptr, activation);
}

void gather_rows_op(const Tensor& out_tensor, const Tensor& x_tensor, const Tensor& indices_tensor) {
  DeviceCall call("gather_rows", x_tensor);
  const Argument out = call.writes("out", out_tensor), x = call.reads("x", x_tensor);
  const Argument indices = call.reads("indices", indices_tensor);
  const int64_t bytes = element_bytes(element_type(x, true)), num_rows = out.dim(2).size(0);
  out.type(x.type()).shape({num_rows, x.dim(2).size(1)});
  indices.type(ScalarType::Int).shape({num_rows}).contiguous();
  check_vector_rows(x, bytes);
  check_vector_rows(out, bytes);
  GatherRowsParams params{};
  params.out = out.data<void>();
  params.x = x.data<void>();
  params.indices = indices.data<const int32_t>();
  params.out_stride = out.stride(0) * bytes;
  params.x_stride = x.stride(0) * bytes;
  params.num_rows = static_cast<int32_t>(num_rows);
  params.row_bytes = static_cast<int32_t>(x.size(1) * bytes);
  call.check(gather_rows(params, call.stream()));
}

void copy_blocks_op(const Tensor& k_cache_tensor, const Tensor& v_cache_tensor, const Tensor& pairs_tensor) {
  DeviceCall call("copy_blocks", k_cache_tensor);
  const Argument k_cache = call.writes("k_cache", k_cache_tensor), v_cache = call.writes("v_cache", v_cache_tensor);
  const Argument pairs = call.reads("pairs", pairs_tensor);
  const int64_t bytes = element_bytes(element_type(k_cache, false));
  v_cache.type(k_cache.type());
  pairs.type(ScalarType::Int).shape({pairs.size(0), 2}).contiguous();
  const int64_t block_size = k_cache.dim(4).size(1) * k_cache.size(2) * k_cache.size(3);
  for (const Argument* cache : {&k_cache, &v_cache}) {
    cache->shape({k_cache.size(0), k_cache.size(1), k_cache.size(2), k_cache.size(3)});
    if (cache->stride(3) != 1 || cache->stride(2) != cache->size(3) ||
        cache->stride(1) != cache->size(2) * cache->size(3))
      cache->fail("must have blocks that are contiguous");
    if (cache->stride(0) * bytes % 16 != 0 || reinterpret_cast<uintptr_t>(cache->data<void>()) % 16 != 0)
      cache->fail("must have blocks that begin at multiples of 16 bytes");
  }
  CopyBlocksParams params{};
  params.k_cache = k_cache.data<void>();
  params.v_cache = v_cache.data<void>();
  params.pairs = pairs.data<const int32_t>();
  params.k_stride = k_cache.stride(0) * bytes;
  params.v_stride = v_cache.stride(0) * bytes;
  params.num_pairs = static_cast<int32_t>(pairs.size(0));
  params.block_bytes = static_cast<int32_t>(block_size * bytes);
  call.check(copy_blocks(params, call.stream()));
}

}  // namespace
}  // namespace pagedllm

PAGEDLLM_DEVICE_OPERATORS(library) {
  using namespace pagedllm;
  PAGEDLLM_IMPLEMENT(library, gated_activation_op,
                     "gated_activation(Tensor(a!) out, Tensor gate, Tensor up, int activation) -> ()");
  PAGEDLLM_IMPLEMENT(library, ungated_activation_op,
                     "ungated_activation(Tensor(a!) out, Tensor x, int activation) -> ()");
  PAGEDLLM_IMPLEMENT(library, gather_rows_op, "gather_rows(Tensor(a!) out, Tensor x, Tensor indices) -> ()");
  PAGEDLLM_IMPLEMENT(library, copy_blocks_op,
                     "copy_blocks(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor pairs) -> ()");
}
