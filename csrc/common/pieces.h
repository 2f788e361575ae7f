// Scratch memory of a kernel call, handed out piece by piece.
#pragma once

#include <cstdint>

namespace pyops::PYOPS_ISA {

// Hands out 64-byte aligned pieces of an arena; with a null arena it only counts.
class Pieces {
  public:
    explicit Pieces(char* start) : start_(start) {}
    template <class T>
    T* take(int64_t count) {
        char* piece = start_ + used_;
        used_ += (count * static_cast<int64_t>(sizeof(T)) + 63) / 64 * 64;
        return reinterpret_cast<T*>(piece);
    }
    int64_t used() const { return used_; }

  private:
    char* start_;
    int64_t used_ = 0;
};

inline int64_t padded(int64_t count, int64_t unit) { return (count + unit - 1) / unit * unit; }

}  // namespace pyops::PYOPS_ISA
