"""Which norm each parameter of a model gets, and a table that says so."""

from __future__ import annotations

import fnmatch
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pyops.optim.base import is_dtensor, named
from pyops.optim.norms import gauge, resolve

if TYPE_CHECKING:
    from pyops.optim.scion import Scion

CONV = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
CONV_TRANSPOSE = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
EMBEDDING = (nn.Embedding, nn.EmbeddingBag)
GAIN = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.PReLU)
GATES = {"LSTM": 4, "GRU": 3}


def groups(
    model: nn.Module,
    *,
    hidden: float = 50.0,
    output: float = 3000.0,
    input: float = 1.0,
    vector: float | None = None,
    input_norm: str = "col",
    output_norm: str = "sign",
    input_layer: str | None = None,
    output_layer: str | None = None,
    overrides: Mapping[str, Mapping[str, Any] | None] | None = None,
    strict: bool = True,
    **settings: Any,
) -> list[dict[str, Any]]:
    """Parameter groups of :class:`pyops.optim.Scion` for a model, by the types of its modules.

    ==================================  ==========================================  ======
    parameter                           norm                                        radius
    ==================================  ==========================================  ======
    Linear                              spectral                                    hidden
    Conv (per group of channels)        spectral_conv                               hidden
    ConvTranspose                       spectral_conv_tap, transposed               hidden
    MultiheadAttention, LSTM, GRU, RNN  spectral per projection and per gate        hidden
    Embedding                           ``input_norm``, transposed (one-hot input)  input
    input layer, where nothing embeds   as Linear or Conv, with scale="rms_max"     input
    output layer; embedding tied to it  ``output_norm``                             output
    bias, norm gain, any vector         rms                                         vector
    ==================================  ==========================================  ======

    The output layer is the last Linear that is a direct child of the model, or else the last one; the input
    layer is the first Linear or Conv. A parameter that several modules share appears once. Frozen parameters
    are left out.

    Args:
        model: the model; its parameters keep their names.
        hidden, output, input, vector: radii; ``vector`` defaults to ``hidden``. 50 and 3000 are the paper's
            for a 124M GPT, and 1 its input radius for a shallow one.
        input_norm: for embeddings; the paper also uses spectral and sign.
        output_norm: the paper also uses row and spectral.
        input_layer, output_layer: name of the module, where the rule above picks another one.
        overrides: settings by pattern of parameter names (``fnmatch``), the first match wins; None leaves the
            parameters out.
        strict: raise for parameters of two and more dimensions that nothing above covers; else warn and leave
            them out.
        settings: for every group, such as ``momentum``.

    Returns:
        Groups with named parameters and a ``name``.

    Raises:
        TypeError: for a model that is none.
        ValueError: for uncovered parameters, naming them, and for a layer or pattern that is not in the
            model.

    >>> model = nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 9))
    >>> for group in groups(model):
    ...     print(group["name"], group["norm"], [name for name, _ in group["params"]])
    input col ['0.weight']
    hidden spectral ['1.weight']
    vector rms ['1.bias', '2.bias', '3.bias']
    gain rms ['2.weight']
    output sign ['3.weight']
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    vector = hidden if vector is None else vector
    radii = {"hidden": hidden, "output": output, "input": input, "vector": vector, "gain": vector}
    owners = _owners(model)
    first, last = _ends(model, owners, input_layer, output_layer)
    found: dict[str, tuple[str, dict[str, Any]]] = {}
    uncovered, matched = [], set()
    for name, p, modules in owners:
        pattern = next((x for x in overrides or () if fnmatch.fnmatchcase(name, x)), None)
        if pattern is not None:
            matched.add(pattern)
            wanted = (overrides or {})[pattern]
            if wanted is not None:
                found[name] = pattern, {"norm": "auto", "radius": hidden, **wanted}
            continue
        if not p.requires_grad:
            continue
        role = _role(name, p, modules, first, last, input_norm, output_norm)
        if role is None:
            uncovered.append(f"{name} {tuple(p.shape)}")
        else:
            found[name] = role[0], {"radius": radii[role[0]], **role[1]}
    for pattern in (overrides or {}).keys() - matched:
        raise ValueError(f"overrides has {pattern!r}, which matches no parameter")
    if uncovered:
        message = (
            f"no group covers {', '.join(uncovered)}: say what they are by overrides={{pattern: settings}}"
        )
        if strict:
            raise ValueError(message)
        warnings.warn(message + "; they are left out and will not be trained", stacklevel=3)
    parameters = {name: p for name, p, _ in owners}
    result: dict[str, dict[str, Any]] = {}
    for name, (role_name, chosen) in found.items():
        group = {"name": role_name, **settings, **chosen}
        result.setdefault(repr(group), {**group, "params": []})["params"].append((name, parameters[name]))
    return list(result.values())


def _owners(model: nn.Module) -> list[tuple[str, nn.Parameter, list[tuple[str, nn.Module]]]]:
    """Each parameter once, under its first name, with all the modules that hold it."""
    found: dict[nn.Parameter, tuple[str, list]] = {}
    for path, module in model.named_modules():
        for key, p in module.named_parameters(recurse=False, remove_duplicate=False):
            name = f"{path}.{key}" if path else key
            found.setdefault(p, (name, []))[1].append((path, module))
    return [(name, p, modules) for p, (name, modules) in found.items()]


def _ends(model, owners, input_layer, output_layer) -> tuple[nn.Module | None, nn.Module | None]:
    modules = dict(model.named_modules())
    for argument, name in (("input_layer", input_layer), ("output_layer", output_layer)):
        if name is not None and name not in modules:
            raise ValueError(f"{argument} must name a module of the model, got {name!r}")
    linear = [(path, m) for path, m in modules.items() if isinstance(m, nn.Linear)]
    direct = [m for path, m in linear if "." not in path]
    last: nn.Module | None = next(reversed(direct or [m for _, m in linear]), None)
    if output_layer is not None:
        last = modules[output_layer]
    embeds = any(isinstance(m, EMBEDDING) for m in modules.values())
    if output_layer is None and any(_tied(owning) for _, _, owning in owners):
        last = None
    weighty = [m for m in modules.values() if isinstance(m, (nn.Linear, *CONV)) and m is not last]
    first = modules[input_layer] if input_layer is not None else None if embeds or not weighty else weighty[0]
    return first, last


def _tied(modules: list[tuple[str, nn.Module]]) -> bool:
    kinds = [isinstance(m, EMBEDDING) for _, m in modules]
    return any(kinds) and not all(kinds)


def _role(name, p, modules, first, last, input_norm, output_norm) -> tuple[str, dict[str, Any]] | None:
    module, key = modules[0][1], name.rpartition(".")[2]
    if isinstance(module, GAIN):
        return ("vector", {"norm": "rms"}) if key == "bias" else ("gain", {"norm": "rms", "init": "keep"})
    if p.dim() < 2 or (isinstance(module, nn.MultiheadAttention) and key in ("bias_k", "bias_v")):
        return ("vector", {"norm": "rms"}) if "bias" in key else ("gain", {"norm": "rms", "init": "keep"})
    if _tied(modules) or any(m is last for _, m in modules):
        return "output", {"norm": output_norm}
    scale = {"scale": "rms_max"} if module is first else {}
    role = "input" if module is first else "hidden"
    if isinstance(module, EMBEDDING):
        return "input", {"norm": input_norm, "transpose": True}
    if isinstance(module, nn.Linear):
        return role, {"norm": "spectral", **scale}
    if isinstance(module, CONV):
        split = {"num_heads": module.groups} if module.groups > 1 else {}
        return role, {"norm": "spectral_conv", **scale, **split}
    if isinstance(module, CONV_TRANSPOSE):
        split = {"num_heads": module.groups} if module.groups > 1 else {}
        return role, {"norm": "spectral_conv_tap", "transpose": True, **split}
    if isinstance(module, nn.MultiheadAttention):
        parts = {"split_sizes": (module.embed_dim,) * 3} if key == "in_proj_weight" else {}
        return "hidden", {"norm": "spectral", **parts}
    if isinstance(module, nn.RNNBase):
        gates = 1 if key.startswith("weight_hr") else GATES.get(module.mode, 1)
        return "hidden", {"norm": "spectral", **({"num_heads": gates} if gates > 1 else {})}
    return None


def ratios(optimizer: Scion) -> dict[str, float]:
    """||W|| / radius of every parameter, in the norm of its group; at most 1 inside the ball."""
    result = {}
    for _, name, group, p in _rows(optimizer):
        w = p.full_tensor() if is_dtensor(p) else p
        length = gauge(w, optimizer._blocks(group, p.shape))
        result[name] = length / group["radius"] if group["radius"] > 0 else math.nan
    return result


def _rows(optimizer: Scion) -> Iterator[tuple[int, str, dict[str, Any], Any]]:
    for i, group in enumerate(optimizer.param_groups):
        for name, p in named(group):
            yield i, name if group.get("param_names") else f"group {i} {name}", group, p


@torch.no_grad()
def summary(optimizer: Scion, model: nn.Module | None = None) -> str:
    """A table of what the optimizer does to each parameter.

    Args:
        optimizer: whose parameters.
        model: also count the trainable parameters of this model that no group covers, and warn if there are
            any.

    Returns:
        One line per parameter: name, shape, group, norm, radius, ||W|| / radius; then totals.
    """
    lengths = ratios(optimizer)
    table = [("parameter", "shape", "group", "norm", "radius", "||W||/radius")]
    covered = set()
    for i, name, group, p in _rows(optimizer):
        covered.add(p)
        norm = resolve(group["norm"], p.dim())
        detail = [group["scale"]] if norm.startswith("spectral") and group["scale"] != "rms" else []
        detail += ["transposed"] if group["transpose"] else []
        detail += [f"split {list(group['split_sizes'])}"] if group["split_sizes"] else []
        detail += [f"heads {group['num_heads']}"] if group["num_heads"] else []
        shown = norm + (f" ({', '.join(detail)})" if detail else "")
        label = group.get("name") or str(i)
        table.append(
            (name, str(tuple(p.shape)), label, shown, f"{group['radius']:g}", f"{lengths[name]:.3g}")
        )
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in table]
    lines.append(f"{len(covered)} parameters, {sum(p.numel() for p in covered):,} entries")
    if model is not None:
        missing = [name for name, p in model.named_parameters() if p.requires_grad and p not in covered]
        lines.append(f"unassigned: {len(missing)}{' (' + ', '.join(missing) + ')' if missing else ''}")
        if missing:
            warnings.warn(f"no group covers {', '.join(missing)}: they will not be trained", stacklevel=3)
    return "\n".join(lines)


def on_whole(p: Any, fill: Callable, *args: Any) -> None:
    """fill(p, *args) for the whole of p; a DTensor gets what the first rank of its mesh drew."""
    if not is_dtensor(p):
        fill(p, *args)
        return
    from torch.distributed.tensor import distribute_tensor

    whole = torch.empty(p.shape, dtype=p.dtype, device=p.device)
    fill(whole, *args)
    p.copy_(distribute_tensor(whole, p.device_mesh, p.placements))
