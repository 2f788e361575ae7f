"""Tubal tensors: matrices of tubes that multiply by circular convolution, and their linear algebra.

    tprod, tgram, facewise                       products
    ttranspose, teye, tinv, tpinv, tsolve        transpose, identity, inverses
    tqr, tsvd, teigh, tsvt                       factorizations, singular value thresholding
    tnorm, tnn, tubal_rank, multi_rank, average_rank
    tube_fft, tube_ifft, HalfFaces               products that stay in the transform domain
    Sensing                                      measurements, and gradient descent on a factor

Kilmer, Martin: "Factorization strategies for third-order tensors", Linear Algebra and its Applications 435,
2011.
"""

from pyops.ops.tubal import tgram, tprod
from pyops.tubal.algebra import (
    average_rank,
    multi_rank,
    teye,
    tinv,
    tnn,
    tnorm,
    tpinv,
    tsolve,
    ttranspose,
    tubal_rank,
)
from pyops.tubal.faces import HalfFaces, facewise, tube_fft, tube_ifft
from pyops.tubal.factorizations import TQR, TSVD, TEigh, teigh, tqr, tsvd, tsvt
from pyops.tubal.sensing import Sensing

__all__ = [
    "TQR",
    "TSVD",
    "HalfFaces",
    "Sensing",
    "TEigh",
    "average_rank",
    "facewise",
    "multi_rank",
    "teigh",
    "teye",
    "tgram",
    "tinv",
    "tnn",
    "tnorm",
    "tpinv",
    "tprod",
    "tqr",
    "tsolve",
    "tsvd",
    "tsvt",
    "ttranspose",
    "tubal_rank",
    "tube_fft",
    "tube_ifft",
]
