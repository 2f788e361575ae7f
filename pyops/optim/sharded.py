"""The step for DTensor parameters: tensor parallel, FSDP2, or replicated.

The momentum average is elementwise and stays local. A direction needs its whole matrix, unless it is taken
entry by entry, or over rows that are whole on every rank. On a one-dimensional mesh the ranks take turns:
matrix j of a round travels to rank j, which computes its direction and sends the parts back, so that no rank
computes what another does. On other meshes each rank gathers the whole matrix.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from pyops.optim.base import Job, Plan, local, mix, run
from pyops.optim.norms import Block
from pyops.reference.lmo import random_bits, stochastic_round, working_dtype


def all_ranks(flags: list[bool], tensors: Sequence[Tensor]) -> list[bool]:
    """Each flag, and-ed over the mesh of its tensor."""
    flags = list(flags)
    meshes: dict[Any, list[int]] = {}
    for i, t in enumerate(tensors):
        if isinstance(t, DTensor):
            meshes.setdefault(t.device_mesh, []).append(i)
    for mesh, members in meshes.items():
        votes = torch.tensor([float(flags[i]) for i in members], device=mesh.device_type)
        for dim in range(mesh.ndim):
            dist.all_reduce(votes, dist.ReduceOp.MIN, group=mesh.get_group(dim))
        for i, vote in zip(members, votes.tolist(), strict=True):
            flags[i] = vote > 0
    return flags


def step(jobs: Sequence[Job]) -> list[Job]:
    """Takes the step of every job that needs other ranks; returns the others as jobs on local tensors."""
    near: list[Job] = []
    whole: list[Job] = []
    rounds: dict[Any, list[Job]] = {}
    for job in jobs:
        p, g = job.param, job.grad
        if g.placements != p.placements:
            g = g.redistribute(placements=p.placements)
        job = job._replace(grad=g)
        if _is_local(job):
            near.append(_localized(job))
        elif p.device_mesh.ndim == 1:
            rounds.setdefault(p.device_mesh, []).append(job)
        else:
            whole.append(job)
    for mesh, members in rounds.items():
        ranks = mesh.size()
        for start in range(0, len(members), ranks):
            _round(members[start : start + ranks], mesh, start)
    for i, job in enumerate(whole):
        d = _average(job)
        mesh, placements = job.param.device_mesh, job.param.placements
        gathered = DTensor.from_local(d, mesh, placements, shape=job.param.shape, stride=job.param.stride())
        u = _direction(gathered.full_tensor(), job.blocks, job.plan)
        everywhere = DTensor.from_local(u, mesh, [Replicate()] * mesh.ndim, run_check=False)
        _write(job, everywhere.redistribute(placements=placements).to_local(), i)
    return near


def _is_local(job: Job) -> bool:
    """Whether every rank's part has the directions of the whole."""
    dims = [placement.dim for placement in job.param.placements if isinstance(placement, Shard)]
    if any(not isinstance(placement, Shard | Replicate) for placement in job.param.placements):
        raise ValueError(f"a parameter must be sharded or replicated, got placements {job.param.placements}")
    if not dims:
        return True
    block = job.blocks[0]
    if len(job.blocks) > 1 or block.heads is not None:
        return False
    if block.direction == "sign":
        return True
    if job.param.dim() == 2:
        return (block.direction, dims) in (("row", [0]), ("col", [1]))
    batched = block.layout == "matrix" and job.param.dim() > 2
    return batched and all(dim < job.param.dim() - 2 for dim in dims)


def _localized(job: Job) -> Job:
    sources = (None if t is None else local(t) for t in (job.grad, job.momentum_buffer))
    grad, momentum = sources
    assert grad is not None
    sharded = any(isinstance(placement, Shard) for placement in job.param.placements)
    rule = job.plan.rule
    if sharded and rule.seed >= 0:
        rule = rule._replace(seed=mix(rule.seed, _offset(job.param)))
    return Job(local(job.param), grad, momentum, job.blocks, job.plan._replace(rule=rule))


def _offset(p: DTensor) -> int:
    """A number that tells this rank's part from the others' and is the same on replicas."""
    coordinates = p.device_mesh.get_coordinate() or ()
    return mix(*(c + 1 for c, kind in zip(coordinates, p.placements, strict=True) if isinstance(kind, Shard)))


def _average(job: Job) -> Tensor:
    """This rank's part of d, after the momentum update."""
    g, rule = local(job.grad), job.plan.rule
    if job.momentum_buffer is None:
        return g
    m = local(job.momentum_buffer)
    wide = torch.promote_types(working_dtype(m), working_dtype(g))
    m.copy_(torch.lerp(m.to(wide), g.to(wide), 1 - rule.momentum))
    return torch.lerp(g.to(wide), m.to(wide), rule.momentum) if rule.nesterov else m


def _direction(d: Tensor, blocks: Sequence[Block], plan: Plan) -> Tensor:
    """factor u(d) of a whole parameter, in float32 or float64: the step of zero weights."""
    u = torch.zeros_like(d, dtype=working_dtype(d))
    run([Job(u, d, None, blocks, Plan(plan.rule._replace(seed=-1), 1.0, -1.0))])
    return u


def _write(job: Job, u: Tensor, position: int) -> None:
    """W <- shrink W - length u on this rank's part."""
    w, (rule, shrink, length) = local(job.param), job.plan
    value = shrink * w.to(working_dtype(w)) - length * u.to(working_dtype(w))
    if rule.seed >= 0 and w.dtype in (torch.bfloat16, torch.float16) and w.numel() > 0:
        seed = mix(rule.seed, _offset(job.param))
        value = stochastic_round(value, w.dtype, random_bits(w.shape, seed, position, w.device))
    w.copy_(value)


def _round(jobs: Sequence[Job], mesh: Any, position: int) -> None:
    """Matrix j goes to rank j, its direction comes back: one exchange of each kind for all of them."""
    group, rank, ranks = mesh.get_group(), mesh.get_local_rank(), mesh.size()
    parts = [_average(job) for job in jobs]
    dtype = parts[0].dtype
    for part in parts[1:]:
        dtype = torch.promote_types(dtype, part.dtype)
    shapes = [[_part_shape(job.param, r) for r in range(ranks)] for job in jobs]
    mine = shapes[rank] if rank < len(jobs) else []
    outgoing = [part.numel() for part in parts] + [0] * (ranks - len(jobs))
    incoming = [shape.numel() for shape in mine] or [0] * ranks
    flat = _exchange(torch.cat([part.to(dtype).reshape(-1) for part in parts]), outgoing, incoming, group)
    directions = flat.new_empty(0, dtype=working_dtype(flat))
    if mine:
        job = jobs[rank]
        dim = _sharded_dim(job.param)
        pieces = [x.view(shape) for x, shape in zip(flat.split(incoming), mine, strict=True)]
        u = _direction(torch.cat(pieces, dim).to(parts[rank].dtype), job.blocks, job.plan)
        sizes = [shape[dim] for shape in mine]
        directions = torch.cat([x.reshape(-1) for x in u.split(sizes, dim)]).to(directions.dtype)
    returned = _exchange(directions, incoming, outgoing, group)
    for i, (job, u) in enumerate(zip(jobs, returned.split(outgoing), strict=False)):
        _write(job, u.view(shapes[i][rank]), position + i)


def _sharded_dim(p: DTensor) -> int:
    (placement,) = p.placements
    assert isinstance(placement, Shard)
    return placement.dim


def _part_shape(p: DTensor, rank: int) -> torch.Size:
    """Shape of a rank's part: as torch.chunk cuts, with empty parts for the last ranks."""
    dim, ranks = _sharded_dim(p), p.device_mesh.size()
    size = p.shape[dim]
    chunk = -(-size // ranks)
    length = min(chunk, max(0, size - chunk * rank))
    return torch.Size([length if i == dim else n for i, n in enumerate(p.shape)])


def _exchange(flat: Tensor, outgoing: list[int], incoming: list[int], group: Any) -> Tensor:
    received = flat.new_empty(sum(incoming))
    dist.all_to_all_single(received, flat, incoming, outgoing, group=group)
    return received
