#include "cuda/attention_kernel.cuh"

namespace pagedllm {
template int launch_attention_of<256>(const PagedAttentionParams& p, void* stream);
}  // namespace pagedllm
