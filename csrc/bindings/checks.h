// Checks of operator arguments. A failure is a RuntimeError that names operator, argument, what is wanted and what
// came: "rms_norm: weight must be float32, got bfloat16".
#pragma once
#include <torch/csrc/stable/tensor.h>

#include <initializer_list>
#include <stdexcept>
#include <string>

#include "cpu/types.h"

namespace pagedllm {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// A tensor with its name. Checks return *this, so that they can be chained.
class Argument {
 public:
  Argument(const char* op, const char* name, const Tensor& tensor) : op_(op), name_(name), tensor_(tensor) {}

  const Argument& type(ScalarType wanted) const;
  const Argument& shape(std::initializer_list<int64_t> wanted) const;
  const Argument& dim(int64_t wanted) const;
  const Argument& contiguous() const;
  // Two dimensions; rows may be strided, the elements of a row lie side by side.
  const Argument& rows() const;
  // int32 or int64, contiguous, each value from `least` to `limit` - 1.
  const Argument& indices(ScalarType wanted, int64_t least, int64_t limit) const;
  [[noreturn]] void fail(const std::string& message) const;

  ScalarType type() const { return tensor_.scalar_type(); }
  int64_t size(int64_t dim) const { return tensor_.size(dim); }
  int64_t stride(int64_t dim) const { return tensor_.stride(dim); }
  template <class T>
  T* data() const {
    return static_cast<T*>(tensor_.data_ptr());
  }

 private:
  const char* op_;
  const char* name_;
  const Tensor& tensor_;
};

[[noreturn]] void fail(const char* op, const std::string& message);

// A cap of logits: 0 for none, or above.
void check_softcap(const char* op, double softcap);

// Calls fn with a value of the element type: bf16 or float. Fails on other types.
template <class F>
void dispatch(const Argument& argument, const F& fn) {
  switch (argument.type()) {
    case ScalarType::BFloat16:
      return fn(bf16{});
    case ScalarType::Float:
      return fn(float{});
    default:
      argument.fail("must be bfloat16 or float32");
  }
}

}  // namespace pagedllm
