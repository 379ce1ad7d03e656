// exp, tanh and the activations on 16 lanes, in terms of simd.h only. Relative errors are of float32 results against
// the exact value; polynomials are minimax fits, good to 1e-8 before rounding.
#pragma once
#include "cpu/simd.h"

namespace pagedllm {

// Evaluates c[0] + x c[1] + ... by Horner's rule.
template <int N>
f32x16 polynomial(f32x16 x, const float (&c)[N]) {
  f32x16 result = f32x16::broadcast(c[N - 1]);
  for (int i = N - 2; i >= 0; --i) result = fma(result, x, f32x16::broadcast(c[i]));
  return result;
}

// e^x within 2 ulp: 0 below -104, infinity above 88.73, NaN for NaN.
inline f32x16 exp(f32x16 x) {
  constexpr float kC[] = {0.5f, 0.166665122f, 0.0416661873f, 0.00836959854f, 0.00139517197f};
  x = min(f32x16::broadcast(89.0f), max(f32x16::broadcast(-104.0f), x));  // NaN passes: it is on the right
  const f32x16 n = round(x * f32x16::broadcast(1.44269504f));
  // ln 2 in two parts, the first short enough that n times it is exact
  f32x16 r = fma(n, f32x16::broadcast(-0.693359375f), x);
  r = fma(n, f32x16::broadcast(2.12194440e-4f), r);
  return scale_by_power(f32x16::broadcast(1.0f) + fma(r * r, polynomial(r, kC), r), n);
}

// Within 3 ulp, small arguments included.
inline f32x16 tanh(f32x16 x) {
  constexpr float kC[] = {-0.333332837f, 0.133314908f, -0.0537434965f, 0.0206505861f, -0.0057170447f};
  const f32x16 one = f32x16::broadcast(1.0f), size = abs(x), square = x * x;
  const f32x16 near_zero = fma(x * square, polynomial(square, kC), x);
  const f32x16 far = one - f32x16::broadcast(2.0f) / (exp(size + size) + one);
  const f32x16 signed_far = select_less(x, f32x16::zero(), f32x16::zero() - far, far);
  return select_less(size, f32x16::broadcast(0.625f), near_zero, signed_far);
}

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
  constexpr float kC[] = {0.225704908f,  0.224990934f, 0.214595079f,  0.131194517f, 0.267677397f,
                          -0.276180238f, 0.537582815f, -0.491417587f, 0.194866911f, -0.0290147197f};
  const f32x16 one = f32x16::broadcast(1.0f);
  const f32x16 y = abs(x) * f32x16::broadcast(0.707106781f);
  const f32x16 t = one / fma(y, f32x16::broadcast(0.4f), one);
  const f32x16 erfc = exp(f32x16::zero() - y * y) * t * polynomial(t, kC);
  const f32x16 half = f32x16::broadcast(0.5f) * abs(x) * erfc;
  return select_less(x, f32x16::zero(), f32x16::zero() - half, x - half);
}

}  // namespace pagedllm
