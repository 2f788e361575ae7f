"""A passkey to recall: five digits noted in a text and asked for at its end."""

from collections.abc import Iterator

import torch
from torch import Tensor

from pyops.papers._text import encode
from pyops.papers.length_generalization import RecurrentLM

DIGITS = 5
MARK = encode(b"\n#key=")  # stands before the digits both where they are noted and where they are asked for
IGNORED = -1  # a target that does not count


def texts(symbols: Tensor, count: int, length: int, span: int, generator: torch.Generator) -> Tensor:
    """Tokens [count, length + 1] that end in question and answer; the note is within the last `span`."""
    begin = torch.randint(len(symbols) - length, (count, 1), generator=generator)
    tokens = symbols[begin + torch.arange(length + 1)]
    digits = encode(b"0") + torch.randint(10, (count, DIGITS), generator=generator)
    note = torch.cat([MARK.expand(count, -1), digits, encode(b"\n").expand(count, 1)], 1)
    size = note.shape[1]
    room = span + 1 - size - (size - 1)
    at = length - span + torch.randint(room + 1, (count, 1), generator=generator)
    tokens.scatter_(1, at + torch.arange(size), note)
    tokens[:, -(size - 1) :] = note[:, :-1]
    return tokens


def batches(
    symbols: Tensor, count: int, context: int, generator: torch.Generator
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Windows to train on: inputs, targets [count, context] in which only the answer counts; all fresh."""
    while True:
        tokens = texts(symbols, count, context, context, generator)
        targets = tokens[:, 1:].clone()
        targets[:, :-DIGITS] = IGNORED
        yield tokens[:, :-1], targets, torch.ones(count, dtype=torch.bool)


@torch.no_grad()
def recall(model: RecurrentLM, tokens: Tensor, segment: int) -> float:
    """Share of the texts of which all digits come right, each being predicted from the true ones before it.

    The model reads `segment` tokens at a time; the length of the texts must be a multiple of that.
    """
    states = model.zero_states(len(tokens))
    for inputs in tokens[:, :-1].split(segment, 1):
        logits, states = model(inputs, states)
    return (logits[:, -DIGITS:].argmax(-1) == tokens[:, -DIGITS:]).all(1).double().mean().item()
