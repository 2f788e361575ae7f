// The best k of a stream of scores, in O(log k) per score that enters and one comparison for each that does not.
#pragma once

#include <cstdint>

#include "common/log.h"

namespace pyops::PYOPS_ISA {

// The k best so far as a heap with the worst on top: larger values, then smaller indices are better, NaN is worst.
template <class T>
struct Best {
    T* values;
    int64_t* indices;
    int64_t k, size = 0;

    static bool better(T a, int64_t i, T b, int64_t j) {
        if (a != a) return b != b && i < j;
        return b != b || a > b || (a == b && i < j);
    }
    // Below this, no value enters.
    T least() const { return size < k || values[0] != values[0] ? -VectorMath<T>::kInfinity : values[0]; }
    bool full() const { return size == k && values[0] == values[0]; }
    void offer(T value, int64_t index) {
        if (size < k) {
            int64_t i = size++;
            for (; i > 0 && better(values[(i - 1) / 2], indices[(i - 1) / 2], value, index); i = (i - 1) / 2) {
                values[i] = values[(i - 1) / 2];
                indices[i] = indices[(i - 1) / 2];
            }
            values[i] = value;
            indices[i] = index;
            return;
        }
        if (better(value, index, values[0], indices[0])) sink(0, value, index);
    }
    // Best first, by taking the worst off the end; the rest is filled up.
    void finish() {
        const int64_t found = size;
        for (; size > 1;) {
            --size;
            const T value = values[size];
            const int64_t index = indices[size];
            values[size] = values[0];
            indices[size] = indices[0];
            sink(0, value, index);
        }
        for (int64_t i = found; i < k; ++i) {
            values[i] = -VectorMath<T>::kInfinity;
            indices[i] = -1;
        }
    }

  private:
    void sink(int64_t i, T value, int64_t index) {
        for (;;) {
            int64_t child = 2 * i + 1;
            if (child >= size) break;
            if (child + 1 < size && better(values[child], indices[child], values[child + 1], indices[child + 1]))
                ++child;
            if (!better(value, index, values[child], indices[child])) break;
            values[i] = values[child];
            indices[i] = indices[child];
            i = child;
        }
        values[i] = value;
        indices[i] = index;
    }
};

}  // namespace pyops::PYOPS_ISA
