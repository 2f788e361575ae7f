"""Losses and regularisers, functions with the reductions of ``torch.nn``.

bce_with_log_probs, noise_contrastive            of log P, as pyops.boxes.containment gives it
max_margin                                       of scores
l2_side                                          of boxes
log1mexp                                         log(1 - exp x)
"""

from pyops.losses.boxes import bce_with_log_probs, l2_side, log1mexp, max_margin, noise_contrastive

__all__ = ["bce_with_log_probs", "l2_side", "log1mexp", "max_margin", "noise_contrastive"]
