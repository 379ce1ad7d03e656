// What the warp instructions do, after the PTX ISA.
#include "simt/runtime.h"

namespace simt {

void execute_nothing(void**, unsigned, unsigned) {}

void execute_shuffle(void** args, unsigned present, unsigned) {
  ++counters.shuffles;
  for (unsigned rest = present; rest; rest &= rest - 1) {
    const int lane = __builtin_ctz(rest);
    auto& me = *static_cast<Shuffle*>(args[lane]);
    const int base = lane & ~(me.width - 1), end = base + me.width;
    int source = lane;
    switch (me.kind) {
      case Shuffle::kIndex:
        source = base + (me.operand & (me.width - 1));
        break;
      case Shuffle::kUp:
        source = lane - me.operand < base ? lane : lane - me.operand;
        break;
      case Shuffle::kDown:
        source = lane + me.operand >= end ? lane : lane + me.operand;
        break;
      case Shuffle::kXor:
        source = (lane ^ me.operand) >= end ? lane : lane ^ me.operand;
        break;
    }
    if ((present >> source & 1u) == 0) fail("shfl: lane %d reads lane %d, which takes no part", lane, source);
    me.result = static_cast<const Shuffle*>(args[source])->value;
  }
}

void execute_ballot(void** args, unsigned present, unsigned) {
  unsigned ballot = 0;
  for (unsigned rest = present; rest; rest &= rest - 1) {
    const int lane = __builtin_ctz(rest);
    if (static_cast<const Vote*>(args[lane])->predicate) ballot |= 1u << lane;
  }
  for (unsigned rest = present; rest; rest &= rest - 1) static_cast<Vote*>(args[__builtin_ctz(rest)])->result = ballot;
}

// ldmatrix.x4: lane 8j + r holds the address of row r of matrix j; lane l receives of matrix j the elements
// [l/4][2(l%4)] and [l/4][2(l%4) + 1], or with .trans [2(l%4)][l/4] and [2(l%4) + 1][l/4].
void execute_load_matrix(void** args, unsigned, unsigned) {
  auto** lanes = reinterpret_cast<LoadMatrix**>(args);
  const bool is_transposed = lanes[0]->is_transposed;
  ++counters.load_matrix;
  uint16_t matrices[4][8][8];
  for (int j = 0; j < 4; ++j) {
    int rows_in_banks[8] = {};  // the 32 banks hold eight rows of 16 bytes in one wavefront, if all differ
    int wavefronts = 1;
    for (int r = 0; r < 8; ++r) {
      const LoadMatrix& lane = *lanes[8 * j + r];
      const auto address = reinterpret_cast<uintptr_t>(lane.row);
      if (address & 15)
        fail("ldmatrix at %s:%d: the row of lane %d is not 16-byte aligned", lane.file, lane.line, 8 * j + r);
      check_shared(lane.row, 16, false, true, lane.file, lane.line);
      memcpy(matrices[j][r], lane.row, 16);
      const uintptr_t bank = (address - reinterpret_cast<uintptr_t>(block.shared)) >> 4 & 7;
      if (++rows_in_banks[bank] > wavefronts) wavefronts = rows_in_banks[bank];
    }
    counters.load_matrix_wavefronts += static_cast<uint64_t>(wavefronts);
  }
  for (int lane = 0; lane < 32; ++lane) {
    const int row = lane >> 2, column = 2 * (lane & 3);
    for (int j = 0; j < 4; ++j) {
      const uint32_t low = is_transposed ? matrices[j][column][row] : matrices[j][row][column];
      const uint32_t high = is_transposed ? matrices[j][column + 1][row] : matrices[j][row][column + 1];
      lanes[lane]->out[j] = low | high << 16;
    }
  }
}

// mma.m16n8k16, g = lane / 4, t = lane % 4, two elements a register:
//   a0 [g][2t]   a1 [g + 8][2t]   a2 [g][2t + 8]   a3 [g + 8][2t + 8]      of A [16][16]
//   b0 [2t][g]   b1 [2t + 8][g]                                            of B [16][8], pairs down a column
//   c0 c1 [g][2t]   c2 c3 [g + 8][2t]                                      of C [16][8]
void execute_multiply_add(void** args, unsigned, unsigned) {
  auto** lanes = reinterpret_cast<MultiplyAdd**>(args);
  ++counters.multiply_add;
  const bool is_bf16 = lanes[0]->is_bf16;
  const auto widen = [is_bf16](uint32_t x) {
    const auto bits = static_cast<uint16_t>(x);
    return is_bf16 ? __bfloat162float({bits}) : __half2float({bits});
  };
  alignas(64) float a[16][16], b[16][8], c[16][8];
  for (int lane = 0; lane < 32; ++lane) {
    const int g = lane >> 2, t = lane & 3;
    const MultiplyAdd& me = *lanes[lane];
    for (int r = 0; r < 4; ++r) {
      float* at = &a[g + (r & 1) * 8][2 * t + (r >> 1) * 8];
      at[0] = widen(me.a[r]);
      at[1] = widen(me.a[r] >> 16);
    }
    for (int r = 0; r < 2; ++r) {
      b[2 * t + 8 * r][g] = widen(me.b[r]);
      b[2 * t + 8 * r + 1][g] = widen(me.b[r] >> 16);
    }
    for (int r = 0; r < 4; ++r) c[g + (r >> 1) * 8][2 * t + (r & 1)] = me.c[r];
  }
  for (int i = 0; i < 16; ++i)
    for (int k = 0; k < 16; ++k)
      for (int j = 0; j < 8; ++j) c[i][j] += a[i][k] * b[k][j];
  for (int lane = 0; lane < 32; ++lane) {
    const int g = lane >> 2, t = lane & 3;
    for (int r = 0; r < 4; ++r) lanes[lane]->c[r] = c[g + (r >> 1) * 8][2 * t + (r & 1)];
  }
}

void cp_async(void* shared, const void* global, int bytes, int source_bytes, const char* file, int line) {
  ++counters.cp_async;
  counters.cp_async_bytes += static_cast<uint64_t>(source_bytes);
  const auto is_aligned = [bytes](const void* p) {
    return reinterpret_cast<uintptr_t>(p) % static_cast<unsigned>(bytes) == 0;
  };
  if (!is_aligned(shared) || (source_bytes > 0 && !is_aligned(global)))
    fail("cp.async at %s:%d: an address is not aligned to %d", file, line, bytes);
  check_shared(shared, bytes, true, false, file, line);
  if (source_bytes > 0) check_global(global, source_bytes, false, file, line);
  memset(shared, 0xff, static_cast<size_t>(bytes));  // NaN until somebody waits
  mark_in_flight(shared, bytes, true);
  current_fiber()->copies.push_back({shared, global, bytes, source_bytes});
}

void cp_async_commit() {
  Fiber* me = current_fiber();
  me->groups.push_back(me->copies.size());
}

void cp_async_wait(int pending_groups, const char* file, int line) {
  Fiber* me = current_fiber();
  const size_t pending = static_cast<size_t>(pending_groups);
  if (me->groups.size() <= pending) return;
  const size_t num_done = me->groups.size() - pending, num_copies = me->groups[num_done - 1];
  for (size_t i = 0; i < num_copies; ++i) {
    const AsyncCopy& copy = me->copies[i];
    memcpy(copy.shared, copy.global, static_cast<size_t>(copy.source_bytes));
    memset(static_cast<char*>(copy.shared) + copy.source_bytes, 0, static_cast<size_t>(copy.bytes - copy.source_bytes));
    mark_in_flight(copy.shared, copy.bytes, false);
    check_shared(copy.shared, copy.bytes, true, false, file, line);
  }
  me->copies.erase(me->copies.begin(), me->copies.begin() + static_cast<ptrdiff_t>(num_copies));
  me->groups.erase(me->groups.begin(), me->groups.begin() + static_cast<ptrdiff_t>(num_done));
  for (size_t& group : me->groups) group -= num_copies;
}

// Fibres of one OS thread: nothing can come between the read and the write.
template <class T>
static void add(T* address, T value, const char* file, int line) {
  ++counters.atomics;
  mark_atomic(address, sizeof(T), file, line);
  *address += value;
}
void atomic_add(uint32_t* address, uint32_t value, const char* file, int line) { add(address, value, file, line); }
void atomic_add(uint64_t* address, uint64_t value, const char* file, int line) { add(address, value, file, line); }

}  // namespace simt
