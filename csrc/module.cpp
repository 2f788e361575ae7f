// pyops._C: loads libpyops.so (which registers the ops with torch) and reports what it offers.
// The only file that depends on the Python version.
#include <pybind11/pybind11.h>

#include "info.h"

namespace py = pybind11;

PYBIND11_MODULE(_C, m) {
    m.def("build_info", [] {
        const pyops::BuildInfo info = pyops::build_info();
        py::dict out;
        out["compiler"] = info.compiler;
        out["torch"] = info.torch;
        out["isas"] = py::str(info.isas).attr("split")();
        out["cuda"] = info.cuda;
        out["cuda_archs"] = py::str(info.cuda_archs).attr("split")();
        return out;
    });
    m.def("cpu_info", [] {
        const pyops::CpuInfo info = pyops::cpu_info();
        py::dict out;
        out["detected"] = info.detected;
        out["isa"] = info.isa;
        out["amx"] = info.amx;
        out["threads"] = info.threads;
        return out;
    });
}
