"""Data: users and attributes as sets of items, what of them is observed, and queries with their answers."""

import importlib.util
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from pyops.papers.box_recommender import Queries

FORMS = {  # number of wanted and of unwanted attributes
    "u": (0, 0),
    "u_a": (1, 0),
    "u_a_b": (2, 0),
    "u_a_not_b": (1, 1),
    "u_a_b_c": (3, 0),
}


@dataclass
class Data:
    """Rows of the masks are sets, users first. All [sets, items], bool; the three parts are disjoint."""

    users: int
    member: Tensor  # the truth
    train: Tensor
    valid: Tensor
    test: Tensor

    @property
    def sets(self) -> int:
        return self.member.shape[0]

    @property
    def items(self) -> int:
        return self.member.shape[1]

    def queries(self, form: str, count: int, part: str, seed: int) -> tuple[Queries, Tensor, Tensor]:
        """At most `count` queries of a form that have something to find: queries, relevant, excluded.

        To find is what the truth of the whole query has in `part` of the user's items. Attributes are
        different ones; an unwanted one must take something of the user's set away, or it says nothing.
        """
        wanted, unwanted = FORMS[form]
        g = torch.Generator().manual_seed(seed)
        draws = 40 * count
        user = torch.randint(self.users, (draws,), generator=g)
        order = torch.rand(draws, self.sets - self.users, generator=g).argsort(1) + self.users
        query = Queries(user, order[:, :wanted], order[:, wanted : wanted + unwanted])
        kept: list[Tensor] = []
        for rows in torch.arange(draws).split(1000):
            some = query.part(rows)
            inside = self.member[some.users]
            for a in some.wanted.unbind(1):
                inside = inside & self.member[a]
            useful = torch.ones(len(rows), dtype=torch.bool)
            for b in some.unwanted.unbind(1):
                useful &= (inside & self.member[b]).any(1)
                inside = inside & ~self.member[b]
            useful &= (inside & getattr(self, part)[some.users]).any(1)
            kept.append(rows[useful])
            if sum(map(len, kept)) >= count:
                break
        query = query.part(torch.cat(kept)[:count])
        relevant = getattr(self, part)[query.users]
        for a in query.wanted.unbind(1):
            relevant = relevant & self.member[a]
        for b in query.unwanted.unbind(1):
            relevant = relevant & ~self.member[b]
        # What the user is known to like is not recommended; nor is, in testing, what validation used.
        excluded = self.train[query.users]
        if part == "test":
            excluded = excluded | self.valid[query.users]
        return query, relevant, excluded


def observed(member: Tensor, users: int, seed: int) -> Data:
    """Of users' items 60 % are seen in training, 10 % in validation; of attributes' items half are seen."""
    u = torch.rand(member.shape, generator=torch.Generator().manual_seed(seed))
    is_user = torch.arange(len(member)).unsqueeze(1) < users
    train = member & (u < torch.where(is_user, 0.6, 0.5))
    valid = member & is_user & (u >= 0.6) & (u < 0.7)
    return Data(users, member, train, valid, member & is_user & (u >= 0.7))


def intervals(users: int, attributes: int, items: int, seed: int, latent: int = 6) -> Data:
    """Items are points in the unit cube; a user bounds three of six coordinates, an attribute two.

    A user has about 8 % of the items, an attribute about 28 %.
    """
    g = torch.Generator().manual_seed(seed)
    points = torch.rand(items, latent, generator=g)
    member = torch.ones(users + attributes, items, dtype=torch.bool)
    for row in range(users + attributes):
        bounds, low, high = (3, 0.3, 0.6) if row < users else (2, 0.4, 0.66)
        for d in torch.randperm(latent, generator=g)[:bounds]:
            side = low + (high - low) * torch.rand((), generator=g)
            start = (1 - side) * torch.rand((), generator=g)
            member[row] &= (points[:, d] >= start) & (points[:, d] <= start + side)
    return observed(member, users, seed)


def halfspaces(users: int, attributes: int, items: int, seed: int, latent: int = 6) -> Data:
    """Items are normal vectors; a set has those with the largest products with a direction of its own.

    A user has 8 %, an attribute 28 %: sets as a product of vectors describes them best.
    """
    g = torch.Generator().manual_seed(seed)
    points = torch.randn(items, latent, generator=g)
    directions = torch.randn(users + attributes, latent, generator=g)
    order = (directions @ points.T).argsort(1, descending=True).argsort(1)
    share = torch.where(torch.arange(users + attributes) < users, 0.08, 0.28)
    return observed(order < (share * items).unsqueeze(1), users, seed)


def movielens_folder() -> Path | None:
    """Where the package recbole keeps MovieLens 100k; the package is found and not imported."""
    spec = importlib.util.find_spec("recbole")
    if spec is None or not spec.submodule_search_locations:
        return None
    folder = Path(spec.submodule_search_locations[0]) / "dataset_example" / "ml-100k"
    return folder if (folder / "ml-100k.inter").exists() else None


def movielens(seed: int) -> Data:
    """MovieLens 100k: a user's set are the films rated 4 or 5, attributes the genres of 40 films or more."""
    folder = movielens_folder()
    if folder is None:
        raise FileNotFoundError(
            "MovieLens 100k is read from the package recbole: pip install --no-deps recbole"
        )
    ratings = [line.split("\t") for line in (folder / "ml-100k.inter").read_text().splitlines()[1:]]
    films = [line.split("\t") for line in (folder / "ml-100k.item").read_text().splitlines()[1:]]
    column = {film[0]: i for i, film in enumerate(films)}
    genres: dict[str, list[int]] = {}
    for film in films:
        for genre in film[3].split():
            genres.setdefault(genre, []).append(column[film[0]])
    names = sorted(name for name, of in genres.items() if len(of) >= 40 and name != "unknown")
    people = sorted({int(r[0]) for r in ratings})
    row = {str(person): i for i, person in enumerate(people)}
    member = torch.zeros(len(people) + len(names), len(films), dtype=torch.bool)
    liked = [(row[r[0]], column[r[1]]) for r in ratings if float(r[2]) >= 4]
    member[tuple(torch.tensor(liked).T)] = True
    for i, name in enumerate(names):
        member[len(people) + i, genres[name]] = True
    return observed(member, len(people), seed)
