#include "common/arena.h"

#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <mutex>
#include <new>
#include <utility>

namespace pyops {
namespace {

constexpr int64_t kPage = int64_t{2} << 20, kKept = int64_t{64} << 20;

struct Block {
    char* data = nullptr;
    int64_t bytes = 0;
};
std::mutex mutex;
std::array<Block, 8> kept;  // of at most kKept bytes together

void release(Block block) {
    if (block.data) munmap(block.data, static_cast<size_t>(block.bytes));
}

Block map(int64_t bytes) {
    void* p =
        mmap(nullptr, static_cast<size_t>(bytes + kPage), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) throw std::bad_alloc();
    char* start = static_cast<char*>(p);
    char* aligned = start + (kPage - reinterpret_cast<uintptr_t>(start) % kPage) % kPage;
    if (aligned != start) munmap(start, static_cast<size_t>(aligned - start));
    if (const auto tail = start + kPage - aligned) munmap(aligned + bytes, static_cast<size_t>(tail));
    madvise(aligned, static_cast<size_t>(bytes), MADV_HUGEPAGE);
    return {aligned, bytes};
}

}  // namespace

Arena::Arena(int64_t bytes) {
    bytes = (bytes + kPage - 1) / kPage * kPage;
    if (bytes == 0) return;
    Block block;
    {
        // Never waited for: a child forked while another thread held it would wait forever.
        const std::unique_lock lock(mutex, std::try_to_lock);
        Block* best = nullptr;
        if (lock)
            for (Block& b : kept)
                if (b.bytes >= bytes && (!best || b.bytes < best->bytes)) best = &b;
        if (best) block = std::exchange(*best, {});
    }
    if (!block.data) block = map(bytes);
    data_ = block.data;
    bytes_ = block.bytes;
}

Arena::~Arena() {
    Block block{data_, bytes_};
    std::array<Block, 8> dropped;
    if (0 < bytes_ && bytes_ <= kKept) {
        const std::unique_lock lock(mutex, std::try_to_lock);
        if (lock) {
            // The smallest go first: they are the cheapest to map again.
            const auto smaller = [](const Block& a, const Block& b) { return a.bytes < b.bytes; };
            int64_t total = bytes_;
            for (const Block& b : kept) total += b.bytes;
            std::sort(kept.begin(), kept.end(), smaller);
            auto next = dropped.begin();
            for (Block& b : kept)
                if (total > kKept && b.data) {
                    total -= b.bytes;
                    *next++ = std::exchange(b, {});
                }
            const auto least = std::min_element(kept.begin(), kept.end(), smaller);
            if (least->bytes < block.bytes) std::swap(*least, block);
        }
    }
    for (const Block& b : dropped) release(b);
    release(block);
}

}  // namespace pyops
