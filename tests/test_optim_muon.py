"""Muon against torch.optim.Muon, and what it checks and offers beyond it."""

import math

import pytest
import torch
from torch import nn

from pyops.optim import Muon

JORDAN = (3.4445, -4.7750, 2.0315)


def muon64(w, grads, lr, wd, momentum, nesterov, adjust, steps=5, eps=1e-7):
    """The formulas of torch.optim.Muon's documentation in float64, on the singular values."""
    m = torch.zeros_like(w)
    for g in grads:
        m = m + (1 - momentum) * (g - m)
        d = g + momentum * (m - g) if nesterov else m
        u, s, vh = torch.linalg.svd(d, full_matrices=False)
        s = s / max(s.norm().item(), eps)
        for _ in range(steps):
            s = JORDAN[0] * s + JORDAN[1] * s**3 + JORDAN[2] * s**5
        w = (1 - lr * wd) * w - lr * adjust(*w.shape) * (u @ torch.diag(s) @ vh)
    return w


ADJUST = {
    None: lambda r, c: math.sqrt(max(1, r / c)),
    "original": lambda r, c: math.sqrt(max(1, r / c)),
    "match_rms_adamw": lambda r, c: 0.2 * math.sqrt(max(r, c)),
    "spectral": lambda r, c: math.sqrt(r / c),
    "unit_rms": lambda r, c: math.sqrt(max(r, c)),
    "none": lambda r, c: 1.0,
}


def run(cls, w, grads, **kwargs):
    p = nn.Parameter(w.clone())
    opt = cls([p], **kwargs)
    for g in grads:
        p.grad = g.clone()
        opt.step()
    return p.detach()


def problem(shape, n=8, seed=0):
    generator = torch.Generator().manual_seed(seed)
    grads = torch.randn(n, *shape, dtype=torch.float64, generator=generator)
    return torch.randn(shape, dtype=torch.float64, generator=generator), grads


@pytest.mark.parametrize("adjust", ADJUST, ids=str)
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (16, 16)])
def test_float64_is_the_formula(shape, nesterov, adjust):
    w, grads = problem(shape)
    kwargs = {"lr": 0.05, "weight_decay": 0.2, "momentum": 0.9, "nesterov": nesterov}
    wanted = muon64(w, grads, 0.05, 0.2, 0.9, nesterov, ADJUST[adjust])
    ours = run(Muon, w, grads, adjust_lr_fn=adjust, compute_dtype=torch.float64, **kwargs)
    assert (ours - wanted).norm() < 1e-10 * wanted.norm()


@pytest.mark.parametrize("adjust", [None, "match_rms_adamw"], ids=str)
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (32, 32), (8, 96)])
def test_as_close_to_the_formula_as_torch(shape, nesterov, adjust):
    """Both round to bfloat16 inside; ours is within the gate of its products, and where it iterates as torch
    does (no
    Gram matrices, which the kernel takes for long matrices) within twice torch's own distance from
    float64."""
    w, grads = problem(shape)
    kwargs = {"lr": 0.05, "weight_decay": 0.0, "momentum": 0.9, "nesterov": nesterov, "adjust_lr_fn": adjust}
    wanted = muon64(w, grads, 0.05, 0.0, 0.9, nesterov, ADJUST[adjust]) - w
    ours = run(Muon, w.float(), grads.float(), **kwargs).double() - w
    theirs = run(torch.optim.Muon, w.float(), grads.float(), **kwargs).double() - w
    distance = (ours - wanted).norm()
    assert distance < 20 * 2e-3 * wanted.norm()
    if max(shape) < 1.75 * min(shape):
        assert distance < 2 * (theirs - wanted).norm()


def test_defaults_and_positional_arguments_are_torchs():
    ours, theirs = (
        cls([nn.Parameter(torch.randn(3, 4))]).param_groups[0] for cls in (Muon, torch.optim.Muon)
    )
    for name, value in theirs.items():
        if name != "params":
            assert ours[name] == value, name
    args = (0.02, 0.3, 0.8, False, (2.0, -1.5, 0.5), 1e-6, 4, "match_rms_adamw")
    w, grads = problem((6, 9))
    ours, theirs = nn.Parameter(w.float()), nn.Parameter(w.float())
    opts = Muon([ours], *args), torch.optim.Muon([theirs], *args)
    for p, opt in zip((ours, theirs), opts, strict=True):
        p.grad = grads[0].float()
        opt.step()
    assert torch.allclose(ours, theirs, atol=0.01)


@pytest.mark.parametrize(
    ("source", "target"), [(torch.optim.Muon, Muon), (Muon, torch.optim.Muon), (Muon, Muon)]
)
def test_checkpoints_load_in_both_directions(source, target):
    w, grads = problem((12, 20), n=6)
    p = nn.Parameter(w.float().clone())
    opt = source([p], lr=0.05, momentum=0.9)
    results = []
    for i, g in enumerate(grads.float()):
        if i == 3:
            q = nn.Parameter(p.detach().clone())
            other = target([q], lr=0.9, momentum=0.1, nesterov=False)
            other.load_state_dict(opt.state_dict())
        if i >= 3:
            q.grad = g.clone()
            other.step()
        p.grad = g.clone()
        opt.step()
        results = p.detach(), q.detach() if i >= 3 else None
    assert (results[0] - results[1]).norm() < 0.01 * results[0].norm()
    assert other.param_groups[0]["lr"] == 0.05


def test_bfloat16_gradients_keep_the_momentum_buffer():
    """With bfloat16 gradients and no Nesterov, nothing may normalise the buffer in place."""
    g = torch.randn(8, 16).bfloat16() * 7
    p = nn.Parameter(torch.zeros(8, 16, dtype=torch.bfloat16))
    opt = Muon([p], momentum=0.5, nesterov=False)
    p.grad = g.clone()
    opt.step()
    assert torch.allclose(opt.state[p]["momentum_buffer"].float(), 0.5 * g.float(), rtol=1e-2)
    assert torch.equal(p.grad, g)


@pytest.mark.parametrize("size", [1e-30, 1e25])
def test_gradients_of_any_size(size):
    w, grads = problem((8, 12), n=2)
    ours = run(Muon, w.float() * 0, grads.float() * size, eps=0.0)
    plain = run(Muon, w.float() * 0, grads.float(), eps=0.0)
    assert (ours - plain).norm() < 0.05 * plain.norm()


@pytest.mark.parametrize("shape", [(1, 9), (9, 1), (1, 1)])
def test_vectors_are_normalised_exactly(shape):
    w, grads = problem(shape, n=1)
    ours = run(Muon, w * 0, grads, lr=1.0, momentum=0.0, adjust_lr_fn="none", eps=0.0)
    assert torch.allclose(ours, -grads[0] / grads[0].norm(), rtol=1e-6)


def test_kernels_are_flattened_on_request():
    w, grads = problem((6, 4, 3, 3), n=3)
    with pytest.raises(ValueError, match="flatten=True"):
        Muon([nn.Parameter(w)])
    ours = run(Muon, w, grads, flatten=True, compute_dtype=torch.float64)
    flat = run(Muon, w.flatten(1), grads.flatten(2), compute_dtype=torch.float64)
    assert torch.allclose(ours.flatten(1), flat, rtol=1e-12)


def test_split_sizes_and_heads():
    w, grads = problem((12, 6), n=3)
    whole = run(Muon, w, grads, split_sizes=(8, 4), num_heads=(2, 1), compute_dtype=torch.float64)
    parts = [run(Muon, w[i : i + 4], grads[:, i : i + 4], compute_dtype=torch.float64) for i in (0, 4, 8)]
    assert torch.allclose(whole, torch.cat(parts), rtol=1e-12)
    columns = run(
        Muon, w, grads, num_heads=3, split_dim=1, adjust_lr_fn="spectral", compute_dtype=torch.float64
    )
    parts = [
        run(
            Muon,
            w[:, i : i + 2],
            grads[:, :, i : i + 2],
            adjust_lr_fn="spectral",
            compute_dtype=torch.float64,
        )
        for i in (0, 2, 4)
    ]
    assert torch.allclose(columns, torch.cat(parts, 1), rtol=1e-12)


BAD = [
    ({"lr": -1.0}, ValueError, "lr"),
    ({"lr": torch.ones(2)}, ValueError, "lr"),
    ({"momentum": 1.5}, ValueError, "momentum"),
    ({"weight_decay": -0.1}, ValueError, "weight_decay"),
    ({"ns_steps": -1}, ValueError, "ns_steps"),
    ({"ns_steps": 100}, ValueError, "ns_steps"),
    ({"ns_steps": 2.5}, TypeError, "ns_steps"),
    ({"eps": -1e-7}, ValueError, "eps"),
    ({"eps": math.nan}, ValueError, "eps"),
    ({"ns_coefficients": (1.0, 2.0)}, ValueError, "ns_coefficients"),
    ({"ns_coefficients": (1.0, 2.0, math.inf)}, ValueError, "coefficients"),
    ({"adjust_lr_fn": "adamw"}, ValueError, "adjust_lr_fn"),
    ({"compute_dtype": "fp8"}, ValueError, "compute_dtype"),
    ({"num_heads": 3}, ValueError, "num_heads"),
]


@pytest.mark.parametrize(("kwargs", "error", "name"), BAD, ids=lambda x: str(x)[:40])
def test_bad_setting_is_named(kwargs, error, name):
    with pytest.raises(error, match=name):
        Muon([nn.Parameter(torch.randn(4, 4))], **kwargs)


def test_bad_parameters():
    with pytest.raises(ValueError, match=r"parameter 1: Muon needs matrices.*\(4,\): .*Scion"):
        Muon([nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4))], flatten=True)
    with pytest.raises(TypeError, match="complex64"):
        Muon([torch.zeros(4, 4, dtype=torch.complex64)])


def test_zero_steps_give_the_normalised_average_and_foreach_is_taken():
    w, grads = problem((4, 6), n=1)
    ours = run(
        Muon, w * 0, grads, lr=1.0, momentum=0.0, ns_steps=0, foreach=True, compute_dtype=torch.float64
    )
    assert torch.allclose(ours, -grads[0] / grads[0].norm(), rtol=1e-12)


def test_error_if_nonfinite():
    p = nn.Parameter(torch.randn(4, 4))
    opt, before = Muon([p], error_if_nonfinite=True), p.detach().clone()
    p.grad = torch.full((4, 4), math.nan)
    with pytest.raises(RuntimeError, match="parameter 0"):
        opt.step()
    assert torch.equal(p, before) and not opt.state


def test_grad_scaler_closure_and_scheduler():
    torch.manual_seed(0)
    p, x = nn.Parameter(torch.randn(4, 6)), torch.randn(8, 6)
    opt = Muon([p], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 5)
    losses = []
    for _ in range(5):
        opt.zero_grad()
        loss = (x @ p.T).square().mean()
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        scheduler.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert opt.step(lambda: (x @ p.T).square().mean()).item() < losses[0]
