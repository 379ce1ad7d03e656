// The emulated bodies of cuda/instructions.cuh, which says what each function does.
#pragma once
#include <type_traits>

#include "simt/simt.h"

namespace pagedllm {

template <class T>
inline T* shared_memory(int byte) {
  return reinterpret_cast<T*>(static_cast<unsigned char*>(simt::shared_memory()) + byte);
}

inline void load_matrix(uint32_t (&r)[4], int row, SIMT_HERE) {
  simt::LoadMatrix arg{shared_memory<void>(row), r, false, file, line};
  simt::warp_collective(0xffffffffu, simt::execute_load_matrix, &arg, "ldmatrix", false, file, line);
}
inline void load_matrix_transposed(uint32_t (&r)[4], int row, SIMT_HERE) {
  simt::LoadMatrix arg{shared_memory<void>(row), r, true, file, line};
  simt::warp_collective(0xffffffffu, simt::execute_load_matrix, &arg, "ldmatrix.trans", false, file, line);
}

template <class T>
inline void multiply_add(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, SIMT_HERE) {
  const uint32_t b[2] = {b0, b1};
  simt::MultiplyAdd arg{c, a, b, std::is_same_v<T, __nv_bfloat16>};
  simt::warp_collective(0xffffffffu, simt::execute_multiply_add, &arg, "mma", false, file, line);
}

inline void copy_async(int shared, const void* global, bool is_valid, SIMT_HERE) {
  simt::cp_async(shared_memory<void>(shared), global, 16, is_valid ? 16 : 0, file, line);
}
inline void copy_async_commit() { simt::cp_async_commit(); }
template <int PENDING>
inline void copy_async_wait(SIMT_HERE) {
  simt::cp_async_wait(PENDING, file, line);
}

inline float exp2_fast(float x) { return exp2f(x); }
inline float reciprocal_fast(float x) { return 1.0f / x; }

inline uint32_t to_bits(float x, __nv_bfloat16) { return __float2bfloat16_rn(x).bits; }
inline uint32_t to_bits(float x, __half) { return __float2half_rn(x).bits; }
template <class T>
inline uint32_t pack(float low, float high) {
  return to_bits(low, T{}) | to_bits(high, T{}) << 16;
}

template <class T>
inline void add_shared(T* target, T value, SIMT_HERE) {
  simt::atomic_add(target, value, file, line);
}

inline int thread_index() { return static_cast<int>(threadIdx.x); }

template <class Params>
int launch(void (*kernel)(Params), dim3 grid_size, dim3 block_size, size_t shared_bytes, void*, const Params& params) {
  return simt::launch(kernel, grid_size, block_size, shared_bytes, params);
}

inline int count_resident_blocks(size_t, int* num_blocks) {
  *num_blocks = 6;  // few, so that blocks walk several items
  return 0;
}

}  // namespace pagedllm
