#include "simt/access_profile.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstdio>
#include <set>
#include <sstream>

#include "simt/runtime.h"

namespace simt {

std::string source_of(uintptr_t pc) {
  Dl_info info;
  if (!dladdr(reinterpret_cast<void*>(pc), &info) || info.dli_fname == nullptr) return "?";
  char command[1024], line[512] = "";
  snprintf(command, sizeof command, "addr2line -e '%s' 0x%zx 2>/dev/null", info.dli_fname,
           static_cast<size_t>(pc - 1 - reinterpret_cast<uintptr_t>(info.dli_fbase)));
  if (FILE* pipe = popen(command, "r")) {
    if (fgets(line, sizeof line, pipe) == nullptr) line[0] = 0;
    pclose(pipe);
  }
  std::string text(line);
  text = text.substr(0, text.find_first_of(" \n"));
  return text.substr(text.rfind('/') + 1);
}

void AccessProfile::begin() {
  is_on_ = true;
  requests_.clear();
  num_by_lane_.clear();
  totals_.clear();
}

void AccessProfile::add(uintptr_t pc, Kind kind, uintptr_t address, int bytes) {
  const Fiber& me = *current_fiber();
  const auto key = std::make_pair(me.warp, Place{pc, kind});
  std::vector<size_t>& counts = num_by_lane_[key];
  counts.resize(32);
  std::vector<Request>& requests = requests_[key];
  const size_t n = counts[static_cast<size_t>(me.lane)]++;
  if (requests.size() <= n) requests.resize(n + 1);
  requests[n].lanes |= 1u << me.lane;
  requests[n].bytes = bytes;
  requests[n].addresses[me.lane] = address;
}

void AccessProfile::count(const Request& request, Kind kind, Totals& totals) {
  ++totals.requests;
  const bool is_global = kind == kGlobalLoad || kind == kGlobalStore;
  // shared memory serves 128 bytes at a time: all lanes' 4 bytes, half the lanes' 8, a quarter's 16
  const int lanes_at_once = is_global ? 32 : 128 / std::max(4, request.bytes);
  for (int first = 0; first < 32; first += lanes_at_once) {
    std::set<uintptr_t> sectors, words;
    std::map<uintptr_t, std::set<uintptr_t>> words_of_bank;
    for (int lane = first; lane < first + lanes_at_once; ++lane) {
      if ((request.lanes >> lane & 1u) == 0) continue;
      const uintptr_t begin = request.addresses[lane], end = begin + static_cast<uintptr_t>(request.bytes);
      for (uintptr_t word = begin / 4; word <= (end - 1) / 4; ++word) {
        sectors.insert(word / 8);
        words.insert(word);
        words_of_bank[word % 32].insert(word);
      }
    }
    if (words.empty()) continue;
    if (is_global) {
      totals.units += sectors.size();
      totals.ideal += (words.size() + 7) / 8;
    } else {
      size_t wavefronts = 1;
      for (const auto& [bank, in_bank] : words_of_bank) wavefronts = std::max(wavefronts, in_bank.size());
      totals.units += wavefronts;
      totals.ideal += 1;
    }
  }
}

void AccessProfile::end_block() {
  for (const auto& [key, requests] : requests_) {
    const Place& place = key.second;
    for (const Request& request : requests) count(request, place.second, totals_[place]);
  }
  requests_.clear();
  num_by_lane_.clear();
}

const char* AccessProfile::end() {
  end_block();
  is_on_ = false;
  static constexpr const char* kKinds[] = {"global_load", "global_store", "shared_load", "shared_store"};
  std::ostringstream text;
  for (const auto& [place, totals] : totals_) {
    const std::string at =
        place.first == reinterpret_cast<uintptr_t>(kAsyncCopyName) ? kAsyncCopyName : source_of(place.first);
    text << kKinds[place.second] << ' ' << at << ' ' << totals.requests << ' ' << totals.units << ' ' << totals.ideal
         << '\n';
  }
  text_ = text.str();
  return text_.c_str();
}

}  // namespace simt
