// Runs a launch: blocks one after another, the threads of a block as fibres, in a chosen order.
#include "simt/runtime.h"

#include <dlfcn.h>
#include <sys/mman.h>

#include <cstdarg>
#include <cstdio>
#include <cstdlib>

namespace simt {

Thread* current = nullptr;
Grid grid;
Options options;
Counters counters;
Block block;
Fiber* fibers = nullptr;
uint64_t launch_id = 0;

namespace {

struct Launch {  // recorded by a capture
  dim3 grid_size, block_size;
  size_t shared_bytes;
  void (*invoke)(const void*, const void*);
  const void* kernel;
  std::vector<char> params;
};
std::vector<Launch> captured;
bool is_capturing = false;
std::string last_error;
bool has_failed;
uint64_t random_state;
void* main_stack_pointer;
void (*run_kernel)(const void*, const void*);
const void* kernel_params;

uint32_t draw() {
  random_state ^= random_state << 13;
  random_state ^= random_state >> 7;
  random_state ^= random_state << 17;
  return static_cast<uint32_t>(random_state >> 16);
}

void switch_to(Fiber* from, Fiber* to) {  // nullptr: the launch itself
  current = to;
  simt_switch(from ? &from->stack_pointer : &main_stack_pointer, to ? to->stack_pointer : main_stack_pointer);
}

int choose_lane(uint32_t ready) {
  if (options.order == Options::kForward) return __builtin_ctz(ready);
  if (options.order == Options::kBackward) return 31 - __builtin_clz(ready);
  const int turn = static_cast<int>(draw() & 31u);
  const uint32_t turned = ready >> turn | ready << ((32 - turn) & 31);
  return (__builtin_ctz(turned) + turn) & 31;
}

Fiber* take_ready() {
  const int start =
      options.order == Options::kRandom ? static_cast<int>(draw() % static_cast<uint32_t>(block.num_warps)) : 0;
  for (int i = 0; i < block.num_warps; ++i) {
    const int step = options.order == Options::kBackward ? block.num_warps - 1 - i : i;
    Warp& warp = block.warps[(start + step) % block.num_warps];
    if (warp.ready == 0) continue;
    const int lane = choose_lane(warp.ready);
    warp.ready &= ~(1u << lane);
    return warp.lanes[lane];
  }
  return nullptr;
}

void park() {  // the running fibre waits somewhere; another one runs
  Fiber* me = current_fiber();
  Fiber* next = take_ready();
  if (next != me) switch_to(me, next);
}

void release_barrier() {
  for (int w = 0; w < block.num_warps; ++w) {
    block.warps[w].ready |= block.arrived[w];
    block.arrived[w] = 0;
  }
  block.num_arrived = 0;
  ++block.epoch;
  ++counters.barriers;
}

// Executes the collective if all lanes that `by` waits for have come.
bool try_collective(Warp& warp, Fiber* by) {
  const unsigned present = by->mask & warp.alive;
  if ((warp.waiting & present) != present || present == 0) return false;
  void* args[32] = {};
  for (unsigned rest = present; rest; rest &= rest - 1) {
    const int lane = __builtin_ctz(rest);
    const Fiber* fiber = warp.lanes[lane];
    if (fiber->mask != by->mask || fiber->execute != by->execute || fiber->line != by->line) {
      fail("warp %d diverged: lane %d is in %s (mask %08x) at %s:%d, lane %d in %s (mask %08x) at %s:%d", by->warp,
           by->lane, by->state, by->mask, by->file, by->line, lane, fiber->state, fiber->mask, fiber->file,
           fiber->line);
    }
    args[lane] = fiber->arg;
  }
  if (by->orders_memory && by->mask == 0xffffffffu) ++warp.epoch;
  by->execute(args, present, by->mask);
  warp.waiting &= ~present;
  warp.ready |= present;
  return true;
}

[[noreturn]] void exit_thread() {
  Fiber* me = current_fiber();
  Warp& warp = block.warps[me->warp];
  if (!me->copies.empty()) fail("the thread ended with cp.async operations that it never waited for");
  --block.num_alive;
  warp.alive &= ~(1u << me->lane);
  me->state = "exited";
  for (unsigned rest = warp.waiting; rest; rest &= rest - 1) {  // lanes that waited for this one only
    if (try_collective(warp, warp.lanes[__builtin_ctz(rest)])) break;
  }
  if (block.num_arrived > 0 && block.num_arrived >= block.num_alive)
    fail("the barrier at %s:%d would complete only because other threads exited", block.barrier_file,
         block.barrier_line);
  switch_to(me, take_ready());
  abort();  // a fibre that exited is never continued
}

void thread_main() {
  run_kernel(block.kernel, kernel_params);
  exit_thread();
}

std::string describe_deadlock() {
  std::string text = "deadlock: ";
  int num_shown = 0;
  for (int i = 0; i < block.num_threads && num_shown < 6; ++i) {
    const Fiber& fiber = fibers[i];
    if (i > 0 && fiber.state == fibers[i - 1].state && fiber.line == fibers[i - 1].line) continue;
    text += (num_shown++ ? "; thread " : "thread ") + std::to_string(i) + " " + fiber.state + " at " + fiber.file +
            ":" + std::to_string(fiber.line);
  }
  return text;
}

std::string place() {
  const uint3 b = grid.block_index;
  return "kernel " + kernel_symbol(block.kernel) + " block (" + std::to_string(b.x) + "," + std::to_string(b.y) + "," +
         std::to_string(b.z) + ")";
}

bool run_block(dim3 size, size_t shared_bytes, size_t params_bytes) {
  const int n = static_cast<int>(size.x * size.y * size.z);
  block.num_threads = block.num_alive = n;
  block.num_warps = (n + 31) / 32;
  block.epoch = 1;
  block.num_arrived = 0;
  block.shared_bytes = shared_bytes;
  memset(block.arrived, 0, sizeof block.arrived);
  memset(block.shared, 0xff, shared_bytes);  // NaN in every float type
  begin_block(kernel_params, params_bytes);
  for (int w = 0; w < block.num_warps; ++w) {
    const int lanes = n - 32 * w < 32 ? n - 32 * w : 32;
    Warp& warp = block.warps[w];
    warp.full = warp.alive = warp.ready = lanes == 32 ? 0xffffffffu : (1u << lanes) - 1u;
    warp.waiting = 0;
    warp.epoch = 1;
  }
  for (int i = 0; i < n; ++i) {
    Fiber& fiber = fibers[i];
    const unsigned u = static_cast<unsigned>(i);
    prepare_stack(fiber, thread_main);
    fiber.index = {u % size.x, u / size.x % size.y, u / (size.x * size.y)};
    fiber.linear = i;
    fiber.lane = i & 31;
    fiber.warp = i >> 5;
    fiber.state = "not started";
    fiber.file = "";
    fiber.line = 0;
    fiber.copies.clear();
    fiber.groups.clear();
    block.warps[fiber.warp].lanes[fiber.lane] = &fiber;
  }
  switch_to(nullptr, take_ready());
  current = nullptr;
  if (!has_failed && block.num_alive > 0) {
    last_error = place() + ": " + describe_deadlock();
    has_failed = true;
  }
  return !has_failed;
}

}  // namespace

std::string kernel_symbol(const void* kernel) {
  Dl_info info;
  return dladdr(kernel, &info) && info.dli_sname ? info.dli_sname : "?";
}

void fail(const char* format, ...) {
  char text[1024];
  va_list args;
  va_start(args, format);
  vsnprintf(text, sizeof text, format, args);
  va_end(args);
  Fiber* me = current_fiber();
  last_error = place() + " thread " + std::to_string(me->linear) + " (warp " + std::to_string(me->warp) + " lane " +
               std::to_string(me->lane) + "): " + text;
  has_failed = true;
  switch_to(me, nullptr);  // the launch ends; the block's other fibres are never continued
  abort();
}

void block_barrier(const char* file, int line) {
  Fiber* me = current_fiber();
  if (block.num_arrived == 0) {
    block.barrier_file = file;
    block.barrier_line = line;
  } else if (block.barrier_line != line || strcmp(block.barrier_file, file) != 0) {
    fail("divergent barrier: threads wait at %s:%d and at %s:%d", file, line, block.barrier_file, block.barrier_line);
  }
  block.arrived[me->warp] |= 1u << me->lane;
  me->state = "waits at the barrier";
  me->file = file;
  me->line = line;
  if (++block.num_arrived < block.num_alive) {
    park();
  } else if (block.num_alive != block.num_threads) {
    fail("barrier at %s:%d reached after other threads exited", file, line);
  } else {
    release_barrier();
    block.warps[me->warp].ready &= ~(1u << me->lane);
  }
}

void warp_collective(unsigned mask, Collective execute, void* arg, const char* name, bool orders_memory,
                     const char* file, int line) {
  Fiber* me = current_fiber();
  Warp& warp = block.warps[me->warp];
  if ((mask >> me->lane & 1u) == 0)
    fail("%s at %s:%d: lane %d is not in its mask %08x", name, file, line, me->lane, mask);
  if ((mask & ~warp.alive) != 0)
    fail("%s at %s:%d: the mask %08x names lanes that exited or never were (alive %08x)", name, file, line, mask,
         warp.alive);
  me->execute = execute;
  me->arg = arg;
  me->mask = mask;
  me->orders_memory = orders_memory;
  me->state = name;
  me->file = file;
  me->line = line;
  warp.waiting |= 1u << me->lane;
  if (try_collective(warp, me))
    warp.ready &= ~(1u << me->lane);
  else
    park();
}

void* shared_memory() { return block.shared; }

int launch(dim3 grid_size, dim3 block_size, size_t shared_bytes, void (*invoke)(const void*, const void*),
           const void* kernel, const void* params, size_t params_bytes) {
  if (is_capturing) {
    const char* bytes = static_cast<const char*>(params);
    captured.push_back({grid_size, block_size, shared_bytes, invoke, kernel, {bytes, bytes + params_bytes}});
    return 0;
  }
  if (fibers == nullptr) {
    fibers = new Fiber[kMaxThreads];
    void* arena = mmap(nullptr, kSharedBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    block.shared = static_cast<char*>(arena);
  }
  block.kernel = kernel;
  const uint64_t num_threads = uint64_t{block_size.x} * block_size.y * block_size.z;
  const auto refuse = [&](const std::string& reason) {
    last_error = "kernel " + kernel_symbol(kernel) + ": " + reason;
    return 1;
  };
  if (num_threads == 0 || num_threads > kMaxThreads)
    return refuse("a block of " + std::to_string(num_threads) + " threads");
  if (shared_bytes > options.shared_limit)
    return refuse("needs " + std::to_string(shared_bytes) + " B of shared memory, the limit is " +
                  std::to_string(options.shared_limit));
  if (grid_size.x == 0 || grid_size.y == 0 || grid_size.z == 0 || grid_size.x > 0x7fffffffu || grid_size.y > 65535u ||
      grid_size.z > 65535u)
    return refuse("the grid has a size that CUDA refuses");
  has_failed = false;
  run_kernel = invoke;
  kernel_params = params;
  random_state = (options.seed * 0x9E3779B97F4A7C15u) | 1u;
  grid.grid_size = grid_size;
  grid.block_size = block_size;
  ++counters.launches;
  ++launch_id;
  const uint64_t num_blocks = uint64_t{grid_size.x} * grid_size.y * grid_size.z;
  for (uint64_t i = 0; i < num_blocks; ++i) {
    const uint64_t k = options.order == Options::kBackward ? num_blocks - 1 - i : i;
    grid.block_index = {static_cast<unsigned>(k % grid_size.x), static_cast<unsigned>(k / grid_size.x % grid_size.y),
                        static_cast<unsigned>(k / (uint64_t{grid_size.x} * grid_size.y))};
    ++counters.blocks;
    if (!run_block(block_size, shared_bytes, params_bytes)) return 1;
  }
  return 0;
}

}  // namespace simt

// For bindings and tests (tests/simt/emulator.py).
#define SIMT_API extern "C" __attribute__((visibility("default")))

SIMT_API void simt_configure(int order, uint64_t seed) {
  simt::options.order = static_cast<simt::Options::Order>(order);
  simt::options.seed = seed;
}
SIMT_API const char* simt_last_error() { return simt::last_error.c_str(); }
SIMT_API const char* simt_counter_names() { return simt::kCounterNames; }
SIMT_API void simt_counters(uint64_t* out) { memcpy(out, &simt::counters, sizeof simt::counters); }

// A stand-in for stream capture: launches are recorded with their parameters frozen and not executed.
SIMT_API void simt_capture_begin() {
  simt::captured.clear();
  simt::is_capturing = true;
}
SIMT_API int simt_capture_end() {
  simt::is_capturing = false;
  return static_cast<int>(simt::captured.size());
}
SIMT_API int simt_replay() {
  for (const simt::Launch& l : simt::captured) {
    if (simt::launch(l.grid_size, l.block_size, l.shared_bytes, l.invoke, l.kernel, l.params.data(), l.params.size()))
      return 1;
  }
  return 0;
}
struct SimtLaunch {  // mirrored in tests/simt/emulator.py
  char symbol[512];
  unsigned grid[3], block[3];
  uint64_t shared_bytes;
  const void* params;
  uint64_t params_bytes;
};
SIMT_API void simt_captured(int index, SimtLaunch* out) {
  const simt::Launch& l = simt::captured[static_cast<size_t>(index)];
  snprintf(out->symbol, sizeof out->symbol, "%s", simt::kernel_symbol(l.kernel).c_str());
  const dim3 g = l.grid_size, b = l.block_size;
  out->grid[0] = g.x, out->grid[1] = g.y, out->grid[2] = g.z;
  out->block[0] = b.x, out->block[1] = b.y, out->block[2] = b.z;
  out->shared_bytes = l.shared_bytes;
  out->params = l.params.data();
  out->params_bytes = l.params.size();
}
