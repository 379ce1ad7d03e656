// A call of an operator on a device: CUDA, or its emulation on the CPU. The bindings in this folder are compiled twice:
// for the namespace pagedllm with CUDA tensors, and with PAGEDLLM_SIMT for the namespace pagedllm_simt with CPU
// tensors.
#pragma once
#include "bindings/checks.h"
#include "bindings/registration.h"
#include "cuda/element_type.h"

namespace pagedllm {

class DeviceCall {
 public:
  // `on` says which device; the call's tensors all have to be there.
  DeviceCall(const char* op, const Tensor& on);
  ~DeviceCall();
  DeviceCall(const DeviceCall&) = delete;
  DeviceCall& operator=(const DeviceCall&) = delete;

  // Names a tensor and what the kernel does with it; the emulator's checker holds the kernel to that.
  Argument reads(const char* name, const Tensor& tensor) { return use(name, tensor, false); }
  Argument writes(const char* name, const Tensor& tensor) { return use(name, tensor, true); }
  // Of optional tensors: a null pointer where there is none.
  template <class T, class Check>
  const T* reads_optional(const char* name, const std::optional<Tensor>& tensor, const Check& check) {
    if (!tensor.has_value()) return nullptr;
    const Argument argument = reads(name, *tensor);
    check(argument);
    return argument.template data<const T>();
  }

  void* stream() const { return stream_; }
  // Throws if a launcher returned an error.
  void check(int error) const;

 private:
  Argument use(const char* name, const Tensor& tensor, bool is_written);

  const char* op_;
  const Tensor& on_;
  void* stream_ = nullptr;
  void* guard_ = nullptr;
};

// bfloat16 or float16, and with `allows_float32` float32; else an error that names the argument.
ElementType element_type(const Argument& argument, bool allows_float32);
constexpr int64_t element_bytes(ElementType type) { return type == ElementType::kFloat32 ? 4 : 2; }
// Rows that kernels read 16 bytes at a time: strided rows of `width` elements, each beginning at a multiple of 16
// bytes.
void check_vector_rows(const Argument& argument, int64_t element_bytes);

}  // namespace pagedllm

#ifdef PAGEDLLM_SIMT
#define PAGEDLLM_DEVICE_OPERATORS(library) STABLE_TORCH_LIBRARY_IMPL(pagedllm_simt, CPU, library)
#else
#define PAGEDLLM_DEVICE_OPERATORS(library) STABLE_TORCH_LIBRARY_IMPL(pagedllm, CUDA, library)
#endif
