"""Sparse training: masks of zero weights, fixed or updated during training."""

from modelzoo_trainer.optim.sparsity.algorithm import SparsityAlgorithm
from modelzoo_trainer.optim.sparsity.curves import (
    CURVES,
    Constant,
    Cosine,
    Cubic,
    Curve,
    Cycling,
    Exp,
    Linear,
    Power,
)
from modelzoo_trainer.optim.sparsity.dynamic import SET, RigL
from modelzoo_trainer.optim.sparsity.factory import ALGORITHMS, Group, algorithms_of
from modelzoo_trainer.optim.sparsity.masks import (
    SparseParam,
    prune_gradients,
    prune_state,
    prune_weights,
)
from modelzoo_trainer.optim.sparsity.selection import select
from modelzoo_trainer.optim.sparsity.static import GMP, Static
from modelzoo_trainer.optim.sparsity.updates import UpdateAt, UpdateEvery, Updates

__all__ = [
    "ALGORITHMS",
    "CURVES",
    "GMP",
    "SET",
    "Constant",
    "Cosine",
    "Cubic",
    "Curve",
    "Cycling",
    "Exp",
    "Group",
    "Linear",
    "Power",
    "RigL",
    "SparseParam",
    "SparsityAlgorithm",
    "Static",
    "UpdateAt",
    "UpdateEvery",
    "Updates",
    "algorithms_of",
    "prune_gradients",
    "prune_state",
    "prune_weights",
    "select",
]
