// The linear attention recurrence, forward, backward and one step. Row vectors; per value head, S is K x V:
//
//   S_t = Diag(a_t) S_{t-1} + k_t^T u_t        a_t = exp(g_t): 1, a scalar or a K-vector; g_t = -inf drops S_{t-1}
//   u_t = v_t,  or with the delta rule  u_t = beta_t (v_t - k_t Diag(a_t) S_{t-1})
//   o_t = scale q_t S_t
//
// Value head h reads q and k of head h / q_group, g of head h / gate_group, beta of head h / beta_group.
#pragma once

#include <cstdint>

#include "common/dtype.h"

namespace pyops {

// A [batch, time, head, last] tensor (last of size 1 where the tensor has three dimensions), or a state, [sequence,
// (none), head, row, last]. Strides count elements.
struct AttentionView {
    void* data = nullptr;
    DType dtype = DType::F32;
    int64_t batch = 0, time = 0, head = 0, row = 0, last = 0;
    bool past_caches = false;  // of an output: too large to stay in a cache until it is read
};

enum class Gate { None, Scalar, Vector };

struct LinearAttention {
    int64_t sequences = 0, length = 0;  // without starts, sequence n is batch entry n, of `length` tokens
    const int64_t* starts = nullptr;    // else sequence n is the tokens from starts[n] to starts[n + 1] of entry 0
    int64_t value_heads = 0, key_dim = 0, value_dim = 0;
    int64_t q_group = 1, gate_group = 1, beta_group = 1;
    Gate gate = Gate::None;
    bool delta = false;
    double scale = 1;
    int64_t chunk = 0;  // tokens handled together, a power of two; 0: the kernel's choice
    AttentionView q, k, v, g, beta, initial_state;
};

// What the backward pass reads and writes besides; absent gradients have no data.
struct LinearAttentionGradients {
    AttentionView o, state;  // incoming
    AttentionView q, k, v, g, beta, initial_state;
};

namespace isa_default {
// Writes o [batch, time, value head, V] and the final states, in float32, or float64 if q is.
void linear_attention(const LinearAttention& problem, const AttentionView& o, const AttentionView& state, int threads);
void linear_attention_backward(const LinearAttention& problem, const LinearAttentionGradients& gradients, int threads);
// One token of every sequence; initial_state, with contiguous rows in float32 or float64, is updated in place.
void linear_attention_step(const LinearAttention& problem, const AttentionView& o, int threads);
}  // namespace isa_default
namespace isa_avx2 {
void linear_attention(const LinearAttention& problem, const AttentionView& o, const AttentionView& state, int threads);
void linear_attention_backward(const LinearAttention& problem, const LinearAttentionGradients& gradients, int threads);
void linear_attention_step(const LinearAttention& problem, const AttentionView& o, int threads);
}  // namespace isa_avx2
namespace isa_avx512 {
void linear_attention(const LinearAttention& problem, const AttentionView& o, const AttentionView& state, int threads);
void linear_attention_backward(const LinearAttention& problem, const LinearAttentionGradients& gradients, int threads);
void linear_attention_step(const LinearAttention& problem, const AttentionView& o, int threads);
}  // namespace isa_avx512
}  // namespace pyops
