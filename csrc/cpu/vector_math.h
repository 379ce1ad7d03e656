// The scalar of RMSNorm, and exp and tanh on 16 lanes, in terms of simd.h only. Relative errors are of float32 results
// against the exact value; polynomials are minimax fits, good to 1e-8 before rounding.
#pragma once
#include <cmath>

#include "cpu/simd.h"

namespace pagedllm {

// Evaluates c[0] + x c[1] + ... by Horner's rule.
template <int N>
f32x16 polynomial(f32x16 x, const float (&c)[N]) {
  f32x16 result = f32x16::broadcast(c[N - 1]);
  for (int i = N - 2; i >= 0; --i) result = fma(result, x, f32x16::broadcast(c[i]));
  return result;
}

// 1 / sqrt(sum / count + eps), rounded once.
inline float inverse_rms(float sum_of_squares, int64_t count, float eps) {
  return static_cast<float>(1.0 / std::sqrt(double{sum_of_squares} / static_cast<double>(count) + double{eps}));
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

// 2^x within 2 ulp for x <= 0: 1 at 0, 0 below -151, NaN for NaN. Two thirds of the operations of exp.
inline f32x16 exp2_of_negative(f32x16 x) {
  constexpr float kC[] = {0.693147003f, 0.240222424f, 0.0555073358f, 0.00967151299f, 0.00132647273f};
  x = max(f32x16::broadcast(-151.0f), x);  // NaN passes: it is on the right
  const f32x16 n = round(x), r = x - n;
  return scale_by_power(fma(r, polynomial(r, kC), f32x16::broadcast(1.0f)), n);
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

}  // namespace pagedllm
