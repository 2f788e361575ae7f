// What this machine and this build offer: instruction sets, AMX permission, threads after fork, build options.
// Compiled for the portable baseline.
#include "info.h"

#include <dirent.h>
#include <pthread.h>
#include <torch/csrc/stable/c/shim.h>

#include <cstdlib>
#include <stdexcept>
#include <string>

#include "common/isa.h"
#include "common/threads.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace pyops {
namespace {

Isa detect() {
#if defined(PYOPS_X86_ISAS)
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")) {
        if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
            __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
            return Isa::Avx512;
        }
        return Isa::Avx2;
    }
#endif
    return Isa::Default;
}

Isa cap() {
    const char* value = std::getenv("PYOPS_CPU_ISA");
    if (value == nullptr || *value == '\0') return Isa::Avx512;
    for (Isa candidate : {Isa::Default, Isa::Avx2, Isa::Avx512}) {
        if (std::string(value) == isa_name(candidate)) return candidate;
    }
    throw std::runtime_error("PYOPS_CPU_ISA must be default, avx2 or avx512, got '" + std::string(value) + "'");
}

bool request_amx() {
#if defined(PYOPS_X86_ISAS) && defined(__linux__)
    unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
    if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return false;
    constexpr unsigned amx_bf16 = 1u << 22, amx_tile = 1u << 24;
    if ((edx & amx_bf16) == 0 || (edx & amx_tile) == 0) return false;
    // Linux hands out the 8 KB tile state only on request: ARCH_REQ_XCOMP_PERM for XFEATURE_XTILEDATA.
    constexpr int arch_req_xcomp_perm = 0x1023, xfeature_xtiledata = 18;
    return syscall(SYS_arch_prctl, arch_req_xcomp_perm, xfeature_xtiledata) == 0;
#else
    return false;
#endif
}

bool forking_with_threads = false;
bool forked_from_threads = false;

void before_fork() {
    int threads = 0;
    if (DIR* tasks = opendir("/proc/self/task")) {
        while (dirent* entry = readdir(tasks)) threads += entry->d_name[0] != '.';
        closedir(tasks);
    }
    forking_with_threads = threads != 1;
}

void in_child() { forked_from_threads = forked_from_threads || forking_with_threads; }

const int fork_handlers = pthread_atfork(before_fork, nullptr, in_child);

}  // namespace

Isa detected_isa() {
    static const Isa detected = detect();
    return detected;
}

Isa isa() {
    static const Isa chosen = detected_isa() < cap() ? detected_isa() : cap();
    return chosen;
}

const char* isa_name(Isa isa) { return isa == Isa::Avx512 ? "avx512" : isa == Isa::Avx2 ? "avx2" : "default"; }

bool amx() {
    static const bool usable = isa() == Isa::Avx512 && request_amx();
    return usable;
}

int kernel_threads() {
    uint32_t threads = 1;
    if (forked_from_threads || torch_get_num_threads(&threads) != 0) return 1;
    return static_cast<int>(threads);
}

BuildInfo build_info() {
    return {PYOPS_BUILD_COMPILER, PYOPS_BUILD_TORCH, PYOPS_BUILD_ISAS, PYOPS_BUILD_CUDA, PYOPS_BUILD_CUDA_ARCHS};
}

CpuInfo cpu_info() { return {isa_name(detected_isa()), isa_name(isa()), amx(), kernel_threads()}; }

}  // namespace pyops
