"""Real text without a download, for training language models: the sources of the standard library."""

import functools
import hashlib
import sysconfig
import zlib
from pathlib import Path

import torch
from torch import Tensor

VOCABULARY = 97  # newline, the 95 printable ASCII characters, and one symbol for every other byte


def encode(text: bytes) -> Tensor:
    """Bytes -> symbols: newline 0, printable ASCII 1..95, anything else 96."""
    byte = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    return torch.where((byte >= 32) & (byte < 127), byte - 31, torch.where(byte == 10, 0, 96))


@functools.cache
def text() -> dict:
    """The sources of Python's standard library: {"train", "validation": symbols, "about": what was chosen}.

    The rule: files matching *.py directly in the standard library's folder, sorted by name; a file is for
    validation when crc32 of its name is a multiple of 10, else for training. Raises FileNotFoundError when
    that gives less than 1 MB for training (a Python without its sources).
    """
    folder = Path(sysconfig.get_path("stdlib"))
    files = {path.name: path.read_bytes() for path in sorted(folder.glob("*.py"))}
    held_out = {name for name in files if zlib.crc32(name.encode()) % 10 == 0}
    train = b"".join(data for name, data in files.items() if name not in held_out)
    validation = b"".join(files[name] for name in files if name in held_out)
    if len(train) < 1_000_000 or not validation:
        raise FileNotFoundError(
            f"{folder} has only {len(train)} bytes of *.py; a Python with its sources is needed"
        )
    about = {
        "files": len(files),
        "validation_files": sorted(held_out),
        "train_characters": len(train),
        "validation_characters": len(validation),
        "sha256": hashlib.sha256(train + validation).hexdigest(),
    }
    return {"train": encode(train), "validation": encode(validation), "about": about}


def windows(symbols: Tensor, starts: Tensor, context: int) -> tuple[Tensor, Tensor]:
    """Inputs and next symbols [len(starts), context] at the given positions."""
    index = starts[:, None] + torch.arange(context + 1)
    window = symbols[index]
    return window[:, :-1], window[:, 1:]
