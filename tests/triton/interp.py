"""Runs launchers of triton_kernels/ under Triton's interpreter, in a process of its own.

TRITON_INTERPRET must be set before Triton is imported and then holds for the whole process; other tests want
the compiler. Tensors travel by torch.save, which keeps strides and shared storages.
"""

import importlib
import io
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor


class Interpreter:
    """`run(function, *args)` -> (result, args as they are afterwards), with every torch.empty full of NaN.

    `function` must be importable by its module and name, which the other process does for itself.
    """

    def __init__(self):
        context = multiprocessing.get_context("spawn")
        self.pool = ProcessPoolExecutor(1, mp_context=context, initializer=_start)

    def run(self, function, *args):
        return unpack(self.pool.submit(_run, function.__module__, function.__qualname__, pack(args)).result())

    def close(self):
        self.pool.shutdown()


class Device:
    """The same on a GPU, in this process."""

    def run(self, function, *args):
        import torch

        args = unpack(pack(args), "cuda")
        before = torch.are_deterministic_algorithms_enabled()
        torch.use_deterministic_algorithms(True)
        try:
            result = function(*args)
        finally:
            torch.use_deterministic_algorithms(before)
        return unpack(pack((result, args)), "cpu")


def pack(value):
    import torch

    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def unpack(data, device=None):
    import torch

    return torch.load(io.BytesIO(data), weights_only=False, map_location=device)


def _run(module, name, data):
    args = unpack(data)
    result = getattr(importlib.import_module(module), name)(*args)
    return pack((result, args))


def _start():
    os.environ["TRITON_INTERPRET"] = "1"
    import torch

    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)  # fills uninitialised memory with NaN
    _repair_bfloat16()
    _patch_once()


def _patch_once():
    """The interpreter patches triton.language anew in every call of a device function, a fifth of its time.

    This process does nothing but interpret: each module is patched once and stays so. Triton 3.6 turns arrays
    of one element into loop bounds in a way that numpy 2.4 refuses.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    patch, seen = interpreter._patch_lang, set()

    def patch_lang(fn):
        if fn.__module__ not in seen:
            seen.add(fn.__module__)
            patch(fn)
            tl.tensor.__index__ = lambda self: int(self.handle.data.squeeze())
        return interpreter._LangPatchScope()

    interpreter._patch_lang = patch_lang


def _repair_bfloat16():
    """The interpreter keeps bfloat16 as bit patterns, multiplies the patterns in tl.dot, converts from and to
    float64 as if they were integers, and does not round to even on the way from float32. A GPU does.
    """
    import numpy as np
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    cast, dot = InterpreterBuilder.cast_impl, InterpreterBuilder.create_dot

    def to_float32(x):
        if x.dtype.scalar != tl.bfloat16:
            return x
        return TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def to_bfloat16(data):
        bits = data.astype(np.float32).view(np.uint32)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return np.where(np.isnan(data), 0x7FC0, rounded).astype(np.uint16)

    def cast_impl(self, src, dst_type):
        src = to_float32(src)
        if dst_type.scalar != tl.bfloat16:
            return cast(self, src, dst_type)
        return TensorHandle(to_bfloat16(src.data), tl.bfloat16)

    def create_dot(self, a, b, d, *args):
        return dot(self, to_float32(a), to_float32(b), d, *args)

    InterpreterBuilder.cast_impl = cast_impl
    InterpreterBuilder.create_dot = create_dot
    InterpreterBuilder.create_fp_to_fp = lambda self, src, dst_type, rounding_mode: cast_impl(
        self, src, dst_type
    )
