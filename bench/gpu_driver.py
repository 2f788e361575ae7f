"""Every GPU kernel once, at small awkward sizes, against plain torch in float64: what compute-sanitizer runs.

    python bench/gpu_driver.py --device cuda [--only directions]

Exits 1 and names the case when a result is wrong.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import pyops

SHAPES = ((1, 1), (1, 37), (33, 1), (31, 65), (3, 17, 130))
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
NORMS = ("sign", "col", "row", "euclidean")
JORDAN = (3.4445, -4.7750, 2.0315)


def direction(g: torch.Tensor, norm: str) -> torch.Tensor:
    if norm == "sign":
        return torch.sign(g)
    dim = {"col": -2, "row": -1, "euclidean": (-2, -1)}[norm]
    length = torch.linalg.vector_norm(g, dim=dim, keepdim=True)
    return torch.where(length > 0, g / length, 0.0)


def newton_schulz(g: torch.Tensor, steps: int) -> torch.Tensor:
    a, b, c = JORDAN
    x = g / torch.linalg.matrix_norm(g)[..., None, None]
    if min(g.shape[-2:]) == 1:
        return x
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def compare(what: str, got: torch.Tensor, wanted: torch.Tensor, tolerance: float) -> list[str]:
    error = float((got.double().cpu() - wanted.cpu()).abs().max()) if got.numel() else 0.0
    return [] if error <= tolerance else [f"{what}: error {error:.3g} above {tolerance:.3g}"]


def directions(device: str) -> list[str]:
    wrong = []
    for norm, shape, dtype in itertools.product(NORMS, SHAPES, DTYPES):
        base = torch.randn(shape, device=device, dtype=torch.float64).to(dtype)
        views = {
            "contiguous": base,
            "transposed": base.mT.contiguous().mT,
            "strided": torch.stack((base, base), -1)[..., 0],
        }
        for view, g in views.items():
            got = torch.ops.pyops.unit_direction(g, norm, 0.5)
            wanted = 0.5 * direction(g.double(), norm)
            what = f"unit_direction {norm} {view} {shape} {dtype}"
            wrong += compare(what, got, wanted, 4 * torch.finfo(dtype).eps)
    return wrong


def step(device: str) -> list[str]:
    """The fused step for the vector norms, with a momentum buffer and in the light form."""
    wrong = []
    for norm, dtype, light in itertools.product(NORMS, DTYPES, (False, True)):
        grads = [torch.randn(shape, device=device, dtype=torch.float64).to(dtype) for shape in SHAPES]
        weights = [torch.randn_like(g) for g in grads]
        before = [(w.clone().double(), g.clone().double()) for w, g in zip(weights, grads, strict=True)]
        momenta = [] if light else [torch.zeros_like(g) for g in grads]
        shrinks, steps = [0.9] * len(grads), [0.1] * len(grads)
        torch.ops.pyops.lmo_step_(
            weights, grads, momenta, norm, shrinks, steps, 0.9, False, 0.9 if light else 1.0,
            list(JORDAN) * 5, [1, 3], "auto", "float32", 0.0, -1,
        )  # fmt: skip
        for w, (w0, g0) in zip(weights, before, strict=True):
            what = f"lmo_step_ {norm} light={light} {tuple(w.shape)} {dtype}"
            wrong += compare(what, w, 0.9 * w0 - 0.1 * direction(g0, norm), 16 * torch.finfo(dtype).eps)
    return wrong


def polar(device: str) -> list[str]:
    wrong = []
    for shape, dtype in itertools.product(SHAPES, DTYPES[1:]):
        g = torch.randn(shape, device=device).to(dtype)
        got = pyops.polar(g, method="newton_schulz", steps=5)
        wrong += compare(f"polar {shape} {dtype}", got, newton_schulz(g.double(), 5), 0.1)
    return wrong


def recurrence(q, k, v, g, beta, state) -> tuple[torch.Tensor, torch.Tensor]:
    """One sequence of linear attention by its definition: q, k [T, H, K], v [T, H, V], state [H, K, V]."""
    out = [v[:0]]
    for t in range(len(q)):
        if g is not None:
            state = g[t].exp().reshape(len(state), -1, 1) * state
        u = v[t] if beta is None else beta[t, :, None] * (v[t] - torch.einsum("hk,hkv->hv", k[t], state))
        state = state + torch.einsum("hk,hv->hkv", k[t], u)
        out.append(q.shape[-1] ** -0.5 * torch.einsum("hk,hkv->hv", q[t], state)[None])
    return torch.cat(out), state


def attention_inputs(device: str, dtype: torch.dtype, gate: str, corrected: bool) -> list:
    """q, k, v, g, beta and initial state of three sequences; one is empty, two end inside a chunk."""
    length, heads, values, key, value = 83, 2, 4, 24, 40
    q, k, v = (
        torch.randn(1, length, n, width, device=device, dtype=torch.float64)
        for n, width in ((heads, key), (heads, key), (values, value))
    )
    k = torch.nn.functional.normalize(k, dim=-1)
    widths = {"none": None, "scalar": (), "vector": (key,)}[gate]
    g = None if widths is None else -torch.rand(1, length, heads, *widths, device=device)
    beta = torch.rand(1, length, values, device=device) if corrected else None
    state = torch.randn(3, values, key, value, device=device)
    inputs = [*(t.to(dtype) for t in (q, k, v)), g, beta, state]
    return [None if t is None else t.requires_grad_() for t in inputs]


def attention(device: str) -> list[str]:
    """Every form of linear attention, forward and backward, and its decode step."""
    wrong = []
    ends = [0, 70, 70, 83]
    for gate, corrected, dtype in itertools.product(("none", "scalar", "vector"), (False, True), DTYPES[1:3]):
        inputs = attention_inputs(device, dtype, gate, corrected)
        q, k, v, g, beta, state = inputs
        offsets = torch.tensor(ends, device=device)
        o, after = pyops.linear_attention(
            q, k, v, g=g, beta=beta, initial_state=state, output_final_state=True, cu_seqlens=offsets
        )
        wide = [None if t is None else t.detach().double().requires_grad_() for t in inputs]
        groups = v.shape[2] // q.shape[2]
        spread = [
            t if t is None or t.shape[2] == v.shape[2] else t.repeat_interleave(groups, 2) for t in wide[:5]
        ]
        parts = [
            recurrence(*(None if t is None else t[0, a:b] for t in spread), wide[5][n])
            for n, (a, b) in enumerate(itertools.pairwise(ends))
        ]
        wanted = [torch.cat([part[0] for part in parts])[None], torch.stack([part[1] for part in parts])]
        weights = [torch.randn_like(t) for t in wanted]
        results, checked = [o, after], list(wanted)
        for leaves, outputs, into in ((inputs, (o, after), results), (wide, wanted, checked)):
            loss = sum((w * t.double()).sum() for w, t in zip(weights, outputs, strict=True))
            into += torch.autograd.grad(loss, [t for t in leaves if t is not None])
        with torch.no_grad():
            token = [None if t is None else t[:, 0] for t in inputs[:5]]
            results += pyops.linear_attention_step(
                *token[:3], state[:1].clone(), g=token[3], beta=token[4], inplace=True
            )
            first = recurrence(*(None if t is None else t[0, :1] for t in spread), wide[5][0])
            checked += [first[0], first[1][None]]
        tolerance = 1e-4 if dtype == torch.float32 else 16 * torch.finfo(dtype).eps
        for i, (got, right) in enumerate(zip(results, checked, strict=True)):
            got, right = got.detach().double(), right.detach()
            size = float(right.abs().max())
            what = f"linear_attention {gate} beta={corrected} {dtype} result {i}"
            wrong += compare(what, got / size, right / size, tolerance)
    return wrong


def face_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    a, b = (torch.fft.fft(t.detach().double().cpu()) for t in (a, b))
    return torch.fft.ifft(torch.einsum("...ikf,...kjf->...ijf", a, b)).real


def tubal(device: str) -> list[str]:
    """t-products in every way that the kernels go, with gradients of a broadcast factor, and Gram tensors."""
    wrong = []
    for tubes, dtype in itertools.product((1, 2, 3, 5, 8, 12, 13, 16, 17, 32), DTYPES):
        a, b = torch.randn(2, 17, 9, tubes, device=device), torch.randn(9, 33, tubes, device=device)
        a, b = (t.to(dtype).transpose(-3, -2).contiguous().transpose(-3, -2) for t in (a, b))
        a, b = a.requires_grad_(), b.requires_grad_()
        c = pyops.tubal.tprod(a, b)
        weights = torch.randn_like(c)
        found = (c, *torch.autograd.grad(c, (a, b), weights), pyops.tubal.tgram(a.detach()))
        a_t, b_t = (pyops.tubal.ttranspose(t.detach().double().cpu()) for t in (a, b))
        by_a = face_product(a_t, weights).sum(0)
        wanted = (face_product(a, b), face_product(weights, b_t), by_a, face_product(a, a_t))
        for i, (got, right) in enumerate(zip(found, wanted, strict=True)):
            size = float(right.abs().max())
            tolerance = (4 if dtype in DTYPES[2:] else 64) * torch.finfo(dtype).eps
            wrong += compare(
                f"tprod {tubes} {dtype} result {i}", got.detach() / size, right / size, tolerance
            )
    return wrong


def log_volume(z: torch.Tensor, Z: torch.Tensor, tau: float, nu: float) -> torch.Tensor:
    """Of boxes by the definition, for nu > 0."""
    w = (Z - z - (2 * 0.5772156649015329 * tau if nu else 0.0)) / nu
    return (torch.nn.functional.softplus(w.clamp(min=-30)) * nu).log().sum(-1)


def boxes(device: str) -> list[str]:
    """Volumes of pairs and of chosen pairs with their gradients, and the best items."""
    wrong = []
    for (tau, nu), dtype in itertools.product(((0.1, 0.1), (0.1, 0.3), (0.01, 0.1)), DTYPES):
        z = torch.rand(75, 20, device=device, dtype=torch.float64)
        corners = [
            t.to(dtype).mT.contiguous().mT.requires_grad_() for t in (z[:9], z[:9] + 1, z[9:], z[9:] + 1)
        ]
        wide = [t.detach().double().requires_grad_() for t in corners]
        temperatures = {"intersection_temperature": tau, "volume_temperature": nu}
        ends = [
            tau * torch.logaddexp(a.unsqueeze(1) / tau, b / tau)
            for a, b in ((wide[0], wide[2]), (-wide[1], -wide[3]))
        ]
        wanted = log_volume(ends[0], -ends[1], tau, nu)
        pairs = pyops.boxes.pairwise_log_volume(corners[:2], corners[2:], **temperatures)
        q, i = torch.randint(9, (7,), device=device), torch.randint(66, (7, 5), device=device)
        some = pyops.boxes.sampled_scores(corners[:2], corners[2:], q, i, score="volume", **temperatures)
        best = pyops.boxes.box_topk(corners[:2], corners[2:], 5, score="volume", **temperatures)
        weights = torch.randn_like(pairs), torch.randn_like(some)
        chosen = wanted[q.unsqueeze(1), i]
        found = [pairs, some, best.values, wanted.gather(1, best.indices)]
        right = [wanted, chosen, *[wanted.topk(5).values] * 2]
        for outputs, leaves, into in (((pairs, some), corners, found), ((wanted, chosen), wide, right)):
            loss = sum((w * t.double()).sum() for w, t in zip(weights, outputs, strict=True))
            into += torch.autograd.grad(loss, leaves)
        for n, (got, exact) in enumerate(zip(found, right, strict=True)):
            size = float(exact.detach().abs().max())
            tolerance = 1e-4 if n < 4 or dtype == torch.float32 else 16 * torch.finfo(dtype).eps
            what = f"boxes tau={tau} nu={nu} {dtype} result {n}"
            wrong += compare(what, got.detach() / size, exact.detach() / size, max(tolerance, 1e-10))
    return wrong


PARTS = {
    "directions": directions,
    "step": step,
    "polar": polar,
    "attention": attention,
    "tubal": tubal,
    "boxes": boxes,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--only", choices=tuple(PARTS), action="append")
    options = parser.parse_args()
    torch.manual_seed(0)
    wrong = [line for name in options.only or PARTS for line in PARTS[name](options.device)]
    if options.device == "cuda":
        torch.cuda.synchronize()
    print("\n".join([*wrong, f"{len(wrong)} wrong results on {options.device}"]))
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
