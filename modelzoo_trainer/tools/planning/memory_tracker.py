"""Track the memory of all tensors, and count operations and communication."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

import torch
from torch import Tensor, UntypedStorage
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type
from torch.utils.flop_counter import flop_registry
from typing_extensions import override

from modelzoo_trainer.base.devices import attention_formulas, collective_of, is_for_real

NOWHERE: Final = torch.device("meta")


FLOPS: Final = "flops"
READS: Final = "host reads"
EXCHANGE: Final = "exchange"
"""First words of the names of counts."""


class MemoryKind(StrEnum):
    """What memory is used for."""

    PARAMETERS = "parameters"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer state"
    BUFFERS = "buffers"
    BATCH = "batch"
    EXCHANGE = "gathered and exchanged"
    ACTIVATIONS = "activations"


@dataclass(slots=True)
class CollectiveTotals:
    """Totals of one kind of collective."""

    num_calls: int = 0
    num_bytes: int = 0  # of the full tensors
    num_sent: int = 0  # bytes sent by each process


@dataclass(slots=True)
class Peak:
    """The moment of peak memory."""

    total: int = 0
    parts: Counter[MemoryKind] = field(default_factory=Counter)  # the same by kind
    # the peak of each kind, at any moment
    highest: Counter[MemoryKind] = field(default_factory=Counter)

    def update(self, total: int, now: Counter[MemoryKind]) -> None:
        """Take a moment into account, if it is higher."""
        if total > self.total:
            self.total, self.parts = total, Counter(now)


class MemoryTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """Track every operation while active, on fake and on real tensors.

    Memory is counted by storage: allocated with its first tensor, freed with its last. Labels
    may be set later, until `peak` is called.

    Host reads of a fake tensor return zero; `num_host_reads` counts them.

    `mode`: the mode of the fake tensors that stand for real ones; None = none.
    """

    def __init__(self, mode: FakeTensorMode | None = None, *, on_host: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._mode = mode
        self._on_host = on_host
        self.flops = 0
        self._formulas = {**flop_registry, **attention_formulas()}
        self.num_host_reads = 0
        self.exchanges: dict[tuple[str, int], CollectiveTotals] = {}
        self._events: list[tuple[int, int]] = []  # number of the storage, change in bytes
        self._kinds: dict[int, MemoryKind] = {}
        self._live: dict[int, tuple[int, int, Any]] = {}  # by address: number, bytes, reference
        self._num_storages = 0
        self._copied: tuple[int, int] | None = None  # for the message in progress
        self._marks: list[tuple[int, str]] = []  # index of the first event, name of the phase
        self.stage = ""  # begins the names of phases

    # ---- what happens

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # asked for more often than all operations together
        kwargs = kwargs or {}
        if any(is_traceable_wrapper_subclass_type(kind) for kind in types):
            return NotImplemented  # its local operations are dispatched here as well
        given = [*_tensors_in(args), *_tensors_in(kwargs.values())]
        fakes = [tensor for tensor in given if isinstance(tensor, FakeTensor)]
        if any(tensor.fake_mode is not self._mode for tensor in fakes):
            return func(*args, **kwargs)  # torch infers a shape
        if fakes and func is torch.ops.aten._local_scalar_dense.default:
            self.num_host_reads += 1
            return _zero(args[0].dtype)
        is_real = is_for_real(func, args) or (given and not fakes)
        with unset_fake_temporarily() if is_real else nullcontext():
            found = func(*args, **kwargs)
        made = list(_tensors_in((found,)))
        for tensor in filter(self._is_memory, made):
            self.take(tensor)
        self._count(func, args, kwargs, found, given + made)
        return found

    def _count(
        self, func: Any, args: Any, kwargs: Any, found: Any, tensors: Sequence[Tensor]
    ) -> None:
        formula = self._formulas.get(func._overloadpacket)
        if formula is not None:
            self.flops += int(formula(*args, **kwargs, out_val=found))
        collective = collective_of(func, [*args, *kwargs.values()], on_host=self._on_host)
        if collective is None:
            return
        for tensor in tensors:
            self.label([tensor], MemoryKind.EXCHANGE, only_new=True)
        if collective.num > 1:
            size = _largest([*args, found])
            place = collective.kind, collective.num
            entry = self.exchanges.setdefault(place, CollectiveTotals())
            entry.num_calls += 1
            entry.num_bytes += size
            entry.num_sent += collective.sent(size)
            if collective.copies:
                self._copy(size)

    # ---- memory

    def _is_memory(self, tensor: Tensor) -> bool:
        if isinstance(tensor, FakeTensor):
            return tensor.fake_mode is self._mode and tensor.fake_device != NOWHERE
        return tensor.device != NOWHERE

    def take(self, tensor: Tensor) -> int:
        """Count a tensor's storage once and return its number."""
        storage = tensor.untyped_storage()
        known = self._live.get(storage._cdata)
        if known is not None:
            return known[0]
        number, size = self._num_storages, storage.nbytes()
        self._num_storages += 1
        address = storage._cdata
        reference = weakref.finalize(storage, self._give_back, address)
        reference.atexit = False
        self._live[address] = (number, size, reference)
        if size:
            self._events.append((number, size))
        return number

    def _copy(self, size: int) -> None:
        """Count a copy that lives until the next one: engines wait for the previous copy first."""
        self.finish_exchange()
        self._copied = (self._num_storages, size)
        self._kinds[self._num_storages] = MemoryKind.EXCHANGE
        self._num_storages += 1
        self._events.append(self._copied)

    def finish_exchange(self) -> None:
        """Note that the last exchange has finished, and free its copy."""
        if self._copied is not None:
            number, size = self._copied
            self._events.append((number, -size))
            self._copied = None

    def _give_back(self, address: int) -> None:
        number, size, _ = self._live.pop(address)
        if size:
            self._events.append((number, -size))

    def resize(self, storage: UntypedStorage, size: int) -> None:
        """Record the new size of a storage."""
        known = self._live.get(storage._cdata)
        if known is None:
            return
        number, before, reference = known
        self._live[storage._cdata] = (number, size, reference)
        self._kinds.setdefault(number, MemoryKind.EXCHANGE)
        if size != before:
            self._events.append((number, size - before))

    def label(self, tensors: Iterable[Tensor], kind: MemoryKind, *, only_new: bool = False) -> None:
        """Set the kind of memory of tensors."""
        for tensor in filter(self._is_memory, map(local, tensors)):
            number = self.take(tensor)
            if not only_new or number not in self._kinds:
                self._kinds[number] = kind

    def held(self, kinds: Sequence[MemoryKind] = ()) -> int:
        """Return the bytes currently allocated, of some kinds or of all."""
        return sum(
            size
            for number, size, _ in self._live.values()
            if not kinds or self._kinds.get(number, MemoryKind.ACTIVATIONS) in kinds
        )

    def mark(self, phase: str) -> None:
        """Begin a phase, whose peak `peaks` returns; it may begin several times."""
        self._marks.append((len(self._events), f"{self.stage}{phase}"))

    def peaks(self) -> dict[str, Peak]:
        """Return the moment of peak memory of each phase; "" is the one before the first mark."""
        marks = iter([*self._marks, (-1, "")])
        now: Counter[MemoryKind] = Counter()
        total, phase = 0, ""
        found = {phase: Peak()}
        begin, following = next(marks)
        for index, (number, change) in enumerate(self._events):
            while index == begin:
                phase = following
                peak = found.setdefault(phase, Peak())
                peak.update(total, now)
                peak.highest |= now
                begin, following = next(marks)
            peak = found[phase]
            kind = self._kinds.get(number, MemoryKind.ACTIVATIONS)
            now[kind] += change
            total += change
            peak.highest[kind] = max(peak.highest[kind], now[kind])
            peak.update(total, now)
        return found

    def peak(self) -> Peak:
        """Return the moment of peak memory."""
        return highest_of(self.peaks().values())

    def counts(self) -> dict[tuple[str, ...], int]:
        """Return the counts of operations and collectives, by name."""
        found: dict[tuple[str, ...], int] = {(FLOPS,): self.flops, (READS,): self.num_host_reads}
        for (kind, num), entry in self.exchanges.items():
            for name in ("num_calls", "num_bytes", "num_sent"):
                found[EXCHANGE, kind, str(num), name] = getattr(entry, name)
        return found

    def clear_counts(self) -> None:
        """Reset the counts of operations and collectives, but keep tracking memory."""
        self.flops = self.num_host_reads = 0
        self.exchanges = {}

    @contextmanager
    def following_sizes(self) -> Iterator[None]:
        """Also track storages that are resized, which no dispatched operation shows."""
        resize = UntypedStorage.resize_

        def followed(storage: UntypedStorage, size: int) -> Any:
            found = resize(storage, size)
            self.resize(storage, size)
            return found

        UntypedStorage.resize_ = followed  # type: ignore[assignment, method-assign]
        try:
            yield
        finally:
            UntypedStorage.resize_ = resize  # type: ignore[method-assign]


def highest_of(peaks: Iterable[Peak]) -> Peak:
    """Return the moment of peak memory of several phases."""
    found = Peak()
    for one in peaks:
        found.update(one.total, one.parts)
        found.highest |= one.highest
    return found


def local(tensor: Tensor) -> Tensor:
    """Return the local shard of a DTensor; any other tensor unchanged."""
    part = getattr(tensor, "_local_tensor", None)
    return tensor if part is None else part


def _tensors_in(items: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors among the arguments or results of an operation, also in lists.

    In a fifth of the time of torch's general function, which was a tenth of a plan's.
    """
    for item in items:
        if isinstance(item, Tensor):
            yield item
        elif isinstance(item, (list, tuple)):
            yield from _tensors_in(item)


def _zero(dtype: torch.dtype) -> bool | int | float:
    if dtype is torch.bool:
        return False
    return 0.0 if dtype.is_floating_point else 0


def _largest(items: Sequence[Any]) -> int:
    """Return the bytes of the largest of several tensors or lists of tensors."""
    return max(sum(tensor.nbytes for tensor in _tensors_in((item,))) for item in items)
