"""Box embeddings: sets as axis-parallel boxes whose volumes are probabilities, hard, soft or Gumbel.

    Box                                              corners, parameterisations, initial values
    intersection, log_volume, containment            elementwise, with broadcasting
    difference, complement, union, jaccard
    pairwise_log_volume, pairwise_containment        every query with every item, without the cube
    box_topk                                         the best items of each query, without the matrix
    sampled_scores                                   chosen pairs of rows, for training with negatives

Dasgupta, Boratko, Zhang, Vilnis, Li, McCallum: "Improving local identifiability in probabilistic box
embeddings", NeurIPS 2020.
"""

from pyops.boxes.box import Box
from pyops.boxes.sets import complement, containment, difference, intersection, jaccard, log_volume, union
from pyops.ops.boxes import TopK, box_topk, pairwise_containment, pairwise_log_volume, sampled_scores

__all__ = [
    "Box",
    "TopK",
    "box_topk",
    "complement",
    "containment",
    "difference",
    "intersection",
    "jaccard",
    "log_volume",
    "pairwise_containment",
    "pairwise_log_volume",
    "sampled_scores",
    "union",
]
