"""Vector models of P(set | item), with as many numbers per set and per item as a box of D = 64: 128."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pyops.papers.box_recommender import Queries


class Vectors(nn.Module):
    """P(set | item) = sigmoid(logit). A composed query is the sum of its vectors, unwanted ones negative."""

    def __init__(self, sets: int, items: int, width: int, generator: torch.Generator):
        super().__init__()
        self.set_vectors = nn.Parameter(0.1 * torch.randn(sets, width, generator=generator))
        self.item_vectors = nn.Parameter(0.1 * torch.randn(items, width, generator=generator))

    def tables(self) -> tuple[Tensor, Tensor]:
        """What is compared: [sets, width], [items, width]."""
        return self.set_vectors, self.item_vectors

    def compare(self, sets: Tensor, items: Tensor) -> Tensor:
        """Logits of vectors, sets [B, width]; items [B, S, width], or [items, width] for all."""
        return sets @ items.T if items.ndim == 2 else (items @ sets.unsqueeze(-1)).squeeze(-1)

    def logits(self, sets: Tensor, items: Tensor) -> Tensor:
        """Of chosen pairs, sets [B] and items [B, S]: [B, S]."""
        of_sets, of_items = self.tables()
        return self.compare(F.embedding(sets, of_sets), F.embedding(items, of_items))

    def penalty(self, sets: Tensor, items: Tensor) -> Tensor:
        """Mean squared norm of the rows that a batch uses, of positives only."""
        rows = F.embedding(sets, self.set_vectors), F.embedding(items, self.item_vectors)
        return sum(r.square().sum(-1).mean() for r in rows)

    def log_probability(self, sets: Tensor) -> Tensor:
        of_sets, of_items = self.tables()
        return F.logsigmoid(self.compare(of_sets[sets], of_items))

    def composed(self, queries: Queries) -> Tensor:
        of_sets, of_items = self.tables()
        return self.compare(self.sum(of_sets, queries), of_items)

    @staticmethod
    def sum(of_sets: Tensor, queries: Queries) -> Tensor:
        """The vector of a composed query, [B, width]."""
        wanted, unwanted = (of_sets[rows].sum(1) for rows in (queries.wanted, queries.unwanted))
        return of_sets[queries.users] + wanted - unwanted


class MatrixFactorization(Vectors):
    """126 factors and a bias for each set and each item; the last two coordinates are the biases."""

    def __init__(self, sets: int, items: int, width: int, generator: torch.Generator):
        super().__init__(sets, items, width, generator)
        with torch.no_grad():
            self.set_vectors[:, -2:] = 0
            self.item_vectors[:, -2:] = 0

    def compare(self, sets: Tensor, items: Tensor) -> Tensor:
        factors = super().compare(sets[..., :-2], items[..., :-2])
        of_items = items[..., -1]
        return factors + sets[..., -1:] + of_items


class NeuralMF(Vectors):
    """NeuMF: products of one half of the vectors beside an MLP on the other half, joined in a last layer.

    The MLP's weights count: vectors are a little narrower, so that all numbers together are no more.
    """

    def __init__(self, sets: int, items: int, width: int, generator: torch.Generator):
        rows = sets + items
        half = width // 2
        while rows * 2 * half + self.shared(half) > rows * width and half > 8:
            half -= 1
        super().__init__(sets, items, 2 * half, generator)
        self.half = half
        with torch.random.fork_rng():
            torch.manual_seed(generator.initial_seed())
            self.sets_in = nn.Linear(half, 32)
            self.items_in = nn.Linear(half, 32, bias=False)
            self.hidden = nn.Linear(32, 16)
            self.out = nn.Linear(half + 16, 1)
        nn.init.ones_(self.out.weight)  # starts as the matrix factorization it contains

    @staticmethod
    def shared(half: int) -> int:
        return 2 * half * 32 + 32 + 32 * 16 + 16 + half + 16 + 1

    def compare(self, sets: Tensor, items: Tensor) -> Tensor:
        if items.ndim == 2 and len(sets) > 64:  # all pairs of a layer of 32 at once would be large
            return torch.cat([self.compare(some, items) for some in sets.split(64)])
        h = self.half
        # The first layer of the concatenation is the sum of two, each computed once per vector.
        first = self.sets_in(sets[:, h:]).unsqueeze(1) + self.items_in(items[..., h:])
        deep = F.relu(self.hidden(F.relu(first)))
        weight, of_deep = self.out.weight[0, :h], self.out.weight[:, h:]
        weighted = sets[:, :h] * weight
        product = weighted @ items[:, :h].T if items.ndim == 2 else items[..., :h] @ weighted.unsqueeze(-1)
        return product.view(deep.shape[:2]) + F.linear(deep, of_deep, self.out.bias).squeeze(-1)


class LightGCN(Vectors):
    """Vectors averaged with those that two rounds of propagation over the observed memberships make of them.

    Without a bias for all, sigmoids could not be small on average.
    """

    def __init__(self, train: Tensor, width: int, generator: torch.Generator, layers: int = 2):
        super().__init__(*train.shape, width, generator)
        self.bias = nn.Parameter(torch.zeros(()))
        self.layers = layers
        norm = (train.sum(1, keepdim=True).clamp(min=1) * train.sum(0).clamp(min=1)).rsqrt()
        # Dense: at these sizes a matrix product is faster than torch's sparse one where 5 % are set.
        self.register_buffer("adjacency", train * norm)

    def tables(self) -> tuple[Tensor, Tensor]:
        sets, items = self.set_vectors, self.item_vectors
        all_sets, all_items = sets, items
        for _ in range(self.layers):
            sets, items = self.adjacency @ items, self.adjacency.T @ sets
            all_sets, all_items = all_sets + sets, all_items + items
        return all_sets / (self.layers + 1), all_items / (self.layers + 1)

    def compare(self, sets: Tensor, items: Tensor) -> Tensor:
        return super().compare(sets, items) + self.bias
