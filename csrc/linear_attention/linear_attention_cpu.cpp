// CPU kernel of the linear attention recurrence: work distribution, the walk over chunks, and the single step. The
// mathematics of a chunk is in linear_attention_chunk.h.
//
// A thread takes a sequence and a few neighbouring heads, whose rows lie side by side in memory, and walks the chunks:
// the states stay in its cache, every input is read once and every output written once. The backward pass first walks
// forward and keeps the state before each chunk, then walks back. All rows are packed into contiguous scratch first:
// the tensors' rows are often 4 KB apart, which would put a chunk's rows into the same few sets of the L1 cache.
//
// Bytes: forward q, k, v, o and the gates once; backward q, k, v, do and the gates twice or once, dq, dk, dv once, and
// 4 K V T / c for the states (8 in float64).
#include <omp.h>

#include <algorithm>
#include <atomic>

#include "common/arena.h"
#include "common/isa.h"
#include "linear_attention/linear_attention_amx.h"
#include "linear_attention/linear_attention_chunk.h"
#include "linear_attention/linear_attention_values.h"

namespace pyops::PYOPS_ISA {
namespace {

template <class Type>
class VectorProducts {
  public:
    using Scalar = Type;
    static constexpr bool kLowPrecision = false;
    VectorProducts(int64_t, int64_t, int64_t, Pieces&) {}
    void multiply(int64_t m, int64_t n, int64_t k, const typename SmallGemm<Type>::Operands& o) {
        SmallGemm<Type>::multiply(m, n, k, o, [this] { prefetch.some(); });
    }
    Prefetch prefetch;
};

// The length of the longest sequence.
int64_t longest(const LinearAttention& p) {
    if (!p.starts) return p.length;
    int64_t longest = 0;
    for (int64_t n = 0; n < p.sequences; ++n) longest = std::max(longest, p.starts[n + 1] - p.starts[n]);
    return longest;
}

// A sequence is cut into `count` segments of `tokens` (the last may be shorter) where there are fewer heads than
// threads.
struct Segments {
    int64_t count = 1, tokens = 0;
};

// Every `group` heads go to one thread. The delta rule is not cut (linear_attention_values.h has its threads).
Segments cut(const LinearAttention& p, int64_t group, int64_t chunk, int threads) {
    const int64_t tokens = longest(p), units = p.sequences * (p.value_heads / group);
    if (p.delta || units == 0 || units >= threads || tokens <= 4 * chunk) return {1, tokens};
    const int64_t wanted = 4 * threads / units, least = 4 * chunk;
    const int64_t length = std::max(padded((tokens + wanted - 1) / wanted, chunk), least);
    return {(tokens + length - 1) / length, length};
}

// A segment, numbered over all sequences, and a range of value heads.
struct Unit {
    int64_t segment, batch, start, length, first_head, last_head;
};

class Units {
  public:
    // Ranges hold whole groups of `group` heads, at most `most` heads, and give every thread a few units if they can.
    Units(const LinearAttention& p, const Segments& segments, int64_t group, int64_t most, int threads)
        : p_(p), segments_(segments), group_(group), groups_(p.value_heads / group) {
        const int64_t wanted = std::max<int64_t>(1, p.sequences * groups_ / (2 * threads));
        const int64_t heads = std::min(wanted, std::max<int64_t>(1, most / group));
        ranges_ = (groups_ + heads - 1) / heads;
    }
    int64_t count() const { return p_.sequences * segments_.count * ranges_; }
    int64_t heads() const { return ranges_ ? (groups_ + ranges_ - 1) / ranges_ * group_ : 0; }
    Unit operator[](int64_t i) const {
        const int64_t segment = i / ranges_, range = i % ranges_, n = segment / segments_.count;
        const int64_t start = p_.starts ? p_.starts[n] : 0, end = p_.starts ? p_.starts[n + 1] : p_.length;
        const int64_t skipped = std::min(segment % segments_.count * segments_.tokens, end - start);
        return {segment,           p_.starts ? 0 : n,
                start + skipped,   std::min(segments_.tokens, end - start - skipped),
                first_head(range), first_head(range + 1)};
    }

  private:
    int64_t first_head(int64_t range) const { return range * groups_ / ranges_ * group_; }

    const LinearAttention& p_;
    Segments segments_;
    int64_t group_, groups_, ranges_;
};

// Calls work(unit, scratch) for every unit, on threads that each own `bytes` of scratch.
template <class F>
void for_units(const Units& units, int64_t bytes, int threads, const F& work) {
    const int64_t count = units.count();
    if (count == 0) return;
    threads = static_cast<int>(std::min<int64_t>(threads, count));
    bytes = padded(bytes, 4096) + 64 * 5;  // threads' scratch starts at different sets of the caches
    Arena arena(bytes * threads);
    std::atomic<int64_t> next{0};
    const auto run = [&](char* scratch) {
        const FlushToZero flush;
        for (int64_t i; (i = next.fetch_add(1)) < count;) work(units[i], scratch);
#if defined(__x86_64__)
        _mm_sfence();  // stores past the caches are done before the caller reads
#endif
    };
    if (threads == 1) return run(arena.data());
#pragma omp parallel num_threads(threads)
    run(arena.data() + omp_get_thread_num() * bytes);
}

template <class T>
void read_state(const AttentionView& x, int64_t sequence, int64_t head, int64_t keys, int64_t values, T* state,
                int64_t rows, int64_t ld) {
    if (x.data)
        read_rows<T>(x, sequence * x.batch + head * x.head, x.row, keys, values, T(1), state, ld);
    else
        keys = 0;
    std::fill(state + keys * ld, state + rows * ld, T(0));
}

template <class T>
void write_state(const AttentionView& x, int64_t sequence, int64_t head, int64_t keys, int64_t values, const T* state,
                 int64_t ld) {
    if (x.data) write_rows<T>(x, sequence * x.batch + head * x.head, x.row, keys, values, state, ld);
}

// What each segment makes of a zero state, and its total decay: together they give the state before every segment.
template <class T>
class SegmentStates {
  public:
    SegmentStates(const LinearAttention& p, const Segments& segments)
        : p_(p),
          count_(segments.count),
          size_(p.key_dim * p.value_dim),
          all_(p.sequences * segments.count * p.value_heads),
          arena_((all_ * (size_ + p.key_dim) + size_) * static_cast<int64_t>(sizeof(T))) {}

    T* state(int64_t segment, int64_t head) const { return data() + (segment * p_.value_heads + head) * size_; }
    T* decay(int64_t segment, int64_t head) const {
        return data() + all_ * size_ + (segment * p_.value_heads + head) * p_.key_dim;
    }
    AttentionView view() const {
        AttentionView v{arena_.data(), sizeof(T) == 8 ? DType::F64 : DType::F32};
        v.batch = p_.value_heads * size_;
        v.head = size_;
        v.row = p_.value_dim;
        v.last = 1;
        return v;
    }

    // From the states that segments make of zero to those that they start from: the first of a sequence from `from`, or
    // zero; the state after the last goes to `to`. With `reversed`, the last segment is the first. False if a state is
    // not finite.
    bool combine(const AttentionView& from, const AttentionView& to, bool reversed) const {
        T* running = data() + all_ * (size_ + p_.key_dim);
        bool finite = true;
        for (int64_t n = 0; n < p_.sequences; ++n)
            for (int64_t h = 0; h < p_.value_heads; ++h) {
                read_state(from, n, h, p_.key_dim, p_.value_dim, running, p_.key_dim, p_.value_dim);
                for (int64_t i = 0; i < count_; ++i) {
                    const int64_t segment = n * count_ + (reversed ? count_ - 1 - i : i);
                    const T* a = decay(segment, h);
                    T* own = state(segment, h);
                    for (int64_t e = 0; e < size_; ++e) {
                        const T before = running[e];
                        running[e] = own[e] + a[e / p_.value_dim] * before;
                        own[e] = before;
                    }
                    finite = finite && all_finite(own, size_) && all_finite(running, size_);
                }
                write_state(to, n, h, p_.key_dim, p_.value_dim, running, p_.value_dim);
            }
        return finite;
    }

  private:
    T* data() const { return reinterpret_cast<T*>(arena_.data()); }

    const LinearAttention& p_;
    int64_t count_, size_, all_;
    Arena arena_;
};

template <class C>
struct Walk {
    using T = typename C::T;

    static int64_t chunk_size(const LinearAttention& p) {
        if (p.chunk) return std::clamp<int64_t>(p.chunk, 16, 128);
        return C::preferred_size(p);
    }

    // One chunk forward, from `state` to `next`; `finite` says whether the state is, and is kept up. Where a result is
    // not finite, the products may have multiplied a zero by something infinite: then the recurrence itself decides.
    static void step(C& chunk, const Place& at, int64_t count, const T* state, T* next, bool& finite,
                     bool wants_output) {
        bool right = false;
        if (chunk.load(at, count, wants_output) && finite) {
            chunk.prepare(wants_output, false);
            chunk.solve(state);
            if (wants_output) {
                chunk.scores();
                chunk.output(state);
            }
            chunk.advance(state, next);
            right = chunk.finite(next) && (!wants_output || chunk.output_finite());
        }
        if (!right) {
            std::copy_n(state, chunk.state_size(), next);
            chunk.recurrent(next, wants_output);
            right = chunk.finite(next);
        }
        finite = right;
    }

    static void forward(const LinearAttention& p, const AttentionView& o, const AttentionView& final_state,
                        int threads) {
        const Segments segments = cut(p, 1, chunk_size(p), threads);
        if (segments.count == 1) return forward(p, segments, o, final_state, threads);
        const SegmentStates<T> states(p, segments);
        if (!summarise(p, segments, nullptr, states, threads) || !states.combine(p.initial_state, final_state, false))
            return forward(p, {1, longest(p)}, o, final_state, threads);
        LinearAttention cut_up = p;
        cut_up.initial_state = states.view();
        forward(cut_up, segments, o, {}, threads);
    }

    static void backward(const LinearAttention& p, const LinearAttentionGradients& d, int threads) {
        const Segments segments = cut(p, p.q_group, chunk_size(p), threads);
        if (segments.count == 1) return backward(p, segments, d, threads);
        const SegmentStates<T> states(p, segments), dstates(p, segments);
        if (!summarise(p, segments, nullptr, states, threads) || !states.combine(p.initial_state, {}, false) ||
            !summarise(p, segments, &d, dstates, threads) || !dstates.combine(d.state, d.initial_state, true))
            return backward(p, {1, longest(p)}, d, threads);
        LinearAttention cut_up = p;
        cut_up.initial_state = states.view();
        LinearAttentionGradients cut_d = d;
        cut_d.state = dstates.view();
        cut_d.initial_state = {};
        backward(cut_up, segments, cut_d, threads);
    }

  private:
    // What every segment makes of a zero state; with gradients, of a zero gradient of its last state, backward.
    // False if a number is not finite: what a state then becomes, the recurrence alone can tell.
    static bool summarise(const LinearAttention& p, const Segments& segments, const LinearAttentionGradients* d,
                          const SegmentStates<T>& out, int threads) {
        const int64_t size = chunk_size(p);
        const Units units(p, segments, 1, 1, threads);
        Pieces count(nullptr);
        const C probe(p, size, d != nullptr, count);
        const int64_t state_size = probe.state_size(), ld = probe.state_ld(), rows = probe.state_rows();
        count.take<T>(2 * state_size);
        std::atomic<bool> all_finite{true};
        for_units(units, count.used(), threads, [&](const Unit& unit, char* scratch) {
            Pieces pieces(scratch);
            C chunk(p, size, d != nullptr, pieces);
            T *state = pieces.take<T>(state_size), *next = pieces.take<T>(state_size);
            const int64_t h = unit.first_head, chunks = (unit.length + size - 1) / size;
            T* decay = out.decay(unit.segment, h);
            std::fill(decay, decay + p.key_dim, T(1));
            std::fill(state, state + rows * ld, T(0));
            bool finite = true;
            for (int64_t i = 0; i < chunks && finite; ++i) {
                const int64_t t = (d ? chunks - 1 - i : i) * size, tokens = std::min(size, unit.length - t);
                const Place at{unit.batch, unit.start + t, h};
                if (d) {
                    finite = chunk.retreat(*d, at, tokens, state);
                } else {
                    step(chunk, at, tokens, state, next, finite, false);
                    std::swap(state, next);
                }
                finite = chunk.multiply_total(decay) && finite;
            }
            if (!finite) all_finite = false;
            for (int64_t r = 0; r < p.key_dim; ++r)
                std::copy_n(state + r * ld, p.value_dim, out.state(unit.segment, h) + r * p.value_dim);
        });
        return all_finite;
    }

    static void forward(const LinearAttention& p, const Segments& segments, const AttentionView& o,
                        const AttentionView& final_state, int threads) {
        const int64_t size = chunk_size(p);
        const Units units(p, segments, 1, 4, threads);
        Pieces count(nullptr);
        const C probe(p, size, false, count);
        const int64_t state_size = probe.state_size(), ld = probe.state_ld(), rows = probe.state_rows();
        count.take<T>(2 * state_size * units.heads());
        count.take<bool>(units.heads());
        for_units(units, count.used(), threads, [&](const Unit& unit, char* scratch) {
            Pieces pieces(scratch);
            C chunk(p, size, false, pieces);
            T* states = pieces.take<T>(state_size * units.heads());
            T* next = pieces.take<T>(state_size * units.heads());
            bool* finite = pieces.take<bool>(units.heads());
            for (int64_t h = unit.first_head; h < unit.last_head; ++h) {
                T* state = states + (h - unit.first_head) * state_size;
                read_state(p.initial_state, unit.segment, h, p.key_dim, p.value_dim, state, rows, ld);
                finite[h - unit.first_head] = chunk.finite(state);
            }
            for (int64_t t = 0; t < unit.length; t += size) {
                for (int64_t h = unit.first_head; h < unit.last_head; ++h) {
                    const Place at{unit.batch, unit.start + t, h};
                    const int64_t i = h - unit.first_head;
                    const bool last_head = h + 1 == unit.last_head;
                    chunk.will_load(
                        {unit.batch, last_head ? at.time + size : at.time, last_head ? unit.first_head : h + 1},
                        std::min(size, unit.length - t - (last_head ? size : 0)), true, nullptr);
                    step(chunk, at, std::min(size, unit.length - t), states + i * state_size, next + i * state_size,
                         finite[i], true);
                    chunk.write_output(o, at);
                }
                std::swap(states, next);
            }
            for (int64_t h = unit.first_head; h < unit.last_head; ++h)
                write_state(final_state, unit.segment, h, p.key_dim, p.value_dim,
                            states + (h - unit.first_head) * state_size, ld);
        });
    }

    static void backward(const LinearAttention& p, const Segments& segments, const LinearAttentionGradients& d,
                         int threads) {
        const int64_t size = chunk_size(p), chunks = (segments.tokens + size - 1) / size;
        // Neighbouring heads share pages of the inputs, but their kept states should not outgrow the caches by far.
        const int64_t kept = (chunks + 2) * p.key_dim * p.value_dim * static_cast<int64_t>(sizeof(T));
        const Units units(p, segments, p.q_group, std::clamp<int64_t>((int64_t{16} << 20) / (kept + 1), 1, 4), threads);
        Pieces count(nullptr);
        const C probe(p, size, true, count);
        const int64_t state_size = probe.state_size(), ld = probe.state_ld(), rows = probe.state_rows();
        count.take<T>(state_size * (chunks + 2) * units.heads());
        count.take<bool>(units.heads());
        for_units(units, count.used(), threads, [&](const Unit& unit, char* scratch) {
            Pieces pieces(scratch);
            C chunk(p, size, true, pieces);
            const int64_t heads = unit.last_head - unit.first_head;
            T* dstates = pieces.take<T>(state_size * units.heads());
            T* states = pieces.take<T>(state_size * (chunks + 1) * units.heads());
            bool* finite = pieces.take<bool>(units.heads());
            const auto state_of = [&](int64_t head, int64_t c) {
                return states + (head * (chunks + 1) + c) * state_size;
            };
            const int64_t used = (unit.length + size - 1) / size;
            for (int64_t i = 0; i < heads; ++i) {
                const int64_t h = unit.first_head + i;
                read_state(p.initial_state, unit.segment, h, p.key_dim, p.value_dim, state_of(i, 0), rows, ld);
                read_state(d.state, unit.segment, h, p.key_dim, p.value_dim, dstates + i * state_size, rows, ld);
                finite[i] = chunk.finite(state_of(i, 0));
            }
            for (int64_t c = 0; c + 1 < used; ++c)
                for (int64_t i = 0; i < heads; ++i) {
                    const int64_t h = unit.first_head + i, t = unit.start + c * size;
                    const bool last_head = i + 1 == heads;
                    chunk.will_load({unit.batch, last_head ? t + size : t, last_head ? unit.first_head : h + 1},
                                    c + 2 == used && last_head ? 0 : size, false, nullptr);
                    step(chunk, {unit.batch, t, h}, size, state_of(i, c), state_of(i, c + 1), finite[i], false);
                }
            for (int64_t c = used - 1; c >= 0; --c) {
                const int64_t t = unit.start + c * size, tokens = std::min(size, unit.length - c * size);
                for (int64_t i = 0; i < heads; ++i) {
                    const int64_t h = unit.first_head + i;
                    const Place at{unit.batch, t, h};
                    const bool last_head = i + 1 == heads;
                    chunk.will_load({unit.batch, last_head ? t - size : t, last_head ? unit.first_head : h + 1},
                                    last_head ? (c > 0 ? size : 0) : tokens, true, &d.o);
                    chunk.load(at, tokens);
                    chunk.prepare(true, true);
                    if (h % p.q_group == 0) chunk.clear_keys();
                    if (h % p.gate_group == 0) chunk.clear_gates();
                    if (h % p.beta_group == 0) chunk.clear_beta();
                    chunk.backward(d, at, state_of(i, c), dstates + i * state_size);
                    if ((h + 1) % p.q_group == 0) chunk.write_keys(d, at);
                    if ((h + 1) % p.gate_group == 0) chunk.write_gates(d, at);
                    if ((h + 1) % p.beta_group == 0) chunk.write_beta(d, at);
                }
            }
            for (int64_t i = 0; i < heads; ++i)
                write_state(d.initial_state, unit.segment, unit.first_head + i, p.key_dim, p.value_dim,
                            dstates + i * state_size, ld);
        });
    }
};

// Calls f with a null pointer to the chunk class of the problem's form.
template <class E, class F>
void with_form(const LinearAttention& p, const F& f) {
    const auto with_gate = [&]<Gate G>() {
        if (p.delta)
            f(static_cast<Chunk<E, G, true>*>(nullptr));
        else
            f(static_cast<Chunk<E, G, false>*>(nullptr));
    };
    switch (p.gate) {
        case Gate::None: return with_gate.template operator()<Gate::None>();
        case Gate::Scalar: return with_gate.template operator()<Gate::Scalar>();
        case Gate::Vector: return with_gate.template operator()<Gate::Vector>();
    }
}

// S <- Diag(a) S + k^T u and o = q S for NV vectors of columns, in one pass over S (the delta rule reads it once more,
// from cache), with u and o in registers. State rows are `ld` apart; a, k, q have K entries, v is what the delta rule
// turns into u. A decay of 0 forgets whatever there was.
template <int NV, class T>
void step_columns(int64_t keys, const T* q, const T* k, const T* a, const T* beta, const T* v, T* state, int64_t ld,
                  T* o) {
    using Gem = SmallGemm<T>;
    using Vector = typename Gem::Vector;
    constexpr int64_t kLanes = Gem::kLanes;
    Vector u[NV], out[NV] = {};
#pragma GCC unroll 8
    for (int s = 0; s < NV; ++s) u[s] = Gem::load(v + s * kLanes);
    if (beta) {
        for (int64_t r = 0; r < keys; ++r) {
            if (a[r] == 0) continue;
            const Vector factor = a[r] * k[r] - Vector{};
#pragma GCC unroll 8
            for (int s = 0; s < NV; ++s) out[s] += factor * Gem::load(state + r * ld + s * kLanes);
        }
#pragma GCC unroll 8
        for (int s = 0; s < NV; ++s) {
            u[s] = *beta * (u[s] - out[s]);
            out[s] = Vector{};
        }
    }
    for (int64_t r = 0; r < keys; ++r) {
        T* row = state + r * ld;
        const Vector ar = a[r] - Vector{}, kr = k[r] - Vector{}, qr = q[r] - Vector{};
        const bool forgets = a[r] == 0;
#pragma GCC unroll 8
        for (int s = 0; s < NV; ++s) {
            const Vector old = forgets ? Vector{} : Gem::load(row + s * kLanes);
            const Vector next = ar * old + kr * u[s];
            Gem::store(row + s * kLanes, next);
            out[s] += qr * next;
        }
    }
#pragma GCC unroll 8
    for (int s = 0; s < NV; ++s) Gem::store(o + s * kLanes, out[s]);
}

// The same for all columns; those beyond the last whole vector in a copy.
template <class T>
void step_state(int64_t keys, int64_t values, const T* q, const T* k, const T* a, const T* beta, const T* v, T* state,
                int64_t ld, T* o, T* copy) {
    constexpr int64_t kLanes = SmallGemm<T>::kLanes;
    int64_t j = 0;
    const auto columns = [&]<int NV>() {
        for (; j + NV * kLanes <= values; j += NV * kLanes)
            step_columns<NV>(keys, q, k, a, beta, v + j, state + j, ld, o + j);
    };
    columns.template operator()<8>();
    columns.template operator()<4>();
    columns.template operator()<1>();
    const int64_t rest = values - j;
    if (rest == 0) return;
    alignas(64) T last_v[kLanes] = {}, last_o[kLanes];
    std::copy_n(v + j, rest, last_v);
    for (int64_t r = 0; r < keys; ++r) {
        std::copy_n(state + r * ld + j, rest, copy + r * kLanes);
        std::fill(copy + r * kLanes + rest, copy + (r + 1) * kLanes, T(0));
    }
    step_columns<1>(keys, q, k, a, beta, last_v, copy, kLanes, last_o);
    for (int64_t r = 0; r < keys; ++r) std::copy_n(copy + r * kLanes, rest, state + r * ld + j);
    std::copy_n(last_o, rest, o + j);
}

// One token of every sequence: `before` becomes p.initial_state, the state that is stepped, unless they are the same.
template <class T>
void step_as(const LinearAttention& p, const AttentionView& before, const AttentionView& out, int threads) {
    const int64_t keys = p.key_dim, values = p.value_dim;
    Pieces count(nullptr);
    constexpr int64_t kLanes = SmallGemm<T>::kLanes;
    for (int64_t size : {keys, keys, keys + 1, values, values, keys * values, int64_t{1}, keys * kLanes})
        count.take<T>(size);
    const Units units(p, {1, 1}, 1, 4, threads);
    for_units(units, count.used(), threads, [&](const Unit& unit, char* scratch) {
        Pieces pieces(scratch);
        T *q = pieces.take<T>(keys), *k = pieces.take<T>(keys), *a = pieces.take<T>(keys + 1);
        T *v = pieces.take<T>(values), *o = pieces.take<T>(values), *copy = pieces.take<T>(keys * values);
        T *beta = pieces.take<T>(1), *last = pieces.take<T>(keys * kLanes);
        for (int64_t h = unit.first_head; h < unit.last_head; ++h) {
            const auto row = [&](const AttentionView& x, int64_t head, int64_t size, T factor, T* to) {
                read_rows<T>(x, offset_of(x, {unit.batch, 0, head}), 0, 1, size, factor, to, size);
            };
            row(p.q, h / p.q_group, keys, static_cast<T>(p.scale), q);
            row(p.k, h / p.q_group, keys, T(1), k);
            row(p.v, h, values, T(1), v);
            const AttentionView& x = p.initial_state;
            if (p.gate != Gate::None) {
                row(p.g, h / p.gate_group, p.gate == Gate::Vector ? keys : 1, T(1), a);
                for (int64_t r = 0; r < (p.gate == Gate::Vector ? keys : 1); ++r) a[r] = exp_of(a[r]);
            } else {
                a[0] = 1;
            }
            if (p.gate != Gate::Vector) std::fill(a, a + keys, a[0]);
            if (p.delta) row(p.beta, h / p.beta_group, 1, T(1), beta);
            const bool direct = x.last == 1;
            T* state = direct ? static_cast<T*>(x.data) + unit.segment * x.batch + h * x.head : copy;
            const int64_t ld = direct ? x.row : values;
            if (!direct || before.data != x.data) read_state<T>(before, unit.segment, h, keys, values, state, keys, ld);
            step_state<T>(keys, values, q, k, a, p.delta ? beta : nullptr, v, state, ld, o, last);
            if (!direct) write_state<T>(x, unit.segment, h, keys, values, state, ld);
            write_rows<T>(out, offset_of(out, {unit.batch, 0, h}), 0, 1, values, o, values);
        }
    });
}

void step_all(const LinearAttention& p, const AttentionView& before, const AttentionView& out, int threads) {
    p.q.dtype == DType::F64 ? step_as<double>(p, before, out, threads) : step_as<float>(p, before, out, threads);
}

template <class F>
void with_chunk(const LinearAttention& p, const F& f) {
    if (p.q.dtype == DType::F64) return with_form<VectorProducts<double>>(p, f);
#if defined(__AVX512F__)
    // Smaller products would be mostly padding, and too short for roundings to average out.
    const bool large = std::min({p.key_dim, p.value_dim, longest(p)}) >= 32;
    if (p.q.dtype == DType::BF16 && large && ::pyops::amx()) return with_form<AmxProducts>(p, f);
#endif
    return with_form<VectorProducts<float>>(p, f);
}

}  // namespace

void linear_attention(const LinearAttention& problem, const AttentionView& o, const AttentionView& state, int threads) {
    if (problem.length == 1 && !problem.starts) {
        LinearAttention step = problem;
        step.initial_state = state;
        return step_all(step, problem.initial_state, o, threads);
    }
    with_chunk(problem, [&](auto* chunk) {
        using W = Walk<std::remove_pointer_t<decltype(chunk)>>;
        const ValueBlocks blocks = value_blocks(problem, threads);
        if (blocks.count == 1) return W::forward(problem, o, state, threads);
        forward_by_values(problem, blocks, o, state,
                          [](const LinearAttention& p, const AttentionView& of_o, const AttentionView& of_state) {
                              W::forward(p, of_o, of_state, 1);
                          });
    });
}

void linear_attention_backward(const LinearAttention& problem, const LinearAttentionGradients& gradients, int threads) {
    with_chunk(problem, [&](auto* chunk) {
        using W = Walk<std::remove_pointer_t<decltype(chunk)>>;
        const ValueBlocks blocks = value_blocks(problem, threads);
        if (blocks.count == 1) return W::backward(problem, gradients, threads);
        backward_by_values<typename W::T>(
            problem, blocks, gradients,
            [](const LinearAttention& p, const LinearAttentionGradients& d) { W::backward(p, d, 1); });
    });
}

void linear_attention_step(const LinearAttention& problem, const AttentionView& o, int threads) {
    step_all(problem, problem.initial_state, o, threads);
}

}  // namespace pyops::PYOPS_ISA
