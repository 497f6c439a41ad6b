"""Orders are those of torch's loader, from any position on, and nothing is loaded for them."""

from __future__ import annotations

import random
from itertools import chain

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from modelzoo_trainer.loading.batch_seeds import seed_generators
from modelzoo_trainer.loading.sample_order import draws, is_sliced
from modelzoo_trainer.loading.seeded_sampler import SeededSampler

NUM = 23


class Untouched(Dataset[int]):
    """Samples that must not be loaded."""

    def __init__(self, num: int = NUM) -> None:
        self.num = num

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, idx: int) -> int:
        raise AssertionError("loaded")


class Identity(Untouched):
    def __getitem__(self, idx: int) -> int:
        return idx


class Drawing(Sampler[int]):
    """Draws from all three generators, anew for each index."""

    def __iter__(self):
        for _ in range(NUM):
            total = random.randrange(7) + np.random.randint(7) + int(torch.randint(7, ()))
            yield total % NUM

    def __len__(self) -> int:
        return NUM


class OddBatches(Sampler[list[int]]):
    """Batches of one, two, three, one, ... indices in random order."""

    def __iter__(self):
        order = torch.randperm(NUM).tolist()
        size = 1
        while order:
            yield [order.pop() for _ in range(min(size, len(order)))]
            size = size % 3 + 1

    def __len__(self) -> int:
        return 12


def own_generator() -> torch.Generator:
    return torch.Generator().manual_seed(11)


DATA = Identity()
LOADERS = {
    "in order": {},
    "in order, whole batches": {"drop_last": True},
    "shuffled": {"shuffle": True},
    "shuffled, whole batches": {"shuffle": True, "drop_last": True},
    "with replacement": {"sampler": RandomSampler(DATA, replacement=True, num_samples=70)},
    "more than all": {"sampler": RandomSampler(DATA, num_samples=60)},
    "fewer than all": {"sampler": RandomSampler(DATA, num_samples=9)},
    "some": {"sampler": SubsetRandomSampler([3, 1, 4, 15, 9, 2, 6, 5])},
    "weighted": {"sampler": WeightedRandomSampler([0.1] * 10 + [1.0] * 13, 40)},
    "weighted, once": {"sampler": WeightedRandomSampler([0.5] * NUM, 20, replacement=False)},
    "seeded": {"sampler": SeededSampler(NUM, seed=3)},
    "distributed": {"sampler": DistributedSampler(DATA, num_replicas=2, rank=1)},
    "batches given": {"batch_sampler": BatchSampler(RandomSampler(DATA), 5, drop_last=False)},
    "list of indices": {"sampler": [5, 4, 3, 2, 1]},
    "custom": {"sampler": Drawing()},
    "custom batches": {"batch_sampler": OddBatches()},
}


def loader_of(name: str, *, dataset: Dataset[int] | None = None, **options) -> DataLoader[int]:
    options = LOADERS[name] | {"collate_fn": list} | options
    if "batch_sampler" not in options and "batch_size" not in options:
        options["batch_size"] = 4
    return DataLoader(dataset or DATA, **options)


def order(loader: DataLoader[int], start: int = 0, seed: int = 5, epoch: int = 0) -> list:
    return [draw.items for draw in draws(loader, seed=seed, epoch=epoch, start=start)]


@pytest.mark.parametrize("name", [name for name in LOADERS if name != "custom"])
def test_the_order_is_that_of_the_loader_itself(name) -> None:
    loader = loader_of(name)
    seed_generators(5)
    expected = list(loader)
    if name == "seeded":
        loader.sampler.set_epoch(0)
    assert order(loader) == expected


@pytest.mark.parametrize("name", ["in order", "shuffled", "with replacement", "seeded"])
def test_the_order_of_samples_without_batches_is_that_of_the_loader(name) -> None:
    loader = loader_of(name, batch_size=None, collate_fn=None)
    whole = order(loader)
    assert all(type(item) is int for item in whole)
    assert whole == list(chain.from_iterable(order(loader_of(name))))
    assert order(loader, 7) == whole[7:]


@pytest.mark.parametrize("start", [1, 3, 50])
@pytest.mark.parametrize("name", LOADERS)
def test_an_order_begins_at_any_position(name, start) -> None:
    loader = loader_of(name, dataset=Untouched())
    whole = order(loader)
    torch.rand(3), random.random(), np.random.rand()
    found = list(draws(loader, seed=5, epoch=0, start=start))
    assert [draw.items for draw in found] == whole[start:]
    assert [draw.number for draw in found] == list(range(start, len(whole)))


@pytest.mark.parametrize("name", ["shuffled", "with replacement", "custom", "custom batches"])
def test_an_order_depends_on_the_seed(name) -> None:
    loader = loader_of(name)
    assert order(loader, seed=6) != order(loader)


def test_what_others_draw_in_between_does_not_change_a_custom_order() -> None:
    loader = loader_of("custom")
    whole, found = order(loader), []
    for draw in draws(loader, seed=5, epoch=0, start=0):
        torch.rand(2), random.random(), np.random.rand()
        found.append(draw.items)
    assert found == whole


@pytest.mark.parametrize("make", [RandomSampler, SubsetRandomSampler, WeightedRandomSampler])
def test_a_generator_of_its_own_decides_the_order_with_the_pass(make) -> None:
    def loader() -> DataLoader[int]:
        arguments = {
            RandomSampler: (DATA,),
            SubsetRandomSampler: (range(NUM),),
            WeightedRandomSampler: ([1.0] * NUM, NUM),
        }[make]
        return DataLoader(DATA, batch_size=4, sampler=make(*arguments, generator=own_generator()))

    assert order(loader(), seed=1) == order(loader(), seed=2)
    assert order(loader(), epoch=1) != order(loader(), epoch=0)
    used = loader()
    used.sampler.generator.seed()  # its numbers so far do not count, its seed does
    used.sampler.generator.manual_seed(11)
    torch.rand(5, generator=used.sampler.generator)
    assert order(used, epoch=1) == order(loader(), epoch=1)


def test_a_generator_of_its_own_is_left_as_it_is() -> None:
    generator = own_generator()
    before = generator.get_state()
    order(DataLoader(DATA, batch_size=4, shuffle=True, generator=generator))
    assert torch.equal(generator.get_state(), before)


@pytest.mark.parametrize("name", [n for n in LOADERS if "custom" not in n and "list" not in n])
def test_the_samplers_of_torch_leave_the_generators_as_they_are(name) -> None:
    seed_generators(1)
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    order(loader_of(name), 2)
    after = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    assert after == before


@pytest.mark.parametrize("name", ["shuffled", "with replacement", "more than all", "custom"])
def test_draws_know_how_many_samples_of_the_epoch_come_before_them(name) -> None:
    found = list(draws(loader_of(name), seed=5, epoch=0, start=2))
    assert found[0].position == 8


def test_positions_of_odd_batches_count_samples() -> None:
    found = list(draws(loader_of("custom batches"), seed=5, epoch=0, start=2))
    assert found[0].position == 3


@pytest.mark.parametrize("name", LOADERS)
def test_samplers_of_torch_are_sliced(name) -> None:
    assert is_sliced(loader_of(name)) == (
        name not in ("custom", "custom batches", "list of indices")
    )


def test_a_subclass_of_a_known_sampler_is_iterated() -> None:
    class Backwards(SequentialSampler):
        def __iter__(self):
            return reversed(range(len(self.data_source)))

    loader = DataLoader(DATA, batch_size=10, sampler=Backwards(DATA))
    assert order(loader, 2) == [[2, 1, 0]]


def test_an_endless_sampler_is_not_read_to_its_end() -> None:
    class Endless(Sampler[int]):
        def __iter__(self):
            while True:
                yield int(torch.randint(NUM, ()))

    loader = DataLoader(DATA, batch_size=2, sampler=Endless())
    found = draws(loader, seed=5, epoch=0, start=1000)
    assert next(found).number == 1000
