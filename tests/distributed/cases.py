"""What the processes of test_optim_sharded.py do: compare sharded with unsharded training."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from pyops.optim import Muon, Scion, base

GATE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 2e-2}


def close(ours, wanted, gate=1e-10):
    ours = ours.full_tensor() if isinstance(ours, DTensor) else ours
    error = (ours.double() - wanted.double()).norm() / (wanted.double().norm() + 1e-12)
    assert error < gate, f"{error:.3g}"


def compare(make, shape, placements, mesh, dtype=torch.float64, steps=3, compute=torch.float64):
    """The same gradients to a whole and to a distributed parameter."""
    generator = torch.Generator().manual_seed(1)
    start = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    whole = nn.Parameter(start.clone())
    parts = nn.Parameter(distribute_tensor(start.clone(), mesh, placements))
    optimizers = [make([p], compute_dtype=compute) for p in (whole, parts)]
    for _ in range(steps):
        g = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
        whole.grad = g.clone()
        parts.grad = distribute_tensor(g, mesh, placements)
        for opt in optimizers:
            opt.step()
    assert not torch.equal(whole, start), "nothing moved"
    close(parts, whole, GATE[dtype])


def scion(norm, **kwargs):
    return lambda params, **more: Scion(params, lr=0.1, norm=norm, radius=2.0, **kwargs, **more)


def muon(params, **more):
    return Muon(params, lr=0.1, **more)


MATRIX = ["spectral", "sign", "col", "row", "euclidean", "rms", "max"]


def placements(rank, world):
    mesh = init_device_mesh("cpu", (world,))
    for norm in MATRIX:
        for placement in (Shard(0), Shard(1), Replicate()):
            for shape in ((8, 6), (5, 7), (1, 9)):  # uneven parts, and ranks with nothing
                compare(scion(norm), shape, [placement], mesh, steps=2)
    for shape in ((7,), (1,)):
        compare(scion("rms"), shape, [Shard(0)], mesh)
    for dim in range(3):
        compare(scion("spectral"), (4, 5, 6), [Shard(dim)], mesh)
    for dim in range(2):
        compare(scion("spectral_conv"), (6, 5, 3, 2), [Shard(dim)], mesh)
        compare(scion("spectral_conv_tap"), (6, 5, 3, 2), [Shard(dim)], mesh)
        compare(scion("spectral", num_heads=3), (6, 4), [Shard(dim)], mesh)
        compare(scion("spectral", split_sizes=(4, 2)), (6, 4), [Shard(dim)], mesh)
        compare(scion("sign", split_sizes=(4, 2)), (6, 4), [Shard(dim)], mesh)


def muon_placements(rank, world):
    mesh = init_device_mesh("cpu", (world,))
    for placement in (Shard(0), Shard(1), Replicate()):
        compare(muon, (9, 6), [placement], mesh)
        compare(lambda p, **kwargs: muon(p, nesterov=False, **kwargs), (6, 9), [placement], mesh)


def dtypes(rank, world):
    mesh = init_device_mesh("cpu", (world,))
    for dtype in (torch.float32, torch.bfloat16):
        for norm in ("spectral", "col", "sign"):
            compare(scion(norm), (12, 8), [Shard(0)], mesh, dtype)
        compare(muon, (12, 8), [Shard(0)], mesh, dtype)
        compare(scion("spectral"), (12, 8), [Shard(0)], mesh, dtype, compute=torch.float32)


def ranks_take_turns(rank, world):
    """Each matrix is orthogonalised on one rank only, and the ranks share them evenly."""
    mesh = init_device_mesh("cpu", (world,))
    params = [nn.Parameter(distribute_tensor(torch.randn(8, 6), mesh, [Shard(0)])) for _ in range(3 * world)]
    for p in params:
        p.grad = distribute_tensor(torch.randn(8, 6), mesh, [Shard(0)])
    opt, counted, plain = Scion(params, lr=0.1), [], base.lmo_step_
    base.lmo_step_ = lambda weights, *args: counted.append(len(weights)) or plain(weights, *args)
    try:
        opt.step()
    finally:
        base.lmo_step_ = plain
    return sum(counted)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.norm = nn.Embedding(11, 6), nn.LayerNorm(6)
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 6, bias=False)
        self.head = nn.Linear(6, 11, bias=False)

    def forward(self, x):
        h = self.tokens(x)
        return self.head(h + self.down(self.up(self.norm(h)).relu()))


def loss_of(model, i):
    tokens = (torch.arange(8) * (i + 3)) % 11
    return nn.functional.cross_entropy(model(tokens), tokens.roll(1))


def pair(light=False, **kwargs):
    """A model and the same one under fully_shard, with their optimizers."""
    nets, optimizers = [], []
    for sharded in (False, True):
        torch.manual_seed(0)
        net = Net().double()
        if sharded:
            for layer in (net.up, net.down):
                fully_shard(layer)
            fully_shard(net)
        settings = {"lr": 0.05, "momentum": 0.8, "compute_dtype": torch.float64, "light": light, **kwargs}
        nets.append(net)
        optimizers.append(Scion(Scion.auto_groups(net, hidden=2.0, output=5.0), **settings))
    return nets, optimizers


def agree(nets):
    for (name, p), q in zip(nets[0].named_parameters(), nets[1].parameters(), strict=True):
        try:
            close(q, p)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from None


def fsdp(rank, world):
    for light in (False, True, "deferred"):
        nets, optimizers = pair(light)
        for i in range(4):
            for net, opt in zip(nets, optimizers, strict=True):
                opt.zero_grad()
                loss_of(net, i).backward()
                opt.step()
        agree(nets)


def fsdp_ranks_see_different_data(rank, world):
    """The unsharded model gets the mean over the ranks' batches."""
    for light in (False, True, "deferred"):
        nets, (plain, sharded) = pair(light)
        for i in range(3):
            sum(loss_of(nets[0], world * i + r) / world for r in range(world)).backward()
            loss_of(nets[1], world * i + rank).backward()
            plain.step()
            sharded.step()
            plain.zero_grad()
            sharded.zero_grad()
        agree(nets)


def fsdp_accumulation(rank, world):
    for light in (False, "deferred"):
        nets, optimizers = pair(light)
        for i in range(3):
            for net, opt in zip(nets, optimizers, strict=True):
                opt.zero_grad()
                for j in range(2):
                    loss_of(net, 2 * i + j).backward()
                opt.step()
        agree(nets)
    nets, _ = pair(True)
    loss_of(nets[1], 0).backward()
    try:
        loss_of(nets[1], 1).backward()
    except RuntimeError as error:
        assert "second backward pass" in str(error)
    else:
        raise AssertionError("a second backward pass on folded gradients went unnoticed")


def fsdp_clipping(rank, world):
    nets, optimizers = pair("deferred")
    for i in range(3):
        for net, opt in zip(nets, optimizers, strict=True):
            loss_of(net, i).backward()
            nn.utils.clip_grad_norm_(net.parameters(), 0.05)
            opt.step()
    agree(nets)
    nets, optimizers = pair(True)
    loss_of(nets[1], 0).backward()
    nn.utils.clip_grad_norm_(nets[1].parameters(), 0.05)
    try:
        optimizers[1].step()
    except RuntimeError as error:
        assert "changed in place" in str(error)
    else:
        raise AssertionError("clipping went unnoticed")


def init_and_ratios(rank, world):
    nets, optimizers = pair()
    for opt in optimizers:
        opt.init_(torch.Generator().manual_seed(5 + rank))
    ratios = optimizers[1].ball_ratios()
    assert ratios.pop("norm.weight") == 0.5  # a gain keeps its ones; radius 2
    assert all(r == 0 or abs(r - 1) < 1e-6 for r in ratios.values()), ratios
    assert "unassigned: 0" in optimizers[1].summary(nets[1])
    return [p.full_tensor().sum().item() for p in nets[1].parameters()]


def nonfinite(rank, world):
    """NaN in the part that one rank holds: all ranks raise, or all leave that parameter alone."""
    mesh = init_device_mesh("cpu", (world,))

    def make(**kwargs):
        torch.manual_seed(0)
        params = [nn.Parameter(distribute_tensor(torch.randn(4, 6), mesh, [Shard(0)])) for _ in range(2)]
        opt = Scion(params, lr=0.1, **kwargs)
        for p in params:
            p.grad = distribute_tensor(torch.randn(4, 6), mesh, [Shard(0)])
        before = [p.full_tensor().clone() for p in params]
        if rank == 0:
            params[1].grad.to_local()[0, 0] = math.nan
        return params, opt, before

    params, opt, before = make(error_if_nonfinite=True)
    try:
        opt.step()
    except RuntimeError as error:
        assert "parameter 1" in str(error)
    else:
        raise AssertionError("no error")
    assert all(torch.equal(p.full_tensor(), old) for p, old in zip(params, before, strict=True))

    nets, optimizers = pair(True)
    for i in range(3):
        handle = None
        if i == 1:
            nets[0].down.weight.register_hook(lambda g: g * math.nan)
            handle = nets[1].down.register_full_backward_hook(lambda *_: None)
        for net, opt in zip(nets, optimizers, strict=True):
            loss = loss_of(net, i)
            if i == 1 and net is nets[1]:
                loss = loss * (math.nan if rank == 0 else 1)
            elif i == 1:
                loss = loss * math.nan
            loss.backward()
            opt.step()
        if handle:
            handle.remove()
            break
    agree(nets)
    for opt in optimizers:
        assert all(base.local(s["momentum_buffer"]).isfinite().all() for s in opt.state.values())


def ddp(rank, world):
    """It averages what stands in for the gradients: by linearity that averages the gradients."""
    results = []
    for light in (False, True, "deferred"):
        torch.manual_seed(0)
        net = Net().double()
        parallel = nn.parallel.DistributedDataParallel(net)
        opt = Scion(
            Scion.auto_groups(net, hidden=2.0, output=5.0), lr=0.05, light=light, compute_dtype=torch.float64
        )
        for i in range(3):
            opt.zero_grad()
            with parallel.no_sync():
                loss_of(parallel, 4 * i + rank).backward()
            loss_of(parallel, 4 * i + 2 + rank).backward()
            opt.step()
        results.append([p.detach().clone() for p in net.parameters()])
    for other in results[1:]:
        for p, q in zip(other, results[0], strict=True):
            close(p, q)
    gathered = [torch.empty_like(results[1][0]) for _ in range(world)]
    dist.all_gather(gathered, results[1][0])
    assert all(torch.equal(gathered[0], g) for g in gathered)


def ddp_clipping(rank, world):
    net = nn.parallel.DistributedDataParallel(Net())
    opt = Scion(Scion.auto_groups(net.module), light=True)
    loss_of(net, rank).backward()
    nn.utils.clip_grad_norm_(net.parameters(), 1e-3)
    try:
        opt.step()
    except RuntimeError as error:
        assert "changed in place" in str(error)
    else:
        raise AssertionError("clipping under DDP went unnoticed")


def fsdp1(rank, world):
    """Flat shards have no matrices: refused, and not taken for vectors."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    for keep in (False, True):
        net = FullyShardedDataParallel(Net(), use_orig_params=keep, device_id=torch.device("cpu"))
        for cls in (Scion, Muon):
            try:
                cls(net.parameters())
            except ValueError as error:
                assert "fully_shard" in str(error)
            else:
                raise AssertionError("flat shards went unnoticed")


def stochastic_rounding(rank, world):
    """Replicas stay equal, parts get different random numbers, and the mean step is kept."""
    mesh = init_device_mesh("cpu", (world,))
    for norm in ("max", "euclidean"):
        for placement in (Replicate(), Shard(0)):
            p = nn.Parameter(distribute_tensor(torch.ones(64, 64).bfloat16(), mesh, [placement]))
            lr = 2.0**-10 * (64 if norm == "euclidean" else 1)
            opt = Scion([p], lr=lr, norm=norm, constrained=False, stochastic_rounding=True)
            p.grad = distribute_tensor(-torch.ones(64, 64).bfloat16(), mesh, [placement])
            opt.step()
            moved = (p.full_tensor().double() - 1) / 2.0**-7  # 0 or 1, one eighth of them
            assert abs(moved.mean().item() - 0.125) < 0.02, moved.mean()
            local = [torch.empty_like(p.to_local()) for _ in range(world)]
            dist.all_gather(local, p.to_local().contiguous())
            assert torch.equal(local[0], local[1]) == isinstance(placement, Replicate)


def checkpoint(rank, world):
    """Through the full state dict into an unsharded model and back: the same trajectory."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

    nets, optimizers = pair()
    options = StateDictOptions(full_state_dict=True)
    for i in range(2):
        loss_of(nets[1], i).backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
    weights, state = get_state_dict(nets[1], optimizers[1], options=options)
    payload = [weights, state]
    dist.broadcast_object_list(payload, 0)
    set_state_dict(nets[0], optimizers[0], model_state_dict=payload[0], optim_state_dict=payload[1])
    for net, opt in zip(nets, optimizers, strict=True):
        loss_of(net, 5).backward()
        opt.step()
    agree(nets)


def meshes(rank, world):
    """Two dimensions: sharded twice, replicated and sharded; four processes."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    for norm in MATRIX:
        for kinds in (
            (Shard(0), Shard(1)),
            (Shard(0), Shard(0)),
            (Replicate(), Shard(1)),
            (Replicate(), Replicate()),
        ):
            compare(scion(norm), (6, 8), kinds, mesh)
    p = nn.Parameter(distribute_tensor(torch.ones(64, 64).bfloat16(), mesh, [Replicate(), Shard(0)]))
    opt = Scion([p], lr=2.0**-4, norm="euclidean", constrained=False, stochastic_rounding=True)
    p.grad = distribute_tensor(-torch.ones(64, 64).bfloat16(), mesh, [Replicate(), Shard(0)])
    opt.step()
    other = p.to_local().clone()
    dist.broadcast(other, rank % 2, group=mesh.get_group("a"))
    assert torch.equal(other, p.to_local()) and not torch.equal(other, torch.ones_like(other))
