// Threads as kernels know them: as many as torch is set to use, and our own.
#pragma once
#include "cpu/parallel.h"

namespace pagedllm {

Parallel torch_threads();

}  // namespace pagedllm
