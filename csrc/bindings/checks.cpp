#include "bindings/checks.h"

#include <algorithm>

namespace pagedllm {
namespace {

std::string name_of(ScalarType type) {
  switch (type) {
    case ScalarType::BFloat16:
      return "bfloat16";
    case ScalarType::Half:
      return "float16";
    case ScalarType::Float:
      return "float32";
    case ScalarType::Double:
      return "float64";
    case ScalarType::Int:
      return "int32";
    case ScalarType::Long:
      return "int64";
    case ScalarType::Byte:
      return "uint8";
    case ScalarType::Bool:
      return "bool";
    default:
      return "type " + std::to_string(static_cast<int>(type));
  }
}

template <class Sizes>
std::string text_of(const Sizes& sizes) {
  std::string text = "[";
  for (const int64_t size : sizes) text += (text.size() > 1 ? ", " : "") + std::to_string(size);
  return text + "]";
}

template <class T>
const T* find_outside(const T* begin, int64_t size, int64_t least, int64_t limit) {
  return std::find_if(begin, begin + size, [&](T value) { return value < least || value >= limit; });
}

}  // namespace

void fail(const char* op, const std::string& message) { throw std::runtime_error(std::string(op) + ": " + message); }

void Argument::fail(const std::string& message) const {
  pagedllm::fail(op_, std::string(name_) + " " + message + ", got " + name_of(type()) + " of shape " +
                          text_of(tensor_.sizes()) + " and strides " + text_of(tensor_.strides()));
}

const Argument& Argument::type(ScalarType wanted) const {
  if (type() != wanted) fail("must be " + name_of(wanted));
  return *this;
}

void check_softcap(const char* op, double softcap) {
  if (!(softcap >= 0)) pagedllm::fail(op, "softcap must be 0 or above, got " + std::to_string(softcap));
}

const Argument& Argument::shape(std::initializer_list<int64_t> wanted) const {
  bool is_equal = tensor_.dim() == static_cast<int64_t>(wanted.size());
  int64_t dim = 0;
  for (const int64_t size : wanted) is_equal = is_equal && tensor_.size(dim++) == size;
  if (!is_equal) fail("must have shape " + text_of(wanted));
  return *this;
}

const Argument& Argument::dim(int64_t wanted) const {
  if (tensor_.dim() != wanted) fail("must have " + std::to_string(wanted) + " dimensions");
  return *this;
}

const Argument& Argument::contiguous() const {
  if (!tensor_.is_contiguous()) fail("must be contiguous");
  return *this;
}

const Argument& Argument::rows() const {
  dim(2);
  if (tensor_.size(1) > 1 && tensor_.stride(1) != 1) fail("must have rows whose elements lie side by side");
  return *this;
}

const Argument& Argument::indices(ScalarType wanted, int64_t least, int64_t limit) const {
  type(wanted).contiguous();
  const int64_t size = tensor_.numel();
  const auto check = [&](auto* values) {
    const auto* outside = find_outside(values, size, least, limit);
    if (outside != values + size) {
      fail("must hold values from " + std::to_string(least) + " to " + std::to_string(limit - 1) + ", holds " +
           std::to_string(*outside) + " at " + std::to_string(outside - values));
    }
  };
  wanted == ScalarType::Int ? check(data<const int32_t>()) : check(data<const int64_t>());
  return *this;
}

}  // namespace pagedllm
