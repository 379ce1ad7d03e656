// A head is one row of WIDTH lanes. A lane holds units of four features: two neighbours of the first half of the
// rotated part and the two that they turn with, so that no lane needs another's; behind the rotated part, four in a
// row.
#include "cuda/elementwise.cuh"
#include "cuda/kv_write.h"

namespace pagedllm {

constexpr int kWriteThreads = 128;

template <class T>
struct alignas(4) Pair {
  T x, y;
};

template <class T>
__device__ __forceinline__ float2 load_pair(const T* p) {
  const Pair<T> pair = *reinterpret_cast<const Pair<T>*>(p);
  return make_float2(to_float(pair.x), to_float(pair.y));
}
__device__ __forceinline__ float2 load_pair(const float* p) { return *reinterpret_cast<const float2*>(p); }

// Turns (a, b) by an angle.
__device__ __forceinline__ void turn(float& a, float& b, float cos, float sin) {
  const float turned = a * cos - b * sin;
  b = b * cos + a * sin;
  a = turned;
}

template <class T, int D>
__global__ void __launch_bounds__(kWriteThreads)
    rope_norm_write_kv_kernel(const __grid_constant__ DeviceKvWriteParams p) {
  constexpr int kUnits = D / 4, kWidth = kUnits <= 16 ? 16 : 32, kPerLane = (kUnits + 31) / 32;
  constexpr int kHeadsPerBlock = kWriteThreads / kWidth;
  const int64_t token = blockIdx.x;
  const int num_heads = p.num_q_heads + 2 * p.num_kv_heads;
  const int head = static_cast<int>(blockIdx.y) * kHeadsPerBlock + static_cast<int>(threadIdx.x) / kWidth;
  const int lane = static_cast<int>(threadIdx.x) % kWidth;
  const bool is_q = head < p.num_q_heads, is_v = head >= p.num_q_heads + p.num_kv_heads;
  const bool is_head = head < num_heads;  // lanes without a head take part in the sum below
  const float* norm = is_q ? p.q_norm : is_v ? nullptr : p.k_norm;
  T* qkv = static_cast<T*>(p.qkv) + token * p.qkv_stride + static_cast<int64_t>(head) * D;
  const int num_turned = p.rotary_dim / 4;

  float2 low[kPerLane], high[kPerLane];
  int low_at[kPerLane], high_at[kPerLane];
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int unit = lane + i * kWidth;
    const bool is_turned = unit < num_turned;
    low_at[i] = is_turned ? 2 * unit : 4 * unit;
    high_at[i] = is_turned ? p.rotary_dim / 2 + 2 * unit : 4 * unit + 2;
    low[i] = high[i] = make_float2(0.f, 0.f);
    if (!is_head || unit >= kUnits) continue;
    low[i] = load_pair(qkv + low_at[i]);
    high[i] = load_pair(qkv + high_at[i]);
    sum += low[i].x * low[i].x + low[i].y * low[i].y + high[i].x * high[i].x + high[i].y * high[i].y;
  }
  sum = warp_sum<kWidth>(sum);
  if (!is_head) return;

  T* target = qkv;
  if (!is_q) {
    const int64_t slot = p.slot_mapping[token];
    if (slot < 0) return;
    const int kv_head = head - p.num_q_heads - (is_v ? p.num_kv_heads : 0);
    const int64_t offset_in_block = (slot & ((int64_t{1} << p.block_shift) - 1)) * D;
    target = static_cast<T*>(is_v ? p.v_cache : p.k_cache) + (slot >> p.block_shift) * p.cache_block_stride +
             kv_head * p.cache_head_stride + offset_in_block;
  }
  const float factor = rsqrtf(sum / static_cast<float>(D) + p.eps);
  const float* cos_sin =
      p.rope_table ? p.rope_table + static_cast<int64_t>(p.rope_rows[token]) * p.rotary_dim : nullptr;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int unit = lane + i * kWidth;
    if (unit >= kUnits) continue;
    if (norm != nullptr) {
      const float2 low_weight = load_pair(norm + low_at[i]), high_weight = load_pair(norm + high_at[i]);
      low[i] = make_float2(low[i].x * factor * low_weight.x, low[i].y * factor * low_weight.y);
      high[i] = make_float2(high[i].x * factor * high_weight.x, high[i].y * factor * high_weight.y);
    }
    if (!is_v && unit < num_turned) {
      if (p.is_interleaved != 0) {
        const int second = p.rotary_dim / 4 + unit, sines = p.rotary_dim / 2;
        turn(low[i].x, low[i].y, cos_sin[unit], cos_sin[sines + unit]);
        turn(high[i].x, high[i].y, cos_sin[second], cos_sin[sines + second]);
      } else {
        const float2 cos = load_pair(cos_sin + 2 * unit), sin = load_pair(cos_sin + p.rotary_dim / 2 + 2 * unit);
        turn(low[i].x, high[i].x, cos.x, sin.x);
        turn(low[i].y, high[i].y, cos.y, sin.y);
      }
    }
    *reinterpret_cast<uint32_t*>(target + low_at[i]) = pack<T>(low[i].x, low[i].y);
    *reinterpret_cast<uint32_t*>(target + high_at[i]) = pack<T>(high[i].x, high[i].y);
  }
}

template <class T, int D>
int launch_write(const DeviceKvWriteParams& p, void* stream) {
  constexpr int kHeadsPerBlock = kWriteThreads / (D / 4 <= 16 ? 16 : 32);
  const int num_heads = p.num_q_heads + 2 * p.num_kv_heads;
  return launch(rope_norm_write_kv_kernel<T, D>,
                grid_of(p.num_tokens, (num_heads + kHeadsPerBlock - 1) / kHeadsPerBlock), dim3(kWriteThreads), 0,
                stream, p);
}

template <class T>
int launch_write_of(const DeviceKvWriteParams& p, void* stream) {
  switch (p.head_dim) {
    case 64:
      return launch_write<T, 64>(p, stream);
    case 80:
      return launch_write<T, 80>(p, stream);
    case 96:
      return launch_write<T, 96>(p, stream);
    case 112:
      return launch_write<T, 112>(p, stream);
    case 128:
      return launch_write<T, 128>(p, stream);
    case 256:
      return launch_write<T, 256>(p, stream);
    default:
      return -1;
  }
}

int rope_norm_write_kv(const DeviceKvWriteParams& p, void* stream) {
  if (p.num_tokens == 0) return 0;
  return p.type == ElementType::kBFloat16 ? launch_write_of<bf16>(p, stream) : launch_write_of<half>(p, stream);
}

}  // namespace pagedllm
