#include "bindings/threads.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <torch/csrc/stable/ops.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <memory>
#include <thread>

// Our own threads, and not torch::stable::parallel_for: OpenMP ends a region when every thread of the team has come to
// it, so on a machine that does other work too each operator waits for a thread that the system has put aside. A tiny
// model on two busy cores ran 50 times slower for it. Here the caller draws tasks as well, closes the job when none is
// left, and waits only for workers that have really taken one.

namespace pagedllm {
namespace {

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

void futex(std::atomic<uint32_t>& word, int operation, uint32_t value) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), operation | FUTEX_PRIVATE_FLAG, value, nullptr, nullptr, 0);
}

// The workers of one calling thread; they end with it. After a fork the child has none, and its callers work alone.
class Team {
 public:
  ~Team() {
    if (!shared_) return;
    shared_->is_over.store(true);
    shared_->wake();
  }

  void run(int num_threads, int64_t num_tasks, Parallel::Task task, const void* context) {
    if (!shared_) shared_ = std::make_shared<Shared>();
    for (; num_workers_ < num_threads - 1; ++num_workers_) {
      std::thread([shared = shared_] { shared->work(); }).detach();
    }
    shared_->run(num_threads, num_tasks, task, context);
  }

 private:
  static constexpr uint32_t kOpen = 1u << 31;
  static constexpr int kSpins = 2000;  // about 80 us: longer than from one operator to the next

  struct Shared {
    std::atomic<uint32_t> job{0};   // counts jobs; workers sleep on it
    std::atomic<uint32_t> gate{0};  // kOpen while there may be tasks, plus the workers inside
    std::atomic<uint32_t> sleepers{0};
    std::atomic<bool> is_over{false};
    std::atomic<uint32_t> most_inside{0};
    std::atomic<int64_t> next{0};
    int64_t num_tasks = 0;  // these are written while the gate is closed and nobody is inside
    Parallel::Task task = nullptr;
    const void* context = nullptr;

    void run(int num_threads, int64_t tasks, Parallel::Task function, const void* its_context) {
      num_tasks = tasks;
      task = function;
      context = its_context;
      next.store(0, std::memory_order_relaxed);
      most_inside.store(static_cast<uint32_t>(num_threads - 1), std::memory_order_relaxed);
      gate.store(kOpen, std::memory_order_release);
      wake();
      draw();
      gate.fetch_and(~kOpen, std::memory_order_acq_rel);
      for (int spins = 0; gate.load(std::memory_order_acquire) != 0; ++spins) {
        pause();
        if (spins >= kSpins) std::this_thread::yield();
      }
    }

    void wake() {
      job.fetch_add(1);
      if (sleepers.load() > 0) futex(job, FUTEX_WAKE, INT_MAX);
    }

    void draw() {
      for (int64_t i = next.fetch_add(1, std::memory_order_relaxed); i < num_tasks;
           i = next.fetch_add(1, std::memory_order_relaxed)) {
        task(context, i);
      }
    }

    bool enter() {
      uint32_t inside = gate.load(std::memory_order_relaxed);
      while ((inside & kOpen) && (inside & ~kOpen) < most_inside.load(std::memory_order_relaxed)) {
        if (gate.compare_exchange_weak(inside, inside + 1, std::memory_order_acquire)) return true;
      }
      return false;
    }

    void work() {
      for (uint32_t seen = 0; !is_over.load();) {
        if (enter()) {
          draw();
          gate.fetch_sub(1, std::memory_order_release);
        }
        seen = wait(seen);
      }
    }

    // Returns the number of a job after `seen`.
    uint32_t wait(uint32_t seen) {
      for (int spins = 0; spins < kSpins; ++spins) {
        const uint32_t present = job.load(std::memory_order_acquire);
        if (present != seen) return present;
        pause();
      }
      sleepers.fetch_add(1);
      uint32_t present = job.load();
      for (; present == seen; present = job.load()) futex(job, FUTEX_WAIT, seen);
      sleepers.fetch_sub(1);
      return present;
    }
  };

  std::shared_ptr<Shared> shared_;
  int num_workers_ = 0;
};

void run(int64_t num_tasks, Parallel::Task task, const void* context) {
  thread_local Team team;
  team.run(static_cast<int>(torch::stable::get_num_threads()), num_tasks, task, context);
}

}  // namespace

Parallel torch_threads() { return Parallel(run, static_cast<int>(torch::stable::get_num_threads())); }

}  // namespace pagedllm
