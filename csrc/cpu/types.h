// Element types that kernels and bindings share.
#pragma once
#include <cstdint>

namespace pagedllm {

// The upper half of a float32.
struct bf16 {
  uint16_t bits;
};

}  // namespace pagedllm
