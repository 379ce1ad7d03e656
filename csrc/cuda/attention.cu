// Chooses the kernels of a head_dim; each is compiled in a file of its own (attention_d*.cu), so that compilers can run
// side by side.
#include "cuda/attention.h"
#include "cuda/device.cuh"

namespace pagedllm {

template <int D>
int launch_attention_of(const PagedAttentionParams& p, void* stream);
extern template int launch_attention_of<64>(const PagedAttentionParams& p, void* stream);
extern template int launch_attention_of<80>(const PagedAttentionParams& p, void* stream);
extern template int launch_attention_of<96>(const PagedAttentionParams& p, void* stream);
extern template int launch_attention_of<112>(const PagedAttentionParams& p, void* stream);
extern template int launch_attention_of<128>(const PagedAttentionParams& p, void* stream);
extern template int launch_attention_of<256>(const PagedAttentionParams& p, void* stream);

int paged_attention(PagedAttentionParams params, void* stream) {
  params.group_magic = make_fast_divisor(static_cast<uint32_t>(params.group)).magic;
  params.tanh_scale = params.softcap > 0.f ? params.scale / params.softcap * (2.f * kLog2E) : 0.f;
  switch (params.head_dim) {
    case 64:
      return launch_attention_of<64>(params, stream);
    case 80:
      return launch_attention_of<80>(params, stream);
    case 96:
      return launch_attention_of<96>(params, stream);
    case 112:
      return launch_attention_of<112>(params, stream);
    case 128:
      return launch_attention_of<128>(params, stream);
    case 256:
      return launch_attention_of<256>(params, stream);
    default:
      return -1;
  }
}

}  // namespace pagedllm
