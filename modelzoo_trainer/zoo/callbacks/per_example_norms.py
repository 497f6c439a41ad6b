"""Squared norms of per-example gradients of a parameter.

B = examples, T = positions of an example, I and O = input and output features, V = rows of a
table. The gradient of an example is a sum over its positions, and over all calls that use the
parameter.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import Module
from torch.nn import functional as F


class Matrix(NamedTuple):
    """A use of (O, I) as a matrix: the sum of outer products of `grads` and `inputs`."""

    grads: Tensor
    """(B, T, O)."""
    inputs: Tensor
    """(B, T, I)."""


class LookupRows(NamedTuple):
    """A use of (V, I) as a lookup table: `grads` are added to the rows `ids`."""

    ids: Tensor
    """(B, T)."""
    grads: Tensor
    """(B, T, I)."""


class Vector(NamedTuple):
    """A use of (I,): the sum of `grads`."""

    grads: Tensor
    """(B, T, I)."""


Use = Matrix | LookupRows | Vector


def squared_norms(uses: list[Use]) -> Tensor:
    """Return the squared 2-norm of each example's gradient, over all uses of one parameter.

    `uses`: of one parameter, with equal B; either vectors only, or matrices and tables.

    Shapes:
        Returns: (B,), float32, or float64 if they are double.
    """
    vectors = [use.grads for use in uses if isinstance(use, Vector)]
    if vectors:
        return wide(torch.cat(vectors, 1)).sum(1).square().sum(1)
    matrices = [use for use in uses if isinstance(use, Matrix)]
    tables = [use for use in uses if isinstance(use, LookupRows)]
    total: Tensor | None = None
    if matrices:
        matrix = Matrix(
            wide(torch.cat([use.grads for use in matrices], 1)),
            wide(torch.cat([use.inputs for use in matrices], 1)),
        )
        total = _square_of_matrix(matrix)
    if tables:
        table = LookupRows(
            torch.cat([use.ids for use in tables], 1),
            wide(torch.cat([use.grads for use in tables], 1)),
        )
        square = _square_of_rows(table)
        total = square if total is None else total + square + 2 * _product(matrix, table)
    assert total is not None  # there is a use
    return total


def _square_of_matrix(use: Matrix) -> Tensor:
    num, size_out, size_in = use.grads.shape[1], use.grads.shape[2], use.inputs.shape[2]
    if 2 * num * num <= size_out * size_in:  # products of positions are smaller than the gradients
        return (_gram(use.grads) * _gram(use.inputs)).sum((1, 2))
    return torch.bmm(use.grads.transpose(1, 2), use.inputs).square().sum((1, 2))


def _square_of_rows(use: LookupRows) -> Tensor:
    is_same = use.ids.unsqueeze(1) == use.ids.unsqueeze(2)
    return (_gram(use.grads) * is_same).sum((1, 2))


def _product(matrix: Matrix, table: LookupRows) -> Tensor:
    """Return the inner products of the contributions of a matrix and a table to a parameter."""
    places = matrix.grads.shape[1]
    index = table.ids.unsqueeze(1).expand(-1, places, -1)
    at_rows = matrix.grads.gather(2, index)
    return (at_rows * torch.bmm(matrix.inputs, table.grads.transpose(1, 2))).sum((1, 2))


def _gram(rows: Tensor) -> Tensor:
    return torch.bmm(rows, rows.transpose(1, 2))


def wide(tensor: Tensor) -> Tensor:
    """Convert a tensor to float32, or to float64 if it is double."""
    return tensor if tensor.dtype is torch.float64 else tensor.float()


# ---- layers


def computes_like(layer: Module, kind: type[Module]) -> bool:
    """Return whether a layer is of a kind, and not a subclass that computes something else."""
    return isinstance(layer, kind) and type(layer).forward is kind.forward


def trained_params(layer: Module) -> dict[str, Tensor]:
    """Return the trainable parameters of the layer itself by name."""
    found = layer._parameters.items()
    return {role: param for role, param in found if param is not None and param.requires_grad}


def is_countable(layer: Module, given: Tensor) -> bool:
    """Return whether the input has examples as its first dimension, and a parameter as weight."""
    if layer._parameters.get("weight") is None and getattr(layer, "weight", None) is not None:
        return False
    if isinstance(layer, nn.LayerNorm):
        return given.dim() > len(layer.normalized_shape)
    return given.dim() > (0 if isinstance(layer, nn.Embedding) else 1)


def uses_of(layer: Module, given: Tensor, grad: Tensor) -> dict[str, Use]:
    """Return the uses of each parameter in a call of a layer.

    `given`: the input; its first dimension is B.
    """
    num = given.shape[0]
    if isinstance(layer, nn.Embedding):
        ids = given.reshape(num, -1)
        rows = grad.reshape(num, ids.shape[1], -1)
        if layer.padding_idx is not None:
            rows = rows * (ids != layer.padding_idx).unsqueeze(2)
        return {"weight": LookupRows(ids, rows)}
    if isinstance(layer, nn.LayerNorm):
        size = math.prod(layer.normalized_shape)
        plain = F.layer_norm(wide(given), layer.normalized_shape, eps=layer.eps)
        grads = wide(grad).reshape(num, -1, size)
        return {"weight": Vector(grads * plain.reshape(num, -1, size)), "bias": Vector(grads)}
    grads = grad.reshape(num, -1, grad.shape[-1])
    inputs = given.reshape(num, -1, given.shape[-1])
    return {"weight": Matrix(grads, inputs), "bias": Vector(grads)}
