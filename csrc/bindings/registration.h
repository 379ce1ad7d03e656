// Registration of implementations. Schemas are defined in Python (pagedllm/ops); torch's stable ABI does not compare
// them with what is registered here, and a swapped argument would read garbage silently. So each operator states its
// schema: the compiler compares it with the C++ function's types, and pagedllm/ops/library.py compares the text with
// Python's when it loads the library.
#pragma once
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <string>
#include <string_view>

namespace pagedllm {

using torch::stable::Tensor;

template <class T>
constexpr std::string_view type_name() {
  using Bare = std::remove_cv_t<std::remove_reference_t<T>>;
  if constexpr (std::is_same_v<Bare, Tensor>)
    return "Tensor";
  else if constexpr (std::is_same_v<Bare, std::optional<Tensor>>)
    return "Tensor?";
  else if constexpr (std::is_same_v<Bare, double>)
    return "float";
  else if constexpr (std::is_same_v<Bare, int64_t>)
    return "int";
  else if constexpr (std::is_same_v<Bare, bool>)
    return "bool";
}

// Whether a schema such as "f(Tensor(a!) out, float eps) -> ()" lists exactly these types.
template <class... Args>
constexpr bool takes(void (*)(Args...), std::string_view schema) {
  size_t at = schema.find('(') + 1;
  const auto matches = [&](std::string_view type) {
    if (schema.substr(at, type.size()) != type) return false;
    at += type.size();
    if (schema[at] == '(') at = schema.find(')', at) + 1;  // an alias annotation
    if (schema[at] != ' ') return false;
    at = schema.find_first_of(",)", at);
    at += schema[at] == ',' ? 2 : 0;
    return true;
  };
  return (matches(type_name<Args>()) && ...) && schema.substr(at) == ") -> ()";
}

// The schemas of this library, one a line, in order of registration.
std::string& signatures();

inline void implement(torch::stable::detail::StableLibrary& library, std::string_view schema,
                      void (*boxed)(StableIValue*, uint64_t, uint64_t)) {
  library.impl(std::string(schema.substr(0, schema.find('('))).c_str(), boxed);
  signatures().append(schema).append("\n");
}

}  // namespace pagedllm

// In the body of STABLE_TORCH_LIBRARY_IMPL(pagedllm, CPU, library).
#define PAGEDLLM_IMPLEMENT(library, function, schema)                                                    \
  static_assert(::pagedllm::takes(&function, schema), "the schema does not match the function's types"); \
  ::pagedllm::implement(library, schema, TORCH_BOX(&function))
