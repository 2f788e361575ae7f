"""What the processes of test_linear_attention.py do: compare spread with whole sequences."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import nn

import pyops
from pyops import distributed

B, H, HV, K, V = 2, 2, 4, 3, 5
GATES = {
    "none": None,
    "constant": (HV,),
    "scalar": (HV,),
    "shared": (H,),
    "vector": (H, K),
    "vectors": (HV, K),
}
SPLITS = {2: [(5, 8), (0, 4), (6, 0)], 4: [(3, 4, 1, 5), (4, 0, 0, 2), (0, 3, 3, 0)]}


def problem(gate, delta, length, dtype=torch.float64, seed=0, batch=B, sequences=B):
    """The whole sequence and its states, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    size = GATES[gate]
    lead = () if gate == "constant" else (batch, length)
    tensors = {
        "q": draw(batch, length, H, K),
        "k": nn.functional.normalize(draw(batch, length, H, K), dim=-1),
        "v": draw(batch, length, HV, V),
        "g": None if size is None else nn.functional.logsigmoid(draw(*lead, *size) + 1),
        "beta": draw(batch, length, HV).sigmoid() if delta else None,
        "initial_state": draw(sequences, HV, K, V),
    }
    return {name: None if t is None else t.to(dtype) for name, t in tensors.items()}


def leaves(tensors):
    return {name: None if t is None else t.clone().requires_grad_() for name, t in tensors.items()}


def mine(tensors, lengths, rank):
    """This rank's tokens."""
    start = sum(lengths[:rank])
    part = slice(start, start + lengths[rank])
    return {
        name: t if t is None or t.ndim == 1 or name == "initial_state" else t[:, part]
        for name, t in tensors.items()
    }


def error(found, wanted):
    return ((found.double() - wanted.double()).norm() / (wanted.double().norm() + 1e-12)).item()


def agree(checks, gate, group=None):
    """Compares (what, found, wanted); where one rank finds a difference all raise, so that none waits."""
    failures = [
        f"{what}: error {error(found, wanted):.3g}, {found.dtype}"
        for what, found, wanted in checks
        if found.shape != wanted.shape or found.dtype != wanted.dtype or not error(found, wanted) < gate
    ]
    everywhere = [None] * dist.get_world_size(group)
    dist.all_gather_object(everywhere, failures, group=group)
    assert not any(everywhere), everywhere


def compare(tensors, lengths, rank, group=None, gate=1e-12, with_state=True, **kwargs):
    """Results and gradients, every rank with its own weight on the final state."""
    ranks = len(lengths)
    if not with_state:
        tensors = {**tensors, "initial_state": None}
    whole = leaves(tensors)
    o, final = pyops.linear_attention(**whole, output_final_state=True, **kwargs)
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(o.shape, generator=generator, dtype=torch.float64)
    on_state = torch.randn(ranks, *final.shape, generator=generator, dtype=torch.float64)
    ((weight * o).sum() + (on_state.sum(0) * final).sum()).backward()

    parts = leaves(mine(tensors, lengths, rank))
    if rank > 0 and with_state:
        parts["initial_state"] = None
    o_part, final_part = distributed.linear_attention(**parts, output_final_state=True, group=group, **kwargs)
    checks = [("o", o_part, mine({"o": o}, lengths, rank)["o"]), ("final state", final_part, final)]
    (
        (mine({"w": weight}, lengths, rank)["w"] * o_part).sum() + (on_state[rank] * final_part).sum()
    ).backward()
    for name, t in parts.items():
        if t is None:
            continue
        wanted, found = whole[name].grad, t.grad
        if t.ndim == 1:  # a constant g: every rank has its share
            dist.all_reduce(found, group=group)
        elif name != "initial_state":
            wanted = mine({name: wanted}, lengths, rank)[name]
        checks.append((f"gradient of {name}", found, wanted))
    agree(checks, gate, group)


def forms(rank, world):
    for gate in GATES:
        for delta in (False, True):
            for lengths in SPLITS[world]:
                compare(problem(gate, delta, sum(lengths)), lengths, rank)


def packed(rank, world):
    """Borders within ranks and on their borders, empty sequences, one over several ranks."""
    for lengths in SPLITS[world]:
        total = sum(lengths)
        ends = sorted({0, 1, lengths[0], total // 2, total - 1, total})
        for bounds in ([0, total], [0, *ends, total], [0, 0, total, total]):
            cu_seqlens = torch.tensor(bounds, dtype=torch.int32 if world == 2 else torch.int64)
            for gate in ("none", "constant", "shared", "vector"):
                for delta in (False, True):
                    tensors = problem(gate, delta, total, batch=1, sequences=len(bounds) - 1)
                    compare(tensors, lengths, rank, cu_seqlens=cu_seqlens)
    compare(tensors, lengths, rank, cu_seqlens=cu_seqlens, with_state=False)


def packed_resets_and_nan(rank, world):
    """NaN stays in its sequence, on whatever ranks that lies."""
    lengths = (6,) * world
    bounds = [0, 4, 6 * world - 3, 6 * world]
    tensors = problem("vector", False, sum(lengths), batch=1, sequences=3)
    tensors["v"][:, 5] = math.nan
    parts = mine(tensors, lengths, rank)
    o, final = distributed.linear_attention(**parts, output_final_state=True, cu_seqlens=torch.tensor(bounds))
    kept = [t for t in range(6) if not 5 <= t + 6 * rank < bounds[2]]
    checks = [("o", o[:, kept]), ("final states", final[[0, 2]])]
    agree([(what, t, t.nan_to_num()) for what, t in checks], 1e-12)
    assert final[1].isnan().all()


def normalized(rank, world):
    """States are pairs; packed or not."""
    lengths = SPLITS[world][0]
    total = sum(lengths)
    for bounds in (None, [0, 2, total - 1, total]):
        count = B if bounds is None else 3
        tensors = problem("scalar", False, total, batch=B if bounds is None else 1, sequences=count)
        tensors |= {name: tensors[name].abs() for name in ("q", "k")}
        state = tensors.pop("initial_state")
        given = {
            "initial_state": (state, state[..., 0].abs()),
            "normalize": True,
            "output_final_state": True,
            "cu_seqlens": None if bounds is None else torch.tensor(bounds),
        }
        whole, parts = leaves(tensors), leaves(mine(tensors, lengths, rank))
        wanted, (wanted_s, wanted_z) = pyops.linear_attention(**whole, **given)
        o, (s, z) = distributed.linear_attention(**parts, **given)
        own = mine({"o": wanted}, lengths, rank)["o"]
        checks = [("o", o, own), ("S", s, wanted_s), ("z", z, wanted_z)]
        (wanted.square().sum() + wanted_s.sum() + wanted_z.square().sum()).backward()
        (o.square().sum() + (s.sum() + z.square().sum()) / world).backward()
        grads = mine({name: t.grad for name, t in whole.items() if t is not None}, lengths, rank)
        checks += [(f"gradient of {name}", parts[name].grad, t) for name, t in grads.items()]
        agree(checks, 1e-12)


def options(rank, world):
    lengths = SPLITS[world][0]
    tensors = problem("scalar", False, sum(lengths))
    compare(tensors, lengths, rank, with_state=False)
    compare(tensors, lengths, rank, scale=-0.3, chunk_size=16)
    whole, _ = pyops.linear_attention(**tensors)
    o, final = distributed.linear_attention(**mine(tensors, lengths, rank))
    assert final is None and not o.requires_grad
    agree([("o", o, mine({"o": whole}, lengths, rank)["o"])], 1e-12)
    for state in (tensors["initial_state"].float(), tensors["initial_state"].bfloat16()):
        compare(
            {**tensors, "initial_state": state},
            lengths,
            rank,
            gate=5e-3 if state.dtype != torch.float32 else 1e-6,
        )


def dtypes(rank, world):
    lengths = (40,) * world
    for dtype, gate in ((torch.float32, 3e-6), (torch.bfloat16, 2e-2)):
        for form in ("vector", "scalar"):
            for delta in (False, True):
                compare(problem(form, delta, sum(lengths), dtype), lengths, rank, gate=gate)


def many_blocks(rank, world):
    """More tokens than one product takes, and decays that underflow."""
    lengths = (700,) * world
    tensors = problem("vector", False, sum(lengths))
    compare(tensors, lengths, rank)
    compare({**tensors, "g": tensors["g"] * 0.01}, lengths, rank)


def resets(rank, world):
    """-inf on either side of a border drops what was before it, NaN included."""
    lengths = (6,) * world
    for gate in ("scalar", "vector"):
        for at in (5, 6, 8):
            tensors = problem(gate, False, sum(lengths))
            tensors["g"][:, at] = -math.inf
            compare(tensors, lengths, rank)
            tensors["k"][:, at - 1] = tensors["v"][:, at - 1] = math.nan
            parts = mine(tensors, lengths, rank)
            o, final = distributed.linear_attention(**parts, output_final_state=True)
            after = max(0, at - 6 * rank)
            checks = [("o", o[:, after:]), ("final state", final)]
            agree([(f"{what}, {gate}, {at}", t, t.nan_to_num()) for what, t in checks], 1e-12)


def through_the_state_alone(rank, world):
    lengths = SPLITS[world][0]
    for delta in (False, True):
        tensors = problem("scalar", delta, sum(lengths))
        whole, parts = leaves(tensors), leaves(mine(tensors, lengths, rank))
        pyops.linear_attention(**whole, output_final_state=True)[1].square().sum().backward()
        distributed.linear_attention(**parts, output_final_state=True)[1].square().sum().div(world).backward()
        wanted = mine({name: whole[name].grad for name in ("k", "v", "g")}, lengths, rank)
        agree([(f"gradient of {name}", parts[name].grad, t) for name, t in wanted.items()], 1e-12)


def segments(rank, world):
    """Truncated backpropagation: the final state of one call starts the next."""
    lengths = (4,) * world
    first, second = (problem("scalar", True, sum(lengths), seed=seed) for seed in (3, 4))
    state = wanted = first["initial_state"]
    for tensors in (first, second):
        wanted_o, wanted = pyops.linear_attention(
            **{**tensors, "initial_state": wanted}, output_final_state=True
        )
        parts = mine({**tensors, "initial_state": state}, lengths, rank)
        o, state = distributed.linear_attention(**parts, output_final_state=True)
        agree([("o", o, mine({"o": wanted_o}, lengths, rank)["o"]), ("final state", state, wanted)], 1e-12)


def autocast(rank, world):
    """Changes nothing: the op chooses its precision."""
    lengths = (5,) * world
    tensors = mine(problem("scalar", False, sum(lengths), torch.float32), lengths, rank)
    plain = distributed.linear_attention(**tensors)[0]
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(distributed.linear_attention(**tensors)[0], plain)


def all_ranks_work_at_once(rank, world):
    """Without beta nothing is sent from rank to rank; with beta one state each way."""
    sent = []
    send, dist.send = dist.send, lambda *args, **kwargs: (sent.append(1), send(*args, **kwargs))
    try:
        counts = []
        for delta in (False, True):
            lengths = (3,) * world
            compare(problem("scalar", delta, sum(lengths)), lengths, rank)
            counts.append(len(sent))
    finally:
        dist.send = send
    return counts


def inside_a_compiled_module(rank, world):
    """A graph break, not an error."""
    lengths = (3,) * world
    tensors = mine(problem("scalar", False, sum(lengths)), lengths, rank)

    @torch.compile(backend="eager")
    def call(q, **rest):
        return distributed.linear_attention(q + 0, **rest)[0]

    assert torch.equal(call(**tensors), distributed.linear_attention(**tensors)[0])


def refusals(rank, world):
    lengths = (3,) * world
    tensors = leaves(mine(problem("scalar", False, sum(lengths)), lengths, rank))
    bad = [
        ({"g": tensors["g"][:, :2]}, ValueError, "g must be"),
        ({"v": tensors["v"].float()}, TypeError, "v must have the dtype of q"),
        ({"scale": math.inf}, ValueError, "scale must be finite"),
        ({"chunk_size": 3}, ValueError, "chunk_size must be a power of two"),
        ({"q": None}, TypeError, "q must be a torch.Tensor"),
        ({"normalize": True, "beta": tensors["g"].exp()}, ValueError, "normalize must be False with beta"),
        ({"cu_seqlens": torch.tensor([0, 3])}, ValueError, "q must have a batch of 1 with cu_seqlens"),
        ({"output_final_state": 1}, TypeError, "output_final_state must be a bool"),
    ]
    for change, kind, message in bad:
        try:
            distributed.linear_attention(**{**tensors, **change})
        except kind as found:
            assert message in str(found)
        else:
            raise AssertionError(f"no error for {list(change)}")
    one = {name: None if t is None else t[:1].detach() for name, t in tensors.items()}
    for bounds, message in (
        ([1, 3 * world], "cu_seqlens must start at 0, got 1"),
        ([0, 3], f"cu_seqlens must end at T = {3 * world}, got 3"),
        ([0, 5, 4, 3 * world], "cu_seqlens must not decrease, got 4 after 5"),
    ):
        try:
            given = {**one, "initial_state": None, "cu_seqlens": torch.tensor(bounds)}
            distributed.linear_attention(**given)
        except ValueError as found:
            assert message in str(found)
        else:
            raise AssertionError(f"no error for {bounds}")
    o, _ = distributed.linear_attention(**tensors)
    (grad,) = torch.autograd.grad(o.square().sum(), tensors["q"], create_graph=True)
    try:
        grad.sum().backward()
    except RuntimeError as found:
        assert "once_differentiable" in str(found)
    else:
        raise AssertionError("a second derivative came out")


def groups(rank, world):
    """Two groups at once, and a process outside one; four processes."""
    pairs = [dist.new_group([0, 1]), dist.new_group([3, 2])]
    group = pairs[rank // 2]
    position = dist.get_rank(group)
    for delta in (False, True):
        compare(problem("vector", delta, 9, seed=rank // 2), (4, 5), position, group=group)
    try:
        distributed.linear_attention(*(torch.zeros(1, 1, 1, 1) for _ in range(3)), group=pairs[1 - rank // 2])
    except ValueError as found:
        assert "group must contain this process" in str(found)
    else:
        raise AssertionError("a group without this process was accepted")
    alone = [dist.new_group([r]) for r in range(world)][rank]
    compare(problem("scalar", True, 7), (7,), 0, group=alone)
