// The checking build. Kernels are compiled with -fsanitize=thread, which calls __tsan_readN / __tsan_writeN for every
// load and store; the sanitizer's own library is not linked, the bodies are here:
//   bounds        a global access falls into one registered tensor, a shared one into the block's bytes
//   initialised   no read of shared bytes that nothing wrote
//   races         two threads of a block on the same bytes, without a barrier (or, in one warp, a __syncwarp) between;
//                 two blocks of a launch on the same global bytes after one of them wrote
//   cp.async      no touch of bytes whose copy has not been waited for
// It also counts each tensor's bytes read and written, and on request profiles accesses (access_profile.h).
#include <link.h>

#include <cstdio>

#include "simt/access_profile.h"
#include "simt/runtime.h"

namespace simt {
namespace {

constexpr int kGrain = 2;  // bytes that one cell stands for
constexpr uint16_t kNobody = 0xffff, kAtomic = 0xfffe;
constexpr uint8_t kNone = 0xfe, kSeveral = 0xff;

struct Cell {
  uint16_t writer;  // thread
  uint8_t reader_warp, reader_lane;
  bool is_in_flight;
  uint32_t write_epoch, write_warp_epoch, read_epoch, read_warp_epoch;  // of the block and of the warp
};
Cell cells[kSharedBytes / kGrain];

constexpr int kGlobalGrain = 4;
struct GlobalCell {  // who wrote last
  uint64_t launch, block;
  uint32_t epoch, warp_epoch;
  int thread;
};

struct Tensor {
  uintptr_t begin, end;
  std::string name;
  bool is_writable;
  uint64_t bytes_read = 0, bytes_written = 0;
  std::vector<GlobalCell> cells;  // if writable
};
std::vector<Tensor> tensors;
size_t last_hit = 0;
AccessProfile profile;

struct Range {
  uintptr_t begin = 0, end = 0;
  bool holds(uintptr_t p) const { return p >= begin && p < end; }
};
Range image, params;  // this library's constants; the launch's parameters

struct Access {
  uintptr_t address;
  int bytes;
  bool is_write;
  uintptr_t pc;  // of an instrumented access, else 0 and a place
  const char* file;
  int line;
};

std::string describe(const Access& a) {
  std::string what;
  const uintptr_t shared = reinterpret_cast<uintptr_t>(block.shared);
  if (a.address - shared < kSharedBytes) {
    what = "shared byte " + std::to_string(a.address - shared) + " of " + std::to_string(block.shared_bytes);
  } else {
    what = "an address in no tensor";
    for (const Tensor& t : tensors) {
      if (a.address + 65536 >= t.begin && a.address < t.end + 65536)
        what = t.name + " byte " + std::to_string(static_cast<int64_t>(a.address - t.begin)) + " of " +
               std::to_string(t.end - t.begin);
    }
  }
  const std::string at = a.pc ? source_of(a.pc) : std::string(a.file) + ":" + std::to_string(a.line);
  return std::to_string(a.bytes) + "-byte " + (a.is_write ? "write" : "read") + " of " + what + " at " + at;
}

[[noreturn]] void report(const char* kind, const Access& a, const std::string& more = "") {
  fail("%s: %s%s", kind, describe(a).c_str(), more.c_str());
}

// Whether what `writer` wrote is ordered before what the running thread does now.
bool is_ordered_after_write(const Cell& cell, const Fiber& me, bool is_collective) {
  if (cell.writer == kNobody || cell.write_epoch != block.epoch) return true;
  if (cell.writer == kAtomic) return false;
  if (cell.writer == me.linear && !is_collective) return true;
  return cell.writer >> 5 == me.warp && cell.write_warp_epoch < block.warps[me.warp].epoch;
}

bool is_ordered_after_reads(const Cell& cell, const Fiber& me) {
  if (cell.reader_warp == kNone || cell.read_epoch != block.epoch) return true;
  if (cell.reader_warp != me.warp) return false;
  return cell.reader_lane == me.lane || cell.read_warp_epoch < block.warps[me.warp].epoch;
}

std::string other_thread(const char* verb, const Cell& cell) {
  if (verb[0] == 'w')
    return cell.writer == kAtomic ? "; atomics wrote it, no barrier since"
                                  : "; thread " + std::to_string(cell.writer) + " wrote it, no barrier since";
  return cell.reader_warp == kSeveral ? "; several warps read it, no barrier since"
                                      : "; warp " + std::to_string(cell.reader_warp) + " read it, no barrier since";
}

void note_write(Cell& cell, uint16_t writer, const Warp& warp) {
  cell.writer = writer;
  cell.write_epoch = block.epoch;
  cell.write_warp_epoch = warp.epoch;
  cell.reader_warp = kNone;
}

void note_read(Cell& cell, const Fiber& me, bool is_collective, const Warp& warp) {
  const uint8_t lane = is_collective ? kSeveral : static_cast<uint8_t>(me.lane);
  if (cell.reader_warp == kNone || cell.read_epoch != block.epoch) {
    cell.reader_warp = static_cast<uint8_t>(me.warp);
    cell.reader_lane = lane;
  } else if (cell.reader_warp != me.warp) {
    cell.reader_warp = cell.reader_lane = kSeveral;
  } else if (cell.read_warp_epoch != warp.epoch || cell.reader_lane == lane) {
    cell.reader_lane = lane;
  } else {
    cell.reader_lane = kSeveral;
  }
  cell.read_epoch = block.epoch;
  cell.read_warp_epoch = warp.epoch;
}

Cell* first_cell(const Access& a) {
  const uintptr_t offset = a.address - reinterpret_cast<uintptr_t>(block.shared);
  if (offset + static_cast<uintptr_t>(a.bytes) > block.shared_bytes) report("out-of-bounds shared memory", a);
  return &cells[offset / kGrain];
}

void access_shared(const Access& a, bool is_collective) {
  Cell* const begin = first_cell(a);
  const Fiber& me = *current_fiber();
  const Warp& warp = block.warps[me.warp];
  for (Cell* cell = begin; cell < begin + (a.bytes + kGrain - 1) / kGrain; ++cell) {
    if (cell->is_in_flight) report("cp.async still in flight", a);
    if (!a.is_write && cell->writer == kNobody) report("uninitialised shared memory", a);
    if (!is_ordered_after_write(*cell, me, is_collective))
      report(a.is_write ? "race (write after write)" : "race (read after write)", a, other_thread("wrote", *cell));
    if (a.is_write) {
      if (!is_ordered_after_reads(*cell, me)) report("race (write after read)", a, other_thread("read", *cell));
      note_write(*cell, static_cast<uint16_t>(me.linear), warp);
    } else {
      note_read(*cell, me, is_collective, warp);
    }
  }
}

Tensor* find_tensor(const Access& a) {
  const auto holds = [&](const Tensor& t) {
    return a.address >= t.begin && a.address + static_cast<uintptr_t>(a.bytes) <= t.end;
  };
  if (last_hit < tensors.size() && holds(tensors[last_hit])) return &tensors[last_hit];
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (!holds(tensors[i])) continue;
    last_hit = i;
    return &tensors[i];
  }
  return nullptr;
}

void access_global(const Access& a) {
  Tensor* tensor = find_tensor(a);
  if (tensor == nullptr) report("out-of-bounds global memory", a);
  if (a.address % static_cast<uintptr_t>(a.bytes) != 0) report("misaligned global memory", a);
  (a.is_write ? tensor->bytes_written : tensor->bytes_read) += static_cast<uint64_t>(a.bytes);
  if (!tensor->is_writable) {
    if (a.is_write) report("write to a tensor that is only read", a);
    return;
  }
  const Fiber& me = *current_fiber();
  const uint32_t warp_epoch = block.warps[me.warp].epoch;
  const GlobalCell mine{launch_id, block_number(), block.epoch, warp_epoch, me.linear};
  const size_t first = (a.address - tensor->begin) / kGlobalGrain;
  for (size_t i = first; i < first + static_cast<size_t>((a.bytes + kGlobalGrain - 1) / kGlobalGrain); ++i) {
    GlobalCell& cell = tensor->cells[i];
    if (cell.launch == launch_id && cell.block != mine.block)
      report("race between blocks", a, "; block " + std::to_string(cell.block) + " of this launch wrote it");
    const bool is_ordered = cell.launch != launch_id || cell.thread == me.linear || cell.epoch != block.epoch ||
                            (cell.thread / 32 == me.warp && cell.warp_epoch < warp_epoch);
    if (!is_ordered)
      report(a.is_write ? "race (write after write)" : "race (read after write)", a,
             "; thread " + std::to_string(cell.thread) + " wrote it, no barrier since");
    if (a.is_write) cell = mine;
  }
}

int find_image(dl_phdr_info* info, size_t, void*) {
  Range range{~uintptr_t{0}, 0};
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    if (info->dlpi_phdr[i].p_type != PT_LOAD) continue;
    const uintptr_t begin = info->dlpi_addr + info->dlpi_phdr[i].p_vaddr;
    if (begin < range.begin) range.begin = begin;
    if (begin + info->dlpi_phdr[i].p_memsz > range.end) range.end = begin + info->dlpi_phdr[i].p_memsz;
  }
  if (!range.holds(reinterpret_cast<uintptr_t>(&cells[0]))) return 0;
  image = range;
  return 1;
}

void access(const Access& a) {
  const uintptr_t stack = reinterpret_cast<uintptr_t>(current_fiber()->stack);
  const uintptr_t shared = reinterpret_cast<uintptr_t>(block.shared);
  const uintptr_t first_fiber = reinterpret_cast<uintptr_t>(fibers);
  if (a.address - stack < kStackBytes || a.address - first_fiber < sizeof(Fiber) * kMaxThreads) return;
  if (a.address - shared < kSharedBytes) {
    access_shared(a, false);
    profile.record(a.pc, a.is_write ? AccessProfile::kSharedStore : AccessProfile::kSharedLoad, a.address - shared,
                   a.bytes);
  } else if (!image.holds(a.address) && !params.holds(a.address)) {
    access_global(a);
    profile.record(a.pc, a.is_write ? AccessProfile::kGlobalStore : AccessProfile::kGlobalLoad, a.address, a.bytes);
  }
}

}  // namespace

void check_shared(const void* address, int bytes, bool is_write, bool is_collective, const char* file, int line) {
  const Access a{reinterpret_cast<uintptr_t>(address), bytes, is_write, 0, file, line};
  if (a.address - reinterpret_cast<uintptr_t>(block.shared) >= kSharedBytes) report("not shared memory", a);
  access_shared(a, is_collective);
}

void check_global(const void* address, int bytes, bool is_write, const char* file, int line) {
  const Access a{reinterpret_cast<uintptr_t>(address), bytes, is_write, 0, file, line};
  access_global(a);
  profile.record_async_copy(AccessProfile::kGlobalLoad, a.address, bytes);
}

void mark_in_flight(const void* shared, int bytes, bool is_in_flight) {
  const Access a{reinterpret_cast<uintptr_t>(shared), bytes, true, 0, "", 0};
  Cell* const begin = first_cell(a);
  for (Cell* cell = begin; cell < begin + bytes / kGrain; ++cell) cell->is_in_flight = is_in_flight;
  if (is_in_flight)
    profile.record_async_copy(AccessProfile::kSharedStore, a.address - reinterpret_cast<uintptr_t>(block.shared),
                              bytes);
}

void mark_atomic(const void* address, int bytes, const char* file, int line) {
  const Access a{reinterpret_cast<uintptr_t>(address), bytes, true, 0, file, line};
  if (a.address - reinterpret_cast<uintptr_t>(block.shared) >= kSharedBytes)
    report("an atomic outside shared memory", a);
  Cell* const begin = first_cell(a);
  const Fiber& me = *current_fiber();
  for (Cell* cell = begin; cell < begin + bytes / kGrain; ++cell) {
    if (cell->writer == kNobody) report("uninitialised shared memory", a);
    if (cell->writer != kAtomic && !is_ordered_after_write(*cell, me, false))
      report("race (atomic after write)", a, other_thread("wrote", *cell));
    if (!is_ordered_after_reads(*cell, me)) report("race (atomic after read)", a, other_thread("read", *cell));
    note_write(*cell, kAtomic, block.warps[me.warp]);
  }
}

void begin_block(const void* launch_params, size_t params_bytes) {
  if (image.end == 0) dl_iterate_phdr(find_image, nullptr);
  params.begin = reinterpret_cast<uintptr_t>(launch_params);
  params.end = params.begin + params_bytes;
  profile.end_block();
  const Cell clean{kNobody, kNone, kNone, false, 0, 0, 0, 0};
  for (size_t i = 0; i < (block.shared_bytes + kGrain - 1) / kGrain; ++i) cells[i] = clean;
}

static void hook(const void* address, int bytes, bool is_write, const void* pc) {
  if (current != nullptr)  // else host code of a launcher
    access({reinterpret_cast<uintptr_t>(address), bytes, is_write, reinterpret_cast<uintptr_t>(pc), "", 0});
}

}  // namespace simt

#define SIMT_API extern "C" __attribute__((visibility("default")))

SIMT_API void simt_register(const void* data, uint64_t bytes, const char* name, int is_writable) {
  const uintptr_t begin = reinterpret_cast<uintptr_t>(data);
  simt::tensors.push_back({begin, begin + bytes, name, is_writable != 0, 0, 0, {}});
  if (is_writable) simt::tensors.back().cells.resize(bytes / simt::kGlobalGrain + 1);
}
SIMT_API void simt_unregister_all() {
  simt::tensors.clear();
  simt::last_hit = 0;
}
SIMT_API int simt_is_checking() { return 1; }

// Of the tensors of the last operator: their bounds, for the PTX interpreter, and the bytes that kernels moved.
struct SimtTensor {  // mirrored in tests/simt/emulator.py
  uint64_t begin, end;
  const char* name;
  uint64_t is_writable, bytes_read, bytes_written;
};
SIMT_API int simt_num_tensors() { return static_cast<int>(simt::tensors.size()); }
SIMT_API void simt_tensor(int index, SimtTensor* out) {
  const simt::Tensor& t = simt::tensors[static_cast<size_t>(index)];
  *out = {t.begin, t.end, t.name.c_str(), t.is_writable, t.bytes_read, t.bytes_written};
}
SIMT_API void simt_profile_begin() { simt::profile.begin(); }
SIMT_API const char* simt_profile_end() { return simt::profile.end(); }

#define SIMT_PC __builtin_return_address(0)
#define SIMT_HOOKS(n)                                                                   \
  SIMT_API void __tsan_read##n(void* p) { simt::hook(p, n, false, SIMT_PC); }           \
  SIMT_API void __tsan_write##n(void* p) { simt::hook(p, n, true, SIMT_PC); }           \
  SIMT_API void __tsan_unaligned_read##n(void* p) { simt::hook(p, n, false, SIMT_PC); } \
  SIMT_API void __tsan_unaligned_write##n(void* p) { simt::hook(p, n, true, SIMT_PC); }
SIMT_HOOKS(1)
SIMT_HOOKS(2)
SIMT_HOOKS(4)
SIMT_HOOKS(8)
SIMT_HOOKS(16)
SIMT_API void __tsan_read_range(void* p, unsigned long n) { simt::hook(p, static_cast<int>(n), false, SIMT_PC); }
SIMT_API void __tsan_write_range(void* p, unsigned long n) { simt::hook(p, static_cast<int>(n), true, SIMT_PC); }
SIMT_API void __tsan_func_entry(void*) {}
SIMT_API void __tsan_func_exit() {}
SIMT_API void __tsan_init() {}
SIMT_API void __tsan_vptr_update(void**, void*) {}
