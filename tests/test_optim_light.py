"""The memory-light form of Scion: each way of training that could break it, against the plain form."""

import math

import pytest
import torch
from torch import nn

from pyops.optim import Scion

LIGHT = [True, "deferred"]


def make(dtype=torch.float64, light=False, seed=0, **kwargs):
    torch.manual_seed(seed)
    layers = [nn.Conv1d(3, 4, 3), nn.Flatten(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 2)]
    model = nn.Sequential(*layers).to(dtype)
    kwargs = {"lr": 0.05, "momentum": 0.8, "light": light, "compute_dtype": torch.float64, **kwargs}
    return model, Scion(Scion.auto_groups(model, hidden=2.0, output=4.0), **kwargs)


def batch(i, dtype=torch.float64):
    generator = torch.Generator().manual_seed(100 + i)
    return torch.randn(8, 3, 6, generator=generator).to(dtype)


def loss_of(model, x):
    return (model(x) - x.mean((1, 2))[:, None]).square().mean()


def same(model, other, gate=1e-10):
    """Equal in float64 up to the order in which the two forms add the same numbers, which the polar factors
    of
    ill-conditioned matrices amplify."""
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        error = (p.double() - q.double()).norm() / (q.double().norm() + 1e-12)
        assert error < gate, error


def both(light, run, dtype=torch.float64, **kwargs):
    """Runs the same training with the form and with the plain one; returns the models after it."""
    results = []
    for form in (light, False):
        model, opt = make(dtype, form, **kwargs)
        run(model, opt)
        results.append(model)
    start, _ = make(dtype)
    assert any(
        not torch.equal(p, q) for p, q in zip(results[0].parameters(), start.parameters(), strict=True)
    )
    return results


@pytest.mark.parametrize("light", LIGHT)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_plain_training(light, dtype):
    def run(model, opt):
        for i in range(6):
            opt.zero_grad()
            loss_of(model, batch(i, dtype)).backward()
            opt.step()

    same(
        *both(light, run, dtype),
        gate={torch.float64: 1e-10, torch.float32: 1e-3, torch.bfloat16: 0.03}[dtype],
    )


@pytest.mark.parametrize("light", LIGHT)
@pytest.mark.parametrize("passes", [2, 5])
def test_gradient_accumulation(light, passes):
    def run(model, opt):
        for i in range(4):
            opt.zero_grad()
            for j in range(passes):
                (loss_of(model, batch(passes * i + j)) / passes).backward()
            opt.step()

    same(*both(light, run))


@pytest.mark.parametrize("light", LIGHT)
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("place", ["after step", "before backward", "twice", "never in light"])
@pytest.mark.parametrize("who", ["optimizer", "model"])
def test_zero_grad(light, set_to_none, place, who):
    def run(model, opt):
        def clear():
            (opt if who == "optimizer" else model).zero_grad(set_to_none=set_to_none)

        for i in range(4):
            if place in ("before backward", "twice"):
                clear()
            loss_of(model, batch(i)).backward()
            opt.step()
            if place in ("after step", "twice") or (
                place == "never in light" and not opt.param_groups[0]["light"]
            ):
                clear()

    same(*both(light, run))


@pytest.mark.parametrize("who", ["optimizer", "model"])
@pytest.mark.parametrize("then", ["step", "backward"])
def test_clearing_unused_gradients_is_told(who, then):
    """The plain form forgets them; here they are in the momentum, so the training must stop."""
    model, opt = make(light=True)
    loss_of(model, batch(0)).backward()
    with pytest.raises(RuntimeError, match="cleared or replaced between backward and step"):
        (opt if who == "optimizer" else model).zero_grad()
        opt.step() if then == "step" else loss_of(model, batch(1)).backward()


def test_clearing_unused_gradients_deferred():
    def run(model, opt):
        for i in range(6):
            opt.zero_grad()
            loss_of(model, batch(i)).backward()
            if i % 2:
                opt.step()

    same(*both("deferred", run))


CHANGES = {
    "clip": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1e-3),
    "clip value": lambda model: nn.utils.clip_grad_value_(model.parameters(), 1e-3),
    "division": lambda model: [p.grad.div_(2) for p in model.parameters()],
    "zeros": lambda model: model.zero_grad(set_to_none=False),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("then", ["step", "backward"])
def test_changing_gradients_in_place_is_told(change, then):
    model, opt = make(light=True)
    before = [p.detach().clone() for p in model.parameters()]
    loss_of(model, batch(0)).backward()
    change(model)
    with pytest.raises(RuntimeError, match="changed in place"):
        opt.step() if then == "step" else loss_of(model, batch(1)).backward()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_changing_gradients_deferred(change):
    def run(model, opt):
        for i in range(5):
            opt.zero_grad()
            loss_of(model, batch(i)).backward()
            if i % 2:
                change(model)
            opt.step()

    same(*both("deferred", run))


def scaled(model, opt, scaler, i, unscale, poison=()):
    opt.zero_grad()
    loss = scaler.scale(loss_of(model, batch(i)))
    (loss * math.inf if i in poison else loss).backward()
    if unscale:
        scaler.unscale_(opt)
    scaler.step(opt)
    scaler.update()


@pytest.mark.parametrize("light", LIGHT)
@pytest.mark.parametrize("unscale", [False, True])
def test_grad_scaler(light, unscale):
    """Scales that grow every other step: an unscaled buffer would weigh the steps wrongly."""
    results = []
    for form in (light, False):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**6, growth_interval=2)
        model, opt = make(light=form, **({"grad_scaler": scaler} if form is True else {}))
        for i in range(6):
            scaled(model, opt, scaler, i, unscale)
        assert scaler.get_scale() == 2.0**9
        results.append(model)
    same(*results)


@pytest.mark.parametrize("light", LIGHT)
@pytest.mark.parametrize("unscale", [False, True])
def test_grad_scaler_skips_a_step(light, unscale):
    """All gradients overflow: the step is skipped, the scale falls, and the momentum is as it was."""
    results = []
    for form in (light, False):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**6)
        model, opt = make(light=form, **({"grad_scaler": scaler} if form is True else {}))
        for i in range(6):
            before = [p.detach().clone() for p in model.parameters()]
            scaled(model, opt, scaler, i, unscale, poison=(2, 3))
            unchanged = all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
            assert unchanged == (i in (2, 3))
        assert scaler.get_scale() == 2.0**4
        results.append(model)
    same(*results)


def test_grad_scaler_partial_overflow_counts_towards_the_next_step():
    """One layer overflows and the step is skipped: for the others it was one more pass to accumulate."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4)
    model, opt = make(light=True, grad_scaler=scaler)
    plain, reference = make()
    for i in range(5):
        loss = scaler.scale(loss_of(model, batch(i)))
        handle = model[0].weight.register_hook(lambda g: g * math.inf) if i == 2 else None
        loss.backward()
        if handle:
            handle.remove()
        scaler.step(opt)
        scaler.update()
        loss_of(plain, batch(i)).backward()
        if i == 2:
            plain[0].weight.grad = None
        else:
            reference.step()
            reference.zero_grad()
    assert scaler.get_scale() == 2.0**3
    same(model, plain)


def test_grad_scaler_that_the_light_form_does_not_know_is_refused():
    scaler = torch.amp.GradScaler("cpu")
    model, opt = make(light=True)
    scaler.scale(loss_of(model, batch(0))).backward()
    with pytest.raises(RuntimeError, match="grad_scaler=scaler"):
        scaler.step(opt)


def test_clipping_between_unscale_and_step_is_told():
    scaler = torch.amp.GradScaler("cpu")
    model, opt = make(light=True, grad_scaler=scaler)
    scaler.scale(loss_of(model, batch(0))).backward()
    scaler.unscale_(opt)
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    with pytest.raises(RuntimeError, match="changed in place"):
        scaler.step(opt)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("clear", ["opt", "model", "nobody"])
def test_nonfinite_backward_leaves_momentum_and_weights(bad, clear):
    """Every gradient is lost, as if the batch had not been; the plain form must clear them for that."""
    model, opt = make(light=True)
    plain, reference = make()
    for i in range(6):
        if i == 2:
            (loss_of(model, batch(i)) * bad).backward()
            assert all(not p.grad.isfinite().all() for p in model.parameters())
            if clear == "opt":
                opt.zero_grad()
            elif clear == "model":
                model.zero_grad()
            else:
                opt.step()
            continue
        for m, o in ((model, opt), (plain, reference)):
            loss_of(m, batch(i)).backward()
            o.step()
        plain.zero_grad()
    same(model, plain)
    assert all(opt.state[p]["momentum_buffer"].isfinite().all() for p in model.parameters())


def test_nonfinite_parameter_is_left_alone_and_the_others_step():
    model, opt = make(light=True)
    plain, reference = make()
    for i in range(5):
        handle = model[2].weight.register_hook(lambda g: g * math.nan) if i == 1 else None
        loss_of(model, batch(i)).backward()
        if handle:
            handle.remove()
        opt.step()
        loss_of(plain, batch(i)).backward()
        if i == 1:
            plain[2].weight.grad = None
        reference.step()
        plain.zero_grad()
    same(model, plain)


def test_nonfinite_microbatch_keeps_the_finite_ones():
    model, opt = make(light=True)
    plain, reference = make()
    for i in range(4):
        for j in range(3):
            x = batch(3 * i + j)
            (loss_of(model, x) * (math.nan if (i, j) == (1, 1) else 1)).backward()
            # After a bad pass p.grad shows it until the step, and passes on top of it are lost with it.
            if i != 1 or j == 0:
                loss_of(plain, x).backward()
        opt.step()
        if i != 1:
            reference.step()
            plain.zero_grad()
    same(model, plain)


def test_error_if_nonfinite_raises_before_any_parameter_changes():
    model, opt = make(light=True, error_if_nonfinite=True)
    before = [p.detach().clone() for p in model.parameters()]
    handle = model[2].weight.register_hook(lambda g: g * math.nan)
    loss_of(model, batch(0)).backward()
    handle.remove()
    with pytest.raises(RuntimeError, match=r"gradient of 2\.weight"):
        opt.step()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    opt.zero_grad()
    loss_of(model, batch(1)).backward()
    opt.step()
    assert all(p.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("light", LIGHT)
def test_parameters_without_gradient_this_step(light):
    """The head is left out of every other loss: its momentum must neither move nor decay."""

    def run(model, opt):
        for i in range(6):
            opt.zero_grad()
            y = model[:-1](batch(i)) if i % 2 else model(batch(i))
            y.square().mean().backward()
            opt.step()

    same(*both(light, run))


@pytest.mark.parametrize("light", LIGHT)
def test_momentum_that_a_scheduler_changes(light):
    def run(model, opt):
        for i in range(6):
            opt.param_groups[0]["momentum"] = 0.5 + 0.05 * i
            opt.zero_grad()
            loss_of(model, batch(i)).backward()
            opt.step()

    same(*both(light, run))


@pytest.mark.parametrize("light", LIGHT)
def test_shared_and_reused_parameters(light):
    """A weight used twice in one graph, and one shared by two modules, arrive as one gradient each."""
    results = []
    for form in (light, False):
        torch.manual_seed(0)
        embedding, mix, head = nn.Embedding(7, 5), nn.Linear(5, 5), nn.Linear(5, 7, bias=False)
        head.weight = embedding.weight
        model = nn.ModuleList([embedding, mix, head]).double()
        opt = Scion(
            Scion.auto_groups(model, hidden=2.0, output=4.0), lr=0.05, light=form, compute_dtype=torch.float64
        )
        tokens = torch.arange(7)
        for i in range(4):
            opt.zero_grad()
            nn.functional.cross_entropy(head(mix(mix(embedding(tokens)))), tokens.roll(i)).backward()
            opt.step()
        results.append(model)
    same(*results)


def test_gradients_given_by_hand():
    def run(model, opt):
        for i in range(4):
            grads = torch.autograd.grad(loss_of(model, batch(i)), list(model.parameters()))
            for p, g in zip(model.parameters(), grads, strict=True):
                p.grad = g
            opt.step()
            assert all(g.isfinite().all() for g in grads)
            opt.zero_grad()

    same(*both(True, run))


def test_autograd_grad_between_backward_and_step():
    def run(model, opt):
        for i in range(4):
            opt.zero_grad()
            loss_of(model, batch(i)).backward()
            torch.autograd.grad(loss_of(model, batch(9)), list(model.parameters()))
            opt.step()

    same(*both(True, run))


def test_closure():
    def run(model, opt):
        for i in range(4):

            def closure(i=i):
                opt.zero_grad()
                loss = loss_of(model, batch(i))
                loss.backward()
                return loss

            assert opt.step(closure) > 0

    same(*both(True, run))


def test_between_step_and_backward_there_is_no_gradient():
    model, opt = make(light=True)
    loss_of(model, batch(0)).backward()
    assert all(p.grad is opt.state[p]["momentum_buffer"] for p in model.parameters())
    with pytest.raises(RuntimeError, match="between backward and step"):
        opt.state_dict()
    opt.step()
    assert all(p.grad is None for p in model.parameters())
    opt.state_dict()


def test_checkpoints_pass_between_the_forms():
    def run(first, second):
        model, opt = make(light=first)
        for i in range(3):
            loss_of(model, batch(i)).backward()
            opt.step()
            opt.zero_grad()
        other, fresh = make(light=second, seed=1)
        other.load_state_dict(model.state_dict())
        fresh.load_state_dict(opt.state_dict())
        assert all(group["light"] == second for group in fresh.param_groups)
        for i in range(3, 6):
            loss_of(other, batch(i)).backward()
            fresh.step()
            fresh.zero_grad()
        return other

    plain = run(False, False)
    for first, second in ((True, False), (False, True), (True, True), ("deferred", True)):
        same(run(first, second), plain)


def test_a_new_optimizer_takes_the_parameters_over():
    model, old = make(light=True)
    new = Scion(model.parameters(), lr=0.05, light=True)
    loss_of(model, batch(0)).backward()
    assert not old.state and all(p in new.state for p in model.parameters())
    new.step()


def test_frozen_parameter_that_thaws():
    def run(model, first):
        model[2].requires_grad_(False)
        light = first.param_groups[0]["light"]
        opt = Scion(model.parameters(), lr=0.05, light=light, compute_dtype=torch.float64)
        for i in range(4):
            if i == 2:
                model[2].requires_grad_(True)
            opt.zero_grad()
            loss_of(model, batch(i)).backward()
            opt.step()

    same(*both(True, run))


def test_sparse_and_graph_gradients_are_refused():
    table = nn.Embedding(5, 3, sparse=True)
    opt = Scion(table.parameters(), light=True)
    with pytest.raises(RuntimeError, match="sparse"):
        table(torch.tensor([1])).sum().backward()
    model, _ = make(light=True)
    with pytest.raises(RuntimeError, match="create_graph"), pytest.warns(UserWarning, match="create_graph"):
        loss_of(model, batch(0)).backward(create_graph=True)
    assert not opt.state


# Memory


def allocated(work):
    """(bytes that the result of ``work`` keeps, the most that were alive while it ran), by the allocator."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        keep = work()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    total = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        total += event.nbytes()
        peak = max(peak, total)
    del keep
    return total, peak


LAYERS, WIDTH = 6, 64


def layers(dtype):
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_set_of_weights_and_one_of_gradients(dtype):
    """Measured bytes per byte of weights, (between backward and step, after the step)."""

    def train(kind, finish):
        model = layers(dtype)
        opt = (
            torch.optim.AdamW(model.parameters())
            if kind == "adamw"
            else Scion(model.parameters(), light=kind)
        )
        for i in range(2):
            opt.zero_grad()
            model(torch.randn(4, WIDTH, dtype=dtype)).square().mean().backward()
            if finish or i == 0:
                opt.step()
        return model, opt

    weights = LAYERS * WIDTH * WIDTH * torch.empty(0, dtype=dtype).element_size()
    sets = {
        kind: tuple(
            round(allocated(lambda k=kind, f=finish: train(k, f))[0] / weights, 2) for finish in (False, True)
        )
        for kind in (True, "deferred", False, "adamw")
    }
    assert sets[True] == (2.0, 2.0)  # weights and gradients, at all times
    assert sets["deferred"] == (3.0, 2.0)
    assert sets[False] == (3.0, 3.0)
    assert sets["adamw"] == (4.0, 4.0)


def test_backward_holds_one_fresh_gradient_at_a_time():
    peaks = {}
    for light in (True, False):
        model = layers(torch.float32)
        opt = Scion(model.parameters(), light=light)
        for _ in range(2):
            opt.zero_grad()
            loss = model(torch.randn(4, WIDTH)).square().mean()
            peaks[light] = allocated(loss.backward)[1]
            opt.step()
    layer = WIDTH * WIDTH * 4
    assert layer <= peaks[True] < 2 * layer
    # Activations that the forward pass left are freed meanwhile, and count against what is allocated.
    activations = (LAYERS + 1) * 4 * WIDTH * 4
    assert peaks[False] >= LAYERS * layer - activations
