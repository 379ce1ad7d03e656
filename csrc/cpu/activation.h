// The activations of gated products on 16 lanes.
#pragma once
#include "cpu/packing.h"
#include "cpu/vector_math.h"

namespace pagedllm {

// x / (1 + e^-x)
inline f32x16 silu(f32x16 x) { return x / (f32x16::broadcast(1.0f) + exp(f32x16::zero() - x)); }

// x/2 (1 + tanh u), u = sqrt(2/pi) (x + 0.044715 x^3), which equals x / (1 + e^-2u): no cancellation for x < 0.
inline f32x16 gelu_tanh(f32x16 x) {
  const f32x16 cubic = fma(x * x * x, f32x16::broadcast(0.044715f), x);
  return x / (f32x16::broadcast(1.0f) + exp(cubic * f32x16::broadcast(-1.59576912f)));
}

// x/2 (1 + erf(x / sqrt 2)) by h = |x|/2 erfc(|x| / sqrt 2): the value is -h for x < 0 and x - h else.
inline f32x16 gelu(f32x16 x) {
  // e^(y^2) erfc(y) = t P(t) with t = 1 / (1 + 0.4 y), for y up to 10
  // (beyond, e^(-y^2) is 0)
  constexpr float kC[] = {0.225704908f,  0.224990934f, 0.214595079f,  0.131194517f, 0.267677397f,
                          -0.276180238f, 0.537582815f, -0.491417587f, 0.194866911f, -0.0290147197f};
  const f32x16 one = f32x16::broadcast(1.0f);
  const f32x16 size = min(f32x16::broadcast(20.0f), abs(x));  // from 14 on the value below is 0
  const f32x16 y = size * f32x16::broadcast(0.707106781f);
  const f32x16 t = one / fma(y, f32x16::broadcast(0.4f), one);
  const f32x16 erfc = exp(f32x16::zero() - y * y) * t * polynomial(t, kC);
  const f32x16 half = f32x16::broadcast(0.5f) * size * erfc;
  return select_less(x, f32x16::zero(), f32x16::zero() - half, x - half);
}

inline f32x16 activate(f32x16 x, Activation activation) {
  switch (activation) {
    case Activation::kSilu:
      return silu(x);
    case Activation::kGeluTanh:
      return gelu_tanh(x);
    case Activation::kGelu:
      return gelu(x);
    default:
      return x;
  }
}

// Of gpt-oss: the gate at most 7, up within +-7, x / (1 + e^(-1.702 x)) of the gate times up + 1.
inline f32x16 clamped_swish(f32x16 gate, f32x16 up) {
  const f32x16 limit = f32x16::broadcast(7.0f), one = f32x16::broadcast(1.0f);
  gate = min(limit, gate);  // NaN passes: it is on the right
  up = max(f32x16::broadcast(-7.0f), min(limit, up));
  return gate / (one + exp(gate * f32x16::broadcast(-1.702f))) * (up + one);
}

// What becomes of gate and up of a gated product.
inline f32x16 activate_gated(f32x16 gate, f32x16 up, Activation activation) {
  return activation == Activation::kClampedSwish ? clamped_swish(gate, up) : activate(gate, activation) * up;
}

}  // namespace pagedllm
