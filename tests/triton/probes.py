"""What tests call inside the interpreter's process, beyond the launchers themselves."""

import torch
from pyops.triton_kernels import lmo


def products(g, compute):
    """R = X X^T, Z = 2 R + 3 R R, Z + 5 I and 2 R + R Z of the scaled X, unpadded; then X and its scale."""
    wide = g.reshape(-1, *g.shape[-2:])
    x = lmo.Iteration(lmo.Source(wide, len(wide)), lmo.Target(torch.empty_like(wide)), compute, 0.0)
    r = x.symmetric(x.x, x.x, scale=x.scale)
    z, q = x.symmetric(r, r, 2.0, r, 3.0, diagonal=5.0)
    t = x.symmetric(r, z, 2.0, r)
    n, m = wide.shape[-2:]
    carried = x.x[0] if x.carry is None else x.carry
    return tuple(d.double().sum(0)[:, :n, :n] for d in (r, z, q, t)), carried[:, :n, :m], x.scale
