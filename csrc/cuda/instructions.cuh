// The instructions for nvcc: PTX of sm_80 and later.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace pagedllm {

// The block's dynamic shared memory, at a byte. The instructions below take such a byte instead of a pointer: half the
// registers.
template <class T>
__device__ __forceinline__ T* shared_memory(int byte) {
  extern __shared__ __align__(128) unsigned char pagedllm_shared_memory[];
  return reinterpret_cast<T*>(pagedllm_shared_memory + byte);
}

__device__ __forceinline__ uint32_t shared_address(int byte) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(shared_memory<unsigned char>(0))) + static_cast<uint32_t>(byte);
}

// Four 8x8 matrices of 16-bit elements; lane 8j + r gives row r of matrix j.
__device__ __forceinline__ void load_matrix(uint32_t (&r)[4], int row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row))
               : "memory");
}
__device__ __forceinline__ void load_matrix_transposed(uint32_t (&r)[4], int row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row))
               : "memory");
}

// c += a b for a [16][16], b [16][8], c [16][8].
template <class T>
__device__ __forceinline__ void multiply_add(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);
template <>
__device__ __forceinline__ void multiply_add<__nv_bfloat16>(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                                            uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <>
__device__ __forceinline__ void multiply_add<__half>(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// 16 bytes from global to shared memory, in the background; where not `is_valid`, zeros, and the address is not read.
__device__ __forceinline__ void copy_async(int shared, const void* global, bool is_valid) {
  const int source_bytes = is_valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;"
               :
               : "r"(shared_address(shared)), "l"(global), "r"(source_bytes)
               : "memory");
}
__device__ __forceinline__ void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits for this thread's copies, but for the last `PENDING` groups.
template <int PENDING>
__device__ __forceinline__ void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// 2^x, relative error 2^-22; 0 for -inf.
__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// 1/x, relative error 2^-23; 0 for inf.
__device__ __forceinline__ float reciprocal_fast(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Two floats as a register of two 16-bit floats, `low` in the low half.
template <class T>
__device__ __forceinline__ uint32_t pack(float low, float high);
template <>
__device__ __forceinline__ uint32_t pack<__nv_bfloat16>(float low, float high) {
  uint32_t r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
template <>
__device__ __forceinline__ uint32_t pack<__half>(float low, float high) {
  uint32_t r;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}

__device__ __forceinline__ void add_shared(uint32_t* target, uint32_t value) { atomicAdd(target, value); }
__device__ __forceinline__ void add_shared(uint64_t* target, uint64_t value) {
  static_assert(sizeof(uint64_t) == sizeof(unsigned long long));
  atomicAdd(reinterpret_cast<unsigned long long*>(target), static_cast<unsigned long long>(value));
}

// threadIdx.x, read anew: what is computed from it is not kept in registers across a loop.
__device__ __forceinline__ int thread_index() {
  int index;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
  return index;
}

// Starts a kernel; 0 or a cudaError_t.
template <class Params>
int launch(void (*kernel)(Params), dim3 grid_size, dim3 block_size, size_t shared_bytes, void* stream,
           const Params& params) {
  if (shared_bytes > 48 * 1024) {
    const cudaError_t error =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes));
    if (error != cudaSuccess) return static_cast<int>(error);
  }
  kernel<<<grid_size, block_size, shared_bytes, static_cast<cudaStream_t>(stream)>>>(params);
  return static_cast<int>(cudaGetLastError());
}

// How many blocks of so much shared memory fit the current device at once; 0 or a cudaError_t.
inline int count_resident_blocks(size_t shared_bytes, int* num_blocks) {
  int device = 0, num_sms = 0, shared_per_sm = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device);
  if (error == cudaSuccess)
    error = cudaDeviceGetAttribute(&shared_per_sm, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device);
  // the driver keeps 1 KiB of each block's shared memory
  const int per_sm = static_cast<int>(static_cast<size_t>(shared_per_sm) / (shared_bytes + 1024));
  *num_blocks = num_sms * (per_sm > 1 ? per_sm : 1);
  return static_cast<int>(error);
}

}  // namespace pagedllm
