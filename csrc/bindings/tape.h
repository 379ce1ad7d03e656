// Tapes: kernel calls of a thread, kept with their params, to be run again in one call.
//
// A decode step of a model of 135M parameters calls 245 kernels. Python and torch's dispatcher between them took an
// eighth of the step where it serves one request (docs/log.md). A tape costs a call. What a kernel reads must stay
// where it was: whoever records owns the tensors. pagedllm/ops/tape.py is the Python side.
#pragma once
#include <functional>
#include <utility>
#include <vector>

namespace pagedllm {

using Tape = std::vector<std::function<void()>>;

// The tape that this thread records, or null.
Tape*& recorded_tape();

// Every operator of a forward pass on CPU tensors calls its kernel through this. `kernel` holds its params by value.
template <class F>
void run_kernel(F kernel) {
  kernel();
  if (Tape* tape = recorded_tape()) tape->emplace_back(std::move(kernel));
}

}  // namespace pagedllm
