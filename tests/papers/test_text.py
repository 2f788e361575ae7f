"""The text that the seeds train on."""

import torch

from pyops.papers._text import VOCABULARY, encode, text, windows, words


def test_encode():
    assert encode(b"\n ~\tA\x00\xff\x7f").tolist() == [0, 1, 95, 96, 34, 96, 96, 96]
    assert encode(bytes(range(256))).max() == VOCABULARY - 1


def test_text_is_split_by_file():
    whole = text()
    held_out = whole["about"]["validation_files"]
    assert 0.05 < len(whole["validation"]) / len(whole["train"]) < 0.3
    assert whole["about"]["train_characters"] == len(whole["train"]) > 1_000_000
    assert 0 < len(held_out) < whole["about"]["files"]
    # A window of a held-out file is not in the training text.
    window = whole["validation"][5000:5200]
    assert not (whole["train"].unfold(0, 200, 1)[:, ::20] == window[::20]).all(1).any()


def test_windows_are_inputs_and_their_next_symbols():
    inputs, targets = windows(torch.arange(50), torch.tensor([0, 7]), 5)
    assert inputs.tolist() == [[0, 1, 2, 3, 4], [7, 8, 9, 10, 11]]
    assert torch.equal(targets, inputs + 1)


def test_words_spell_the_same_text():
    whole, coarse = text(), words(600)
    assert coarse["train"].max() == 599 and coarse["validation"].max() <= 599
    assert words(VOCABULARY)["validation"].equal(whole["validation"])  # no piece but the symbols
    assert coarse["about"]["validation_tokens"] < 0.7 * len(whole["validation"])
    # Symbols that are left in a text are in their old order.
    spelled = coarse["validation"][coarse["validation"] < VOCABULARY].tolist()
    rest = iter(whole["validation"].tolist())
    assert all(symbol in rest for symbol in spelled)
