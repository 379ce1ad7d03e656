// The activations of MLPs, by the numbers of pagedllm.ops.linear.Activation.
#pragma once
#include "cuda/device.cuh"

namespace pagedllm {

__device__ __forceinline__ float activate(float x, int activation) {
  if (activation == 1) return x / (1.f + expf(-x));
  if (activation == 2) return 0.5f * x * (1.f + tanhf(0.7978845608028654f * (x + 0.044715f * x * x * x)));
  return 0.5f * x * (1.f + erff(x * 0.7071067811865476f));
}

__device__ __forceinline__ float activate_gated(float gate, float up, int activation) {
  if (activation != 4) return activate(gate, activation) * up;
  gate = gate > 7.f ? 7.f : gate;  // NaN passes
  up = up > 7.f ? 7.f : up < -7.f ? -7.f : up;
  return gate / (1.f + expf(-1.702f * gate)) * (up + 1.f);
}

}  // namespace pagedllm
