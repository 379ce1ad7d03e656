// Where rows of 16-byte chunks lie in shared memory, so that eight rows at one chunk (ldmatrix) and eight chunks of one
// row (cp.async) both touch all 32 banks once.
#pragma once

namespace pagedllm {

// Rows of CHUNKS 16-byte chunks. CHUNKS = odd * 2^k: the k (at most 3) low bits of a chunk turn with the row.
template <int CHUNKS>
struct Swizzle {
  static_assert(CHUNKS % 2 == 0, "a row of an odd number of chunks would need padding");
  static constexpr int kPeriod = (CHUNKS & -CHUNKS) < 8 ? (CHUNKS & -CHUNKS) : 8;
  static constexpr int kRowShift = kPeriod == 8 ? 0 : kPeriod == 4 ? 1 : 2;  // rows that turn alike: 8 / kPeriod
  static constexpr int kRowBytes = CHUNKS * 16;                              // eight rows on, the turn is the same

  __device__ __forceinline__ static int byte(int row, int chunk) {
    return row * kRowBytes + (chunk ^ (row >> kRowShift & (kPeriod - 1))) * 16;
  }
  // The byte `steps` chunks after the chunk that `byte` is of, which has zeros where `steps` has ones: one operation on
  // a register, where byte() would keep a register for each chunk.
  __device__ __forceinline__ static int advance(int byte, int steps) {
    return (byte ^ (steps & (kPeriod - 1)) * 16) + (steps & ~(kPeriod - 1)) * 16;
  }
};

}  // namespace pagedllm
