// Blocks of value channels for threads that have no head of their own: the delta rule's state cannot be cut in time (it
// goes through a K x K matrix), but its columns do not know of each other. What they share is computed in every block;
// gradients of q, k, g and beta are summed over the blocks, in order.
#pragma once

#include <omp.h>

#include "common/arena.h"
#include "linear_attention/linear_attention_rows.h"

namespace pyops::PYOPS_ISA {

struct ValueBlocks {
    int64_t count, width;
};

inline ValueBlocks value_blocks(const LinearAttention& p, int threads) {
    constexpr int64_t kUnit = 32;
    const int64_t units = p.sequences * p.value_heads / p.q_group;
    if (!p.delta || units == 0 || units >= threads || p.value_dim < 2 * kUnit) return {1, p.value_dim};
    const int64_t wanted = std::min((threads + units - 1) / units, p.value_dim / kUnit);
    const int64_t width = padded((p.value_dim + wanted - 1) / wanted, kUnit);
    return {(p.value_dim + width - 1) / width, width};
}

// Columns from `first` on of values or states.
inline AttentionView columns(AttentionView x, int64_t first) {
    if (x.data) x.data = static_cast<char*>(x.data) + first * x.last * size_of(x.dtype);
    return x;
}

inline LinearAttention columns(LinearAttention p, const ValueBlocks& blocks, int64_t block) {
    const int64_t first = block * blocks.width;
    p.v = columns(p.v, first);
    p.initial_state = columns(p.initial_state, first);
    p.value_dim = std::min(blocks.width, p.value_dim - first);
    return p;
}

// run(problem, o, state) on every block's columns, a thread each.
template <class F>
void forward_by_values(const LinearAttention& p, const ValueBlocks& blocks, const AttentionView& o,
                       const AttentionView& state, const F& run) {
#pragma omp parallel for schedule(static, 1) num_threads(static_cast<int>(blocks.count))
    for (int64_t b = 0; b < blocks.count; ++b)
        run(columns(p, blocks, b), columns(o, b * blocks.width), columns(state, b * blocks.width));
}

// The same backward; T is the scalar of the computation.
template <class T, class F>
void backward_by_values(const LinearAttention& p, const ValueBlocks& blocks, const LinearAttentionGradients& d,
                        const F& run) {
    struct Shared {
        const AttentionView target;
        int64_t heads, size, start = 0;
    };
    const int64_t tokens = (p.starts ? 1 : p.sequences) * p.length;
    Shared shared[] = {{d.q, p.value_heads / p.q_group, p.key_dim},
                       {d.k, p.value_heads / p.q_group, p.key_dim},
                       {p.gate == Gate::None ? AttentionView{} : d.g, p.value_heads / p.gate_group,
                        p.gate == Gate::Vector ? p.key_dim : 1},
                       {d.beta, p.value_heads / p.beta_group, 1}};
    int64_t total = 0;
    for (Shared& s : shared) {
        s.start = total;
        if (s.target.data) total += padded(tokens * s.heads * s.size, 16);
    }
    const Arena arena(blocks.count * total * static_cast<int64_t>(sizeof(T)));
    T* sums = reinterpret_cast<T*>(arena.data());
#pragma omp parallel for schedule(static, 1) num_threads(static_cast<int>(blocks.count))
    for (int64_t b = 0; b < blocks.count; ++b) {
        const auto own = [&](const Shared& s) {
            if (!s.target.data) return s.target;
            AttentionView v{sums + b * total + s.start, sizeof(T) == 8 ? DType::F64 : DType::F32};
            v.batch = p.length * s.heads * s.size;
            v.time = s.heads * s.size;
            v.head = s.size;
            v.last = 1;
            return v;
        };
        LinearAttentionGradients mine = d;
        mine.o = columns(d.o, b * blocks.width);
        mine.state = columns(d.state, b * blocks.width);
        mine.v = columns(d.v, b * blocks.width);
        mine.initial_state = columns(d.initial_state, b * blocks.width);
        mine.q = own(shared[0]);
        mine.k = own(shared[1]);
        mine.g = own(shared[2]);
        mine.beta = own(shared[3]);
        run(columns(p, blocks, b), mine);
    }
    for (const Shared& s : shared) {
        if (!s.target.data) continue;
        const int64_t row = s.heads * s.size;
#pragma omp parallel for num_threads(static_cast<int>(blocks.count))
        for (int64_t t = 0; t < tokens; ++t) {
            T* sum = sums + s.start + t * row;
            for (int64_t b = 1; b < blocks.count; ++b)
                for (int64_t e = 0; e < row; ++e) sum[e] += sum[b * total + e];
            const Place at{t / p.length, t % p.length, 0};
            write_rows<T>(s.target, offset_of(s.target, at), s.target.head, s.heads, s.size, sum, s.size);
        }
    }
}

}  // namespace pyops::PYOPS_ISA
