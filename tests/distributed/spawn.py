"""Runs functions on several gloo processes and hands back what each returned or raised."""

from __future__ import annotations

import importlib
import pickle
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def _work(rank: int, world: int, module: str, names: list[str], folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    results: dict[str, Any] = {}
    for name in names:
        torch.manual_seed(0)
        try:
            results[name] = getattr(importlib.import_module(module), name)(rank, world)
        except Exception:
            results[name] = traceback.format_exc()
        dist.barrier()
    Path(folder, f"{rank}.pickle").write_bytes(pickle.dumps(results))
    dist.destroy_process_group()


def run(module: str, names: list[str], world: int, folder: Path) -> dict[str, list[Any]]:
    """Calls ``module.name(rank, world)`` for each name on every rank, in turn.

    Returns:
        For each name, what each rank returned, in the order of ranks; a traceback (str) where it raised.
    """
    mp.spawn(_work, (world, module, names, str(folder)), nprocs=world)
    results = [pickle.loads(Path(folder, f"{rank}.pickle").read_bytes()) for rank in range(world)]
    return {name: [result[name] for result in results] for name in names}
