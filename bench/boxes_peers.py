"""Pairwise box volumes in plain torch at its best, and box-embeddings. Every builder may raise Missing.

Both temperatures are one number, TAU, or 0 for hard boxes. A form of Gumbel boxes first brings the corners of
queries and items where pairs need little work, which is [B, D] and [N, D]:

    log domain   z / tau and 2 gamma - Z / tau, which two logaddexp join: log side = log softplus(-(z + Z'))
    exp domain   P = exp((z - c) / tau), Q = exp((c - Z) / tau + 2 gamma), which add up: log1p(1 / (P Q))

in units of tau. c, a centre per dimension, cancels.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.case import Impl, Runner, need
from bench.linear_attention_peers import runner

TAU = 0.1
GAMMA = 0.5772156649015329  # Euler's
ROWS, COLUMNS = 16, 4096  # of a chunk: its working tensors stay in or near the cache
Volumes = Callable[..., Tensor]  # [B, N] of qz, qZ, iz, iZ


def may_write() -> bool:
    """Whether a result may go into the memory of an operand, which spares eager torch a large tensor."""
    return not torch.is_grad_enabled() and not torch.compiler.is_compiling()


# ---- forms: of all corners, then of pairs


class Form(NamedTuple):
    bring: Callable[..., tuple[Tensor, ...]]  # qz, qZ, iz, iZ to four tensors of the same shapes
    pair: Volumes  # [b, n, D] in between


def log_domain(qz: Tensor, qZ: Tensor, iz: Tensor, iZ: Tensor) -> tuple[Tensor, ...]:
    return qz / TAU, 2 * GAMMA - qZ / TAU, iz / TAU, 2 * GAMMA - iZ / TAU


def log_pair(qz: Tensor, qZ: Tensor, iz: Tensor, iZ: Tensor) -> Tensor:
    z, upper = torch.logaddexp(qz[:, None], iz), torch.logaddexp(qZ[:, None], iZ)
    side = F.softplus(z.add_(upper).neg_()).log_() if may_write() else F.softplus(-(z + upper)).log()
    return side.sum(-1) + iz.shape[1] * math.log(TAU)


def exp_domain(qz: Tensor, qZ: Tensor, iz: Tensor, iZ: Tensor) -> tuple[Tensor, ...]:
    c = 0.5 * (iz.detach().mean(0) + iZ.detach().mean(0))
    lower = (((z - c) / TAU).exp() for z in (qz, iz))
    upper = (((c - Z) / TAU + 2 * GAMMA).exp() for Z in (qZ, iZ))
    (qp, ip), (qq, iq) = lower, upper
    return qp, qq, ip, iq


def exp_pair(qp: Tensor, qq: Tensor, ip: Tensor, iq: Tensor) -> Tensor:
    p, q = qp[:, None] + ip, qq[:, None] + iq
    side = p.mul_(q).reciprocal_().log1p_().log_() if may_write() else (p * q).reciprocal().log1p().log()
    return side.sum(-1) + ip.shape[1] * math.log(TAU)


def corners(*corners: Tensor) -> tuple[Tensor, ...]:
    return corners


def hard_pair(qz: Tensor, qZ: Tensor, iz: Tensor, iZ: Tensor) -> Tensor:
    z, upper = torch.maximum(qz[:, None], iz), torch.minimum(qZ[:, None], iZ)
    if may_write():
        return upper.sub_(z).relu_().log_().sum(-1)
    return (upper - z).relu().log().sum(-1)


FORMS = {
    "log": Form(log_domain, log_pair),
    "exp": Form(exp_domain, exp_pair),
    "hard": Form(corners, hard_pair),
}


def written_out(qz: Tensor, qZ: Tensor, iz: Tensor, iZ: Tensor) -> Tensor:
    """The formula as it stands in the paper, with a new tensor for every operation."""
    z = TAU * torch.logaddexp(qz[:, None] / TAU, iz / TAU)
    upper = -TAU * torch.logaddexp(-qZ[:, None] / TAU, -iZ / TAU)
    return F.softplus(upper - z - 2 * GAMMA * TAU, beta=1 / TAU).log().sum(-1)


# ---- whole, in chunks, compiled


def whole(form: Form) -> Volumes:
    return lambda *corners: form.pair(*form.bring(*corners))


def chunked(form: Form, rows: int = ROWS) -> Volumes:
    """Some queries at a time, without gradients."""

    def run(*corners: Tensor) -> Tensor:
        q, p, *items = form.bring(*corners)
        out = q.new_empty(len(q), len(items[0]))
        for part, *queries in zip(*(t.split(rows) for t in (out, q, p)), strict=True):
            part.copy_(form.pair(*queries, *items))
        return out

    return run


def chunked_both_ways(form: Form, rows: int = ROWS) -> Callable[..., tuple[Tensor, ...]]:
    """Forward and backward pass of some queries at a time: (volumes, gradients) of the corners and the
    gradient of the volumes. The gradients of items add up, and go back to the corners once."""

    def run(*args: Tensor) -> tuple[Tensor, ...]:
        *corners, grad = args
        with torch.enable_grad():
            brought = form.bring(*corners)
        q, p, *items = (t.detach() for t in brought)
        pieces = list(zip(q.split(rows), p.split(rows), strict=True))
        for t in (*(t for both in pieces for t in both), *items):
            t.requires_grad_()
        out = torch.empty_like(grad)
        for queries, part, own in zip(pieces, out.split(rows), grad.split(rows), strict=True):
            with torch.enable_grad():
                logs = form.pair(*queries, *items)
            part.copy_(logs.detach())
            torch.autograd.backward(logs, own)
        found = [torch.cat([both[side].grad for both in pieces]) for side in range(2)]
        found += [t.grad for t in items]
        return out, *torch.autograd.grad(brought, corners, found)

    return run


NAMES = {"log": "torch eager", "exp": "torch exp-domain", "hard": "torch eager"}
CHUNKS = f"chunks of {ROWS} rows"


def eager(key: str, backward: bool = False) -> Impl:
    return Impl(NAMES[key], lambda: runner(whole(FORMS[key]), backward))


def as_written() -> Impl:
    return Impl("torch eager, as written", lambda: runner(written_out, False))


def in_chunks(key: str, backward: bool = False) -> Impl:
    form = FORMS[key]

    def build() -> Runner:
        if not backward:
            return runner(chunked(form), False)
        return Runner(chunked_both_ways(form), runner(whole(form), True).prepare)

    return Impl(f"{NAMES[key]}, {CHUNKS}", build)


def compiled(key: str, backward: bool = False) -> Impl:
    name = "torch.compile, exp-domain" if key == "exp" else "torch.compile"
    return Impl(name, lambda: runner(torch.compile(whole(FORMS[key]), dynamic=False), backward))


# ---- box-embeddings


def package(backward: bool = False, hard: bool = False) -> Impl:
    """Its functions on box tensors that broadcast; the hard one counts a side of 0 as 1e-13."""

    def build() -> Runner:
        tensor = need("box_embeddings.parameterizations.box_tensor").BoxTensor
        intersections = need("box_embeddings.modules.intersection")
        volumes = need("box_embeddings.modules.volume")
        meet, volume = (
            (intersections.HardIntersection(), volumes.HardVolume(log_scale=True))
            if hard
            else (
                intersections.GumbelIntersection(intersection_temperature=TAU),
                volumes.BesselApproxVolume(
                    log_scale=True, volume_temperature=TAU, intersection_temperature=TAU
                ),
            )
        )

        def run(qz: Tensor, qZ: Tensor, iz: Tensor, iZ: Tensor) -> Tensor:
            left = tensor((qz[:, None], qZ[:, None]))
            return volume(meet(left, tensor((iz[None], iZ[None]))))

        return runner(run, backward)

    return Impl("box-embeddings 0.1.0", build)


# ---- the best items of composed queries


def meet(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    z = TAU * torch.logaddexp(a[0] / TAU, b[0] / TAU)
    return z, -TAU * torch.logaddexp(-a[1] / TAU, -b[1] / TAU)


def own_log_volume(iz: Tensor, iZ: Tensor) -> Tensor:
    return F.softplus((iZ - iz) / TAU - 2 * GAMMA).log().sum(-1) + iz.shape[1] * math.log(TAU)


def subtract(logs: Tensor, without: Tensor) -> Tensor:
    """log(e^logs - e^without), in the memory of both."""
    return logs.add_(without.sub_(logs).expm1_().neg_().log_())


def topk(key: str, k: int, compile_whole: bool = False, rows: int = ROWS, columns: int = COLUMNS) -> Impl:
    """All scores, by chunks or compiled, then torch.topk. Inputs are the user, the attribute, perhaps the
    attribute that is excluded, and the items."""
    form = FORMS[key]

    def build() -> Runner:
        fused = torch.compile(whole(form), dynamic=False) if compile_whole else None

        def volumes(queries: tuple[Tensor, Tensor], items: list[Tensor]) -> Tensor:
            if fused is not None:
                return fused(*queries, *items)
            q, p, i, j = form.bring(*queries, *items)
            out = q.new_empty(len(q), len(i))
            for column in (slice(c, c + columns) for c in range(0, len(i), columns)):
                for row in (slice(r, r + rows) for r in range(0, len(q), rows)):
                    out[row, column] = form.pair(q[row], p[row], i[column], j[column])
            return out

        def run(*args: Tensor) -> tuple[Tensor, Tensor]:
            (user, attribute, *without), items = pairs(args[:-2]), list(args[-2:])
            both = meet(user, attribute)
            scores = volumes(both, items)
            if without:
                subtract(scores, volumes(meet(both, *without), items))
            found = scores.sub_(own_log_volume(*items)).topk(k)
            return found.values, found.indices

        return runner(run, False)

    name = "torch.compile" if compile_whole else f"{NAMES[key]}, chunks of {rows} x {columns}"
    return Impl(f"{name}, torch.topk", build)


def pairs(tensors: tuple[Tensor, ...]) -> list[tuple[Tensor, Tensor]]:
    return list(zip(tensors[::2], tensors[1::2], strict=True))
