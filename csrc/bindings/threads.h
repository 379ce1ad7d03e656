// torch's threads, as kernels know them.
#pragma once
#include "cpu/parallel.h"

namespace pagedllm {

Parallel torch_threads();

}  // namespace pagedllm
