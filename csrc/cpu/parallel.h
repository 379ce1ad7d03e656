// How a kernel uses threads without knowing whose they are: it gets a Parallel in its params.
#pragma once
#include <cstdint>

namespace pagedllm {

class Parallel {
 public:
  using Task = void (*)(const void* context, int64_t task);
  using Run = void (*)(int64_t num_tasks, Task task, const void* context);

  Parallel() = default;  // for params that are filled in later
  // `run` calls task(context, i) once for each i below num_tasks, on as many threads as it likes, and waits for all.
  Parallel(Run run, int num_threads) : run_(run), num_threads_(num_threads) {}

  int num_threads() const { return num_threads_; }

  // Calls fn(task) for every task in 0 .. num_tasks - 1. Tasks are drawn one by one by idle threads, so they may differ
  // in size; fn must not throw.
  template <class F>
  void operator()(int64_t num_tasks, const F& fn) const {
    if (num_tasks > 1 && num_threads_ > 1) {
      run_(num_tasks, [](const void* context, int64_t task) { (*static_cast<const F*>(context))(task); }, &fn);
    } else {
      for (int64_t task = 0; task < num_tasks; ++task) fn(task);
    }
  }

  // Calls fn(begin, end) on ranges that cover 0 .. num_items - 1. `cost` is the work of an item in bytes moved or
  // operations done; what costs less than a thread's start (about 5 us) stays on the calling thread.
  template <class F>
  void ranges(int64_t num_items, int64_t cost, const F& fn) const {
    constexpr int64_t kCostOfLaunch = 64 * 1024;
    const int64_t total = num_items * cost;
    int64_t num_ranges = 1;
    if (num_threads_ > 1 && total > kCostOfLaunch) {
      num_ranges = total / (kCostOfLaunch / 4);
      const int64_t most = 4 * int64_t{num_threads_};
      num_ranges = num_ranges < most ? num_ranges : most;
      num_ranges = num_ranges < num_items ? num_ranges : num_items;
    }
    (*this)(num_ranges,
            [&](int64_t range) { fn(num_items * range / num_ranges, num_items * (range + 1) / num_ranges); });
  }

 private:
  Run run_ = nullptr;
  int num_threads_ = 1;
};

}  // namespace pagedllm
