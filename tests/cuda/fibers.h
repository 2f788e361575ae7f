// Fibers for the emulator: up to kMaxThreads stacks in one thread of the system, switched by hand.
//
// x86-64 uses twenty instructions and no system call; other machines, and -DPYOPS_EMULATOR_UCONTEXT, use ucontext.
#pragma once

#include <stddef.h>
#include <stdlib.h>
#include <sys/mman.h>

#if !defined(__x86_64__) || defined(PYOPS_EMULATOR_UCONTEXT)
#include <ucontext.h>
#define PYOPS_EMULATOR_PORTABLE 1
#endif

namespace emu {

constexpr unsigned kMaxThreads = 1024;
constexpr size_t kStack = 128 * 1024, kPage = 4096;

inline unsigned char* stacks() {  // one slice per fiber, each above an inaccessible page
    static unsigned char* base = [] {
        void* p = mmap(nullptr, kStack * (kMaxThreads + 1), PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (p == MAP_FAILED) abort();
        for (unsigned i = 0; i <= kMaxThreads; ++i)
            mprotect(static_cast<unsigned char*>(p) + i * kStack, kPage, PROT_NONE);
        return static_cast<unsigned char*>(p);
    }();
    return base;
}

#ifdef PYOPS_EMULATOR_PORTABLE

inline ucontext_t& scheduler_context() {
    static ucontext_t c;
    return c;
}
inline ucontext_t* fiber_contexts() {
    static ucontext_t c[kMaxThreads];
    return c;
}
// Makes fiber i start `body` when it is next resumed; when `body` returns, so does fiber_resume.
inline void fiber_prepare(unsigned i, void (*body)()) {
    ucontext_t& c = fiber_contexts()[i];
    getcontext(&c);
    c.uc_stack.ss_sp = stacks() + i * kStack + kPage;
    c.uc_stack.ss_size = kStack - kPage;
    c.uc_link = &scheduler_context();
    makecontext(&c, body, 0);
}
inline void fiber_resume(unsigned i) { swapcontext(&scheduler_context(), &fiber_contexts()[i]); }
inline void fiber_yield(unsigned i) { swapcontext(&fiber_contexts()[i], &scheduler_context()); }

#else

// Saves the callee-saved registers and the stack pointer in *save, and continues from `load`.
asm(R"(
.text
.type pyops_emulator_switch, @function
pyops_emulator_switch:
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
.size pyops_emulator_switch, .-pyops_emulator_switch
)");
extern "C" __attribute__((visibility("hidden"))) void pyops_emulator_switch(void** save, void* load);

struct FiberTable {
    void* pointer[kMaxThreads + 1];  // saved stack pointers; the last is the scheduler's
    void (*body[kMaxThreads])();
    unsigned running;
};
inline FiberTable& fibers() {
    static FiberTable table;
    return table;
}
inline void fiber_yield(unsigned i) { pyops_emulator_switch(&fibers().pointer[i], fibers().pointer[kMaxThreads]); }
inline void fiber_start() {
    const unsigned me = fibers().running;
    fibers().body[me]();
    fiber_yield(me);
    abort();  // a finished fiber is never resumed
}
// Makes fiber i start `body` when it is next resumed; when `body` returns, so does fiber_resume.
inline void fiber_prepare(unsigned i, void (*body)()) {
    void** top = reinterpret_cast<void**>(stacks() + (i + 1) * kStack) - 2;
    *top = reinterpret_cast<void*>(fiber_start);  // the return address: the stack is then aligned as after a call
    fibers().pointer[i] = top - 6;
    fibers().body[i] = body;
}
inline void fiber_resume(unsigned i) {
    fibers().running = i;
    pyops_emulator_switch(&fibers().pointer[kMaxThreads], fibers().pointer[i]);
}

#endif

}  // namespace emu
