// Runs CUDA kernels on the CPU, from the same .cu source that nvcc compiles.
//
// Blocks run one after another; the threads of a block are fibers that run until they reach a barrier, a shuffle or a
// vote. What a GPU leaves undefined is an error here, with a message:
//   - a barrier that not every thread of the block reaches, or that threads reach on different lines;
//   - a shuffle, vote or __syncwarp whose mask names an absent lane, omits the caller, or differs between its lanes;
//   - a shared-memory index out of range, a read of shared memory that nothing wrote, a write through a raw pointer
//     into the guard zones around it;
//   - a race: two threads touch one shared element, one of them writing, with no barrier (or __syncwarp) between them;
//   - a memory fault, a misaligned vector access, signed overflow (compile with the flags of harness.py).
// Shared memory holds NaN when a block starts. Blocks and threads run in one of three orders (forward, reverse, seeded
// random), so that a result that depends on the order shows.
//
// Kernels declare shared memory with PYOPS_SHARED / PYOPS_DYNAMIC_SHARED and are launched with PYOPS_LAUNCH
// (common/cuda.h). Include this header in one translation unit per library.
#pragma once

#include <math.h>
#include <setjmp.h>
#include <signal.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <functional>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "fibers.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)

struct uint3 {
    unsigned x, y, z;
};
struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};

using cudaStream_t = struct CUstream_st*;
enum cudaError_t {
    cudaSuccess = 0,
    cudaErrorInvalidValue = 1,
    cudaErrorInvalidConfiguration = 9,
    cudaErrorLaunchFailure = 719
};

namespace emu {

constexpr unsigned kWarp = 32, kNone = ~0u;
constexpr size_t kStaticShared = 48 * 1024, kDynamicShared = 227 * 1024, kGuard = 64;

struct Failure {};  // unwinds the fiber that found the fault

enum class State : unsigned char { Ready, Barrier, Warp, Done };
enum class Collective : unsigned char { Sync, Shuffle, Up, Down, Xor, Ballot, Any, All };

struct Thread {
    State state = State::Ready;
    int line = 0;  // of the barrier that it waits at
    Collective kind = Collective::Sync;
    unsigned mask = 0, argument = 0, width = kWarp;
    unsigned long long value = 0;  // what it gives to a collective, then what it gets
    unsigned seen[kWarp] = {};     // per lane of its warp: the accesses that happened before, counted by __syncwarp
};

struct Access {
    unsigned thread = kNone, epoch = 0, clock = 0;
    bool atomic = false;
};

struct Cell {  // what is known of one granule of shared memory
    bool written = false;
    Access writer;
    std::vector<Access> readers;  // since the last barrier
};

struct Region {  // one shared array
    const char* name = "";
    size_t bytes = 0, granule = 1;
    unsigned long long block = 0;  // serial number of the block that it was poisoned for
    std::vector<unsigned char> storage;
    std::vector<Cell> cells;
    unsigned char* data() { return storage.data() + kGuard; }
};

struct Machine {
    uint3 thread_index{}, block_index{};
    dim3 block_dim, grid_dim;
    unsigned current = 0, epoch = 0;
    unsigned long long block_serial = 0, launches = 0;
    size_t dynamic_bytes = 0;
    bool failed = false, running = false;
    int order = 0;  // 0 forward, 1 reverse, 2 random
    unsigned long long seed = 0;
    std::string error;
    std::vector<Thread> threads;
    std::vector<Region*> touched;
    std::function<void()> body;
    sigjmp_buf fault;
    char fault_text[160] = {};
};

inline Machine& machine() {
    static Machine m;
    return m;
}

inline void run_thread() {  // the body of every fiber
    Machine& m = machine();
    try {
        m.body();
    } catch (const Failure&) {
    }
    m.threads[m.current].state = State::Done;
}

inline void yield() { fiber_yield(machine().current); }

// --- Faults ----------------------------------------------------------------------------------------------------------

template <class... Args>
inline std::string format(const char* text, Args... args) {
    char buffer[400];
    snprintf(buffer, sizeof buffer, text, args...);
    return buffer;
}

inline void record(const std::string& text) {  // the first fault is the one that is reported
    Machine& m = machine();
    if (!m.failed) m.error = text + format(" [block %u,%u,%u]", m.block_index.x, m.block_index.y, m.block_index.z);
    m.failed = true;
}

[[noreturn]] inline void fail(const std::string& text) {
    record(text + format(" in thread %u", machine().current));
    throw Failure();
}

inline void on_signal(int number, siginfo_t* info, void*) {
    Machine& m = machine();
    if (!m.running) _exit(128 + number);
    const char* what = number == SIGILL ? "undefined behaviour (misaligned access, signed overflow or bad shift)"
                                        : "memory fault (out-of-range global access or stack overflow)";
    snprintf(m.fault_text, sizeof m.fault_text, "%s at %p in thread %u", what, info->si_addr, m.current);
    siglongjmp(m.fault, 1);
}

struct SignalGuard {  // catches faults of device code, and gives the process its own handlers back
    static constexpr int numbers[3] = {SIGSEGV, SIGBUS, SIGILL};
    struct sigaction previous[3];
    stack_t previous_stack;
    SignalGuard() {
        static unsigned char alternate[64 * 1024];
        stack_t stack{};
        stack.ss_sp = alternate;
        stack.ss_size = sizeof alternate;
        sigaltstack(&stack, &previous_stack);
        struct sigaction action{};
        action.sa_sigaction = on_signal;
        action.sa_flags = SA_SIGINFO | SA_ONSTACK;
        for (int i = 0; i < 3; ++i) sigaction(numbers[i], &action, &previous[i]);
    }
    ~SignalGuard() {
        for (int i = 0; i < 3; ++i) sigaction(numbers[i], &previous[i], nullptr);
        sigaltstack(&previous_stack, nullptr);
    }
};

// --- Shared memory ---------------------------------------------------------------------------------------------------

inline Region& enter(Region& region, const char* name, size_t granule, size_t bytes) {
    Machine& m = machine();
    if (region.block != m.block_serial) {
        region.name = name;
        region.granule = granule;
        region.bytes = bytes;
        region.block = m.block_serial;
        region.storage.assign(bytes + 2 * kGuard, 0xff);  // 0xff...: NaN for every floating type
        region.cells.assign((bytes + granule - 1) / granule, Cell{});
        m.touched.push_back(&region);
        size_t total = 0;
        for (Region* r : m.touched) total += r->bytes;
        if (total > kStaticShared + m.dynamic_bytes) fail(format("%zu bytes of shared memory", total));
    }
    return region;
}

inline Region& dynamic_region() {
    static Region region;
    return enter(region, "dynamic shared memory", 2, machine().dynamic_bytes);
}

// Whether `a` happened before what the current thread does now.
inline bool ordered(const Access& a) {
    const Machine& m = machine();
    if (a.thread == kNone || a.thread == m.current || a.epoch != m.epoch) return true;
    if (a.thread / kWarp != m.current / kWarp) return false;
    return m.threads[m.current].seen[a.thread % kWarp] > a.clock;
}

inline void touch(Region& region, size_t offset, size_t size, bool write, bool atomic) {
    Machine& m = machine();
    const Access now{m.current, m.epoch, m.threads[m.current].seen[m.current % kWarp], atomic};
    for (size_t i = offset / region.granule; i * region.granule < offset + size; ++i) {
        Cell& cell = region.cells[i];
        const auto race = [&](const Access& other, const char* did) {
            if (!ordered(other) && !(atomic && other.atomic))
                fail(format("race (missing barrier): %s of %s, byte %zu, after thread %u %s it",
                            write ? "write" : "read", region.name, offset, other.thread, did));
        };
        race(cell.writer, "wrote");
        if ((!write || atomic) && !cell.written)
            fail(format("read of unwritten shared memory: %s, byte %zu", region.name, offset));
        if (!cell.readers.empty() && cell.readers.front().epoch != m.epoch) cell.readers.clear();
        if (write) {
            for (const Access& reader : cell.readers) race(reader, "read");
            cell.readers.clear();
            cell.writer = now;
            cell.written = true;
        } else {
            const auto same = std::find_if(cell.readers.rbegin(), cell.readers.rend(),
                                           [&](const Access& a) { return a.thread == now.thread; });
            if (same == cell.readers.rend()) {
                cell.readers.push_back(now);
            } else {
                *same = now;
            }
        }
    }
}

template <class T>
struct SharedPointer {  // &array[i], for the atomics
    Region* region;
    size_t offset;
};

template <class T>
struct SharedElement {  // array[i]: reads and writes are checked. Name the type of what it is read into; auto is not
                        // it.
    Region* region;
    size_t offset;
    SharedElement(Region* r, size_t o) : region(r), offset(o) {}
    SharedElement(const SharedElement&) = default;
    T* address() const { return reinterpret_cast<T*>(region->data() + offset); }
    operator T() const {
        touch(*region, offset, sizeof(T), false, false);
        return *address();
    }
    T operator=(T value) const {
        touch(*region, offset, sizeof(T), true, false);
        return *address() = value;
    }
    T operator=(const SharedElement& other) const { return *this = static_cast<T>(other); }
    T operator+=(T v) const { return *this = static_cast<T>(*this) + v; }
    T operator-=(T v) const { return *this = static_cast<T>(*this) - v; }
    T operator*=(T v) const { return *this = static_cast<T>(*this) * v; }
    SharedPointer<T> operator&() const { return {region, offset}; }
};

template <class T>
struct Shared {  // stands for T name[count] and for T*
    Region* region;
    long long first, count;
    SharedElement<T> operator[](long long i) const {
        if (i < 0 || i >= count)
            fail(format("shared-memory index out of range: %s[%lld] of %lld", region->name, i, count));
        return {region, static_cast<size_t>(first + i) * sizeof(T)};
    }
    Shared operator+(long long i) const { return {region, first + i, count - i}; }
    T* raw() const { return reinterpret_cast<T*>(region->data()) + first; }  // unchecked, but for the guard zones
};

template <class T>
inline Shared<T> dynamic_shared() {
    Region& region = dynamic_region();
    return {&region, 0, static_cast<long long>(region.bytes / sizeof(T))};
}

inline void check_guards() {
    for (Region* r : machine().touched)
        for (size_t i = 0; i < kGuard; ++i)
            if (r->storage[i] != 0xff || r->storage[kGuard + r->bytes + i] != 0xff)
                return record(format("write outside shared memory: guard zone of %s", r->name));
}

// --- Barriers, shuffles, votes ---------------------------------------------------------------------------------------

inline void sync_threads(int line) {
    Thread& t = machine().threads[machine().current];
    t.state = State::Barrier;
    t.line = line;
    yield();
}

inline unsigned shuffle_source(const Thread& t, unsigned lane) {
    const unsigned first = lane & ~(t.width - 1), last = first + t.width - 1;
    switch (t.kind) {
        case Collective::Shuffle: return first + (t.argument & (t.width - 1));
        case Collective::Up: return lane - first < t.argument ? lane : lane - t.argument;
        case Collective::Down: return lane + t.argument > last ? lane : lane + t.argument;
        default: return (lane ^ t.argument) > last ? lane : lane ^ t.argument;
    }
}

// Runs the collective that `lane` of `warp` waits for, if every lane of its mask has arrived.
inline void try_collective(unsigned warp, unsigned lane) {
    Machine& m = machine();
    Thread* const t = m.threads.data() + warp * kWarp;
    const unsigned mask = t[lane].mask, count = std::min<size_t>(kWarp, m.threads.size() - warp * kWarp);
    const Collective kind = t[lane].kind;
    for (unsigned i = 0; i < kWarp; ++i)
        if (mask >> i & 1)
            if (i >= count || t[i].state != State::Warp || t[i].mask != mask || t[i].kind != kind) return;
    unsigned long long given[kWarp] = {}, votes = 0;
    unsigned seen[kWarp] = {};
    for (unsigned i = 0; i < count; ++i) {
        if (!(mask >> i & 1)) continue;
        given[i] = t[i].value;
        if (t[i].value) votes |= 1ull << i;
        for (unsigned j = 0; j < kWarp; ++j) seen[j] = std::max(seen[j], t[i].seen[j] + (j == i ? 1 : 0));
    }
    for (unsigned i = 0; i < count; ++i) {
        if (!(mask >> i & 1)) continue;
        t[i].state = State::Ready;
        if (kind == Collective::Sync) {
            std::copy(seen, seen + kWarp, t[i].seen);
        } else if (kind == Collective::Ballot) {
            t[i].value = votes;
        } else if (kind == Collective::Any || kind == Collective::All) {
            t[i].value = kind == Collective::Any ? votes != 0 : votes == mask;
        } else {
            const unsigned from = shuffle_source(t[i], i);
            if (!(mask >> from & 1))
                return record(format("shuffle mask %08x does not name lane %u, which lane %u of warp %u reads", mask,
                                     from, i, warp));
            t[i].value = given[from];
        }
    }
}

inline unsigned long long collective(Collective kind, unsigned mask, unsigned long long value, unsigned argument = 0,
                                     unsigned width = kWarp) {
    Machine& m = machine();
    const unsigned me = m.current, lane = me % kWarp;
    if (!(mask >> lane & 1)) fail(format("wrong mask: %08x does not name the calling lane %u", mask, lane));
    Thread& t = m.threads[me];
    t.kind = kind;
    t.mask = mask;
    t.value = value;
    t.argument = argument;
    t.width = width;
    t.state = State::Warp;
    try_collective(me / kWarp, lane);
    if (t.state == State::Warp || m.failed) yield();
    return t.value;
}

template <class T>
inline T shuffle(Collective kind, unsigned mask, T value, unsigned argument, int width) {
    static_assert(sizeof(T) <= 8);
    if (width < 1 || width > 32 || (width & (width - 1))) fail(format("shuffle width %d is not a power of two", width));
    unsigned long long bits = 0;
    memcpy(&bits, &value, sizeof(T));
    bits = collective(kind, mask, bits, argument, width);
    memcpy(&value, &bits, sizeof(T));
    return value;
}

// --- Scheduler -------------------------------------------------------------------------------------------------------

inline std::vector<unsigned> order_of(unsigned count, std::mt19937_64& random) {
    std::vector<unsigned> order(count);
    std::iota(order.begin(), order.end(), 0u);
    if (machine().order == 1) std::reverse(order.begin(), order.end());
    if (machine().order == 2) std::shuffle(order.begin(), order.end(), random);
    return order;
}

// No thread can run: either all wait at one barrier, which opens, or the kernel is wrong.
inline void open_barrier() {
    Machine& m = machine();
    unsigned first = kNone;
    for (unsigned i = 0; i < m.threads.size(); ++i)
        if (m.threads[i].state == State::Barrier && first == kNone) first = i;
    for (unsigned i = 0; i < m.threads.size(); ++i) {
        const Thread& t = m.threads[i];
        if (t.state == State::Warp)
            return record(
                format("wrong mask: lane %u of warp %u waits for lanes %08x, and not all of them come with that mask",
                       i % kWarp, i / kWarp, t.mask));
        if (t.state == State::Done)
            return record(format("divergent barrier: thread %u waits on line %d, and thread %u ended without it", first,
                                 m.threads[first].line, i));
        if (t.line != m.threads[first].line)
            return record(format("divergent barrier: thread %u waits on line %d, thread %u on line %d", first,
                                 m.threads[first].line, i, t.line));
    }
    for (Thread& t : m.threads) t.state = State::Ready;
    ++m.epoch;
}

inline void run_block(std::mt19937_64& random) {
    Machine& m = machine();
    const unsigned count = m.block_dim.x * m.block_dim.y * m.block_dim.z;
    m.threads.assign(count, Thread{});
    m.touched.clear();
    m.epoch = 0;
    ++m.block_serial;
    for (unsigned i = 0; i < count; ++i) fiber_prepare(i, run_thread);
    unsigned done = 0;
    while (done < count && !m.failed) {
        bool ran = false;
        for (unsigned i : order_of(count, random)) {
            if (m.threads[i].state != State::Ready) continue;
            ran = true;
            m.current = i;
            m.thread_index = {i % m.block_dim.x, i / m.block_dim.x % m.block_dim.y,
                              i / (m.block_dim.x * m.block_dim.y)};
            fiber_resume(i);
            if (m.failed) return;
            done += m.threads[i].state == State::Done;
        }
        if (!ran) open_barrier();
    }
    check_guards();
}

inline void launch(dim3 grid, dim3 block, size_t dynamic_bytes, std::function<void()> body) {
    Machine& m = machine();
    if (m.failed) return;
    const unsigned long long threads = 1ull * block.x * block.y * block.z;
    if (threads == 0 || threads > kMaxThreads || block.z > 64 || grid.x == 0 || grid.x > 0x7fffffffu || grid.y == 0 ||
        grid.y > 65535 || grid.z == 0 || grid.z > 65535 || dynamic_bytes > kDynamicShared)
        return record(format("invalid launch configuration: grid %u,%u,%u block %u,%u,%u shared %zu", grid.x, grid.y,
                             grid.z, block.x, block.y, block.z, dynamic_bytes));
    m.grid_dim = grid;
    m.block_dim = block;
    m.dynamic_bytes = dynamic_bytes;
    m.body = std::move(body);
    ++m.launches;
    std::mt19937_64 random(m.seed);
    const auto xs = order_of(grid.x, random), ys = order_of(grid.y, random), zs = order_of(grid.z, random);
    const SignalGuard signals;
    m.running = true;
    if (sigsetjmp(m.fault, 1) == 0) {
        for (unsigned z : zs)
            for (unsigned y : ys)
                for (unsigned x : xs) {
                    m.block_index = {x, y, z};
                    if (!m.failed) run_block(random);
                }
    } else {
        record(m.fault_text);
    }
    m.running = false;
}

template <class T, class U, class Op>
inline T update(T* address, U operand, Op op) {
    const T old = *address;
    *address = op(old, static_cast<T>(operand));
    return old;
}
template <class T, class U, class Op>
inline T update(SharedPointer<T> p, U operand, Op op) {
    touch(*p.region, p.offset, sizeof(T), true, true);
    return update(reinterpret_cast<T*>(p.region->data() + p.offset), operand, op);
}

}  // namespace emu

// --- The names that device code and launchers use --------------------------------------------------------------------

#define threadIdx (::emu::machine().thread_index)
#define blockIdx (::emu::machine().block_index)
#define blockDim (::emu::machine().block_dim)
#define gridDim (::emu::machine().grid_dim)
#define warpSize 32

#define PYOPS_SHARED(type, name, count)                                                     \
    static ::emu::Region name##_region;                                                     \
    const ::emu::Shared<type> name {                                                        \
        &::emu::enter(name##_region, #name, sizeof(type), sizeof(type) * (count)), 0, count \
    }
#define PYOPS_DYNAMIC_SHARED(type, name) const ::emu::Shared<type> name = ::emu::dynamic_shared<type>()
#define PYOPS_LAUNCH(kernel, grid, block, shared, stream, ...) \
    ((void)(stream), ::emu::launch(grid, block, shared, [=] { kernel(__VA_ARGS__); }))

#define __syncthreads() ::emu::sync_threads(__LINE__)
inline void __syncwarp(unsigned mask = 0xffffffffu) { emu::collective(emu::Collective::Sync, mask, 0); }
inline void __threadfence() {}

template <class T>
inline T __shfl_sync(unsigned mask, T value, int lane, int width = 32) {
    return emu::shuffle(emu::Collective::Shuffle, mask, value, lane, width);
}
template <class T>
inline T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32) {
    return emu::shuffle(emu::Collective::Up, mask, value, delta, width);
}
template <class T>
inline T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32) {
    return emu::shuffle(emu::Collective::Down, mask, value, delta, width);
}
template <class T>
inline T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32) {
    return emu::shuffle(emu::Collective::Xor, mask, value, lanes, width);
}
inline unsigned __ballot_sync(unsigned mask, int vote) {
    return static_cast<unsigned>(emu::collective(emu::Collective::Ballot, mask, vote != 0));
}
inline int __any_sync(unsigned mask, int vote) { return emu::collective(emu::Collective::Any, mask, vote != 0) != 0; }
inline int __all_sync(unsigned mask, int vote) { return emu::collective(emu::Collective::All, mask, vote != 0) != 0; }

template <class P, class U>
inline auto atomicAdd(P p, U v) {
    return emu::update(p, v, [](auto a, auto b) { return a + b; });
}
template <class P, class U>
inline auto atomicMax(P p, U v) {
    return emu::update(p, v, [](auto a, auto b) { return a < b ? b : a; });
}
template <class P, class U>
inline auto atomicMin(P p, U v) {
    return emu::update(p, v, [](auto a, auto b) { return b < a ? b : a; });
}
template <class P, class U>
inline auto atomicOr(P p, U v) {
    return emu::update(p, v, [](auto a, auto b) { return a | b; });
}
template <class P, class U>
inline auto atomicExch(P p, U v) {
    return emu::update(p, v, [](auto, auto b) { return b; });
}
template <class P, class C, class U>
inline auto atomicCAS(P p, C compare, U v) {
    return emu::update(p, v, [=](auto a, auto b) { return a == static_cast<decltype(a)>(compare) ? b : a; });
}

inline cudaError_t cudaGetLastError() { return emu::machine().failed ? cudaErrorLaunchFailure : cudaSuccess; }
inline cudaError_t cudaMemsetAsync(void* p, int byte, size_t bytes, cudaStream_t) {
    if (bytes) memset(p, byte, bytes);
    return cudaSuccess;
}

#define PYOPS_EMULATOR_API extern "C" __attribute__((used, visibility("default")))

PYOPS_EMULATOR_API void emulator_begin(int order, unsigned long long seed) {
    emu::Machine& m = emu::machine();
    m.order = order;
    m.seed = seed;
    m.failed = false;
    m.error.clear();
    m.launches = 0;
}
PYOPS_EMULATOR_API const char* emulator_error() { return emu::machine().error.c_str(); }
PYOPS_EMULATOR_API unsigned long long emulator_launches() { return emu::machine().launches; }
