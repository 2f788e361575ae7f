// A team of threads working on one problem, and the barrier between its phases.
#pragma once

#include <sched.h>

#include <atomic>
#include <cstdint>

namespace pyops::PYOPS_ISA {

// Shared by the members. Waiting spins for about the length of a phase (tens of microseconds) and then yields, so an
// oversubscribed machine stays usable.
class Barrier {
  public:
    // Before the first wait.
    void set_members(int members) { members_ = members; }
    void wait() {
        if (members_ == 1) return;
        const uint32_t phase = phase_.load(std::memory_order_relaxed);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == members_) {
            arrived_.store(0, std::memory_order_relaxed);
            phase_.store(phase + 1, std::memory_order_release);
            return;
        }
        for (int spins = 0; phase_.load(std::memory_order_acquire) == phase; ++spins) {
            if (spins < 4000) {
#if defined(__x86_64__)
                __builtin_ia32_pause();
#endif
            } else {
                sched_yield();
            }
        }
    }

  private:
    int members_ = 1;
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<uint32_t> phase_{0};
};

struct Team {
    int rank = 0, size = 1;
    Barrier* barrier = nullptr;
    void wait() const {
        if (size > 1) barrier->wait();
    }
    // This member's contiguous share of [0, count).
    int64_t begin(int64_t count) const { return count * rank / size; }
    int64_t end(int64_t count) const { return count * (rank + 1) / size; }
};

}  // namespace pyops::PYOPS_ISA
