// simd.h for AVX2 and FMA. Included by simd.h only; comments on meaning are in simd_avx512.h.
#pragma once
#include <immintrin.h>

namespace pagedllm {

struct f32x16 {
  __m256 lo, hi;
  static f32x16 zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
  static f32x16 broadcast(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
};

inline f32x16 operator+(f32x16 a, f32x16 b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
inline f32x16 operator-(f32x16 a, f32x16 b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
inline f32x16 operator*(f32x16 a, f32x16 b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
inline f32x16 operator/(f32x16 a, f32x16 b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
inline f32x16 fma(f32x16 a, f32x16 b, f32x16 c) {
  return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
inline f32x16 max(f32x16 a, f32x16 b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
inline f32x16 min(f32x16 a, f32x16 b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
inline f32x16 abs(f32x16 a) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_andnot_ps(sign, a.lo), _mm256_andnot_ps(sign, a.hi)};
}
inline f32x16 round(f32x16 a) {
  constexpr int kMode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(a.lo, kMode), _mm256_round_ps(a.hi, kMode)};
}
inline __m256 power_of_two(__m256i n) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23));
}
inline __m256 scale_by_power(__m256 a, __m256 power) {
  // in two steps, for a result may be subnormal and 2^n too large or too small for a float
  const __m256i n = _mm256_cvtps_epi32(power);
  const __m256i half = _mm256_srai_epi32(n, 1);
  return _mm256_mul_ps(_mm256_mul_ps(a, power_of_two(half)), power_of_two(_mm256_sub_epi32(n, half)));
}
inline f32x16 scale_by_power(f32x16 a, f32x16 n) { return {scale_by_power(a.lo, n.lo), scale_by_power(a.hi, n.hi)}; }
inline f32x16 select_less(f32x16 a, f32x16 b, f32x16 x, f32x16 y) {
  return {_mm256_blendv_ps(y.lo, x.lo, _mm256_cmp_ps(a.lo, b.lo, _CMP_LT_OQ)),
          _mm256_blendv_ps(y.hi, x.hi, _mm256_cmp_ps(a.hi, b.hi, _CMP_LT_OQ))};
}

inline float reduce_add(f32x16 a) {
  const __m256 eight = _mm256_add_ps(a.lo, a.hi);
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
inline float reduce_max(f32x16 a) {
  const __m256 eight = _mm256_max_ps(a.lo, a.hi);
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

// All ones in the first `count` of 8 lanes that begin at lane `first`.
inline __m256i first_lanes(int64_t count, int first) {
  const int left = count > 16 ? 16 : static_cast<int>(count);
  const __m256i lane = _mm256_add_epi32(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_set1_epi32(first));
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(left), lane);
}
inline f32x16 select_first(int64_t count, f32x16 a, f32x16 b) {
  return {_mm256_blendv_ps(b.lo, a.lo, _mm256_castsi256_ps(first_lanes(count, 0))),
          _mm256_blendv_ps(b.hi, a.hi, _mm256_castsi256_ps(first_lanes(count, 8)))};
}

inline __m256 widen(__m128i x) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16)); }
inline f32x16 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline f32x16 load(const bf16* p) {
  const auto* words = reinterpret_cast<const __m128i*>(p);
  return {widen(_mm_loadu_si128(words)), widen(_mm_loadu_si128(words + 1))};
}
inline f32x16 load_partial(const float* p, int64_t count) {
  return {_mm256_maskload_ps(p, first_lanes(count, 0)), _mm256_maskload_ps(p + 8, first_lanes(count, 8))};
}
inline f32x16 load_partial(const bf16* p, int64_t count) {
  if (count >= 16) return load(p);
  bf16 copy[16] = {};
  std::memcpy(copy, p, static_cast<size_t>(count) * sizeof(bf16));
  return load(copy);
}

inline __m256i round_to_upper_half(__m256 x) {
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF)));
  const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  return _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, is_nan), 16);
}
inline void store(float* p, f32x16 a) {
  _mm256_storeu_ps(p, a.lo);
  _mm256_storeu_ps(p + 8, a.hi);
}
inline void store(bf16* p, f32x16 a) {
  const __m256i packed = _mm256_packus_epi32(round_to_upper_half(a.lo), round_to_upper_half(a.hi));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(packed, 0xD8));
}
inline void store_partial(float* p, f32x16 a, int64_t count) {
  _mm256_maskstore_ps(p, first_lanes(count, 0), a.lo);
  _mm256_maskstore_ps(p + 8, first_lanes(count, 8), a.hi);
}
inline void store_partial(bf16* p, f32x16 a, int64_t count) {
  if (count >= 16) return store(p, a);
  bf16 copy[16];
  store(copy, a);
  std::memcpy(p, copy, static_cast<size_t>(count) * sizeof(bf16));
}

struct bf16x32 {
  __m256i lo, hi;
};
inline bf16x32 load_pairs(const bf16* p) {
  const auto* words = reinterpret_cast<const __m256i*>(p);
  return {_mm256_loadu_si256(words), _mm256_loadu_si256(words + 1)};
}
inline bf16x32 broadcast_pair(uint32_t pair) {
  const __m256i x = _mm256_set1_epi32(static_cast<int>(pair));
  return {x, x};
}
inline __m256 dot_pairs(__m256i a, __m256i b, __m256 c) {
  const __m256i upper = _mm256_set1_epi32(static_cast<int>(0xFFFF0000));
  const __m256 a0 = _mm256_castsi256_ps(_mm256_slli_epi32(a, 16)), b0 = _mm256_castsi256_ps(_mm256_slli_epi32(b, 16));
  const __m256 a1 = _mm256_castsi256_ps(_mm256_and_si256(a, upper));
  const __m256 b1 = _mm256_castsi256_ps(_mm256_and_si256(b, upper));
  return _mm256_fmadd_ps(a1, b1, _mm256_fmadd_ps(a0, b0, c));
}
inline f32x16 dot_pairs(bf16x32 a, bf16x32 b, f32x16 c) {
  return {dot_pairs(a.lo, b.lo, c.lo), dot_pairs(a.hi, b.hi, c.hi)};
}

}  // namespace pagedllm
