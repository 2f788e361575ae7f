// Subnormal results as zeros.
#pragma once

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace pyops::PYOPS_ISA {

// While this lives, results below the normal range are flushed to zero: operations on them would trap into microcode,
// and decays and exponentials pass through that range on their way to zero.
class FlushToZero {
  public:
#if defined(__x86_64__)
    FlushToZero() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ | 0x8000); }
    ~FlushToZero() { _mm_setcsr(saved_); }

  private:
    unsigned saved_;
#else
    FlushToZero() {}
#endif
};

}  // namespace pyops::PYOPS_ISA
