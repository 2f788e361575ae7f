// Scratch memory for one kernel call.
#pragma once

#include <cstdint>

namespace pyops {

// 2 MiB aligned, on huge pages where the system has them. Up to eight released arenas, of 64 MiB together, are kept for
// the next calls, since the page faults of fresh memory can cost more than the arithmetic; larger ones go back to the
// system at once. Contents are undefined. Throws std::bad_alloc. Defined in common/arena.cpp, for the portable
// baseline.
class Arena {
  public:
    explicit Arena(int64_t bytes);
    ~Arena();
    Arena(const Arena&) = delete;
    Arena& operator=(const Arena&) = delete;
    char* data() const { return data_; }

  private:
    char* data_ = nullptr;
    int64_t bytes_ = 0;
};

}  // namespace pyops
