// CUDA's language for a host compiler: what csrc/cuda needs to compile with g++ and run on the CPU.
//
// Every CUDA thread is a fibre with its own stack. Fibres run until a block barrier or a warp collective parks them, so
// that barriers, shuffles, votes, ldmatrix, mma and cp.async have their documented meaning, and misuse (divergence,
// a deadlock, a lane outside its mask) is an error with a source line instead of undefined behaviour.
// Kernels see this file only; runtime.h is the other side.
#pragma once
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#define __global__ __attribute__((visibility("default")))  // so that a launch can name its kernel (dladdr)
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __grid_constant__
#define __restrict__

struct uint3 {
  unsigned x, y, z;
};
struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

template <class To, class From>
inline To simt_bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}

// 16-bit floats, stored as bits and rounded to nearest even, as the hardware does.
struct __nv_bfloat16 {
  uint16_t bits;
};
struct __half {
  uint16_t bits;
};
inline float __bfloat162float(__nv_bfloat16 x) { return simt_bit_cast<float>(uint32_t{x.bits} << 16); }
inline __nv_bfloat16 __float2bfloat16_rn(float x) {
  const uint32_t u = simt_bit_cast<uint32_t>(x);
  if ((u & 0x7fffffffu) > 0x7f800000u) return {0x7fff};
  return {static_cast<uint16_t>((u + 0x7fffu + (u >> 16 & 1u)) >> 16)};
}
inline float __half2float(__half x) {
  const uint32_t sign = uint32_t{x.bits & 0x8000u} << 16, exponent = x.bits >> 10 & 31u, mantissa = x.bits & 1023u;
  if (exponent == 0)
    return simt_bit_cast<float>(sign | simt_bit_cast<uint32_t>(static_cast<float>(mantissa) * 0x1p-24f));
  if (exponent == 31) return simt_bit_cast<float>(sign | 0x7f800000u | mantissa << 13);
  return simt_bit_cast<float>(sign | (exponent + 112u) << 23 | mantissa << 13);
}
inline __half __float2half_rn(float x) {
  const uint32_t u = simt_bit_cast<uint32_t>(x), sign = u >> 16 & 0x8000u, magnitude = u & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return {0x7fff};
  if (magnitude >= 0x477ff000u) return {static_cast<uint16_t>(sign | 0x7c00u)};  // 65520 and more round to infinity
  if (magnitude < 0x38800000u)  // subnormal: adding 0.5 makes the float addition round to multiples of 2^-24
    return {static_cast<uint16_t>(
        sign | (simt_bit_cast<uint32_t>(simt_bit_cast<float>(magnitude) + 0.5f) - simt_bit_cast<uint32_t>(0.5f)))};
  const uint32_t rebased = magnitude - 0x38000000u;
  return {static_cast<uint16_t>(sign | (rebased + 0xfffu + (rebased >> 13 & 1u)) >> 13)};
}

namespace simt {

#define SIMT_HERE const char *file = __builtin_FILE(), int line = __builtin_LINE()

struct Thread {  // what a running thread sees of itself
  uint3 index;
  int linear, lane, warp;
};
struct Grid {
  dim3 grid_size, block_size;
  uint3 block_index;
};
extern Thread* current;  // the runtime's; there is one emulated device a process, and it runs one launch at a time
extern Grid grid;

// What the lanes of a warp do together once all of a mask have come: args[lane], the lanes present, the mask.
using Collective = void (*)(void** args, unsigned present, unsigned mask);
void warp_collective(unsigned mask, Collective execute, void* arg, const char* name, bool orders_memory,
                     const char* file, int line);
void block_barrier(const char* file, int line);
void* shared_memory();
void cp_async(void* shared, const void* global, int bytes, int source_bytes, const char* file, int line);
void cp_async_commit();
void cp_async_wait(int pending_groups, const char* file, int line);
void atomic_add(uint32_t* address, uint32_t value, const char* file, int line);
void atomic_add(uint64_t* address, uint64_t value, const char* file, int line);
[[noreturn]] void fail(const char* format, ...);

struct Shuffle {
  enum Kind { kIndex, kUp, kDown, kXor } kind;
  uint32_t value;
  int operand, width;
  uint32_t result;
};
struct Vote {
  bool predicate;
  uint32_t result;
};
struct LoadMatrix {  // x4
  const void* row;
  uint32_t* out;
  bool is_transposed;
  const char* file;
  int line;
};
struct MultiplyAdd {  // m16n8k16, 16-bit floats with float32 accumulators
  float* c;
  const uint32_t *a, *b;
  bool is_bf16;
};
void execute_shuffle(void**, unsigned, unsigned);
void execute_ballot(void**, unsigned, unsigned);
void execute_nothing(void**, unsigned, unsigned);
void execute_load_matrix(void**, unsigned, unsigned);
void execute_multiply_add(void**, unsigned, unsigned);

// 0, or an error whose text simt_last_error() has. Kernels take one parameter struct, as the real ones do.
int launch(dim3 grid_size, dim3 block_size, size_t shared_bytes, void (*invoke)(const void* kernel, const void* params),
           const void* kernel, const void* params, size_t params_bytes);
template <class Params>
int launch(void (*kernel)(Params), dim3 grid_size, dim3 block_size, size_t shared_bytes, const Params& params) {
  const auto invoke = [](const void* k, const void* p) {
    reinterpret_cast<void (*)(Params)>(const_cast<void*>(k))(*static_cast<const Params*>(p));
  };
  return launch(grid_size, block_size, shared_bytes, invoke, reinterpret_cast<const void*>(kernel), &params,
                sizeof params);
}

template <class T>
T shuffle(Shuffle::Kind kind, unsigned mask, T value, int operand, int width, const char* file, int line) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8);
  uint32_t words[sizeof(T) / 4];
  memcpy(words, &value, sizeof value);
  for (uint32_t& word : words) {
    Shuffle shuffle{kind, word, operand, width, 0};
    warp_collective(mask, execute_shuffle, &shuffle, "shfl", false, file, line);
    word = shuffle.result;
  }
  memcpy(&value, words, sizeof value);
  return value;
}

}  // namespace simt

#define threadIdx (::simt::current->index)
#define blockIdx (::simt::grid.block_index)
#define blockDim (::simt::grid.block_size)
#define gridDim (::simt::grid.grid_size)

inline void __syncthreads(SIMT_HERE) { simt::block_barrier(file, line); }
inline void __syncwarp(unsigned mask = 0xffffffffu, SIMT_HERE) {
  simt::warp_collective(mask, simt::execute_nothing, nullptr, "syncwarp", true, file, line);
}
template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32, SIMT_HERE) {
  return simt::shuffle(simt::Shuffle::kIndex, mask, value, source, width, file, line);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, SIMT_HERE) {
  return simt::shuffle(simt::Shuffle::kUp, mask, value, static_cast<int>(delta), width, file, line);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32, SIMT_HERE) {
  return simt::shuffle(simt::Shuffle::kXor, mask, value, lanes, width, file, line);
}
inline unsigned __ballot_sync(unsigned mask, bool predicate, SIMT_HERE) {
  simt::Vote vote{predicate, 0};
  simt::warp_collective(mask, simt::execute_ballot, &vote, "vote", false, file, line);
  return vote.result;
}
inline bool __any_sync(unsigned mask, bool predicate, SIMT_HERE) {
  return __ballot_sync(mask, predicate, file, line) != 0;
}

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<unsigned>(uint64_t{a} * b >> 32); }
inline uint64_t __umul64hi(uint64_t a, uint64_t b) {
  return static_cast<uint64_t>(static_cast<unsigned __int128>(a) * b >> 64);
}
inline float __int_as_float(int x) { return simt_bit_cast<float>(x); }
inline int __float_as_int(float x) { return simt_bit_cast<int>(x); }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
