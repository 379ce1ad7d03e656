#pragma once
#include <cstdint>

namespace pagedllm {

enum class ElementType : int32_t { kFloat32, kBFloat16, kFloat16 };

}  // namespace pagedllm
