"""Box embeddings against their peers: log volumes of all pairs with their gradients, the best items of
composed queries, and memory.

Results are checked against float64 before anything is timed: volumes and gradients on evenly spaced queries
with all items and on evenly spaced items with all queries; of the best items all scores, and whether they are
the best for some queries. By convention an element, which is one dimension of one pair, has 20 flops with
Gumbel boxes, 5 with hard ones, and 30 more in the backward pass, which computes the sides again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from bench import boxes_peers as peers
from bench import measure
from bench.boxes_peers import GAMMA, TAU
from bench.case import Case, Impl, Runner, later

# Bounds: of a log volume relative to 1 + its size; of a gradient relative to its largest entry; of a score,
# the difference of two log volumes of about 100, absolute.
VOLUME_ERROR, GRADIENT_ERROR, SCORE_ERROR = 2e-6, 1e-5, 2e-4
GUMBEL_FLOPS, BACKWARD_FLOPS, HARD_FLOPS = 20.0, 30.0, 5.0
PART = 16  # queries, and items, on which a result is checked
BOUNDED = 4  # dimensions that an attribute bounds
RANKED = 8  # queries whose whole ranking is checked
ALLOWED_BYTES = 64 * 2**20
KEPT = {"MALLOC_TRIM_THRESHOLD_": "100000000000", "MALLOC_MMAP_THRESHOLD_": "100000000000"}
WIDEST = 0.519  # corners reach that far in from 0 and 1: in 64 dimensions half of the pairs meet


class Shape(NamedTuple):
    queries: int
    items: int
    dim: int
    hard: bool = False

    @property
    def elements(self) -> int:
        return self.queries * self.items * self.dim

    @property
    def name(self) -> str:
        return f"{'hard' if self.hard else 'Gumbel'} float32 {self.queries}x{self.items}x{self.dim}"

    @property
    def temperatures(self) -> dict[str, float]:
        tau = 0.0 if self.hard else TAU
        return {"intersection_temperature": tau, "volume_temperature": tau}


def flops(s: Shape, backward: bool) -> float:
    return s.elements * ((HARD_FLOPS if s.hard else GUMBEL_FLOPS) + (BACKWARD_FLOPS if backward else 0.0))


def least_bytes(s: Shape, backward: bool) -> float:
    """Corners and volumes once; with the backward pass corners again, and the gradients of both."""
    corners, volumes = 8.0 * (s.queries + s.items) * s.dim, 4.0 * s.queries * s.items
    return 3 * corners + 2 * volumes if backward else corners + volumes


def speed(elements: float) -> str:
    """How to read elements per second off a time."""
    return f"{elements / 1e6:.4g} M elements: 1e9 elements/s = {elements / 1e6:.4g} / ms."


def boxes(count: int, dim: int, generator: torch.Generator, device: str, widest: float = WIDEST):
    """Corners at random within widest of the sides of the unit cube."""
    z, upper = (widest * torch.rand(count, dim, generator=generator, device=device) for _ in range(2))
    return z, 1 - upper


def inputs(s: Shape, backward: bool, device: str) -> Callable[[torch.Generator], tuple]:
    """qz, qZ, iz, iZ, and the gradient of the volumes for the backward pass."""

    def make(generator: torch.Generator) -> tuple[Tensor, ...]:
        corners = (
            *boxes(s.queries, s.dim, generator, device),
            *boxes(s.items, s.dim, generator, device),
        )
        grad = torch.randn(s.queries, s.items, generator=generator, device=device) if backward else None
        return corners if grad is None else (*corners, grad)

    return make


# ---- what is right


def join(a: Tensor, b: Tensor, tau: float) -> Tensor:
    """The smooth maximum."""
    return torch.logaddexp(a / tau, b / tau) * tau if tau else torch.maximum(a, b)


def log_volume(z: Tensor, upper: Tensor, tau: float) -> Tensor:
    w = upper - z
    if not tau:
        return w.clamp(min=0).log().sum(-1)
    x = w / tau - 2 * GAMMA
    return torch.logaddexp(x, torch.zeros_like(x)).log().sum(-1) + z.shape[-1] * math.log(tau)


def exact(qz: Tensor, qZ: Tensor, iz: Tensor, iZ: Tensor, tau: float) -> Tensor:
    """The definition; give it float64."""
    return log_volume(join(qz[:, None], iz, tau), -join(-qZ[:, None], -iZ, tau), tau)


def spaced(count: int, some: int, device: torch.device) -> Tensor:
    """Evenly spaced rows, the first and the last among them."""
    return torch.linspace(0, count - 1, min(count, some), device=device).round().long()


def worst(errors: Iterable[Tensor]) -> float:
    """The largest; NaN if there is one, which Python's max would drop."""
    return float(torch.stack([e.double().max() for e in errors]).max())


def volume_errors(got: Tensor, wanted: Tensor) -> Tensor:
    """Entry by entry, relative to 1 + the wanted one; inf where one of them alone is -inf."""
    none = wanted == -math.inf
    assert got.shape == wanted.shape, f"shape {tuple(got.shape)}, wanted {tuple(wanted.shape)}"
    error = (got.double() - wanted).abs() / (1 + wanted.abs())
    return torch.where(none, torch.where(got == -math.inf, 0.0, math.inf), error)


def gradient_errors(got: Tensor, wanted: Tensor) -> Tensor:
    assert got.shape == wanted.shape, f"shape {tuple(got.shape)}, wanted {tuple(wanted.shape)}"
    return (got.double() - wanted).abs() / wanted.abs().max()


class Oracle:
    """The error of volumes, and of gradients as a share of its bound times that of volumes, on a part of the
    queries and a part of the items; float64 runs once per input for all implementations of a case."""

    def __init__(self, hard: bool, backward: bool) -> None:
        self.tau, self.backward = 0.0 if hard else TAU, backward
        self.known: tuple = (None, ())

    def exact(self, data: tuple) -> tuple[Tensor, ...]:
        """Row indices, column indices, their volumes, and the gradients qz, qZ of the rows and iz, iZ of the
        columns."""
        if self.known[0] is not data[0]:
            qz, qZ, iz, iZ, *grad = (t.double() for t in data)
            rows, columns = (spaced(len(t), PART, t.device) for t in (qz, iz))
            left, left_grads = self.part((qz[rows], qZ[rows]), (iz, iZ), [g[rows] for g in grad], True)
            right, right_grads = self.part(
                (qz, qZ), (iz[columns], iZ[columns]), [g[:, columns] for g in grad], False
            )
            self.known = data[0], (rows, columns, left, right, *left_grads, *right_grads)
        return self.known[1]

    def part(
        self, queries: tuple, items: tuple, grad: list[Tensor], of_queries: bool
    ) -> tuple[Tensor, list[Tensor]]:
        corners = [t.detach().requires_grad_(self.backward) for t in (*queries, *items)]
        with torch.enable_grad():
            logs = exact(*corners, self.tau)
        if not self.backward:
            return logs, []
        wanted = corners[:2] if of_queries else corners[2:]
        return logs.detach(), list(torch.autograd.grad(logs, wanted, grad))

    def __call__(self, data: tuple, output: Tensor | tuple) -> float:
        got = output if isinstance(output, tuple) else (output,)
        rows, columns, left, right, *grads = self.exact(data)
        assert len(got) == 1 + len(grads), f"{len(got)} results, wanted {1 + len(grads)}"
        assert got[0].shape == (len(data[0]), len(data[2])), f"shape {tuple(got[0].shape)}"
        errors = [volume_errors(got[0][rows], left), volume_errors(got[0][:, columns], right)]
        for found, wanted, part in zip(got[1:], grads, (rows, rows, columns, columns), strict=False):
            errors.append(gradient_errors(found[part], wanted) * (VOLUME_ERROR / GRADIENT_ERROR))
        return worst(errors)


# ---- all pairs


def ours(s: Shape, backward: bool) -> Impl:
    def build() -> Runner:
        from pyops.boxes import pairwise_log_volume

        def run(qz: Tensor, qZ: Tensor, iz: Tensor, iZ: Tensor) -> Tensor:
            return pairwise_log_volume((qz, qZ), (iz, iZ), **s.temperatures)

        return peers.runner(run, backward)

    return Impl("pyops.boxes.pairwise_log_volume", build)


def pair_case(
    s: Shape, backward: bool, against: tuple[Impl, ...], suffix: str = "", device: str = "cpu", **more
) -> Case:
    small = inputs(s._replace(queries=min(s.queries, 32), items=min(s.items, 64)), backward, device)

    def served() -> str:
        import pyops

        corners = small(torch.Generator(device=device).manual_seed(0))[:4]
        tau = s.temperatures["intersection_temperature"]
        return pyops.which("box_log_volumes", *corners, tau, tau, 2 * GAMMA * tau, None)

    return Case(
        op="boxes",
        name=f"{s.name}, {'forward + backward' if backward else 'forward'}{suffix}",
        compute="float32",
        inputs=inputs(s, backward, device),
        small_inputs=small,
        ours=ours(s, backward),
        peers=against,
        flops=flops(s, backward),
        bytes=least_bytes(s, backward),
        check=Oracle(s.hard, backward),
        error_bound=VOLUME_ERROR,
        served_by=served,
        note=speed(s.elements),
        **more,
    )


# ---- the best items


def topk_inputs(s: Shape, excluded: bool, device: str) -> Callable[[torch.Generator], tuple]:
    """Users, attributes, perhaps attributes to exclude, and items: two corners each. Users and items bound
    every dimension; attributes bound few, so that what is excluded is a good part of the rest, but not all
    of it: the difference would have no digits."""

    def attribute(generator: torch.Generator) -> list[Tensor]:
        z, upper = boxes(s.queries, s.dim, generator, device)
        free = torch.rand(s.queries, s.dim, generator=generator, device=device).argsort(-1) >= BOUNDED
        return [torch.where(free, -1.0, z), torch.where(free, 2.0, upper)]

    def make(generator: torch.Generator) -> tuple[Tensor, ...]:
        user = boxes(s.queries, s.dim, generator, device, 0.3)
        attributes = [t for _ in range(1 + excluded) for t in attribute(generator)]
        middle, half = (torch.rand(s.items, s.dim, generator=generator, device=device) for _ in range(2))
        middle, half = 0.1 + 0.8 * middle, 0.05 + 0.15 * half
        return *user, *attributes, middle - half, middle + half

    return make


class BestOracle:
    """The largest error of a score: of all that are returned, against that of their items, and for some
    queries against the best there are."""

    def __init__(self, k: int) -> None:
        self.k = k
        self.known: tuple = (None, ())

    def scores(self, queries: list[Tensor], iz: Tensor, iZ: Tensor) -> Tensor:
        """log P of [..., n, D] items for queries [..., D] in double."""
        (z, upper), second, *without = [tuple(t[..., None, :] for t in pair) for pair in peers.pairs(queries)]

        def met(a: tuple, b: tuple) -> tuple[Tensor, Tensor]:
            return join(a[0], b[0], TAU), -join(-a[1], -b[1], TAU)

        both = met(met((z, upper), second), (iz, iZ))
        volume = log_volume(*both, TAU)
        if without:
            less = log_volume(*met(both, *without), TAU)
            volume = volume + torch.log(-torch.expm1(less - volume))
        return volume - log_volume(iz, iZ, TAU)

    def __call__(self, data: tuple, output: tuple) -> float:
        values, indices = output
        *queries, iz, iZ = (t.double() for t in data)
        shape = len(data[0]), min(self.k, len(iz))
        assert values.shape == indices.shape == shape, f"shape {tuple(values.shape)}, wanted {shape}"
        assert int(indices.min()) >= 0 and int(indices.max()) < len(iz), "an index outside the items"
        once = indices.sort(-1).values
        assert bool((once[:, 1:] > once[:, :-1]).all()), "an item twice"
        errors = [values.double() - self.scores(queries, iz[indices], iZ[indices])]
        rows = spaced(len(data[0]), RANKED, iz.device)
        if self.known[0] is not data[0]:
            best = []
            for row in rows:
                one = [t[row] for t in queries]
                parts = zip(iz.split(16384), iZ.split(16384), strict=True)
                best.append(torch.cat([self.scores(one, *part) for part in parts]).topk(self.k).values)
            self.known = data[0], torch.stack(best)
        errors.append(values[rows].double() - self.known[1])
        return worst(e.abs() for e in errors)


def topk_case(
    s: Shape, k: int, excluded: bool, against: tuple[Impl, ...], device: str = "cpu", **more
) -> Case:
    def best(**options) -> Callable[[], Runner]:
        def build() -> Runner:
            from pyops.boxes import box_topk

            def run(*args: Tensor) -> tuple[Tensor, Tensor]:
                user, attribute, *without = peers.pairs(args[:-2])
                found = box_topk(
                    [user, attribute], args[-2:], k, without=without, **s.temperatures, **options
                )
                return found.values, found.indices

            return peers.runner(run, False)

        return build

    terms = 1 + excluded
    elements = terms * s.elements
    query = "AND, NOT" if excluded else "AND"
    return Case(
        op="boxes",
        name=f"top {k} of {s.items}, {s.queries} queries {query}, {s.dim} dimensions",
        compute="float32",
        inputs=topk_inputs(s, excluded, device),
        small_inputs=topk_inputs(s._replace(queries=min(s.queries, 8), items=64), excluded, device),
        ours=Impl("pyops.boxes.box_topk", best()),
        variants=(Impl("pyops.boxes.box_topk, prune=False", best(prune=False)),),
        peers=against,
        flops=GUMBEL_FLOPS * elements,
        bytes=8.0 * (terms * s.queries + s.items) * s.dim + 12.0 * s.queries * k,
        check=BestOracle(k),
        error_bound=SCORE_ERROR,
        note=f"{speed(elements)} Without pruning.",
        **more,
    )


# ---- memory


def memory_case(s: Shape, backward: bool) -> Case:
    """The error is the peak of extra memory, results included, as a share of what is allowed; the results are
    checked as in the other cases."""
    oracle = Oracle(s.hard, backward)

    def build() -> Runner:
        made = ours(s, backward).build()

        def run(*args: Tensor) -> tuple[int, tuple]:
            results: list = []
            return measure.extra_bytes_cpu(lambda: results.append(made.run(*args))), results[0]

        return Runner(run, made.prepare)

    def check(data: tuple, output: tuple) -> float:
        extra, results = output
        error = oracle(data, results)
        assert error <= VOLUME_ERROR, f"error {error:.3g}"
        return extra / ALLOWED_BYTES

    what = "forward + backward" if backward else "forward"
    return Case(
        op="boxes",
        name=f"memory of {what}, {s.name}, within {ALLOWED_BYTES >> 20} MB",
        compute="float32",
        inputs=inputs(s, backward, "cpu"),
        small_inputs=inputs(s._replace(queries=min(s.queries, 32), items=min(s.items, 64)), backward, "cpu"),
        ours=Impl("pyops.boxes.pairwise_log_volume", build, note="error: share of the allowed memory"),
        peers=(),
        flops=flops(s, backward),
        bytes=least_bytes(s, backward),
        check=check,
        error_bound=1.0,
        rounds=1,
        env=measure.MEMORY_ENV,
        note="Extra memory includes the volumes and the gradients of the corners.",
    )


# ---- what is shown


def cpu_cases(scale: str) -> list[Case]:
    """The promised table. Where several promises are of one shape, each is a case with its own peers."""
    s, many, k = Shape(1024, 4096, 64), Shape(256, 100_000, 64), 10
    if scale == "tiny":
        s, many, k = Shape(40, 70, 9), Shape(20, 4200, 9), 5
    hard = s._replace(hard=True)
    rounds = {"rounds": {"full": 11, "quick": 2, "tiny": 1}[scale]}
    slower = {"rounds": {"full": 3, "quick": 1, "tiny": 1}[scale]}
    eager, chunked = "torch eager", f"torch eager, {peers.CHUNKS}"

    def full(*impls: Impl) -> tuple[Impl, ...]:
        return impls if scale == "full" else tuple(map(later, impls))

    def ranked() -> tuple[Impl, ...]:
        return peers.topk("log", k), peers.topk("exp", k), *full(peers.topk("log", k, compile_whole=True))

    # The quick form leaves out what it could not compare, and eager runs of seconds that say little new.
    long = scale != "quick"
    slowest = f"torch eager, chunks of {peers.ROWS} x {peers.COLUMNS}, torch.topk"
    compiled = [
        pair_case(s, False, full(peers.compiled("log"), peers.compiled("exp")), ", compiled",
                  bar=(20, "torch.compile"), **rounds),
        pair_case(s, True, (peers.in_chunks("exp", True), *full(peers.compiled("log", True))), ", compiled",
                  bar=(20, "torch.compile"), **slower),
    ]  # fmt: skip
    kept = [
        pair_case(shape, backward, (peers.eager(key, backward),), ", malloc keeps memory", env=KEPT, **slower)
        for shape, key, backward in ((s, "log", False), (s, "log", True), (hard, "hard", False))
    ]
    return [
        pair_case(s, False, (peers.eager("log"), peers.as_written()), bar=(45, eager), **slower),
        pair_case(s, False, (peers.in_chunks("log"),), ", in chunks", bar=(22, chunked), **rounds),
        pair_case(s, False, (peers.package(),), ", package", bar=(55, "box-embeddings 0.1.0"), **slower),
        pair_case(s, False, (peers.in_chunks("exp"),), ", exp-domain",
                  bar=(8, f"torch exp-domain, {peers.CHUNKS}"), **rounds),
        pair_case(s, True, (peers.eager("log", True), peers.in_chunks("log", True)),
                  bar=(50, eager), **slower),
        pair_case(hard, False, (peers.eager("hard"), peers.in_chunks("hard"), *full(peers.compiled("hard"))),
                  bar=(90, eager), **slower),
        topk_case(many, k, True, ranked(), bar=(10, slowest), **slower),
        topk_case(many, k, False, ranked(), bar=(10, slowest), **slower),
        *(compiled + kept if long else ()),
        memory_case(s, False),
        memory_case(s, True),
    ]  # fmt: skip


def cuda_cases(scale: str) -> list[Case]:
    s, many, k = Shape(1024, 4096, 64), Shape(256, 100_000, 64), 10
    rounds = {"rounds": 15 if scale == "full" else 7}

    def against(key: str, backward: bool = False) -> tuple[Impl, ...]:
        fused = [peers.compiled(each, backward) for each in ((key,) if key == "hard" else ("log", "exp"))]
        return peers.eager(key, backward), *(fused if scale == "full" else map(later, fused))

    fused = peers.topk("log", k, compile_whole=True)
    ranked = (peers.topk("exp", k, rows=64, columns=32768), fused if scale == "full" else later(fused))
    return [
        pair_case(s, False, against("log"), device="cuda", **rounds),
        pair_case(s, True, against("log", True), device="cuda", **rounds),
        pair_case(s._replace(hard=True), False, against("hard"), device="cuda", **rounds),
        *(topk_case(many, k, excluded, ranked, "cuda", **rounds) for excluded in (True, False)),
    ]


def cases(device: str, scale: str) -> list[Case]:
    return cuda_cases(scale) if device == "cuda" else cpu_cases(scale)


def test_boxes(measured, case, impl):
    measured(case, impl)
