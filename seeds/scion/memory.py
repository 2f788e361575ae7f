"""Bytes that training keeps between two steps, counted in a process of its own.

`python memory.py adamw float32` prints a JSON line. Kinds: adamw, scion (a momentum buffer), light (the
gradient buffer is the momentum).
"""

import ctypes
import gc
import json
import os
import subprocess
import sys
from pathlib import Path

import torch

from pyops.papers.scion import GPT, scion

WIDTH, DEPTH, VOCABULARY = 768, 4, 97
KINDS = [
    ("adamw", "float32"),
    ("adamw", "bfloat16"),
    ("scion", "float32"),
    ("light", "float32"),
    ("light", "bfloat16"),
]


def measure(kind: str, dtype: str) -> dict:
    """Runs `memory.py kind dtype` and returns what it prints: parameters, storage_bytes, resident_bytes."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    command = [sys.executable, str(Path(__file__).resolve()), kind, dtype]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise RuntimeError(f"memory.py {kind} {dtype} ended with {done.returncode}:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def resident() -> int:
    """Resident set of this process in bytes, after free memory went back to the system."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def live_storages() -> int:
    """Bytes of all distinct storages that any live tensor, or its gradient, refers to."""
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if isinstance(thing, torch.Tensor)]
    tensors += [tensor.grad for tensor in tensors if tensor.is_leaf and tensor.grad is not None]
    return sum({s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in tensors)}.values())


def make(kind: str, dtype: str, width: int, depth: int):
    """A model of that width and a function that takes one training step on it."""
    model = GPT(VOCABULARY, width, depth).to(getattr(torch, dtype))
    if kind == "adamw":
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    else:
        optimizer = scion(model, 1e-3, light=kind == "light")
    tokens = torch.randint(VOCABULARY, (1, 65))

    def step() -> None:
        torch.nn.functional.cross_entropy(model(tokens[:, :-1])[0].float(), tokens[0, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    return model, step


def main(kind: str, dtype: str) -> None:
    torch.set_num_threads(1)
    _, step = make(kind, dtype, 64, 1)  # libraries, thread pools and caches are there before counting starts
    step()
    del step, _
    storages, pages = live_storages(), resident()
    model, step = make(kind, dtype, WIDTH, DEPTH)
    for _ in range(3):
        step()
    parameters = sum(p.numel() for p in model.parameters())
    counted = {"storage_bytes": live_storages() - storages, "resident_bytes": resident() - pages}
    print(json.dumps({"kind": kind, "dtype": dtype, "parameters": parameters, **counted}))


if __name__ == "__main__":
    main(*sys.argv[1:])
