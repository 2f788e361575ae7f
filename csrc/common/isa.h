// Which instruction set the kernels use on this machine.
//
// Kernels (csrc/<op>/<op>_cpu.cpp) are compiled once per instruction set with -DPYOPS_ISA=isa_default, isa_avx2
// or isa_avx512, and put everything they define into `namespace pyops::PYOPS_ISA`. Bindings pick one of them
// through PYOPS_ISA_CALL. Everything here is defined in csrc/info.cpp, which is compiled for the portable
// baseline: a function with a body in this header would be emitted by the AVX-512 objects too, and the linker
// might keep that copy.
#pragma once

namespace pyops {

enum class Isa { Default, Avx2, Avx512 };

// The best set that CPU and operating system offer, capped by PYOPS_CPU_ISA=default|avx2|avx512.
// Decided once. Throws std::runtime_error for any other value of the variable.
Isa isa();

// The same without the cap.
Isa detected_isa();

// "default", "avx2" or "avx512".
const char* isa_name(Isa isa);

// True if bf16 AMX tiles may be used: CPUID reports them, Linux granted the tile registers to this process
// (asked for once), and the cap is not below avx512.
bool amx();

}  // namespace pyops

#if defined(PYOPS_X86_ISAS)
#define PYOPS_ISA_CALL(function, ...)                                                    \
    (::pyops::isa() == ::pyops::Isa::Avx512 ? ::pyops::isa_avx512::function(__VA_ARGS__) \
     : ::pyops::isa() == ::pyops::Isa::Avx2 ? ::pyops::isa_avx2::function(__VA_ARGS__)   \
                                            : ::pyops::isa_default::function(__VA_ARGS__))
#else
#define PYOPS_ISA_CALL(function, ...) (::pyops::isa_default::function(__VA_ARGS__))
#endif
