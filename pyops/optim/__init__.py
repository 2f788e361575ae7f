"""Optimizers on the compiled LMO step."""

from pyops.optim.muon import Muon
from pyops.optim.scion import Scion

__all__ = ["Muon", "Scion"]
