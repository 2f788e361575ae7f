// The ops of linear attention: schemas, checks, allocation, CPU registration.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include "common/check.h"
#include "common/isa.h"
#include "common/threads.h"
#include "linear_attention/linear_attention.h"

namespace pyops {
namespace {

using Optional = std::optional<Tensor>;

std::string sizes_text(const std::vector<int64_t>& sizes) {
    std::string text = "[";
    for (size_t i = 0; i < sizes.size(); ++i) text += (i ? ", " : "") + std::to_string(sizes[i]);
    return text + "]";
}

std::vector<int64_t> sizes_of(const Tensor& t) {
    std::vector<int64_t> sizes;
    for (int64_t d = 0; d < t.dim(); ++d) sizes.push_back(t.size(d));
    return sizes;
}

void check_shape(const Tensor& t, std::string_view op, const char* argument, const std::vector<int64_t>& wanted) {
    PYOPS_CHECK(sizes_of(t) == wanted, op, argument, "must have shape " + sizes_text(wanted), shape_text(t));
}

// [batch, time, head] or [batch, time, head, last]; of a single step, [batch, head] or [batch, head, last].
AttentionView view(const Tensor& t, DType dtype, bool has_last, bool has_time = true) {
    AttentionView v{t.data_ptr(), dtype};
    int64_t d = 0;
    v.batch = t.stride(d++);
    if (has_time) v.time = t.stride(d++);
    v.head = t.stride(d++);
    v.last = has_last ? t.stride(d) : 1;
    v.past_caches = t.numel() * size_of(dtype) >= int64_t{4} << 20;
    return v;
}

AttentionView state_view(const Tensor& t, DType dtype) {
    AttentionView v{t.data_ptr(), dtype};
    v.batch = t.stride(0);
    v.head = t.stride(1);
    v.row = t.stride(2);
    v.last = t.stride(3);
    return v;
}

ScalarType state_type(DType dtype) { return dtype == DType::F64 ? ScalarType::Double : ScalarType::Float; }

// Checks the arguments that the ops share and describes them to the kernel.
struct Arguments {
    LinearAttention problem;
    std::vector<int64_t> starts;
    DType dtype;
    int64_t batch, time;

    // has_time: whole sequences; without, a single step, whose tensors lack that dimension.
    Arguments(std::string_view op, const Tensor& q, const Tensor& k, const Tensor& v, const Optional& g,
              const Optional& beta, const Optional& state, const Optional& cu_seqlens, double scale, int64_t chunk,
              bool has_time) {
        const int64_t t = has_time ? 1 : 0;
        dtype = checked_dtype(q, op, "q");
        PYOPS_CHECK(q.dim() == 3 + t, op, "q", has_time ? "must be [B, T, H, K]" : "must be [B, H, K]", shape_text(q));
        check_shape(k, op, "k", sizes_of(q));
        PYOPS_CHECK(v.dim() == 3 + t, op, "v", has_time ? "must be [B, T, HV, V]" : "must be [B, HV, V]",
                    shape_text(v));
        PYOPS_CHECK(checked_dtype(k, op, "k") == dtype, op, "k", "must have q's dtype",
                    torch::headeronly::toString(k.scalar_type()));
        PYOPS_CHECK(checked_dtype(v, op, "v") == dtype, op, "v", "must have q's dtype",
                    torch::headeronly::toString(v.scalar_type()));
        batch = q.size(0);
        time = has_time ? q.size(1) : 1;
        const int64_t heads = q.size(1 + t), value_heads = v.size(1 + t);
        for (int64_t d = 0; d < 1 + t; ++d)
            PYOPS_CHECK(v.size(d) == q.size(d), op, "v", "must have q's batch and length", shape_text(v));
        PYOPS_CHECK(heads > 0 ? value_heads % heads == 0 : value_heads == 0, op, "v",
                    "must have a multiple of q's " + std::to_string(heads) + " heads", shape_text(v));

        LinearAttention& p = problem;
        p.length = time;
        p.value_heads = value_heads;
        p.key_dim = q.size(2 + t);
        p.value_dim = v.size(2 + t);
        p.q_group = heads ? value_heads / heads : 1;
        p.scale = scale;
        p.chunk = chunk;
        PYOPS_CHECK(chunk >= 0 && (chunk & (chunk - 1)) == 0, op, "chunk_size", "must be a power of two, or 0",
                    std::to_string(chunk));
        p.q = view(q, dtype, true, has_time);
        p.k = view(k, dtype, true, has_time);
        p.v = view(v, dtype, true, has_time);
        const auto per_head = [&](const Tensor& x, const char* argument, bool has_last) {
            const int64_t own = x.dim() > 1 + t ? x.size(1 + t) : -1;
            PYOPS_CHECK(own == heads || own == value_heads, op, argument,
                        "must have q's or v's number of heads in dimension " + std::to_string(1 + t), shape_text(x));
            std::vector<int64_t> wanted{batch};
            if (has_time) wanted.push_back(time);
            wanted.push_back(own);
            if (has_last) wanted.push_back(p.key_dim);
            check_shape(x, op, argument, wanted);
            return own ? value_heads / own : 1;
        };
        if (g) {
            const bool vector = g->dim() == 3 + t;
            p.gate = vector ? Gate::Vector : Gate::Scalar;
            p.gate_group = per_head(*g, "g", vector);
            p.g = view(*g, checked_dtype(*g, op, "g"), vector, has_time);
        }
        if (beta) {
            p.delta = true;
            p.beta_group = per_head(*beta, "beta", false);
            p.beta = view(*beta, checked_dtype(*beta, op, "beta"), false, has_time);
        }
        p.sequences = batch;
        if (cu_seqlens) read_starts(op, *cu_seqlens);
        if (state) {
            check_shape(*state, op, has_time ? "initial_state" : "state",
                        {p.sequences, value_heads, p.key_dim, p.value_dim});
            p.initial_state = state_view(*state, checked_dtype(*state, op, has_time ? "initial_state" : "state"));
        }
    }

    std::vector<int64_t> state_shape() const {
        return {problem.sequences, problem.value_heads, problem.key_dim, problem.value_dim};
    }

  private:
    void read_starts(std::string_view op, const Tensor& cu_seqlens) {
        const bool wide = cu_seqlens.scalar_type() == ScalarType::Long;
        PYOPS_CHECK(wide || cu_seqlens.scalar_type() == ScalarType::Int, op, "cu_seqlens", "must be int32 or int64",
                    torch::headeronly::toString(cu_seqlens.scalar_type()));
        PYOPS_CHECK(cu_seqlens.dim() == 1 && cu_seqlens.size(0) >= 1, op, "cu_seqlens", "must be [N + 1]",
                    shape_text(cu_seqlens));
        PYOPS_CHECK(batch == 1, op, "cu_seqlens", "needs a batch of 1", std::to_string(batch));
        for (int64_t i = 0; i < cu_seqlens.size(0); ++i) {
            const int64_t at = i * cu_seqlens.stride(0);
            starts.push_back(wide ? static_cast<const int64_t*>(cu_seqlens.data_ptr())[at]
                                  : static_cast<const int32_t*>(cu_seqlens.data_ptr())[at]);
            if (i > 0)
                PYOPS_CHECK(starts[static_cast<size_t>(i)] >= starts[static_cast<size_t>(i) - 1], op, "cu_seqlens",
                            "must not decrease", std::to_string(starts.back()));
        }
        PYOPS_CHECK(starts.front() == 0, op, "cu_seqlens", "must start at 0", std::to_string(starts.front()));
        PYOPS_CHECK(starts.back() == time, op, "cu_seqlens", "must end at " + std::to_string(time),
                    std::to_string(starts.back()));
        problem.sequences = cu_seqlens.size(0) - 1;
        problem.starts = starts.data();
    }
};

std::tuple<Tensor, Tensor> linear_attention(Tensor q, Tensor k, Tensor v, Optional g, Optional beta,
                                            Optional initial_state, Optional cu_seqlens, double scale,
                                            int64_t chunk_size) {
    constexpr std::string_view op = "linear_attention";
    const Arguments a(op, q, k, v, g, beta, initial_state, cu_seqlens, scale, chunk_size, true);
    Tensor o = allocate(q, sizes_of(v));
    Tensor state = allocate(q, a.state_shape(), state_type(a.dtype));
    PYOPS_ISA_CALL(linear_attention, a.problem, view(o, a.dtype, true),
                   state_view(state, a.dtype == DType::F64 ? DType::F64 : DType::F32), kernel_threads());
    return {o, state};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> linear_attention_backward(
    Tensor grad_o, Tensor grad_state, Tensor q, Tensor k, Tensor v, Optional g, Optional beta, Optional initial_state,
    Optional cu_seqlens, double scale, int64_t chunk_size) {
    constexpr std::string_view op = "linear_attention_backward";
    const Arguments a(op, q, k, v, g, beta, initial_state, cu_seqlens, scale, chunk_size, true);
    check_shape(grad_o, op, "grad_o", sizes_of(v));
    check_shape(grad_state, op, "grad_state", a.state_shape());
    LinearAttentionGradients d;
    d.o = view(grad_o, checked_dtype(grad_o, op, "grad_o"), true);
    d.state = state_view(grad_state, checked_dtype(grad_state, op, "grad_state"));
    Tensor dq = allocate(q, sizes_of(q)), dk = allocate(k, sizes_of(k)), dv = allocate(v, sizes_of(v));
    const auto like = [&](const Optional& x) {
        return x ? allocate(*x, sizes_of(*x)) : allocate(q, {0}, ScalarType::Float);
    };
    Tensor dg = like(g), dbeta = like(beta), dstate = like(initial_state);
    d.q = view(dq, a.dtype, true);
    d.k = view(dk, a.dtype, true);
    d.v = view(dv, a.dtype, true);
    if (g) d.g = view(dg, a.problem.g.dtype, a.problem.gate == Gate::Vector);
    if (beta) d.beta = view(dbeta, a.problem.beta.dtype, false);
    if (initial_state) d.initial_state = state_view(dstate, a.problem.initial_state.dtype);
    PYOPS_ISA_CALL(linear_attention_backward, a.problem, d, kernel_threads());
    return {dq, dk, dv, dg, dbeta, dstate};
}

Tensor linear_attention_step_(Tensor q, Tensor k, Tensor v, Optional g, Optional beta, Tensor state, double scale) {
    constexpr std::string_view op = "linear_attention_step_";
    const Arguments a(op, q, k, v, g, beta, state, {}, scale, 0, false);
    PYOPS_CHECK(state.scalar_type() == state_type(a.dtype), op, "state", "must be float32, or float64 if q is",
                torch::headeronly::toString(state.scalar_type()));
    for (int64_t i = 0; i < 4; ++i)
        PYOPS_CHECK(state.size(i) <= 1 || state.stride(i) != 0, op, "state",
                    "must not be expanded: elements would share memory", shape_text(state));
    Tensor o = allocate(q, sizes_of(v));
    PYOPS_ISA_CALL(linear_attention_step, a.problem, view(o, a.dtype, true, false), kernel_threads());
    return o;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(pyops, m) {
    m.def(
        "linear_attention(Tensor q, Tensor k, Tensor v, Tensor? g, Tensor? beta, Tensor? initial_state, "
        "Tensor? cu_seqlens, float scale, int chunk_size) -> (Tensor, Tensor)");
    m.def(
        "linear_attention_backward(Tensor grad_o, Tensor grad_state, Tensor q, Tensor k, Tensor v, Tensor? g, "
        "Tensor? beta, Tensor? initial_state, Tensor? cu_seqlens, float scale, int chunk_size) "
        "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
    m.def(
        "linear_attention_step_(Tensor q, Tensor k, Tensor v, Tensor? g, Tensor? beta, Tensor(a!) state, float scale) "
        "-> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(pyops, CPU, m) {
    m.impl("linear_attention", TORCH_BOX(&linear_attention));
    m.impl("linear_attention_backward", TORCH_BOX(&linear_attention_backward));
    m.impl("linear_attention_step_", TORCH_BOX(&linear_attention_step_));
}

}  // namespace pyops
