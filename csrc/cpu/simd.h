// The vector layer of the CPU kernels: 16 float32 lanes, whatever the instruction set offers.
//
//   PAGEDLLM_ISA_AVX512 (and _AVX512_BF16)  one 512-bit register      PAGEDLLM_ISA_AVX2  two 256-bit registers
//   neither                                 GCC's vector extension: correct on every CPU, fast on none
//
// Every operation acts lane by lane and rounds as IEEE float32 does, except dot_pairs. For kernels only: bindings are
// compiled without these flags and must not include this.
//
// Members: f32x16 zero broadcast, + - * /, fma max min abs round scale_by_power select_less, reduce_add reduce_max,
//          load load_partial store store_partial (float and bf16), bf16x32 load_pairs broadcast_pair dot_pairs
#pragma once
#include <cstdint>
#include <cstring>

#include "cpu/types.h"

#if defined(PAGEDLLM_ISA_AVX512)
#include "cpu/simd_avx512.h"
#elif defined(PAGEDLLM_ISA_AVX2)
#include "cpu/simd_avx2.h"
#else
#include "cpu/simd_generic.h"
#endif

namespace pagedllm {

inline float to_float(float x) { return x; }
inline float to_float(bf16 x) {
  const uint32_t bits = uint32_t{x.bits} << 16;
  float result;
  std::memcpy(&result, &bits, sizeof(result));
  return result;
}

// Round to nearest even; NaN stays NaN.
inline bf16 to_bf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  const uint32_t rounded = x != x ? bits | 0x400000 : bits + ((bits >> 16) & 1) + 0x7FFF;
  return {static_cast<uint16_t>(rounded >> 16)};
}

// The two elements at `pair`, as one 32-bit word: what broadcast_pair repeats.
inline uint32_t read_pair(const bf16* pair) {
  uint32_t bits;
  std::memcpy(&bits, pair, sizeof(bits));
  return bits;
}

}  // namespace pagedllm
