"""Real text without a download, for training language models: the sources of the standard library."""

import functools
import hashlib
import itertools
import re
import sysconfig
import zlib
from collections import Counter
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


_ALPHABET = "\n" + bytes(range(32, 127)).decode() + "\x7f"  # of the symbols, one character each
_WORD = re.compile(
    r" ?[A-Za-z_]+| ?[0-9]+|\n *| +|."
)  # a name or number with the space before it; an indented line


@functools.cache
def words(vocabulary: int) -> dict:
    """The same texts in longer pieces: {"train", "validation": tokens, "about"}.

    Token i is symbol i for i < 97. The others are the training text's most frequent pieces of two characters
    or more: names, numbers, and line ends with the indentation after them. Any other piece is spelled.
    """
    whole = text()
    pieces = {
        part: _WORD.findall("".join(map(_ALPHABET.__getitem__, whole[part].tolist())))
        for part in ("train", "validation")
    }
    frequent = Counter(piece for piece in pieces["train"] if len(piece) > 1).most_common(
        vocabulary - VOCABULARY
    )
    token = {piece: [VOCABULARY + i] for i, (piece, _) in enumerate(frequent)}
    symbol = {character: i for i, character in enumerate(_ALPHABET)}

    def tokens(part: str) -> Tensor:
        spelled = (token.get(piece) or [symbol[c] for c in piece] for piece in pieces[part])
        return torch.tensor(list(itertools.chain.from_iterable(spelled)))

    train, validation = tokens("train"), tokens("validation")
    about = {**whole["about"], "train_tokens": len(train), "validation_tokens": len(validation)}
    return {"train": train, "validation": validation, "about": about}


def windows(symbols: Tensor, starts: Tensor, context: int) -> tuple[Tensor, Tensor]:
    """Inputs and next symbols, or tokens, [len(starts), context] at the given positions."""
    index = starts[:, None] + torch.arange(context + 1)
    window = symbols[index]
    return window[:, :-1], window[:, 1:]
