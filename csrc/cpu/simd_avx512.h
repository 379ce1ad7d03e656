// simd.h for AVX-512 (F, BW, VL, DQ), with or without BF16. Included by simd.h only.
#pragma once
#include <immintrin.h>

namespace pagedllm {

struct f32x16 {
  __m512 v;
  static f32x16 zero() { return {_mm512_setzero_ps()}; }
  static f32x16 broadcast(float x) { return {_mm512_set1_ps(x)}; }
};

inline f32x16 operator+(f32x16 a, f32x16 b) { return {_mm512_add_ps(a.v, b.v)}; }
inline f32x16 operator-(f32x16 a, f32x16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline f32x16 operator*(f32x16 a, f32x16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline f32x16 operator/(f32x16 a, f32x16 b) { return {_mm512_div_ps(a.v, b.v)}; }
// a * b + c, rounded once.
inline f32x16 fma(f32x16 a, f32x16 b, f32x16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
// Where a lane is NaN the result is b's lane: keep the value that may be NaN on the right.
inline f32x16 max(f32x16 a, f32x16 b) { return {_mm512_max_ps(a.v, b.v)}; }
inline f32x16 min(f32x16 a, f32x16 b) { return {_mm512_min_ps(a.v, b.v)}; }
inline f32x16 abs(f32x16 a) { return {_mm512_abs_ps(a.v)}; }
// To the nearest integer, ties to even; |a| < 2^22.
inline f32x16 round(f32x16 a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
// a * 2^n for an integral n in -252 .. 254.
inline f32x16 scale_by_power(f32x16 a, f32x16 n) { return {_mm512_scalef_ps(a.v, n.v)}; }
// a < b ? x : y
inline f32x16 select_less(f32x16 a, f32x16 b, f32x16 x, f32x16 y) {
  return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ), y.v, x.v)};
}

inline float reduce_add(f32x16 a) { return _mm512_reduce_add_ps(a.v); }
inline float reduce_max(f32x16 a) { return _mm512_reduce_max_ps(a.v); }

inline __mmask16 first_lanes(int64_t count) {
  return count >= 16 ? __mmask16(0xFFFF) : static_cast<__mmask16>((1u << count) - 1);
}
// The first `count` lanes are a's, the others b's; count >= 0.
inline f32x16 select_first(int64_t count, f32x16 a, f32x16 b) {
  return {_mm512_mask_blend_ps(first_lanes(count), b.v, a.v)};
}

inline f32x16 widen(__m256i x) { return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16))}; }
inline f32x16 load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline f32x16 load(const bf16* p) { return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
// The first min(count, 16) elements and zeros; reads nothing past them.
inline f32x16 load_partial(const float* p, int64_t count) { return {_mm512_maskz_loadu_ps(first_lanes(count), p)}; }
inline f32x16 load_partial(const bf16* p, int64_t count) {
  return widen(_mm256_maskz_loadu_epi16(first_lanes(count), p));
}

// Round to nearest even; NaN stays NaN.
inline __m256i narrow(f32x16 a) {
#ifdef PAGEDLLM_ISA_AVX512_BF16
  return (__m256i)_mm512_cvtneps_pbh(a.v);
#else
  const __m512i bits = _mm512_castps_si512(a.v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF)));
  const __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
  const __mmask16 is_nan = _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q);
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_mask_blend_epi32(is_nan, rounded, quiet), 16));
#endif
}
inline void store(float* p, f32x16 a) { _mm512_storeu_ps(p, a.v); }
inline void store(bf16* p, f32x16 a) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow(a)); }
// Writes the first min(count, 16) elements and touches nothing past them.
inline void store_partial(float* p, f32x16 a, int64_t count) {
  if (count >= 16) return store(p, a);
  _mm512_mask_storeu_ps(p, first_lanes(count), a.v);
}
inline void store_partial(bf16* p, f32x16 a, int64_t count) {
  if (count >= 16) return store(p, a);
  _mm256_mask_storeu_epi16(p, first_lanes(count), narrow(a));
}

// 16 pairs of bf16.
struct bf16x32 {
  __m512i v;
};
inline bf16x32 load_pairs(const bf16* p) { return {_mm512_loadu_si512(p)}; }
inline bf16x32 broadcast_pair(uint32_t pair) { return {_mm512_set1_epi32(static_cast<int>(pair))}; }
// c + a[2i] * b[2i] + a[2i + 1] * b[2i + 1] in lane i; how it rounds is the instruction set's affair.
inline f32x16 dot_pairs(bf16x32 a, bf16x32 b, f32x16 c) {
#ifdef PAGEDLLM_ISA_AVX512_BF16
  return {_mm512_dpbf16_ps(c.v, (__m512bh)a.v, (__m512bh)b.v)};
#else
  const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xFFFF0000));
  const __m512 a0 = _mm512_castsi512_ps(_mm512_slli_epi32(a.v, 16)),
               b0 = _mm512_castsi512_ps(_mm512_slli_epi32(b.v, 16));
  const __m512 a1 = _mm512_castsi512_ps(_mm512_and_si512(a.v, upper));
  const __m512 b1 = _mm512_castsi512_ps(_mm512_and_si512(b.v, upper));
  return {_mm512_fmadd_ps(a1, b1, _mm512_fmadd_ps(a0, b0, c.v))};
#endif
}

}  // namespace pagedllm
