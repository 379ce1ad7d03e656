// Checks that the operators on packed weights share.
#pragma once
#include <type_traits>

#include "bindings/checks.h"
#include "cpu/packing.h"

namespace pagedllm {

// Checks a packed weight over k features of the element type T; returns its number of panels.
template <class T>
int64_t check_packed(const Argument& weight, int64_t k) {
  if (k < 1) weight.fail("must belong to one feature or more");
  const int64_t num_panels = weight.dim(kPairing<T> == 1 ? 3 : 4).size(0);
  if constexpr (kPairing<T> == 1) {
    weight.type(ScalarType::Float).shape({num_panels, k, kPanel});
  } else {
    weight.type(ScalarType::BFloat16).shape({num_panels, (k + 1) / 2, kPanel, 2});
  }
  weight.contiguous();
  return num_panels;
}

// An Activation from `first` to `last`.
inline Activation check_activation(const char* op, int64_t activation, Activation first, Activation last) {
  return static_cast<Activation>(
      check_range(op, "activation", activation, static_cast<int64_t>(first), static_cast<int64_t>(last)));
}

}  // namespace pagedllm
