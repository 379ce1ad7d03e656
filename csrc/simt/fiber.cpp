// Context switch of a fibre: callee-saved registers on its own stack.
#include <sys/mman.h>

#include "simt/runtime.h"

#if defined(__x86_64__)
asm(R"(
.text
.p2align 4
.globl simt_switch
.hidden simt_switch
.type simt_switch,@function
simt_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size simt_switch,.-simt_switch
)");
#elif defined(__aarch64__)
asm(R"(
.text
.p2align 4
.globl simt_switch
.hidden simt_switch
.type simt_switch,%function
simt_switch:
  sub sp, sp, #160
  stp x19, x20, [sp, #0]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #0]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
.size simt_switch,.-simt_switch
)");
#else
#error "the emulator has no context switch for this processor"
#endif

namespace simt {

void prepare_stack(Fiber& fiber, void (*entry)()) {
  if (fiber.stack == nullptr) {
    void* memory =
        mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    fiber.stack = static_cast<char*>(memory);
    mprotect(fiber.stack, 4096, PROT_NONE);  // an overflow stops there
  }
  const uintptr_t top = (reinterpret_cast<uintptr_t>(fiber.stack) + kStackBytes) & ~uintptr_t{63};
#if defined(__x86_64__)
  void** frame = reinterpret_cast<void**>(top) - 8;  // six registers, the return address, and its caller's place
  for (int i = 0; i < 8; ++i) frame[i] = nullptr;
  frame[6] = reinterpret_cast<void*>(entry);
#else
  void** frame = reinterpret_cast<void**>(top) - 20;
  for (int i = 0; i < 20; ++i) frame[i] = nullptr;
  frame[11] = reinterpret_cast<void*>(entry);
#endif
  fiber.stack_pointer = frame;
}

}  // namespace simt
