#include "bindings/threads.h"

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <atomic>

namespace pagedllm {
namespace {

void run(int64_t num_tasks, Parallel::Task task, const void* context) {
  std::atomic<int64_t> next{0};
  const int64_t num_workers = std::min<int64_t>(torch::stable::get_num_threads(), num_tasks);
  torch::stable::parallel_for(0, num_workers, 1, [&](int64_t, int64_t) {
    for (int64_t i = next.fetch_add(1, std::memory_order_relaxed); i < num_tasks;
         i = next.fetch_add(1, std::memory_order_relaxed)) {
      task(context, i);
    }
  });
}

}  // namespace

Parallel torch_threads() { return Parallel(run, static_cast<int>(torch::stable::get_num_threads())); }

}  // namespace pagedllm
