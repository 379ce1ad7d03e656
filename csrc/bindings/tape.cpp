#include "bindings/tape.h"

namespace pagedllm {

Tape*& recorded_tape() {
  thread_local Tape* tape = nullptr;
  return tape;
}

}  // namespace pagedllm

// Called by pagedllm/ops/tape.py.
extern "C" {

__attribute__((visibility("default"))) void* pagedllm_tape_new() { return new pagedllm::Tape; }

__attribute__((visibility("default"))) void pagedllm_tape_delete(void* tape) {
  delete static_cast<pagedllm::Tape*>(tape);
}

// From here on this thread's kernels are recorded, or no longer, where `tape` is null.
__attribute__((visibility("default"))) void pagedllm_tape_record(void* tape) {
  pagedllm::recorded_tape() = static_cast<pagedllm::Tape*>(tape);
}

__attribute__((visibility("default"))) void pagedllm_tape_run(const void* tape) {
  for (const auto& kernel : *static_cast<const pagedllm::Tape*>(tape)) kernel();
}

}  // extern "C"
