"""Which norm and radius each parameter of a model gets."""

import pytest
import torch
from torch import nn

from pyops.optim import Scion


def assigned(model, **kwargs):
    """{parameter name: its group}."""
    groups = Scion.auto_groups(model, hidden=5.0, output=7.0, input=2.0, vector=3.0, **kwargs)
    return {name: group for group in groups for name, _ in group["params"]}


class Gpt(nn.Module):
    def __init__(self, tied):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(11, 8), nn.Embedding(16, 8)
        self.norm = nn.LayerNorm(8)
        self.attention = nn.MultiheadAttention(8, 2)
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)
        self.head = nn.Linear(8, 11, bias=False)
        if tied:
            self.head.weight = self.tokens.weight


def test_gpt():
    found = assigned(Gpt(tied=False))
    assert {name: (g["norm"], g["radius"]) for name, g in found.items()} == {
        "tokens.weight": ("col", 2.0),
        "positions.weight": ("col", 2.0),
        "norm.weight": ("rms", 3.0),
        "norm.bias": ("rms", 3.0),
        "attention.in_proj_weight": ("spectral", 5.0),
        "attention.in_proj_bias": ("rms", 3.0),
        "attention.out_proj.weight": ("spectral", 5.0),
        "attention.out_proj.bias": ("rms", 3.0),
        "up.weight": ("spectral", 5.0),
        "up.bias": ("rms", 3.0),
        "down.weight": ("spectral", 5.0),
        "down.bias": ("rms", 3.0),
        "head.weight": ("sign", 7.0),
    }
    assert found["tokens.weight"]["transpose"] and found["norm.weight"]["init"] == "keep"
    assert found["attention.in_proj_weight"]["split_sizes"] == (8, 8, 8)


def test_tied_weights_are_one_output_parameter():
    model = Gpt(tied=True)
    found = assigned(model)
    assert (found["tokens.weight"]["norm"], found["tokens.weight"]["radius"]) == ("sign", 7.0)
    assert "head.weight" not in found and found["down.weight"]["norm"] == "spectral"
    assert len(found) == len(list(model.parameters()))


def test_convolutional_network():
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3, groups=4),
        nn.ConvTranspose2d(8, 6, 2, groups=2), nn.PReLU(6), nn.Flatten(), nn.Linear(6, 4), nn.Linear(4, 10),
    )  # fmt: skip
    found = assigned(model)
    first = found["0.weight"]
    assert (first["norm"], first["scale"], first["radius"]) == ("spectral_conv", "rms_max", 2.0)
    assert (found["2.weight"]["norm"], found["2.weight"]["num_heads"]) == ("spectral_conv", 4)
    up = found["3.weight"]
    assert (up["norm"], up["transpose"], up["num_heads"]) == ("spectral_conv_tap", True, 2)
    assert found["1.weight"]["init"] == found["4.weight"]["init"] == "keep"
    assert (found["6.weight"]["norm"], found["7.weight"]["norm"]) == ("spectral", "sign")
    opt = Scion(Scion.auto_groups(model), lr=0.05)
    opt.init_()
    assert (model[1].weight == 1).all() and (model[1].bias == 0).all()
    ratios = opt.ball_ratios()
    for i in (0, 2, 3, 6, 7):
        assert ratios[f"{i}.weight"] == pytest.approx(1.0, abs=1e-4), i
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    opt.step()
    assert all(p.isfinite().all() for p in model.parameters())


def test_recurrent_gates():
    found = assigned(nn.ModuleList([nn.LSTM(4, 6, proj_size=3), nn.GRU(4, 6), nn.RNN(4, 6), nn.Linear(3, 2)]))
    assert found["0.weight_ih_l0"]["num_heads"] == 4 and found["1.weight_hh_l0"]["num_heads"] == 3
    assert "num_heads" not in found["0.weight_hr_l0"] and "num_heads" not in found["2.weight_ih_l0"]
    assert found["0.bias_ih_l0"]["norm"] == "rms"


def test_a_single_layer_is_the_output():
    assert assigned(nn.Linear(4, 3))["weight"]["norm"] == "sign"


def test_layers_can_be_named():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    found = assigned(model, output_layer="0", input_layer="2", output_norm="row")
    assert [found[f"{i}.weight"]["norm"] for i in range(3)] == ["row", "spectral", "spectral"]
    assert found["2.weight"]["scale"] == "rms_max" and "scale" not in found["1.weight"]
    with pytest.raises(ValueError, match="output_layer"):
        assigned(model, output_layer="head")


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.gain = nn.Parameter(torch.randn(2, 4, 6)), nn.Parameter(torch.ones(6))
        self.head = nn.Linear(6, 2)


def test_uncovered_parameters():
    with pytest.raises(ValueError, match=r"no group covers up \(2, 4, 6\)"):
        assigned(Experts())
    with pytest.warns(UserWarning, match="up.*not be trained"):
        found = assigned(Experts(), strict=False)
    assert "up" not in found and (found["gain"]["norm"], found["gain"]["init"]) == ("rms", "keep")
    found = assigned(Experts(), overrides={"u*": {"norm": "spectral", "radius": 9.0}})
    assert (found["up"]["norm"], found["up"]["radius"]) == ("spectral", 9.0)
    assert "up" not in assigned(Experts(), overrides={"up": None})
    with pytest.raises(ValueError, match="'uq'"):
        assigned(Experts(), overrides={"uq": None, "up": None})


def test_frozen_parameters_are_left_out():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].requires_grad_(False)
    assert set(assigned(model)) == {"1.weight", "1.bias"}


def test_settings_reach_every_group():
    assert all(g["momentum"] == 0.3 for g in assigned(Gpt(tied=True), momentum=0.3).values())


def test_summary_tells_everything():
    model = Experts()
    opt = Scion(
        Scion.auto_groups(model, hidden=5.0, output=7.0, overrides={"up": {"norm": "spectral"}}), lr=0.1
    )
    opt.init_()
    text = opt.summary(model)
    rows = {line.split()[0]: line for line in text.splitlines()}
    assert "spectral" in rows["up"] and "(2, 4, 6)" in rows["up"] and "5" in rows["up"]
    assert "sign" in rows["head.weight"] and rows["head.weight"].endswith("1")
    assert "4 parameters, 68 entries" in text and "unassigned: 0" in text
    partial = Scion(model.head.named_parameters(), lr=0.1)
    with pytest.warns(UserWarning, match="up, gain"):
        assert "unassigned: 2 (up, gain)" in partial.summary(model)


def test_ratio_follows_the_weights():
    model = nn.Sequential(nn.Linear(4, 4, bias=False))
    opt = Scion([{"params": list(model.parameters()), "norm": "spectral", "radius": 2.0}])
    opt.init_()
    before = opt.ball_ratios()["group 0 parameter 0"]
    with torch.no_grad():
        model[0].weight.mul_(0.5)
    assert before == pytest.approx(1.0) and opt.ball_ratios()["group 0 parameter 0"] == pytest.approx(0.5)
