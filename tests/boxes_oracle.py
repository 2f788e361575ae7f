"""Float64 oracle of boxes: the definition on the whole cube of queries x items x dimensions.

Every sum of exponentials is torch.logsumexp of corners over tau, the logarithm of softplus goes by log(log1p)
and, below -30, by its linear tail; gradients are those of autograd. The ops take maxima plus corrections,
tables or products of exponentials instead, and have hand-written gradients.
"""

import math

import torch

GAMMA = 0.5772156649015329


def smooth_max(xs, tau):
    """tau LSE(x / tau) over the first dimension of a stack."""
    xs = torch.stack(torch.broadcast_tensors(*xs))
    return xs.amax(0) if tau == 0 else tau * torch.logsumexp(xs / tau, 0)


def intersection(boxes, tau):
    return smooth_max([z for z, _ in boxes], tau), -smooth_max([-Z for _, Z in boxes], tau)


def log_side(w, nu):
    """nu: a number, or a tensor per dimension."""
    if not isinstance(nu, torch.Tensor) and nu == 0:
        return torch.where(w > 0, torch.where(w > 0, w, 1.0).log(), torch.where(w.isnan(), w, -math.inf))
    x = w / nu
    inside = x.clamp(-30, 700)
    soft = torch.where(x > 30, x + torch.log1p(torch.exp(-x.clamp(min=0))), torch.log1p(inside.exp()))
    logs = torch.where(x < -30, x, torch.where(x < -30, 1.0, soft).log())
    return logs + (nu.log() if isinstance(nu, torch.Tensor) else math.log(nu))


def offset(tau, nu):
    return 2 * GAMMA * tau if tau > 0 and (isinstance(nu, torch.Tensor) or nu > 0) else 0.0


def log_volume(box, tau, nu, shift=None):
    """The volume that "auto" chooses, with another offset by ``shift``."""
    z, Z = box
    w = Z - z - (offset(tau, nu) if shift is None else shift)
    logs = log_side(w, nu)
    empty = (logs == -math.inf).any(-1) & ~logs.isnan().any(-1)
    return torch.where(empty, -math.inf, torch.where(empty.unsqueeze(-1), 0.0, logs).sum(-1))


def pairwise(qz, qZ, iz, iZ, tau, nu, shift=None):
    """[B, N] from [B, D] and [N, D]."""
    both = intersection([(qz.unsqueeze(1), qZ.unsqueeze(1)), (iz, iZ)], tau)
    return log_volume(both, tau, nu, shift)


def containment(qz, qZ, iz, iZ, tau, nu):
    return pairwise(qz, qZ, iz, iZ, tau, nu) - log_volume((iz, iZ), tau, nu)


def composed(queries, without, item, tau, nu):
    """[B, N]: log volume of what is in all queries and the items and in none of ``without``."""
    total = 0.0
    for subset in range(2 ** len(without)):
        chosen = [box for i, box in enumerate(without) if subset >> i & 1]
        z, Z = intersection([*queries, *chosen], tau)
        total = total + (-1) ** len(chosen) * pairwise(z, Z, *item, tau, nu).exp()
    return torch.where(total > 0, total, 0.0).log()


def topk(scores, k):
    """(values, indices) by sorting in Python: NaN last, equal scores by lower index, padded."""
    values = torch.full((len(scores), k), -math.inf, dtype=scores.dtype)
    indices = torch.full((len(scores), k), -1, dtype=torch.int64)
    for b, row in enumerate(scores.tolist()):
        order = sorted(range(len(row)), key=lambda n: (math.isnan(row[n]), -row[n], n))[:k]
        order = sorted(order, key=lambda n: (math.isnan(row[n]), 0 if math.isnan(row[n]) else -row[n], n))
        for j, n in enumerate(order):
            values[b, j], indices[b, j] = row[n], n
    return values, indices


def gate(dtype, dim, log_volume):
    """Largest absolute error of log volumes: 2e-6 max(1, |log volume|) + 1e-6 D; 1e-12 in float64."""
    size = log_volume.abs().clamp(min=1)
    return 1e-12 * size if dtype == torch.float64 else 2e-6 * size + 1e-6 * dim


def condition(qz, qZ, iz, iZ, tau):
    """[B, N, D]: rounding of w relative to w, what hard sides of smooth corners (nu = 0 < tau) amplify it by.

    w = 0 is where their logarithm ends; all other sides are a single difference of corners, or soft.
    """
    z, Z = intersection([(qz.unsqueeze(1), qZ.unsqueeze(1)), (iz, iZ)], tau)
    w = Z - z
    return torch.where(w > 0, (z.abs() + Z.abs() + tau) / w, 0.0)


def assert_log_volumes(found, wanted, dtype, dim, slack=0.0):
    """Elementwise, with ``slack`` above the gate; infinities and NaN must agree."""
    found = found.double()
    assert found.shape == wanted.shape, f"shape {tuple(found.shape)}, not {tuple(wanted.shape)}"
    assert torch.equal(found.isnan(), wanted.isnan())
    infinite = wanted.isinf()
    assert torch.equal(found[infinite], wanted[infinite])
    finite = wanted.isfinite()
    error = ((found - wanted).abs() - gate(dtype, dim, wanted) - slack)[finite]
    assert not error.numel() or error.max() <= 0, f"above the gate by {error.max():.3g}"


def assert_gradients(found, wanted, gate):
    """Error against the largest entry of the exact gradient, of all its parts."""
    largest = max(w.abs().max().item() for w in wanted if w.numel())
    for f, w in zip(found, wanted, strict=True):
        assert f.shape == w.shape
        error = (f.double() - w).abs().max().item() if w.numel() else 0.0
        assert error <= gate * largest, f"gradient error {error / largest:.3g} is above its gate {gate:.3g}"


def boxes(*shape, dtype=torch.float64, spread=1.0, side=0.5):
    """Random boxes, most of them not inverted."""
    z = torch.randn(*shape, dtype=torch.float64) * spread
    return z.to(dtype), (z + side * torch.randn(*shape, dtype=torch.float64).exp()).to(dtype)
