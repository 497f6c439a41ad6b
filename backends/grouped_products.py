"""Products of rows with the matrix of their group, as a mixture of experts needs them.

Rows are sorted by group. Where groups end is known only on the device, and not read there:

    the host                                    a loop over the groups
    bfloat16 where torch has a kernel for it    torch.nn.functional.grouped_mm
    everything else                             a batched product over blocks of rows

Operators of their own, as the shape function of torch's operator accepts bfloat16 only: without
one, nothing could be compiled or planned in float32.

Dimension letters: N rows, G groups, I inputs, O outputs, M blocks, S rows of a block.
"""

from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional

from .operators import define_operator

_KERNEL_ARCHITECTURES: Final = (9, 10)  # the others' version of the kernel reads the group sizes
_KERNEL_ALIGNMENT: Final = 8  # elements of bfloat16


def grouped_linear(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Return y_n = W_g x_n, where g is the group of row n.

    Args:
        rows: Sorted by group.
        weights: A matrix for each group, of the dtype of the rows.
        ends: The number of rows up to the end of each group; the last one is N.

    Shapes:
        rows: (N, I). weights: (G, O, I). ends: (G,), int32. Returns: (N, O).
    """
    found: Tensor = _LINEAR(rows, weights, ends)
    return found


def _linear(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    if _is_on_host(rows):
        return _linear_by_loop(rows, weights, ends)
    if _has_kernel(rows, weights.shape[1:]):
        products: Tensor = functional.grouped_mm(
            rows.contiguous(), weights.transpose(1, 2), offs=ends
        )
        return products
    blocks = _Blocks(len(rows), ends)
    return blocks.to_rows(blocks.of(rows) @ weights[blocks.groups].transpose(1, 2))


def grouped_outer(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """Return the sums of the outer products of the rows of each group; 0 for an empty one.

    This is the gradient of the weights of `grouped_linear`.

    Shapes:
        left: (N, O). right: (N, I). ends: (G,), int32. Returns: (G, O, I).
    """
    found: Tensor = _OUTER(left, right, ends)
    return found


def _outer(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    if _is_on_host(left):
        return _outer_by_loop(left, right, ends)
    if _has_kernel(left, (left.shape[1], right.shape[1])):
        products: Tensor = functional.grouped_mm(
            left.contiguous().t(), right.contiguous(), offs=ends
        )
        # Some releases leave an empty group as it was: github.com/pytorch/pytorch/issues/172439.
        is_empty = ends.diff(prepend=ends.new_zeros(1)) == 0
        return products.masked_fill_(is_empty[:, None, None], 0.0)
    blocks = _Blocks(len(left), ends)
    products = blocks.of(left).transpose(1, 2) @ blocks.of(right)
    # A product with ones and zeros, as adding by index has no fixed order on every device.
    group = torch.arange(len(ends), device=ends.device).unsqueeze(1)
    sums = (blocks.groups == group).to(products.dtype) @ products.flatten(1)
    return sums.view(len(ends), *products.shape[1:])


def moved_rows(rows: Tensor, places: Tensor, origins: Tensor, num_copies: int) -> Tensor:
    """Return copies of rows in another order: copy i of the result is copy places[i] of the rows.

    The gradient is a copy as well. Indexing would add by index in the backward pass, which is
    slower and has no fixed order on some devices.

    Args:
        rows: Copies j of row n have the number num_copies * n + j.
        places: A permutation of the copies.
        origins: The inverse of `places`.
        num_copies: Of each row.

    Shapes:
        rows: (N / num_copies, I). places, origins: (N,), int64. Returns: (N, I).
    """
    found: Tensor = _MOVED(rows, places, origins, num_copies)
    return found


def _moved(rows: Tensor, places: Tensor, origins: Tensor, num_copies: int) -> Tensor:
    return rows.index_select(0, places if num_copies == 1 else places // num_copies)


# ---- shapes, gradients and operations


def _linear_shape(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    return rows.new_empty(rows.shape[0], weights.shape[1])


def _outer_shape(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    return left.new_empty(ends.shape[0], left.shape[1], right.shape[1])


def _moved_shape(rows: Tensor, places: Tensor, origins: Tensor, num_copies: int) -> Tensor:
    return rows.new_empty(places.shape[0], rows.shape[1])


def _keep(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _linear_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    rows, weights, ends = ctx.saved_tensors
    needs_rows, needs_weights, _ = ctx.needs_input_grad
    return (
        grouped_linear(grad, weights.transpose(1, 2), ends) if needs_rows else None,
        grouped_outer(grad, rows, ends) if needs_weights else None,
        None,
    )


def _outer_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    left, right, ends = ctx.saved_tensors
    needs_left, needs_right, _ = ctx.needs_input_grad
    return (
        grouped_linear(right, grad, ends) if needs_left else None,
        grouped_linear(left, grad.transpose(1, 2), ends) if needs_right else None,
        None,
    )


def _keep_places(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, places, origins, ctx.num_copies = inputs
    ctx.save_for_backward(places, origins)


def _moved_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
    places, origins = ctx.saved_tensors
    found: Tensor = moved_rows(grad, origins, places, 1)
    if ctx.num_copies != 1:
        found = found.view(-1, ctx.num_copies, found.shape[1]).sum(dim=1)
    return found, None, None, None


def _linear_flops(rows: Any, weights: Any, ends: Any, *, out_shape: Any, **_: Any) -> int:
    """Count the operations; whatever the implementation, blocks have no rows of their own."""
    return int(2 * rows[0] * weights[1] * weights[2])


def _outer_flops(left: Any, right: Any, ends: Any, *, out_shape: Any, **_: Any) -> int:
    return int(2 * left[0] * left[1] * right[1])


_LINEAR: Final = define_operator(
    "grouped_linear(Tensor rows, Tensor weights, Tensor ends) -> Tensor",
    _linear,
    _linear_shape,
    flops=_linear_flops,
    keep=_keep,
    backward=_linear_backward,
)
_OUTER: Final = define_operator(
    "grouped_outer(Tensor left, Tensor right, Tensor ends) -> Tensor",
    _outer,
    _outer_shape,
    flops=_outer_flops,
    keep=_keep,
    backward=_outer_backward,
)
_MOVED: Final = define_operator(
    "moved_rows(Tensor rows, Tensor places, Tensor origins, int num_copies) -> Tensor",
    _moved,
    _moved_shape,
    keep=_keep_places,
    backward=_moved_backward,
)


# ---- implementations


def _is_on_host(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu"


def _has_kernel(rows: Tensor, sizes: tuple[int, ...]) -> bool:
    """Return whether torch has a kernel that leaves the ends on the device."""
    if rows.device.type != "cuda" or rows.dtype != torch.bfloat16:
        return False
    if not hasattr(functional, "grouped_mm") or any(size % _KERNEL_ALIGNMENT for size in sizes):
        return False
    return torch.cuda.get_device_capability(rows.device)[0] in _KERNEL_ARCHITECTURES


def _linear_by_loop(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    found = rows.new_empty(rows.shape[0], weights.shape[1])
    begin = 0
    for matrix, end in zip(weights, ends.tolist(), strict=True):
        if end > begin:
            torch.mm(rows[begin:end], matrix.t(), out=found[begin:end])
        begin = end
    return found


def _outer_by_loop(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    found = left.new_empty(ends.shape[0], left.shape[1], right.shape[1])
    begin = 0
    for total, end in zip(found, ends.tolist(), strict=True):
        if end > begin:
            torch.mm(left[begin:end].t(), right[begin:end], out=total)
        else:
            total.zero_()
        begin = end
    return found


class _Blocks:
    """Rows in blocks of equal size; each block has rows of one group only, and zeros after them.

    With blocks of N / G rows there are at most 2 G, so that a batched product has at most twice
    the operations, and shapes do not depend on the sizes of the groups.

    Attributes:
        groups: (M,), the group of each block.
    """

    def __init__(self, num_rows: int, ends: Tensor) -> None:
        num_groups = len(ends)
        self._size = size = max(1, -(-num_rows // num_groups))
        num_blocks = min(num_rows, (num_rows + num_groups * (size - 1)) // size)
        begins = functional.pad(ends[:-1], (1, 0))
        block_ends = ((ends - begins + size - 1) // size).cumsum(0)
        block_begins = functional.pad(block_ends[:-1], (1, 0))

        blocks = torch.arange(num_blocks, device=ends.device)
        groups = (blocks.unsqueeze(1) >= block_ends).sum(1)
        self.groups = groups.clamp(max=num_groups - 1)  # blocks after the last one are empty
        first = begins[self.groups] + (blocks - block_begins[self.groups]) * size
        sources = first.unsqueeze(1) + torch.arange(size, device=ends.device)
        self._is_row = (sources < ends[self.groups].unsqueeze(1)).unsqueeze(-1)
        self._sources = sources.clamp(max=max(0, num_rows - 1))

        rows = torch.arange(num_rows, device=ends.device)
        of_row = (rows.unsqueeze(1) >= ends).sum(1)
        self._places = block_begins[of_row] * size + rows - begins[of_row]

    def of(self, rows: Tensor) -> Tensor:
        """Return the rows in blocks, (N, I) to (M, S, I)."""
        return torch.where(self._is_row, rows[self._sources], 0)

    def to_rows(self, blocks: Tensor) -> Tensor:
        """Return the rows of blocks, (M, S, O) to (N, O)."""
        return blocks.flatten(0, 1)[self._places]
