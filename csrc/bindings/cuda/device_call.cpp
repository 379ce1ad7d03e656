#include "bindings/cuda/device_call.h"

#ifdef PAGEDLLM_SIMT
extern "C" {
const char* simt_last_error();
void simt_register(const void* data, uint64_t bytes, const char* name, int is_writable);
void simt_unregister_all();
}
#else
#include <cuda_runtime.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#endif

namespace pagedllm {

#ifdef PAGEDLLM_SIMT

DeviceCall::DeviceCall(const char* op, const Tensor& on) : op_(op), on_(on) { simt_unregister_all(); }
DeviceCall::~DeviceCall() = default;

Argument DeviceCall::use(const char* name, const Tensor& tensor, bool is_written) {
  int64_t last = 0;  // element
  bool is_empty = false;
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    is_empty = is_empty || tensor.size(dim) == 0;
    last += (tensor.size(dim) - 1) * tensor.stride(dim);
  }
  const auto bytes = static_cast<uint64_t>(is_empty ? 0 : (last + 1) * static_cast<int64_t>(tensor.element_size()));
  simt_register(tensor.data_ptr(), bytes, name, is_written ? 1 : 0);
  return Argument(op_, name, tensor);
}

void DeviceCall::check(int error) const {
  if (error != 0) fail(op_, simt_last_error());
}

#else

DeviceCall::DeviceCall(const char* op, const Tensor& on) : op_(op), on_(on) {
  guard_ = new torch::stable::accelerator::DeviceGuard(static_cast<int32_t>(on.get_device_index()));
  if (aoti_torch_get_current_cuda_stream(static_cast<int32_t>(on.get_device_index()), &stream_) != AOTI_TORCH_SUCCESS)
    fail(op_, "torch has no current CUDA stream");
}
DeviceCall::~DeviceCall() { delete static_cast<torch::stable::accelerator::DeviceGuard*>(guard_); }

Argument DeviceCall::use(const char* name, const Tensor& tensor, bool) {
  const Argument argument(op_, name, tensor);
  if (!tensor.is_cuda() || tensor.get_device_index() != on_.get_device_index())
    argument.fail("must be on the CUDA device of the call's first tensor");
  return argument;
}

void DeviceCall::check(int error) const {
  if (error != 0) fail(op_, std::string("the launch failed: ") + cudaGetErrorString(static_cast<cudaError_t>(error)));
}

#endif

ElementType element_type(const Argument& argument, bool allows_float32) {
  switch (argument.type()) {
    case ScalarType::BFloat16:
      return ElementType::kBFloat16;
    case ScalarType::Half:
      return ElementType::kFloat16;
    case ScalarType::Float:
      if (allows_float32) return ElementType::kFloat32;
      [[fallthrough]];
    default:
      argument.fail(allows_float32 ? "must be bfloat16, float16 or float32" : "must be bfloat16 or float16");
  }
}

void check_vector_rows(const Argument& argument, int64_t element_bytes) {
  argument.rows();
  const auto is_whole = [&](int64_t elements) { return elements * element_bytes % 16 == 0; };
  if (!is_whole(argument.size(1)) || !is_whole(argument.stride(0)) ||
      reinterpret_cast<uintptr_t>(argument.data<void>()) % 16 != 0)
    argument.fail("must have rows of whole 16 bytes that begin at multiples of 16 bytes");
}

}  // namespace pagedllm
