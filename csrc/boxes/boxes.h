// Box embeddings: log-volumes of intersections of pairs of boxes. No torch.
//
//   z = tau LSE(z_q / tau, z_i / tau), Z = -tau LSE(-Z_q / tau, -Z_i / tau)    (tau = 0: max and min),    w = Z - z
//   log side = log(nu softplus((w - offset) / nu))    (nu = 0: log relu(w - offset));    log volume = sum over d
#pragma once

#include <cstdint>

#include "common/dtype.h"

namespace pyops {

// Corners of boxes: z of box i in dimension d is z[i z_row + d z_dim]; strides in elements.
struct BoxTable {
    const void *z = nullptr, *Z = nullptr;
    int64_t rows = 0, z_row = 0, z_dim = 0, Z_row = 0, Z_dim = 0;
};

struct BoxModel {
    int64_t dims = 0;
    DType dtype = DType::F32;
    double tau = 0, nu = 0, offset = 0;
    const double* nus = nullptr;  // per dimension, instead of nu
};

// Results and gradients of results are double for float64 and float otherwise. Gradients of corners are contiguous and
// have the corners' dtype; those of sampled rows have that of the results.
struct BoxGradients {
    const void* grad = nullptr;  // queries x items, contiguous
    void *query_z = nullptr, *query_Z = nullptr, *item_z = nullptr, *item_Z = nullptr;
};

// Queries of `terms` boxes each: score = log sum_t signs_t volume_t - item_log_volume, which with item_log_volume is a
// log probability and at most 0; queries holds `terms` rows for each. Indices are -1 where there are fewer than k
// items.
struct BoxTopk {
    BoxTable queries, items;
    int64_t terms = 1, k = 1;
    const double* signs = nullptr;          // queries x terms
    const void* item_log_volume = nullptr;  // contiguous, or null
    bool prune = false;
    void* values = nullptr;
    int64_t* indices = nullptr;
};

// One query and `samples` items per row of the result.
struct BoxSamples {
    BoxTable queries, items;
    const int64_t *query_index = nullptr, *item_index = nullptr;
    int64_t count = 0, samples = 0;
};

#define PYOPS_BOXES_DECLARE(isa)                                                                                   \
    namespace isa {                                                                                                \
    void box_log_volumes(const BoxModel&, const BoxTable& queries, const BoxTable& items, void* out, int threads); \
    void box_log_volumes_backward(const BoxModel&, const BoxTable& queries, const BoxTable& items,                 \
                                  const BoxGradients&, int threads);                                               \
    void box_topk(const BoxModel&, const BoxTopk&, int threads);                                                   \
    void box_sampled(const BoxModel&, const BoxSamples&, void* out, int threads);                                  \
    void box_sampled_backward(const BoxModel&, const BoxSamples&, const BoxGradients&, int threads);               \
    }
PYOPS_BOXES_DECLARE(isa_default)
#if defined(PYOPS_X86_ISAS)
PYOPS_BOXES_DECLARE(isa_avx2)
PYOPS_BOXES_DECLARE(isa_avx512)
#endif
#undef PYOPS_BOXES_DECLARE

}  // namespace pyops
