// The part of libpyops.so that the Python module reads (csrc/module.cpp).
#pragma once

namespace pyops {

struct BuildInfo {
    const char* compiler;
    const char* torch;       // the version whose headers were used; any torch >= 2.11 can load the library
    const char* isas;        // space separated
    const char* cuda;        // nvcc's version, or "" in a build without CUDA
    const char* cuda_archs;  // space separated, "90+PTX" where PTX is included
};

struct CpuInfo {
    const char* detected;  // what the CPU and the operating system offer
    const char* isa;       // what the kernels use: the same, capped by PYOPS_CPU_ISA
    bool amx;
    int threads;
};

__attribute__((visibility("default"))) BuildInfo build_info();
__attribute__((visibility("default"))) CpuInfo cpu_info();

}  // namespace pyops
