"""Few batch shapes: samples padded to one of a few lengths, the last batch to its full size.

Devices that compile a graph per shape wait once for each. These are pure functions of the samples,
for `DataLoader(collate_fn=...)`: in any process, and after resuming, the same samples give the same
batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from math import ceil
from operator import index
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import default_collate

from modelzoo_trainer.errors import ConfigError, suggest
from modelzoo_trainer.loading.batches import batch_size_of

Name = str | int
"""An entry: a key of a mapping, or a position in a tuple or list."""

Values = Mapping[str, float] | Mapping[int, float] | Mapping[Name, float]

_TOLERANCE: Final = 1e-9  # roots are inexact: 32 ** (4 / 5) is above 16


def bucket_lengths(longest: int, *, num: int = 4, multiple_of: int = 64) -> list[int]:
    """Return lengths for `PadToBuckets`, which increase by about the same factor.

    Args:
        longest: Length of the longest sample, >= 1; the last bucket holds it.
        num: Maximum number of buckets, >= 1; there are fewer if rounding makes some equal.
        multiple_of: Each is rounded up to a multiple of this, >= 1; it is the first bucket if there
            are several.

    Raises:
        ConfigError: If a number is out of range.

    Example:
        >>> bucket_lengths(1000, num=5)
        [64, 128, 256, 512, 1024]
    """
    longest = _at_least_one("bucket_lengths: longest", longest)
    num = _at_least_one("bucket_lengths: num", num)
    multiple_of = _at_least_one("bucket_lengths: multiple_of", multiple_of)
    units = -(-longest // multiple_of)
    exact = [units ** (number / (num - 1)) for number in range(num - 1)]
    sizes = {*(ceil(size - _TOLERANCE) for size in exact), units}
    return [size * multiple_of for size in sorted(sizes)]


class PadToBuckets:
    """Collate samples of different lengths, padded to the smallest bucket that holds the longest.

    The entries of `pad` all get this length, so there are at most as many lengths as buckets. Other
    entries are stacked. Otherwise as torch's `default_collate`: mappings stay mappings, tuples
    become lists, numbers become tensors.

    Args:
        lengths: The buckets: each >= 1, increasing.
        pad: The entries to pad and their padding values: by keys of mappings, or positions in
            tuples. A number if each sample is one tensor.
        dim: Dimension of these entries of a sample to pad; negative = from the end.
        truncate: Whether to truncate samples longer than all buckets. If not, they raise.
        mask: Key of an entry to add: 1 in samples, 0 in padding.

    Shapes:
        An entry of `pad`, with dim 0: (T, ...) of any type in tensors, arrays and lists of numbers
        becomes (B, bucket, ...) of this type. mask: (B, bucket), int64.

    Raises:
        ConfigError: If an argument is invalid or, when called, a sample is.

    Example:
        >>> collate = PadToBuckets([4, 8], pad={"input_ids": 0, "labels": -100})
        >>> samples = [{"input_ids": [5, 6], "labels": [6, 7]}, {"input_ids": [8], "labels": [9]}]
        >>> batch = collate(samples)
        >>> batch["input_ids"].tolist()
        [[5, 6, 0, 0], [8, 0, 0, 0]]
        >>> batch["labels"].tolist()
        [[6, 7, -100, -100], [9, -100, -100, -100]]
    """

    def __init__(
        self,
        lengths: Sequence[int],
        pad: Values | float,
        *,
        dim: int = 0,
        truncate: bool = False,
        mask: str | None = None,
    ) -> None:
        self.lengths = _checked_lengths(lengths)
        self.is_bare = not isinstance(pad, Mapping)
        self.pad = _checked_values(
            "PadToBuckets: pad", pad if isinstance(pad, Mapping) else {0: pad}
        )
        self.dim = dim
        self.truncate = truncate
        self.mask = mask
        if mask is not None and (mask in self.pad or not all(isinstance(n, str) for n in self.pad)):
            raise ConfigError(
                f"PadToBuckets: with mask={mask!r}, pad must be a dict with keys of the samples, "
                f"such as {{'input_ids': 0}}, but without the key {mask!r}; got pad={pad!r}. "
                f"Change pad, use another name for mask, or remove mask."
            )

    def __call__(self, samples: list[Any]) -> Any:
        """Return the batch of these samples."""
        if not isinstance(samples, list) or not samples:
            raise ConfigError(
                f"PadToBuckets got a {type(samples).__name__}, but requires a list of at least one "
                "sample. A dataset that returns whole batches must pad them itself."
            )
        if self.is_bare:
            return self._collated([(sample,) for sample in samples])[0]
        return self._collated(samples)

    def _collated(self, samples: list[Any]) -> Any:
        found = [self._sequences(sample, number) for number, sample in enumerate(samples)]
        longest = max(entry.shape[self.dim] for entries in found for entry in entries.values())
        bucket = next((length for length in self.lengths if length >= longest), self.lengths[-1])
        rows = [
            _replaced(
                sample,
                {
                    name: self._padded(entry, bucket, self.pad[name])
                    for name, entry in entries.items()
                },
            )
            for sample, entries in zip(samples, found, strict=True)
        ]
        batch = default_collate(rows)
        if self.mask is not None:
            first = next(iter(self.pad))
            sizes = torch.tensor([entries[first].shape[self.dim] for entries in found])
            batch[self.mask] = (torch.arange(bucket) < sizes.unsqueeze(1)).long()
        return batch

    def _sequences(self, sample: Any, number: int) -> dict[Name, Tensor]:
        """Return the entries of a sample to pad, validated."""
        where = f"sample {number} of the batch"
        _check_names(self.pad, sample, f"PadToBuckets: pad has {{}}, but {where}")
        if self.mask is not None and self.mask in sample:
            raise ConfigError(
                f"PadToBuckets: mask is {self.mask!r}, but {where} already has that key. Remove "
                f"mask and add {{{self.mask!r}: 0}} to pad, or use another name for mask."
            )
        entries = {}
        for name, value in self.pad.items():
            what = where if self.is_bare else f"{where}: {name!r}"
            entry = entries[name] = _as_tensor(sample[name], what)
            self._check_entry(entry, value, what)
        sizes = {name: entry.shape[self.dim] for name, entry in entries.items()}
        if self.mask is not None and len(set(sizes.values())) > 1:
            raise ConfigError(
                f"PadToBuckets: {where} has entries of different lengths ({sizes}), so there "
                "is no common mask. Make them equally long, or remove mask."
            )
        return entries

    def _check_entry(self, entry: Tensor, value: float, what: str) -> None:
        if not -entry.dim() <= self.dim < entry.dim():
            raise ConfigError(
                f"PadToBuckets: {what} has shape {tuple(entry.shape)}, so it has no dimension "
                f"{self.dim}. Change dim, or remove the entry from pad to stack it unpadded."
            )
        _check_fits(value, entry.dtype, f"PadToBuckets: {what} is padded with")
        length = entry.shape[self.dim]
        if length > self.lengths[-1] and not self.truncate:
            raise ConfigError(
                f"PadToBuckets: {what} has length {length}, but the last bucket is "
                f"{self.lengths[-1]}. Add a longer bucket, shorten the samples, or set "
                "truncate=True."
            )

    def _padded(self, entry: Tensor, bucket: int, value: float) -> Tensor:
        missing = bucket - entry.shape[self.dim]
        if missing <= 0:
            return entry.narrow(self.dim, 0, bucket)
        after = (
            entry.dim() - 1 - self.dim % entry.dim()
        )  # number of later dimensions; torch lists the last one first
        return functional.pad(entry, (0, 0) * after + (0, missing), value=value)


class PadLastBatch:
    """Pad a smaller last batch to the full size, with rows that do not count.

    Use it for validations, which must see every sample; in training use `drop_last`, since added
    rows affect everything computed across a batch (batch normalization). An added row is a copy of
    the last sample, except for the entries of `fill`.

    Averages equal the averages of the smaller batch, up to rounding, if the model excludes such
    rows from its loss and metrics and returns `num_items`, the number of labels they are averaged
    over. Without `num_items`, the weight of a batch is its number of rows (`batch_size_of`),
    including added ones, so the last batch counts too much. A micro-batch may consist of added rows
    only: its loss must not divide by 0:

        losses = cross_entropy(logits, labels, ignore_index=-100, reduction="sum")
        num_items = (labels != -100).sum()
        return {"loss": losses / num_items.clamp(min=1), "num_items": num_items}

    Args:
        batch_size: Full size, the loader's, >= 1.
        fill: Values of entries in added rows instead of the copy, such as {"labels": -100}: by keys
            of a mapping, or positions in a tuple or list.
        weight: Key of an entry to add to every batch: 1 for samples, 0 for added rows.
        collate: Collates the samples: `default_collate`, `PadToBuckets(...)`, or a custom function.
            All tensors of its batches have the samples in their first dimension.

    Shapes:
        All tensors: (batch_size, ...). weight: (batch_size,), float32.

    Raises:
        ConfigError: If an argument is invalid or, when called, a batch is.

    Example:
        >>> collate = PadLastBatch(4, {1: -100})
        >>> inputs, labels = collate([(0.5, 7), (0.25, 8)])
        >>> inputs.tolist(), labels.tolist()
        ([0.5, 0.25, 0.25, 0.25], [7, 8, -100, -100])
    """

    def __init__(
        self,
        batch_size: int,
        fill: Values | None = None,
        *,
        weight: str | None = None,
        collate: Callable[[list[Any]], Any] = default_collate,
    ) -> None:
        if not fill and weight is None:
            raise ConfigError(
                "PadLastBatch: without fill or weight, added rows would count as samples. Pass "
                'fill, such as {"labels": -100}, or weight, the key of an entry to add.'
            )
        self.batch_size = _at_least_one("PadLastBatch: batch_size", batch_size)
        self.fill = _checked_values("PadLastBatch: fill", fill) if fill else {}
        self.weight = weight
        self.collate = collate

    @property
    def padding_weight(self) -> str | None:
        """The key of a batch that `predict` drops padding rows by."""
        return self.weight

    def __call__(self, samples: list[Any]) -> Any:
        """Return the batch of these samples, full."""
        batch = self.collate(samples)
        num = batch_size_of(batch)
        if num > self.batch_size:
            raise ConfigError(
                f"PadLastBatch: batch_size is {self.batch_size}, but a batch has {num} samples. "
                "Use the batch_size of the DataLoader."
            )
        self._check(batch, num)  # also a full one, to find invalid names in the first batch
        if num < self.batch_size:
            batch = _with_rows(batch, num, self.batch_size - num)
            for name, value in self.fill.items():
                batch[name][num:] = value
        if self.weight is not None:
            weight = (torch.arange(self.batch_size) < num).float()
            batch = _replaced(batch, {self.weight: weight})
        return batch

    def _check(self, batch: Any, num: int) -> None:
        _check_names(self.fill, batch, "PadLastBatch: fill has {}, but the batch")
        for name, value in self.fill.items():
            entry = batch[name]
            if not isinstance(entry, Tensor) or entry.shape[:1] != (num,):
                shape = f" of shape {tuple(entry.shape)}" if isinstance(entry, Tensor) else ""
                raise ConfigError(
                    f"PadLastBatch: fill has {name!r}, which is a {type(entry).__name__}{shape} "
                    f"in a batch of {num} samples. Only a tensor with {num} rows can be filled."
                )
            _check_fits(value, entry.dtype, f"PadLastBatch: {name!r} is filled with")
        if self.weight is not None and (not isinstance(batch, Mapping) or self.weight in batch):
            has = "already has that entry" if isinstance(batch, Mapping) else "is not a dict"
            raise ConfigError(
                f"PadLastBatch: weight={self.weight!r} can only be added to dicts without that "
                f"key, but this batch (a {type(batch).__name__}) {has}. Use fill instead."
            )


def _with_rows(batch: Any, num: int, missing: int) -> Any:
    """Copy a batch, with its last row repeated."""
    if isinstance(batch, Tensor):
        if not batch.dim():
            return batch
        if batch.shape[0] != num:
            raise ConfigError(
                f"PadLastBatch: a batch of {num} samples has a tensor of shape "
                f"{tuple(batch.shape)}. The first dimension of all tensors must be the samples."
            )
        return torch.cat((batch, batch[-1:].expand(missing, *batch.shape[1:])))
    if isinstance(batch, Mapping):
        parts = {key: _with_rows(value, num, missing) for key, value in batch.items()}
        return parts if type(batch) is dict else type(batch)(parts)  # type: ignore[call-arg]  # like dict
    if isinstance(batch, tuple | list):
        is_list_of_samples = len(batch) == num and not any(map(_has_parts, batch))
        if is_list_of_samples:  # such as file names
            items = [*batch, *batch[-1:] * missing]
        else:
            items = [_with_rows(item, num, missing) for item in batch]
        return type(batch)(*items) if hasattr(batch, "_fields") else type(batch)(items)
    return batch


def _has_parts(item: Any) -> bool:
    return isinstance(item, Tensor | Mapping | tuple | list)


def _replaced(sample: Any, changed: Mapping[Name, Tensor]) -> Any:
    """Return a mapping, tuple or list with entries replaced or added."""
    if isinstance(sample, Mapping):
        return {**sample, **changed}
    items = [changed.get(number, item) for number, item in enumerate(sample)]
    return type(sample)(*items) if hasattr(sample, "_fields") else tuple(items)


def _as_tensor(value: Any, what: str) -> Tensor:
    if isinstance(value, Tensor):
        return value
    try:
        if isinstance(value, np.ndarray):
            return torch.from_numpy(np.array(value))  # a copy: it may be a read-only memory map
        if isinstance(value, list | tuple) and value:
            return torch.tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"PadToBuckets: {what} cannot become a tensor: {error}.") from error
    kind = f"{'an empty' if isinstance(value, list | tuple) else 'a'} {type(value).__name__}"
    raise ConfigError(
        f"PadToBuckets: {what} is {kind}; only tensors, arrays and non-empty lists of numbers can "
        "be padded. Return one of these from the dataset, or remove the entry from pad to stack it "
        "unpadded."
    )


# ---- checks


def _checked_lengths(lengths: Sequence[int]) -> tuple[int, ...]:
    try:
        found = tuple(index(length) for length in lengths)
    except TypeError:
        found = ()
    if not found or found[0] < 1 or any(a >= b for a, b in pairwise(found)):
        raise ConfigError(
            f"PadToBuckets: lengths is {lengths!r}. Give at least one integer, each at least "
            "1 and greater than the previous one, such as [128, 256, 512]."
        )
    return found


def _at_least_one(what: str, number: int) -> int:
    try:
        found = index(number)
    except TypeError:
        found = 0
    if found < 1:
        raise ConfigError(f"{what} is {number!r}; it must be an integer >= 1.")
    return found


def _checked_values(what: str, values: Mapping[Any, Any]) -> dict[Name, float]:
    wrong = {n: v for n, v in values.items() if not isinstance(v, int | float)}
    names = [name for name in values if not isinstance(name, str | int)]
    if wrong or names or not values:
        raise ConfigError(
            f"{what} is {dict(values)!r}. It must map one or more entries, by key or position, to "
            'numbers, such as {"labels": -100} or {1: -100}.'
        )
    return dict(values)


_NO_ENTRIES: Final = "Only dicts, tuples and lists have entries."


def _check_names(names: Mapping[Name, float], owner: Any, said: str) -> None:
    """Raise a `ConfigError` if a mapping, tuple or list lacks one of these entries."""
    known: list[Name] = []
    if isinstance(owner, Mapping):
        known = list(owner)
    elif isinstance(owner, tuple | list):
        known = list(range(len(owner)))
    for name in names:
        if name not in known:
            near = suggest(str(name), map(str, known)) if known else _NO_ENTRIES
            raise ConfigError(
                f"{said.format(repr(name))} is a {type(owner).__name__} without it. {near}"
            )


def _check_fits(value: float, dtype: torch.dtype, what: str) -> None:
    """Raise a `ConfigError` if a tensor of this type cannot hold the value."""
    if dtype.is_floating_point or dtype.is_complex:
        return
    low, high = (0, 1) if dtype == torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    if not (low <= value <= high and float(value).is_integer()):
        raise ConfigError(
            f"{what} {value}, but its dtype is {dtype}, which holds integers from {low} to "
            f"{high}. Use another value, or samples of another dtype."
        )


def _listed(names: Any) -> str:
    return ", ".join(repr(name) for name in names)
