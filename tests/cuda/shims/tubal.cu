// The launchers of csrc/tubal/tubal_cuda.cu under C names, for ctypes. Arguments come as pointers to their structs.
#include "tubal/tubal_cuda.cu"

using namespace pyops::cuda;

PYOPS_EMULATOR_API size_t shim_tprod_workspace(const TubalProduct* p) { return tprod_workspace(*p); }
PYOPS_EMULATOR_API int shim_tprod(const TubalProduct* p, void* workspace) { return tprod(*p, workspace, nullptr); }
PYOPS_EMULATOR_API size_t shim_tgram_workspace(const TubalGram* g) { return tgram_workspace(*g); }
PYOPS_EMULATOR_API int shim_tgram(const TubalGram* g, void* workspace) { return tgram(*g, workspace, nullptr); }
