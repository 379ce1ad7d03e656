// simd.h for any CPU, by GCC's and clang's vector extension. Included by simd.h only; comments on meaning are in
// simd_avx512.h.
#pragma once
#include <cmath>

namespace pagedllm {

typedef float floats16 __attribute__((vector_size(64), aligned(4)));
typedef int32_t ints16 __attribute__((vector_size(64), aligned(4)));
typedef uint32_t words16 __attribute__((vector_size(64), aligned(4)));
typedef uint16_t halves16 __attribute__((vector_size(32), aligned(2)));

struct f32x16 {
  floats16 v;
  static f32x16 zero() { return {floats16{}}; }
  static f32x16 broadcast(float x) { return {floats16{} + x}; }
};

inline f32x16 operator+(f32x16 a, f32x16 b) { return {a.v + b.v}; }
inline f32x16 operator-(f32x16 a, f32x16 b) { return {a.v - b.v}; }
inline f32x16 operator*(f32x16 a, f32x16 b) { return {a.v * b.v}; }
inline f32x16 operator/(f32x16 a, f32x16 b) { return {a.v / b.v}; }
// Rounded twice: CPUs of this set may have no fused multiply-add, and calling one in software would cost 50 times more.
inline f32x16 fma(f32x16 a, f32x16 b, f32x16 c) { return {a.v * b.v + c.v}; }
inline f32x16 max(f32x16 a, f32x16 b) { return {a.v > b.v ? a.v : b.v}; }
inline f32x16 min(f32x16 a, f32x16 b) { return {a.v < b.v ? a.v : b.v}; }
inline f32x16 abs(f32x16 a) { return {(floats16)((words16)a.v & 0x7FFFFFFFu)}; }
inline f32x16 round(f32x16 a) {
  constexpr float kShift = 12582912.0f;  // 1.5 * 2^23: adding it drops the fraction
  return {(a.v + kShift) - kShift};
}
inline f32x16 scale_by_power(f32x16 a, f32x16 power) {
  const ints16 n = __builtin_convertvector(power.v, ints16);
  const ints16 half = n >> 1;
  return {a.v * (floats16)((half + 127) << 23) * (floats16)((n - half + 127) << 23)};
}
inline f32x16 select_less(f32x16 a, f32x16 b, f32x16 x, f32x16 y) { return {a.v < b.v ? x.v : y.v}; }

inline float reduce_add(f32x16 a) {
  float sums[8];
  for (int i = 0; i < 8; ++i) sums[i] = a.v[i] + a.v[i + 8];
  for (int width = 4; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) sums[i] += sums[i + width];
  }
  return sums[0];
}
inline float reduce_max(f32x16 a) {
  float result = a.v[0];
  for (int i = 1; i < 16; ++i) result = a.v[i] > result ? a.v[i] : result;
  return result;
}

inline f32x16 select_first(int64_t count, f32x16 a, f32x16 b) {
  const ints16 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return {lane < static_cast<int32_t>(count < 16 ? count : 16) ? a.v : b.v};
}

inline f32x16 load(const float* p) {
  f32x16 result;
  std::memcpy(&result, p, sizeof(result));
  return result;
}
inline f32x16 load(const bf16* p) {
  halves16 halves;
  std::memcpy(&halves, p, sizeof(halves));
  return {(floats16)(__builtin_convertvector(halves, words16) << 16)};
}
template <class T>
f32x16 load_partial(const T* p, int64_t count) {
  if (count >= 16) return load(p);
  T copy[16] = {};
  std::memcpy(copy, p, static_cast<size_t>(count) * sizeof(T));
  return load(copy);
}

inline void store(float* p, f32x16 a) { std::memcpy(p, &a, sizeof(a)); }
inline void store(bf16* p, f32x16 a) {
  const words16 bits = (words16)a.v;
  const words16 rounded = bits + ((bits >> 16) & 1) + 0x7FFF;
  const words16 quiet = bits | 0x400000;
  const words16 upper = (a.v != a.v ? quiet : rounded) >> 16;
  const halves16 halves = __builtin_convertvector(upper, halves16);
  std::memcpy(p, &halves, sizeof(halves));
}
template <class T>
void store_partial(T* p, f32x16 a, int64_t count) {
  if (count >= 16) return store(p, a);
  T copy[16];
  store(copy, a);
  std::memcpy(p, copy, static_cast<size_t>(count) * sizeof(T));
}

struct bf16x32 {
  words16 v;
};
inline bf16x32 load_pairs(const bf16* p) {
  bf16x32 result;
  std::memcpy(&result, p, sizeof(result));
  return result;
}
inline bf16x32 broadcast_pair(uint32_t pair) { return {words16{} + pair}; }
inline f32x16 dot_pairs(bf16x32 a, bf16x32 b, f32x16 c) {
  const floats16 a0 = (floats16)(a.v << 16), a1 = (floats16)(a.v & 0xFFFF0000u);
  const floats16 b0 = (floats16)(b.v << 16), b1 = (floats16)(b.v & 0xFFFF0000u);
  return {a1 * b1 + (a0 * b0 + c.v)};
}

}  // namespace pagedllm
