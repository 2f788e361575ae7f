"""Loads the compiled library, registers ops with torch, and says which implementation serves a call."""

from __future__ import annotations

import functools
import importlib.util
import os
import platform
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

LIBRARY_PATH = Path(__file__).parent / "lib" / "libpyops.so"
_FRAGMENT = torch.library.Library("pyops", "FRAGMENT")


class Op(NamedTuple):
    """What was registered for one op."""

    name: str
    schema: str
    triton: bool
    plain: bool
    uses_amx: Callable[..., bool] | None


OPS: dict[str, Op] = {}


@functools.cache
def load() -> bool:
    """Loads libpyops.so, which registers schemas and kernels; False (and one warning) where there is none."""
    if not LIBRARY_PATH.exists():
        warnings.warn(
            "pyops runs without its compiled library (not built): every op uses its plain torch reference. "
            "Build it with `pip install --no-build-isolation .` where a C++ compiler is available.",
            RuntimeWarning,
            stacklevel=2,
        )
        return False
    try:
        from pyops import _C  # links libpyops.so, whose static initialisers register the ops
    except ImportError as error:
        raise ImportError(
            f"pyops is built, but not for Python {platform.python_version()} with torch {torch.__version__}: "
            f"{error}. Build it again with `pip install --no-build-isolation .`"
        ) from error
    _C.cpu_info()  # reads PYOPS_CPU_ISA, so that a wrong value is reported here and not inside a kernel
    return True


def _has_kernel(name: str, key: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"pyops::{name}", key)


def register(
    name: str,
    schema: str,
    *,
    reference: Callable,
    fake: Callable,
    cuda: Callable | None = None,
    vmap: Callable | None = None,
    backward: Callable | None = None,
    setup_context: Callable | None = None,
    uses_amx: Callable[..., bool] | None = None,
    plain: bool = False,
) -> None:
    """Registers one op with torch.

    Args:
        name: the op, as in ``torch.ops.pyops.<name>``.
        schema: its arguments and results, ``"(Tensor g, float eps) -> Tensor"``; defined here unless the
            compiled library defined it.
        reference: plain torch, for any device that has no kernel.
        fake: shapes, strides and dtypes of the results for ``torch.compile``.
        cuda: launcher of the Triton kernel; registered when Triton is installed and the compiled library has
            no CUDA kernel for the op.
        vmap, backward, setup_context: as in ``torch.library.register_vmap`` and ``register_autograd``.
        uses_amx: whether the CPU kernel would use AMX tiles for these arguments (None: never); only ``which``
            asks.
        plain: True for an op that is plain torch on every device on purpose; its reference is then no
            fallback: no warning, and PYOPS_STRICT=1 allows it.
    """
    load()
    if not hasattr(torch.ops.pyops, name):
        _FRAGMENT.define(name + schema)
    _FRAGMENT.impl(name, reference if plain else _guarded(name, reference), "CompositeExplicitAutograd")
    triton = (
        cuda is not None and importlib.util.find_spec("triton") is not None and not _has_kernel(name, "CUDA")
    )
    if triton:
        _FRAGMENT.impl(name, cuda, "CUDA")
    qualified = f"pyops::{name}"
    torch.library.register_fake(qualified, fake, lib=_FRAGMENT)
    if vmap is not None:
        torch.library.register_vmap(qualified, vmap, lib=_FRAGMENT)
    if backward is not None:
        torch.library.register_autograd(qualified, backward, setup_context=setup_context, lib=_FRAGMENT)
    OPS[name] = Op(name, schema, triton, plain, uses_amx)


def _guarded(name: str, reference: Callable) -> Callable:
    """The reference, which says once per device that it stands in, or raises under PYOPS_STRICT=1."""
    told: set[str] = set()

    @functools.wraps(reference)
    def run(*args: Any, **kwargs: Any) -> Any:
        device = _device_type(args, kwargs)
        message = f"pyops::{name} has no kernel for {device} here: it runs the plain torch reference"
        if os.environ.get("PYOPS_STRICT") == "1":
            raise RuntimeError(f"{message}, which PYOPS_STRICT=1 forbids")
        if device not in told and LIBRARY_PATH.exists():
            told.add(device)
            warnings.warn(message, RuntimeWarning, stacklevel=2)
        return reference(*args, **kwargs)

    return run


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _device_type(args: tuple, kwargs: dict) -> str:
    return next((t.device.type for t in _tensors([*args, *kwargs.values()])), "cpu")


def which(op: str, *args: Any, **kwargs: Any) -> str:
    """Says which implementation would serve ``torch.ops.pyops.<op>`` called with these arguments.

    Args:
        op: the op's name.
        args, kwargs: what it would be called with; the first tensor among them decides the device (CPU if
            there is none).

    Returns:
        ``"cpu:amx"``, ``"cpu:avx512"``, ``"cpu:avx2"``, ``"cpu:default"``, ``"cuda:triton"``,
        ``"cuda:cuda"`` or ``"reference"``.

    Raises:
        ValueError: for an unknown op.
        TypeError: for a keyword that the op does not have.

    >>> import torch, pyops
    >>> pyops.which("polar", torch.randn(8, 8)).startswith(("cpu:", "reference"))
    True
    """
    backend(op, "cpu")
    schema = getattr(torch.ops.pyops, op).default._schema
    if unknown := set(kwargs) - {argument.name for argument in schema.arguments}:
        raise TypeError(
            f"which({op!r}, ...) takes the arguments of {schema}, got {', '.join(sorted(unknown))}"
        )
    served = backend(op, _device_type(args, kwargs))
    uses_amx = OPS[op].uses_amx
    if served.startswith("cpu:") and uses_amx and cpu_info()["amx"] and uses_amx(*args, **kwargs):
        return "cpu:amx"
    return served


def backend(op: str, device: str) -> str:
    """What serves an op on a device type; as ``which``, without AMX, which depends on the arguments."""
    if op not in OPS:
        raise ValueError(f"op must be one of {', '.join(sorted(OPS))}, got {op!r}")
    if device == "cuda" and OPS[op].triton:
        return "cuda:triton"
    if device in ("cpu", "cuda") and _has_kernel(op, device.upper()):
        return f"cpu:{cpu_info()['isa']}" if device == "cpu" else "cuda:cuda"
    return "reference"


def build_info() -> dict[str, Any]:
    """How the compiled library was built: compiler, torch, isas, cuda, cuda_archs."""
    from pyops import _C

    return _C.build_info()


def cpu_info() -> dict[str, Any]:
    """The instruction set detected and used, AMX permission, and the threads a kernel call gets now."""
    if not load():
        return {"detected": "none", "isa": "none", "amx": False, "threads": torch.get_num_threads()}
    from pyops import _C

    return _C.cpu_info()
