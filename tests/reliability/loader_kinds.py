"""Training data of every kind that a trainer is given, by name."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
    get_worker_info,
)

from modelzoo_trainer.zoo.data import ShardedStream as TrainerShardedStream
from tests.reliability.toy_task import Samples

NUM: Final = 22  # divided by two workers, no batch has a single sample
BATCH_SIZE: Final = 4
LIMIT: Final = 4  # steps of an epoch of the kinds whose names end with "limited"

EXACT: Final = "exact"
WARNED: Final = "warned"
EQUAL_OR_WARNED: Final = "equal or warned"

WORKERS: Final[dict[str, dict[str, Any]]] = {
    "0": {},
    "2": {"num_workers": 2},
    "persistent": {"num_workers": 2, "persistent_workers": True},
}

ALL_WAYS: Final = tuple(WORKERS)

KINDS: Final[dict[str, Callable[[], Any]]] = {}
EXPECTED: Final[dict[str, str]] = {}
LIBRARIES: Final = {"datasets": "datasets", "torchdata": "torchdata"}


def add(
    name: str,
    ways: Sequence[str] = (),
    *,
    warned: Sequence[str] = (),
    either: Sequence[str] = (),
    limited: Sequence[str] = (),
    expected: str = EXACT,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that adds a function to `KINDS`, once for each number of workers.

    Args:
        name: Of the kind; the number of workers is appended.
        ways: Keys of `WORKERS`; none = the function takes no options of a loader.
        warned: Those with which a resumed run need not be equal, but is warned of.
        either: Those with which it is one of the two.
        limited: Those that are also run with `steps_per_epoch`.
        expected: Of the others.
    """

    def added(make: Callable[..., Any]) -> Callable[..., Any]:
        for way in ways or ("",):
            full = f"{name}-{way}" if way else name
            result = WARNED if way in warned else EQUAL_OR_WARNED if way in either else expected
            names = [full, f"{full}-limited"] if way in limited else [full]
            for each in names:
                KINDS[each] = lambda way=way: make(**WORKERS.get(way, {}))
                EXPECTED[each] = result
        return make

    return added


def steps_per_epoch(name: str) -> int | None:
    """Return the steps after which an epoch of a kind ends; None = with its data."""
    return LIMIT if name.endswith("limited") else None


def library_of(name: str) -> str | None:
    """Return the optional library that a kind needs."""
    return LIBRARIES.get(name.partition("_")[0])


def augmented(inputs: Tensor) -> Tensor:
    """Change inputs by numbers of python's, numpy's and torch's generators."""
    by_numpy = torch.from_numpy(np.random.standard_normal(inputs.shape).astype(np.float32))
    inputs = inputs * (0.9 + 0.2 * random.random()) + 0.1 * by_numpy
    return inputs + 0.1 * torch.randn(inputs.shape)


def points(*, augment: bool = True) -> Samples:
    return Samples(NUM, 1, augment=augment)


# ---- data sets with indices, samplers of torch


@add("augmented", ALL_WAYS, limited=["0", "2"])
def _augmented(**workers: Any) -> Any:
    return DataLoader(points(), BATCH_SIZE, shuffle=True, **workers)


@add("in_order", ["0", "2"])
def _in_order(**workers: Any) -> Any:
    return DataLoader(points(), BATCH_SIZE, **workers)


@add("tensors", ["0", "2"])
def _tensors(**workers: Any) -> Any:
    plain = points()
    data = TensorDataset(plain.inputs, plain.targets)
    return DataLoader(data, BATCH_SIZE, shuffle=True, **workers)


class Together(Samples):
    """Loads the samples of a batch at once."""

    def __getitems__(self, indices: list[int]) -> list[tuple[Tensor, Tensor]]:
        inputs = augmented(self.inputs[indices])
        return list(zip(inputs, self.targets[indices], strict=True))


@add("getitems", ["0", "2"])
def _getitems(**workers: Any) -> Any:
    return DataLoader(Together(NUM, 1, augment=True), BATCH_SIZE, shuffle=True, **workers)


@add("own_collate", ["0", "2"])
def _own_collate(**workers: Any) -> Any:
    def collate(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        inputs, targets = default_collate(samples)
        return augmented(inputs), targets

    data = points(augment=False)
    return DataLoader(data, BATCH_SIZE, shuffle=True, collate_fn=collate, **workers)


def seed_worker(worker_id: int) -> None:
    """Do what torch's notes on reproducibility advise."""
    seed = torch.initial_seed() % 2**32
    np.random.seed(seed)
    random.seed(seed)


@add("worker_init", ["2", "persistent"])
def _worker_init(**workers: Any) -> Any:
    return DataLoader(points(), BATCH_SIZE, shuffle=True, worker_init_fn=seed_worker, **workers)


@add("loader_generator", ALL_WAYS)
def _loader_generator(**workers: Any) -> Any:
    generator = torch.Generator().manual_seed(11)
    return DataLoader(points(), BATCH_SIZE, shuffle=True, generator=generator, **workers)


@add("sampler_of_torch_with_generator", ["0", "2"])
def _sampler_of_torch_with_generator(**workers: Any) -> Any:
    data = points()
    sampler = RandomSampler(data, generator=torch.Generator().manual_seed(12))
    return DataLoader(data, BATCH_SIZE, sampler=sampler, **workers)


@add("replacement", ["0", "2"])
def _replacement(**workers: Any) -> Any:
    data = points()
    sampler = RandomSampler(data, replacement=True, num_samples=NUM)
    return DataLoader(data, BATCH_SIZE, sampler=sampler, **workers)


@add("weighted", ["0", "2"])
def _weighted(**workers: Any) -> Any:
    sampler = WeightedRandomSampler([1.0 + idx % 3 for idx in range(NUM)], NUM)
    return DataLoader(points(), BATCH_SIZE, sampler=sampler, **workers)


@add("subset", ["0"])
def _subset(**workers: Any) -> Any:
    sampler = SubsetRandomSampler(range(2, NUM))
    return DataLoader(points(), BATCH_SIZE, sampler=sampler, **workers)


@add("drop_last", ["0", "2"])
def _drop_last(**workers: Any) -> Any:
    return DataLoader(points(), BATCH_SIZE, shuffle=True, drop_last=True, **workers)


class Batches(Dataset[tuple[Tensor, Tensor]]):
    """Its items are batches."""

    def __init__(self) -> None:
        self.plain = points()

    def __len__(self) -> int:
        return NUM // BATCH_SIZE

    def __getitem__(self, idx: int) -> tuple[Tensor, Tensor]:
        part = slice(idx * BATCH_SIZE, (idx + 1) * BATCH_SIZE)
        return augmented(self.plain.inputs[part]), self.plain.targets[part]


@add("unbatched", ["0", "2"])
def _unbatched(**workers: Any) -> Any:
    return DataLoader(Batches(), batch_size=None, shuffle=True, **workers)


# ---- samplers of a user


class Order(Sampler[int]):
    """A sampler whose order is that of `permutation`."""

    def __init__(self) -> None:
        super().__init__()

    def __len__(self) -> int:
        return NUM

    def __iter__(self) -> Iterator[int]:
        yield from self.permutation()

    def permutation(self) -> list[int]:
        return torch.randperm(NUM).tolist()


class WithTorchGenerator(Order):
    """Draws from a generator that continues from epoch to epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(21)

    def permutation(self) -> list[int]:
        return torch.randperm(NUM, generator=self.generator).tolist()


class WithNumpyGenerator(Order):
    """Likewise, from one of numpy."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = np.random.default_rng(22)

    def permutation(self) -> list[int]:
        return self.generator.permutation(NUM).tolist()


class WithRandomState(Order):
    """Likewise, from an old one of numpy."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = np.random.RandomState(23)

    def permutation(self) -> list[int]:
        return self.generator.permutation(NUM).tolist()


class WithPythonGenerator(Order):
    """Likewise, from one of python."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = random.Random(24)

    def permutation(self) -> list[int]:
        return self.generator.sample(range(NUM), NUM)


class ShufflesInPlace(WithPythonGenerator):
    """Shuffles the order of the epoch before."""

    def __init__(self) -> None:
        super().__init__()
        self.order = list(range(NUM))

    def permutation(self) -> list[int]:
        self.generator.shuffle(self.order)
        return self.order


class DrawsWhileIterated(WithPythonGenerator):
    """Draws each index when it is asked for it."""

    def __iter__(self) -> Iterator[int]:
        for _ in range(NUM):
            yield self.generator.randrange(NUM)


class CountsEpochs(Order):
    """Its order follows from how often it was iterated."""

    def __init__(self) -> None:
        super().__init__()
        self.num_epochs = 0

    def permutation(self) -> list[int]:
        self.num_epochs += 1
        return random.Random(self.num_epochs).sample(range(NUM), NUM)


class SetEpoch(Order):
    """Its order follows from the epoch that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def permutation(self) -> list[int]:
        return random.Random(self.epoch).sample(range(NUM), NUM)


class WithStateDict(Order):
    """Keeps its generator where nobody finds it, and has a state."""

    def __init__(self) -> None:
        super().__init__()
        generator = np.random.RandomState(25)
        self.generator = lambda: generator

    def permutation(self) -> list[int]:
        return self.generator().permutation(NUM).tolist()

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self.generator().get_state(legacy=False)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.generator().set_state(state["generator"])


class OutOfSight(Order):
    """Likewise, and has no state."""

    def __init__(self) -> None:
        super().__init__()
        generator = np.random.RandomState(26)
        self.generator = lambda: generator

    def permutation(self) -> list[int]:
        return self.generator().permutation(NUM).tolist()


class WithoutSeed(Order):
    """Makes a generator without a seed each time it is iterated."""

    def permutation(self) -> list[int]:
        return np.random.default_rng().permutation(NUM).tolist()


def loader_of(sampler: Sampler[int], workers: dict[str, Any]) -> Any:
    return DataLoader(points(), BATCH_SIZE, sampler=sampler, **workers)


add("sampler_global", ["0", "2"])(lambda **workers: loader_of(Order(), workers))
add("sampler_torch_generator", ALL_WAYS, limited=["0", "2"])(
    lambda **workers: loader_of(WithTorchGenerator(), workers)
)
add("sampler_numpy_generator", ["0", "2"])(
    lambda **workers: loader_of(WithNumpyGenerator(), workers)
)
add("sampler_random_state", ["0"])(lambda **workers: loader_of(WithRandomState(), workers))
add("sampler_python_generator", ["0"])(lambda **workers: loader_of(WithPythonGenerator(), workers))
add("sampler_in_place", ["0"])(lambda **workers: loader_of(ShufflesInPlace(), workers))
add("sampler_draws_while_iterated", ALL_WAYS, limited=ALL_WAYS)(
    lambda **workers: loader_of(DrawsWhileIterated(), workers)
)
add("sampler_counts_epochs", ["0", "persistent"])(
    lambda **workers: loader_of(CountsEpochs(), workers)
)
add("sampler_set_epoch", ["0", "2"])(lambda **workers: loader_of(SetEpoch(), workers))
add("sampler_state_dict", ["0", "2"], limited=["0"])(
    lambda **workers: loader_of(WithStateDict(), workers)
)
add("sampler_without_seed", ["0", "2"], expected=WARNED)(
    lambda **workers: loader_of(WithoutSeed(), workers)
)
add("sampler_out_of_sight", ["0"], expected=EQUAL_OR_WARNED)(
    lambda **workers: loader_of(OutOfSight(), workers)
)


class Buckets(Sampler[list[int]]):
    """A sampler of batches: of neighbours, in an order of its generator."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = random.Random(27)

    def __len__(self) -> int:
        return -(-NUM // BATCH_SIZE)

    def __iter__(self) -> Iterator[list[int]]:
        starts = list(range(0, NUM, BATCH_SIZE))
        self.generator.shuffle(starts)
        for start in starts:
            yield list(range(start, min(start + BATCH_SIZE, NUM)))


@add("batch_sampler", ALL_WAYS, limited=["0"])
def _batch_sampler(**workers: Any) -> Any:
    return DataLoader(points(), batch_sampler=Buckets(), **workers)


@add("batch_sampler_of_torch", ["0"])
def _batch_sampler_of_torch(**workers: Any) -> Any:
    batches = BatchSampler(WithNumpyGenerator(), BATCH_SIZE, drop_last=True)
    return DataLoader(points(), batch_sampler=batches, **workers)


@add("unbatched_sampler", ["0"])
def _unbatched_sampler(**workers: Any) -> Any:
    sampler = SubsetRandomSampler(
        range(NUM // BATCH_SIZE), generator=torch.Generator().manual_seed(28)
    )
    return DataLoader(Batches(), batch_size=None, sampler=sampler, **workers)


# ---- data sets with indices that change while they are read


class Counting(Samples):
    """Counts what it has loaded, and changes it by that."""

    def __init__(self) -> None:
        super().__init__(NUM, 1, augment=False)
        self.num_loaded = 0

    def __getitem__(self, idx: int) -> tuple[Tensor, Tensor]:
        self.num_loaded += 1
        inputs, targets = super().__getitem__(idx)
        return inputs * (1 + 0.01 * self.num_loaded), targets


class WithAugmentation(Samples):
    """Draws from a generator of its own."""

    def __init__(self) -> None:
        super().__init__(NUM, 1, augment=False)
        self.generator = np.random.RandomState(31)

    def __getitem__(self, idx: int) -> tuple[Tensor, Tensor]:
        inputs, targets = super().__getitem__(idx)
        return inputs + float(self.generator.standard_normal()), targets


class WithState(WithAugmentation):
    """Draws from a generator of its own, counts, and has a state."""

    def __init__(self) -> None:
        super().__init__()
        self.num_loaded = 0

    def __getitem__(self, idx: int) -> tuple[Tensor, Tensor]:
        self.num_loaded += 1
        inputs, targets = super().__getitem__(idx)
        return inputs * (1 + 0.01 * self.num_loaded), targets

    def state_dict(self) -> dict[str, Any]:
        state = self.generator.get_state(legacy=False)
        return {"num_loaded": self.num_loaded, "generator": state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.num_loaded = state["num_loaded"]
        self.generator.set_state(state["generator"])


class OpensLazily(Samples):
    """Opens what it reads when it is first asked, in whichever process."""

    def __init__(self) -> None:
        super().__init__(NUM, 1, augment=True)
        self.opened: Any = None

    def __getitem__(self, idx: int) -> tuple[Tensor, Tensor]:
        if self.opened is None:
            self.opened = memoryview(self.inputs.numpy())
        return super().__getitem__(idx)


class Cached(Samples):
    """Keeps what it has loaded: it changes, but not what it loads."""

    def __init__(self) -> None:
        super().__init__(NUM, 1, augment=False)
        self.cache: dict[int, tuple[Tensor, Tensor]] = {}

    def __getitem__(self, idx: int) -> tuple[Tensor, Tensor]:
        if idx not in self.cache:
            self.cache[idx] = super().__getitem__(idx)
        return self.cache[idx]


@add("data_counter", ALL_WAYS, expected=WARNED)
def _data_counter(**workers: Any) -> Any:
    return DataLoader(Counting(), BATCH_SIZE, shuffle=True, **workers)


@add("data_generator", ALL_WAYS, expected=WARNED)
def _data_generator(**workers: Any) -> Any:
    return DataLoader(WithAugmentation(), BATCH_SIZE, shuffle=True, **workers)


@add("data_state_dict", ALL_WAYS, limited=ALL_WAYS)
def _data_state_dict(**workers: Any) -> Any:
    return DataLoader(WithState(), BATCH_SIZE, shuffle=True, **workers)


@add("data_opens_lazily", ["0", "2"])
def _data_opens_lazily(**workers: Any) -> Any:
    return DataLoader(OpensLazily(), BATCH_SIZE, shuffle=True, **workers)


@add("data_cache", ["0", "2"], expected=EQUAL_OR_WARNED)
def _data_cache(**workers: Any) -> Any:
    return DataLoader(Cached(), BATCH_SIZE, shuffle=True, **workers)


# ---- data sets, samplers and collate functions whose state grows from nothing


class Growing(Samples):
    """Keeps its samples as they were changed when they were first loaded."""

    def __init__(self) -> None:
        super().__init__(NUM, 1, augment=True)
        self.kept: Any = self.nothing_yet()

    def nothing_yet(self) -> Any:
        return {}

    def __getitem__(self, idx: int) -> tuple[Tensor, Tensor]:
        if not self.has(idx):
            self.kept[idx] = super().__getitem__(idx)
        return self.kept[idx]

    def has(self, idx: int) -> bool:
        return idx in self.kept


class GrowingList(Growing):
    """Likewise, in a list that has room for all."""

    def nothing_yet(self) -> Any:
        return [None] * NUM

    def has(self, idx: int) -> bool:
        return self.kept[idx] is not None


class GrowingLongList(GrowingList):
    """Likewise, in one too long to look at every item."""

    def nothing_yet(self) -> Any:
        return [None] * 20_000


class GrowingObjects(GrowingList):
    """Likewise, in an array of objects."""

    def nothing_yet(self) -> Any:
        return np.empty(NUM, dtype=object)


class GrowingTensor(Growing):
    """Likewise, in a tensor that is too large to be copied."""

    def nothing_yet(self) -> Any:
        return torch.full((5_000, *self.inputs.shape[1:]), torch.nan)

    def __getitem__(self, idx: int) -> tuple[Tensor, Tensor]:
        if not self.has(idx):
            self.kept[idx] = Samples.__getitem__(self, idx)[0]
        return self.kept[idx].clone(), self.targets[idx]

    def has(self, idx: int) -> bool:
        return not self.kept[idx].isnan().any()


class GrowingLater(Growing):
    """Likewise, in a mapping that the first sample makes."""

    def nothing_yet(self) -> Any:
        return None

    def has(self, idx: int) -> bool:
        if self.kept is None:
            self.kept = {}
        return idx in self.kept


class GrowingOfClass(Growing):
    """Likewise, in a mapping of the class."""

    kept: Any = {}  # noqa: RUF012  # that is the case

    def __init__(self) -> None:
        Samples.__init__(self, NUM, 1, augment=True)


class CountsByClass(Samples):
    """Counts what it has loaded, from a number of the class."""

    num_loaded = 0

    def __init__(self) -> None:
        super().__init__(NUM, 1, augment=False)

    def __getitem__(self, idx: int) -> tuple[Tensor, Tensor]:
        self.num_loaded += 1
        inputs, targets = super().__getitem__(idx)
        return inputs * (1 + 0.01 * self.num_loaded), targets


class MixesPrevious(Samples):
    """Mixes a sample with the one before, of which there is none at first."""

    def __init__(self) -> None:
        super().__init__(NUM, 1, augment=False)
        self.previous: Any = None

    def __getitem__(self, idx: int) -> tuple[Tensor, Tensor]:
        inputs, targets = super().__getitem__(idx)
        mixed = inputs if self.previous is None else 0.9 * inputs + 0.1 * self.previous
        self.previous = inputs
        return mixed, targets


class GrowingCollation:
    """A collate function that adds what it has seen before."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def __call__(self, samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        inputs, targets = default_collate(samples)
        self.seen.append(inputs.mean(0))
        return inputs + 0.1 * torch.stack(self.seen).mean(0), targets


def growing_transform() -> Callable[[Tensor], Tensor]:
    """Return a function that keeps what it has seen in its closure."""
    seen: list[Tensor] = []

    def transform(inputs: Tensor) -> Tensor:
        seen.append(inputs)
        return inputs + 0.1 * torch.stack(seen).mean(0)

    return transform


class Transformed(Samples):
    """Changes samples by a function."""

    def __init__(self) -> None:
        super().__init__(NUM, 1, augment=False)
        self.transform = growing_transform()

    def __getitem__(self, idx: int) -> tuple[Tensor, Tensor]:
        inputs, targets = super().__getitem__(idx)
        return self.transform(inputs), targets


class OrderOfOrders(Order):
    """Its order depends on the orders before, which cannot be saved."""

    def __init__(self) -> None:
        super().__init__()
        self.orders: dict[int, tuple[Tensor, str]] = {}

    def permutation(self) -> list[int]:
        seed = sum(int(order[0]) for order, _ in self.orders.values()) + len(self.orders)
        order = random.Random(seed).sample(range(NUM), NUM)
        self.orders[len(self.orders)] = torch.tensor(order), "order"
        return order


for _name, _kind in {
    "cache": Growing,
    "list": GrowingList,
    "long_list": GrowingLongList,
    "objects": GrowingObjects,
    "tensor": GrowingTensor,
    "later": GrowingLater,
    "of_class": GrowingOfClass,
    "count_of_class": CountsByClass,
    "previous": MixesPrevious,
    "closure": Transformed,
}.items():
    add(f"grows_{_name}", ALL_WAYS if _kind is Growing else ["0", "2"], expected=WARNED)(
        lambda _kind=_kind, **workers: DataLoader(_kind(), BATCH_SIZE, shuffle=True, **workers)
    )
add("grows_collation", ["0", "2"], expected=WARNED)(
    lambda **workers: DataLoader(points(), BATCH_SIZE, collate_fn=GrowingCollation(), **workers)
)
add("grows_sampler", ["0", "2"], limited=["0"], expected=WARNED)(
    lambda **workers: loader_of(OrderOfOrders(), workers)
)


@add("grows_batch_sampler", ["0"], expected=WARNED)
def _grows_batch_sampler(**workers: Any) -> Any:
    batches = BatchSampler(OrderOfOrders(), BATCH_SIZE, drop_last=False)
    return DataLoader(points(), batch_sampler=batches, **workers)


# ---- streams


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    """Yields samples; each worker all of them, or its part."""

    is_sharded = False

    def __init__(self) -> None:
        plain = points()
        self.inputs, self.targets = plain.inputs, plain.targets

    def indices(self) -> Sequence[int]:
        return range(NUM)

    def changed(self, inputs: Tensor) -> Tensor:
        return inputs

    def part(self) -> Sequence[int]:
        info = get_worker_info()
        if info is None or not self.is_sharded:
            return self.indices()
        return self.indices()[info.id :: info.num_workers]

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for idx in self.part():
            yield self.changed(self.inputs[idx]), self.targets[idx]


class AugmentedStream(Stream):
    """Changes each sample at random."""

    def changed(self, inputs: Tensor) -> Tensor:
        return augmented(inputs)


class ShardedStream(AugmentedStream):
    """Is divided by its workers."""

    is_sharded = True


class EpochStream(ShardedStream):
    """Its order follows from the epoch that it is given."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def indices(self) -> Sequence[int]:
        return random.Random(self.epoch).sample(range(NUM), NUM)


class ShuffledStream(ShardedStream):
    """Shuffles in a buffer."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        buffer: list[tuple[Tensor, Tensor]] = []
        for sample in super().__iter__():
            buffer.append(sample)
            if len(buffer) == 8:
                yield buffer.pop(random.randrange(8))
        random.shuffle(buffer)
        yield from buffer


class GeneratorStream(ShardedStream):
    """Draws from a generator of its own, which continues from epoch to epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = np.random.default_rng(41)

    def changed(self, inputs: Tensor) -> Tensor:
        return inputs + float(self.generator.standard_normal())


class CountingStream(ShardedStream):
    """Counts its epochs, and changes samples by that."""

    def __init__(self) -> None:
        super().__init__()
        self.num_epochs = 0

    def part(self) -> Sequence[int]:
        self.num_epochs += 1
        return super().part()

    def changed(self, inputs: Tensor) -> Tensor:
        return inputs * (1 + 0.1 * self.num_epochs)


class GrowingStream(ShardedStream):
    """Keeps its samples as they were changed when they were first read."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for idx in self.part():
            if idx not in self.kept:
                self.kept[idx] = self.changed(self.inputs[idx]), self.targets[idx]
            yield self.kept[idx]


class MixingStream(ShardedStream):
    """Mixes a sample with the one before, also with that of the epoch before."""

    def __init__(self) -> None:
        super().__init__()
        self.previous: Any = None

    def changed(self, inputs: Tensor) -> Tensor:
        mixed = inputs if self.previous is None else 0.9 * inputs + 0.1 * self.previous
        self.previous = inputs
        return mixed


class CountsEpochsByClass(ShardedStream):
    """Counts its epochs, from a number of the class."""

    num_epochs = 0

    def part(self) -> Sequence[int]:
        self.num_epochs += 1
        return super().part()

    def changed(self, inputs: Tensor) -> Tensor:
        return inputs * (1 + 0.1 * self.num_epochs)


add("grows_stream", ALL_WAYS, warned=["0", "persistent"], limited=["0"])(
    lambda **workers: DataLoader(GrowingStream(), batch_size=BATCH_SIZE, **workers)
)
add("grows_mixing_stream", ALL_WAYS, warned=["persistent"], limited=["0"])(
    lambda **workers: DataLoader(MixingStream(), batch_size=BATCH_SIZE, **workers)
)
add("grows_counting_stream", ALL_WAYS, warned=["persistent"])(
    lambda **workers: DataLoader(CountsEpochsByClass(), batch_size=BATCH_SIZE, **workers)
)


class StatefulStream(ShardedStream):
    """Has a state: the position and a generator."""

    def __init__(self) -> None:
        super().__init__()
        self.position = 0
        self.generator = np.random.RandomState(42)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        found = self.part()
        while self.position < len(found):
            idx = found[self.position]
            self.position += 1
            noise = float(self.generator.standard_normal())
            yield self.inputs[idx] + noise, self.targets[idx]
        self.position = 0

    def state_dict(self) -> dict[str, Any]:
        state = self.generator.get_state(legacy=False)
        return {"position": self.position, "generator": state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]
        self.generator.set_state(state["generator"])


class BatchStream(Stream):
    """Yields batches."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for inputs, targets in batches_of(self.inputs, self.targets):
            yield augmented(inputs), targets


def stream(data: IterableDataset[Any], workers: dict[str, Any], **options: Any) -> Any:
    return DataLoader(data, **{"batch_size": BATCH_SIZE} | options | workers)


add("stream", ALL_WAYS)(lambda **workers: stream(Stream(), workers))
add("stream_augmented", ALL_WAYS, limited=["0", "2"])(
    lambda **workers: stream(AugmentedStream(), workers)
)
add("stream_sharded", ["2", "persistent"], limited=["persistent"])(
    lambda **workers: stream(ShardedStream(), workers)
)
add("stream_set_epoch", ALL_WAYS)(lambda **workers: stream(EpochStream(), workers))
add("stream_shuffle_buffer", ALL_WAYS)(lambda **workers: stream(ShuffledStream(), workers))
add("stream_drop_last", ["2"])(lambda **workers: stream(ShardedStream(), workers, drop_last=True))
add("stream_of_batches", ["0", "2"])(
    lambda **workers: stream(BatchStream(), workers, batch_size=None)
)
add("stream_generator", ALL_WAYS, warned=["persistent"], limited=["0"])(
    lambda **workers: stream(GeneratorStream(), workers)
)
add("stream_counts_epochs", ALL_WAYS, warned=["persistent"])(
    lambda **workers: stream(CountingStream(), workers)
)


class EvenStream(StatefulStream):
    """Has whole batches alone, also in each of two workers: its end is seen after the last one."""

    def indices(self) -> Sequence[int]:
        return range(16)


class Positions(Iterator[tuple[Tensor, Tensor]]):
    """An iterator with a state."""

    def __init__(self, data: Stream) -> None:
        self.data = data
        self.part = data.part()
        self.position = 0

    def __next__(self) -> tuple[Tensor, Tensor]:
        if self.position == len(self.part):
            raise StopIteration
        idx = self.part[self.position]
        self.position += 1
        return augmented(self.data.inputs[idx]), self.data.targets[idx]

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


class IteratorStream(ShardedStream):
    """Its iterators have a state."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return Positions(self)


class EvenIteratorStream(IteratorStream):
    """Likewise, with whole batches alone."""

    def indices(self) -> Sequence[int]:
        return range(16)


add("stream_even_state_dict", ALL_WAYS)(lambda **workers: stream(EvenStream(), workers))
add("stream_iterator_state_dict", ALL_WAYS, limited=["0", "2"])(
    lambda **workers: stream(IteratorStream(), workers)
)
add("stream_even_iterator_state_dict", ALL_WAYS)(
    lambda **workers: stream(EvenIteratorStream(), workers)
)
add("stream_state_dict", ALL_WAYS, limited=ALL_WAYS)(
    lambda **workers: stream(StatefulStream(), workers)
)


class OrderedAtRandom(Stream):
    """Its order is drawn from python's generator when it is begun."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        order = random.sample(range(NUM), NUM)
        for idx in order:
            yield augmented(self.inputs[idx]), self.targets[idx]


add("sharded_stream", ALL_WAYS, limited=["2"])(
    lambda **workers: stream(TrainerShardedStream(OrderedAtRandom()), workers)
)


# ---- torchdata


def stateful_loader(data: Any, workers: dict[str, Any], **options: Any) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(data, BATCH_SIZE, **options, **workers)


add("torchdata_augmented", ALL_WAYS, limited=["0", "2"])(
    lambda **workers: stateful_loader(points(), workers, shuffle=True)
)
add("torchdata_plain", ALL_WAYS, limited=["2"])(
    lambda **workers: stateful_loader(points(augment=False), workers, shuffle=True)
)
add("torchdata_data_state_dict", ALL_WAYS)(
    lambda **workers: stateful_loader(WithState(), workers, shuffle=True)
)
add("torchdata_stream", ALL_WAYS)(lambda **workers: stateful_loader(Stream(), workers))
add("torchdata_stream_augmented", ["0", "2"])(
    lambda **workers: stateful_loader(ShardedStream(), workers)
)
add("torchdata_stream_state_dict", ALL_WAYS, limited=["0", "2"])(
    lambda **workers: stateful_loader(StatefulStream(), workers)
)


# ---- Hugging Face datasets


def table() -> Any:
    from datasets import Dataset as Table

    plain = points()
    return Table.from_dict({"inputs": plain.inputs.tolist(), "targets": plain.targets.tolist()})


def hugging_face_stream() -> Any:
    return table().to_iterable_dataset(num_shards=2)


def augment_row(row: dict[str, Any]) -> dict[str, Any]:
    return row | {"inputs": [number + random.random() - 0.5 for number in row["inputs"]]}


def augment_rows(rows: dict[str, Any]) -> dict[str, Any]:
    inputs = augmented(torch.tensor(rows["inputs"]))
    return {"inputs": list(inputs), "targets": list(torch.tensor(rows["targets"]))}


@add("datasets_map", ["0", "2"])
def _datasets_map(**workers: Any) -> Any:
    return DataLoader(table().with_format("torch"), BATCH_SIZE, shuffle=True, **workers)


@add("datasets_map_transform", ["0", "2"])
def _datasets_map_transform(**workers: Any) -> Any:
    return DataLoader(table().with_transform(augment_rows), BATCH_SIZE, shuffle=True, **workers)


add("datasets_stream", ALL_WAYS, limited=["0"])(
    lambda **workers: stream(hugging_face_stream().with_format("torch"), workers)
)
add("datasets_stream_shuffled", ALL_WAYS, limited=["2"])(
    lambda **workers: stream(
        hugging_face_stream().shuffle(seed=51, buffer_size=8).with_format("torch"), workers
    )
)
add("datasets_stream_without_seed", ["0", "2"], expected=WARNED)(
    lambda **workers: stream(
        hugging_face_stream().shuffle(buffer_size=8).with_format("torch"), workers
    )
)
add("datasets_stream_augmented", ["0", "2"])(
    lambda **workers: stream(hugging_face_stream().map(augment_row).with_format("torch"), workers)
)


# ---- other iterables


def batches_of(inputs: Tensor, targets: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    return zip(inputs.split(BATCH_SIZE), targets.split(BATCH_SIZE), strict=True)


@add("list")
def _list() -> Any:
    plain = points()
    return list(batches_of(plain.inputs, plain.targets))


@add("generator_function")
def _generator_function() -> Any:
    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        plain = points()
        for inputs, targets in batches_of(plain.inputs, plain.targets):
            yield augmented(inputs), targets

    return batches


@add("function_that_makes_a_loader")
def _function_that_makes_a_loader() -> Any:
    return _augmented


class Iterates:
    """Has nothing but `__iter__`; draws from the generators of the process."""

    def __init__(self) -> None:
        plain = points()
        self.inputs, self.targets = plain.inputs, plain.targets

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        order = torch.randperm(NUM)
        for inputs, targets in batches_of(self.inputs[order], self.targets[order]):
            yield augmented(inputs), targets


class IteratesWithGenerator(Iterates):
    """Draws from a generator of its own, which continues from epoch to epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = np.random.default_rng(61)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        order = self.generator.permutation(NUM)
        for inputs, targets in batches_of(self.inputs[order], self.targets[order]):
            yield inputs + float(self.generator.standard_normal()), targets


class IteratesWithState(Iterates):
    """Has a state: the position, the order, and a generator."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = np.random.RandomState(62)
        self.order: list[int] = []

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        if not self.order:
            self.order = self.generator.permutation(NUM).tolist()
        while self.order:
            now, self.order = self.order[:BATCH_SIZE], self.order[BATCH_SIZE:]
            noise = float(self.generator.standard_normal())
            yield self.inputs[now] + noise, self.targets[now]

    def state_dict(self) -> dict[str, Any]:
        return {"order": list(self.order), "generator": self.generator.get_state(legacy=False)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.order = list(state["order"])
        self.generator.set_state(state["generator"])


add("iterable")(Iterates)
add("iterable_generator", [""], limited=[""])(IteratesWithGenerator)
add("iterable_state_dict", [""], limited=[""])(IteratesWithState)


@add("iterator-limited")
def _iterator() -> Any:
    plain = points()

    def endless() -> Iterator[tuple[Tensor, Tensor]]:
        generator = random.Random(63)
        while True:
            order = generator.sample(range(NUM), NUM)
            yield from batches_of(plain.inputs[order], plain.targets[order])

    return endless()


class UsersLoader(DataLoader[Any]):
    """A subclass that changes batches at random."""

    def __iter__(self) -> Any:
        for inputs, targets in super().__iter__():
            yield inputs + 0.1 * random.random(), targets


@add("subclass", ALL_WAYS, either=["persistent"], limited=["2"])
def _subclass(**workers: Any) -> Any:
    return UsersLoader(points(), BATCH_SIZE, shuffle=True, **workers)


@add("subclass_generator", ["0", "2"])
def _subclass_generator(**workers: Any) -> Any:
    generator = torch.Generator().manual_seed(64)
    return UsersLoader(points(), BATCH_SIZE, shuffle=True, generator=generator, **workers)


@add("subclass_stream", ["0", "2"])
def _subclass_stream(**workers: Any) -> Any:
    return UsersLoader(ShardedStream(), BATCH_SIZE, **workers)


class GrowingBatches(Iterates):
    """Keeps its batches as they were changed when they were first read."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for idx, (inputs, targets) in enumerate(batches_of(self.inputs, self.targets)):
            if idx not in self.kept:
                self.kept[idx] = augmented(inputs), targets
            yield self.kept[idx]


add("grows_iterable", [""], limited=[""], expected=WARNED)(GrowingBatches)


@add("grows_subclass", ["0"], expected=WARNED)
def _grows_subclass(**workers: Any) -> Any:
    return UsersLoader(Growing(), BATCH_SIZE, shuffle=True, **workers)
