// The emulator's inside: fibres, blocks, counters, and the memory checker's interface. Kernels do not see it.
#pragma once
#include <string>
#include <vector>

#include "simt/simt.h"
#undef threadIdx
#undef blockIdx
#undef blockDim
#undef gridDim

namespace simt {

constexpr int kMaxThreads = 1024;  // of a block
constexpr int kMaxWarps = kMaxThreads / 32;
constexpr size_t kSharedBytes = 256 * 1024;  // of the arena; a launch may use less, see Options
constexpr size_t kStackBytes = 128 * 1024;

struct Options {
  enum Order { kForward, kBackward, kRandom } order = kForward;  // which ready thread runs next, and which block
  uint64_t seed = 1;                                             // of kRandom
  size_t shared_limit = 99 * 1024;                               // of a block: what every GPU from sm_80 on has
};

struct Counters {
  uint64_t launches, blocks, barriers, shuffles, load_matrix, load_matrix_wavefronts, multiply_add, cp_async,
      cp_async_bytes, atomics;
};
constexpr const char* kCounterNames =
    "launches blocks barriers shuffles load_matrix load_matrix_wavefronts multiply_add cp_async cp_async_bytes atomics";

struct AsyncCopy {
  void* shared;
  const void* global;
  int bytes, source_bytes;  // the rest is filled with zeros
};

struct Fiber : Thread {
  void* stack_pointer = nullptr;
  char* stack = nullptr;
  Collective execute = nullptr;  // what it waits for
  void* arg = nullptr;
  unsigned mask = 0;
  bool orders_memory = false;
  const char *state = "", *file = "";
  int line = 0;
  std::vector<AsyncCopy> copies;
  std::vector<size_t> groups;  // how many of `copies` each committed group reaches up to
};

struct Warp {
  uint32_t ready, waiting, alive, full;  // lanes
  uint32_t epoch;                        // counts the moments when memory was ordered within the warp
  Fiber* lanes[32];
};

struct Block {
  const void* kernel;
  int num_threads, num_warps, num_alive;
  uint32_t epoch;  // counts barriers
  int num_arrived;
  uint32_t arrived[kMaxWarps];
  const char* barrier_file;
  int barrier_line;
  Warp warps[kMaxWarps];
  char* shared;  // the arena
  size_t shared_bytes;
};

extern Options options;
extern Counters counters;
extern Block block;
extern Fiber* fibers;  // kMaxThreads
extern uint64_t launch_id;

inline Fiber* current_fiber() { return static_cast<Fiber*>(current); }
inline uint64_t block_number() {
  return grid.block_index.x +
         uint64_t{grid.grid_size.x} * (grid.block_index.y + uint64_t{grid.grid_size.y} * grid.block_index.z);
}
std::string kernel_symbol(const void* kernel);  // mangled

// fiber.cpp: saves the running context in *save and continues the other one.
extern "C" void simt_switch(void** save, void* to);
void prepare_stack(Fiber& fiber, void (*entry)());

// memory_checked.cpp, or memory_unchecked.cpp which only looks at the bounds of shared memory. `is_collective`: done
// for the whole warp at once, as ldmatrix does.
void check_shared(const void* address, int bytes, bool is_write, bool is_collective, const char* file, int line);
void check_global(const void* address, int bytes, bool is_write, const char* file, int line);
void mark_in_flight(const void* shared, int bytes, bool is_in_flight);
void mark_atomic(const void* address, int bytes, const char* file, int line);
void begin_block(const void* params, size_t params_bytes);

}  // namespace simt
