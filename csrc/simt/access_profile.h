// Counts, for each load and store of the source, how many sectors or shared-memory wavefronts its requests took and how
// few they could have taken. A request is what the lanes of a warp do at one place for the n-th time.
#pragma once
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace simt {

std::string source_of(uintptr_t pc);  // "attention_kernel.cuh:120"
inline constexpr char kAsyncCopyName[] = "cp.async";

class AccessProfile {
 public:
  enum Kind { kGlobalLoad, kGlobalStore, kSharedLoad, kSharedStore };

  void begin();
  void record(uintptr_t pc, Kind kind, uintptr_t address, int bytes) {
    if (is_on_) add(pc, kind, address, bytes);
  }
  void record_async_copy(Kind kind, uintptr_t address, int bytes) {  // all under one name
    if (is_on_) add(reinterpret_cast<uintptr_t>(kAsyncCopyName), kind, address, bytes);
  }
  void end_block();
  // Lines "kind place requests units ideal"; units are sectors of 32 bytes or wavefronts.
  const char* end();

 private:
  using Place = std::pair<uintptr_t, Kind>;
  struct Request {
    uint32_t lanes = 0;
    int bytes = 0;
    uintptr_t addresses[32];
  };
  struct Totals {
    uint64_t requests = 0, units = 0, ideal = 0;
  };

  void add(uintptr_t pc, Kind kind, uintptr_t address, int bytes);
  static void count(const Request& request, Kind kind, Totals& totals);

  bool is_on_ = false;
  std::map<std::pair<int, Place>, std::vector<Request>> requests_;    // of the running block, by warp
  std::map<std::pair<int, Place>, std::vector<size_t>> num_by_lane_;  // how often each lane has been there
  std::map<Place, Totals> totals_;
  std::string text_;
};

}  // namespace simt
