// The launchers of csrc/lmo/lmo_cuda.cu under C names, for ctypes. Views come as pointers.
#include "lmo/lmo_cuda.cu"

using namespace pyops;
using namespace pyops::cuda;

PYOPS_EMULATOR_API size_t shim_norm_workspace(int norm, i64 batch, i64 rows, i64 cols) {
    return norm_workspace(static_cast<VectorNorm>(norm), batch, rows, cols);
}

PYOPS_EMULATOR_API int shim_unit_direction(const View* g, const View* out, i64 batch, i64 rows, i64 cols, int norm,
                                           double scale, void* workspace) {
    return unit_direction(*g, *out, batch, rows, cols, static_cast<VectorNorm>(norm), scale, workspace, nullptr);
}

PYOPS_EMULATOR_API int shim_vector_step(const View* w, const View* g, const View* m, i64 batch, i64 rows, i64 cols,
                                        int norm, double shrink, double step, double momentum, int nesterov,
                                        double decay, i64 seed, i64 tensor, void* workspace) {
    return vector_step(*w, *g, *m, batch, rows, cols, static_cast<VectorNorm>(norm), shrink, step, momentum,
                       nesterov != 0, decay, seed, tensor, workspace, nullptr);
}
