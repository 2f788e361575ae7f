"""What Scion refuses, and that nothing has changed when it does."""

import math

import pytest
import torch
from torch import nn

from pyops.optim import Scion

BAD = [
    ({"lr": -1.0}, ValueError, "lr"),
    ({"lr": 1.5}, ValueError, "lr"),
    ({"lr": math.nan}, ValueError, "lr"),
    ({"momentum": 1.0}, ValueError, "momentum"),
    ({"momentum": 0.9, "alpha": 0.1}, ValueError, "alpha"),
    ({"alpha": 0.0}, ValueError, "alpha"),
    ({"norm": "nuclear"}, ValueError, "norm"),
    ({"radius": -1.0}, ValueError, "radius"),
    ({"scale": "sqrt"}, ValueError, "scale"),
    ({"normalized": True, "norm": "spectral"}, ValueError, "normalized"),
    ({"transpose": True, "norm": "rms"}, ValueError, "transpose"),
    ({"method": "cholesky"}, ValueError, "method"),
    ({"steps": -1}, ValueError, "steps"),
    ({"steps": "adaptive"}, ValueError, "steps"),
    ({"steps": None, "coefficients": [(1.0, 2.0)]}, ValueError, "coefficients"),
    ({"eps": -1.0}, ValueError, "eps"),
    ({"form": "grams"}, ValueError, "form"),
    ({"compute_dtype": torch.int32}, ValueError, "compute_dtype"),
    ({"split_sizes": (2, 3)}, ValueError, "split_sizes"),
    ({"num_heads": 3}, ValueError, "num_heads"),
    ({"num_heads": (2, 2)}, ValueError, "num_heads"),
    ({"num_heads": 2, "norm": "rms"}, ValueError, "num_heads"),
    ({"split_dim": 2, "num_heads": 2}, ValueError, "split_dim"),
    ({"light": "yes"}, ValueError, "light"),
    ({"init": "ones"}, ValueError, "init"),
    ({"grad_scaler": torch.amp.GradScaler("cpu")}, ValueError, "grad_scaler"),
]


@pytest.mark.parametrize(("kwargs", "error", "name"), BAD, ids=lambda x: str(x)[:40])
def test_bad_setting_is_named(kwargs, error, name):
    with pytest.raises(error, match=name):
        Scion([nn.Parameter(torch.randn(4, 4))], **kwargs)


def test_bad_group_is_not_added():
    opt = Scion([nn.Parameter(torch.randn(4, 4))])
    for group in ({"radius": -1.0}, {"raduis": 1.0}, {"momentum": 0.1, "alpha": 0.9}, {"light": True}):
        with pytest.raises(ValueError, match=r"raduis .* settings are .*radius|radius|alpha|light"):
            opt.add_param_group({"params": [nn.Parameter(torch.randn(4, 4))], **group})
    assert len(opt.param_groups) == 1
    opt.param_groups[0]["radius"] = -1.0
    with pytest.raises(ValueError, match="radius"):
        opt.step()


def test_bad_parameters():
    matrix = nn.Parameter(torch.randn(4, 4))
    with pytest.raises(TypeError, match="parameter 1"):
        Scion([matrix, torch.zeros(4, 4, dtype=torch.complex64)])
    with pytest.raises(TypeError, match="float64, float32"):
        Scion([torch.zeros(4, 4, dtype=torch.int64)])
    with pytest.raises(TypeError, match="dense"):
        Scion([torch.eye(4).to_sparse()])
    with pytest.raises(ValueError, match="twice"):
        Scion([matrix, matrix])
    with pytest.raises(ValueError, match="more than one parameter group"):
        Scion([{"params": [matrix]}, {"params": [matrix]}])
    with pytest.raises(
        ValueError, match=r"bias: norm 'spectral' needs a matrix, got a parameter of shape \(5,\); .*rms"
    ):
        Scion([("bias", nn.Parameter(torch.zeros(5)))], norm="spectral")
    flat = nn.Parameter(torch.zeros(16))
    flat._fsdp_flattened = True
    with pytest.raises(ValueError, match="fully_shard"):
        Scion([flat])
    with pytest.raises(TypeError):
        Scion([matrix], differentiable=True)
    for model in (nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4))):
        with pytest.raises(TypeError, match=r"got the module .*auto_groups"):
            Scion(model)
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, got generator"):
        Scion.auto_groups(nn.Linear(4, 4).parameters())


def test_sparse_gradient_is_refused_before_anything_changes():
    table = nn.Embedding(10, 4, sparse=True)
    other = nn.Parameter(torch.randn(4, 4))
    opt, before = Scion([other, table.weight]), other.detach().clone()
    other.grad = torch.randn(4, 4)
    table(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(RuntimeError, match="parameter 1 has a sparse gradient"):
        opt.step()
    assert torch.equal(other, before) and not opt.state


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_error_if_nonfinite_comes_before_any_change(bad):
    params = [("a", nn.Parameter(torch.randn(4, 4))), ("b", nn.Parameter(torch.randn(4, 4)))]
    opt = Scion(params, error_if_nonfinite=True)
    before = [p.detach().clone() for _, p in params]
    for _, p in params:
        p.grad = torch.randn(4, 4)
    params[1][1].grad[2, 1] = bad
    with pytest.raises(RuntimeError, match="gradient of b"):
        opt.step()
    for (_, p), old in zip(params, before, strict=True):
        assert torch.equal(p, old)
    assert not opt.state
    params[1][1].grad[2, 1] = 0.0
    opt.step()
    assert not torch.equal(params[0][1], before[0])
