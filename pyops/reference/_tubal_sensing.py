"""Gradient descent on a factor of measured tubal tensors, in plain torch.

Part of the slice ``tubal``; a file of its own, with a name that is no op's stem, because the measurement
operator is no t-product.
"""

from __future__ import annotations

from torch import Tensor

from pyops.reference import tubal
from pyops.reference._precision import without_autocast


@without_autocast
def tubal_sensing_steps_(u: Tensor, operator: Tensor, y: Tensor, step: float, steps: int) -> Tensor:
    """res_i = <A_i, U * U^T> - y_i, U <- U - step sum_i res_i (A_i + A_i^T)/2 * U; losses |res|^2 / 4."""
    rows = operator.flatten(1)
    losses = u.new_empty(steps)
    x = u
    for i in range(steps):
        residual = rows @ tubal.tgram(x, False, False).flatten() - y
        losses[i] = residual.square().sum() / 4
        g = (residual @ rows).view(operator.shape[1:])
        g = (g + tubal.ttranspose(g, False)) / 2
        x = x - step * tubal.tprod(g, x, False, False, False, None, None, None)
    u.copy_(x)
    return losses
