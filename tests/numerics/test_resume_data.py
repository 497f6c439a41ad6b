"""Whatever the data comes from, a resumed run takes, bit by bit, what the unbroken one takes."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
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
)
from torch.utils.data.distributed import DistributedSampler

from modelzoo_trainer import Callback, Checkpoint, TrainingLoop
from modelzoo_trainer.base.devices import make_backend
from modelzoo_trainer.callbacks import GlobalFlags
from modelzoo_trainer.loading.seeded_sampler import SeededSampler
from tests.doubles import Crash, Interrupted, TinyModel, differing, tiny_batches, weights_of

pytestmark = pytest.mark.slow

NUM = 26  # 7 batches of 4, the last one of 2
INPUTS, TARGETS = (torch.cat(parts)[:NUM] for parts in zip(*tiny_batches(7), strict=True))
Make = Callable[[], Any]


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


class Jitter(Callback):
    """Writes down each batch, and changes weights by what the generators of this process give."""

    def __init__(self, *, draws: bool = True) -> None:
        self.draws = draws
        self.seen: list[tuple[int, int, list[float], float]] = []

    def on_train_batch_start(self, trainer, model, batch, batch_idx):
        drawn = random.random() + float(np.random.rand()) + float(torch.rand(()))
        drawn *= self.draws
        place = trainer.data.epoch, batch_idx
        self.seen.append((*place, batch[0].flatten().tolist(), drawn))
        with torch.no_grad():
            next(model.parameters()).mul_(1 + 0.01 * drawn)


class Runs:
    """Runs of three passes with dropout, and a validation every five steps."""

    def __init__(self, trainer_of, tmp_path) -> None:
        self.trainer_of = trainer_of
        self.tmp_path = tmp_path

    def trainer(self, name: str, *callbacks: Any, **settings: Any) -> Any:
        arguments = {
            "model": lambda: TinyModel(dropout=0.5),
            "checkpoint": Checkpoint(steps=1),
            "num_epochs": 3,
            "eval_frequency": 5,
            "model_dir": self.tmp_path / name,
        }
        return self.trainer_of(*callbacks, **(arguments | settings))

    def check(
        self,
        make: Make,
        step: int,
        resumed: Make | None = None,
        *,
        draws: bool = True,
        **settings: Any,
    ) -> Any:
        """Compare a run that crashed after a step and went on with one that never did.

        `draws` is false if batches are loaded in this process on one side and in workers on the
        other one, where what else is drawn here need not be the same.
        """
        seen = whole, broken, rest = [Jitter(draws=draws) for _ in range(3)]
        val = tiny_batches(2)
        unbroken = self.trainer("unbroken", whole, **settings)
        unbroken.fit(make(), val)
        random.random(), np.random.rand(), torch.rand(3)
        with pytest.raises(Interrupted):
            self.trainer("broken", broken, Crash(step), **settings).fit(make(), val)
        random.random(), np.random.rand(), torch.rand(3)
        again = self.trainer("broken", rest, **settings)
        again.fit((resumed or make)(), val)
        num = len(broken.seen)
        assert broken.seen == whole.seen[:num]
        assert rest.seen == whole.seen[num:]
        assert again.global_step == unbroken.global_step > step
        assert differing(weights_of(again), weights_of(unbroken)) == []
        return seen


@pytest.fixture
def runs(trainer_of, tmp_path) -> Runs:
    return Runs(trainer_of, tmp_path)


# ---- augmentation


def by_python() -> float:
    return random.gauss(0, 1)


def by_numpy() -> float:
    return float(np.random.standard_normal())


def by_torch() -> float:
    return float(torch.randn(()))


class Augmented(Dataset):
    """Samples that are changed by random numbers."""

    def __init__(self, draw: Callable[[], float] = by_python) -> None:
        self.draw = draw

    def __len__(self) -> int:
        return NUM

    def __getitem__(self, idx: int) -> tuple[Tensor, Tensor]:
        return INPUTS[idx] + 0.1 * self.draw(), TARGETS[idx]


class AugmentedBatches(Augmented):
    """The same, a batch at a time."""

    def __getitems__(self, indices: list[int]) -> list[tuple[Tensor, Tensor]]:
        return [self[idx] for idx in indices]


# CI: each generator without and with workers, each change of their number with one; in the middle
# of an epoch, at other steps once.
@pytest.mark.soak_cases(
    "*-3", "*-12", "by_numpy-[12]-*", "by_torch-[12]-*", "!by_python-0-2-3", "!by_torch-0-0-12"
)
@pytest.mark.slow_cases("by_numpy-*", "by_torch-*")
@pytest.mark.parametrize("step", [7, slow(3), slow(12)])
@pytest.mark.parametrize(("workers", "later"), [(0, 0), (0, 2), (2, 0), slow(2, 2), slow(1, 2)])
@pytest.mark.parametrize("draw", [by_python, by_numpy, by_torch])
def test_augmentation_goes_on_with_any_number_of_workers(runs, draw, workers, later, step) -> None:
    def make(num_workers: int) -> DataLoader[Any]:
        data = Augmented(draw)
        return DataLoader(data, batch_size=4, shuffle=True, num_workers=num_workers)

    is_alike = (workers == 0) == (later == 0)
    runs.check(lambda: make(workers), step, lambda: make(later), draws=is_alike)


# CI: at and before the end of an epoch, with and without; once with a worker.
@pytest.mark.soak_cases("*", "!0-7-*", "!0-6-True", "!1-13-True")
@pytest.mark.slow_cases("0-13-*", "0-2-*", "0-6-*", "0-7-True")
@pytest.mark.parametrize("look_ahead", [True, False])
@pytest.mark.parametrize("step", [2, 6, 7, 13])
@pytest.mark.parametrize("workers", [0, slow(1)])
def test_fetching_ahead_changes_nothing(runs, look_ahead, step, workers) -> None:
    def make() -> DataLoader[Any]:
        return DataLoader(Augmented(), batch_size=4, shuffle=True, num_workers=workers)

    backend = make_backend("fake", {"look_ahead": look_ahead})
    runs.check(make, step, backend=backend, device=None)
    seen = []
    for place, settings in (("with", {"backend": backend, "device": None}), ("without", {})):
        runs.tmp_path = runs.tmp_path / place
        seen.append(runs.check(make, step, draws=False, **settings)[0].seen)
    assert seen[0] == seen[1]


def test_a_data_set_of_whole_batches_goes_on(runs) -> None:
    runs.check(
        lambda: DataLoader(AugmentedBatches(), batch_size=4, shuffle=True),
        9,
        lambda: DataLoader(AugmentedBatches(), batch_size=4, shuffle=True, num_workers=2),
        draws=False,
    )


@pytest.mark.parametrize("workers", [0, 2])
def test_a_collation_that_draws_goes_on(runs, workers) -> None:
    def collate(samples):
        inputs, targets = zip(*samples, strict=True)
        return torch.stack(inputs) * (0.9 + 0.2 * random.random()), torch.stack(targets)

    data = TensorDataset(INPUTS, TARGETS)
    runs.check(
        lambda: DataLoader(data, 4, shuffle=True, collate_fn=collate),
        9,
        lambda: DataLoader(data, 4, shuffle=True, collate_fn=collate, num_workers=workers),
        draws=not workers,
    )


# ---- samplers and options


class Lengths(Sampler[list[int]]):
    """Batches of a user's own, in an order that numpy draws."""

    def __iter__(self) -> Iterator[list[int]]:
        order = np.random.permutation(NUM).tolist()
        for start in range(0, NUM, 5):
            random.shuffle(order)
            yield order[start : start + 5]

    def __len__(self) -> int:
        return 6


DATA = Augmented()
KINDS: dict[str, dict[str, Any]] = {
    "in order": {},
    "shuffled": {"shuffle": True},
    "whole batches": {"shuffle": True, "drop_last": True},
    "with replacement": {"sampler": RandomSampler(DATA, replacement=True, num_samples=31)},
    "some": {"sampler": SubsetRandomSampler(range(3, 24))},
    "weighted": {"sampler": WeightedRandomSampler([1.0] * 5 + [0.2] * 21, 26)},
    "seeded": {"sampler": SeededSampler(NUM, seed=5)},
    "distributed": {"sampler": DistributedSampler(DATA, num_replicas=2, rank=0)},
    "own": {"batch_sampler": Lengths()},
    "batches": {"batch_sampler": BatchSampler(RandomSampler(DATA), 4, drop_last=True)},
}


# CI: each sampler at one step; workers with two of them.
@pytest.mark.soak_cases("*-2-*", "*-0-2", "*-0-9", "!own-2-9", "!shuffled-2-6", "!weighted-0-2")
@pytest.mark.slow_cases("*-0-6", "w*-0-9", "some-0-9", "seeded-0-9")
@pytest.mark.parametrize("step", [slow(2), 6, 9])
@pytest.mark.parametrize("workers", [0, slow(2)])
@pytest.mark.parametrize("kind", KINDS)
def test_every_sampler_goes_on(runs, kind, workers, step) -> None:
    options = KINDS[kind] | ({} if "batch_sampler" in KINDS[kind] else {"batch_size": 4})
    runs.check(
        lambda: DataLoader(DATA, **options),
        step,
        lambda: DataLoader(DATA, **options, num_workers=workers),
        draws=not workers,
    )


@pytest.mark.parametrize("step", [3, 9])
def test_a_shuffle_with_a_generator_of_its_own_goes_on(runs, step) -> None:
    def make() -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(3)
        return DataLoader(DATA, batch_size=4, shuffle=True, generator=generator)

    runs.check(make, step)


# CI: in the second epoch.
@pytest.mark.soak_cases("3", "7")
@pytest.mark.slow
@pytest.mark.parametrize("step", [slow(3), slow(7), 9])
def test_persistent_workers_go_on(runs, step) -> None:
    class Told(Augmented):
        epoch = 0

        def set_epoch(self, epoch):
            self.epoch = epoch

        def __getitem__(self, idx):
            inputs, targets = super().__getitem__(idx)
            return inputs + self.epoch, targets

    def make() -> DataLoader[Any]:
        return DataLoader(Told(), 4, shuffle=True, num_workers=2, persistent_workers=True)

    runs.check(make, step, make)
    runs.tmp_path = runs.tmp_path / "without"
    runs.check(make, step, lambda: DataLoader(Told(), 4, shuffle=True), draws=False)


def test_batches_that_the_data_set_makes_go_on(runs) -> None:
    class Whole(Augmented):
        def __len__(self):
            return 7

        def __getitem__(self, idx):
            part = slice(4 * idx, 4 * idx + 4)
            return INPUTS[part] + self.draw(), TARGETS[part]

    runs.check(
        lambda: DataLoader(Whole(), batch_size=None, shuffle=True),
        9,
        lambda: DataLoader(Whole(), batch_size=None, shuffle=True, num_workers=1),
        draws=False,
    )


@pytest.mark.parametrize("step", [3, 5, 8])
def test_passes_that_are_cut_short_go_on(runs, step) -> None:
    runs.check(lambda: DataLoader(DATA, 4, shuffle=True), step, steps_per_epoch=4)


def test_steps_of_several_batches_go_on(runs) -> None:
    runs.check(lambda: DataLoader(DATA, 4, shuffle=True), 5, grad_accum_steps=2)


@pytest.mark.parametrize("kind", [list, tuple])
def test_a_sequence_of_batches_goes_on(runs, kind) -> None:
    runs.check(lambda: kind(tiny_batches(7)), 9)


# ---- loaders with a state of their own


class Stateful:
    """A loader in order, whose samples are changed by a generator of its own."""

    def __init__(self) -> None:
        self.position = 0
        self.generator = random.Random(1)

    def __iter__(self):
        while self.position < 7:
            part = slice(4 * self.position, 4 * self.position + 4)
            self.position += 1
            yield INPUTS[part] + self.generator.random() + random.random(), TARGETS[part]
        self.position = 0

    def state_dict(self):
        version, numbers, gauss = self.generator.getstate()
        return {"position": self.position, "generator": [version, list(numbers), gauss]}

    def load_state_dict(self, state):
        self.position = state["position"]
        version, numbers, gauss = state["generator"]
        self.generator.setstate((version, tuple(numbers), gauss))


class Sized(Stateful):
    def __len__(self):
        return 7


class Live(Stateful):
    """One whose state is what it works with, not a copy."""

    def __init__(self) -> None:
        self.state = {"position": 0}

    def __iter__(self):
        while self.state["position"] < 7:
            part = slice(4 * self.state["position"], 4 * self.state["position"] + 4)
            self.state["position"] += 1
            yield INPUTS[part], TARGETS[part]
        self.state["position"] = 0

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


class StatefulStream(IterableDataset):
    """The same as a data set: one sample at a time."""

    def __init__(self) -> None:
        self.position = 0
        self.generator = torch.Generator().manual_seed(1)

    def __iter__(self):
        while self.position < NUM:
            idx = self.position
            self.position += 1
            yield INPUTS[idx] + torch.rand((), generator=self.generator), TARGETS[idx]
        self.position = 0

    def state_dict(self):
        return {"position": self.position, "generator": self.generator.get_state()}

    def load_state_dict(self, state):
        self.position = state["position"]
        self.generator.set_state(state["generator"])


def stateful_stream() -> DataLoader[Any]:
    return DataLoader(StatefulStream(), batch_size=4)


# CI: each kind before and at the end of an epoch; one on the other device, one later.
@pytest.mark.soak_cases(
    "*-fake", "*-3-cpu", "*-9-cpu", "*-14-cpu", "!Live-9-fake", "!stateful_stream-14-cpu"
)
@pytest.mark.slow_cases("*-14-cpu", "*-3-cpu", "*-6-cpu")
@pytest.mark.parametrize("backend", ["cpu", slow("fake")])
@pytest.mark.parametrize("step", [3, 6, 7, slow(9), 14])
@pytest.mark.parametrize("make", [Stateful, Sized, Live, stateful_stream])
def test_a_loader_with_a_state_gets_that_of_the_batch_consumed(runs, make, step, backend) -> None:
    runs.check(make, step, device=backend)


@pytest.mark.parametrize("step", [2, 3, 5, 6])
@pytest.mark.parametrize("make", [Stateful, stateful_stream])
def test_a_loader_with_a_state_goes_on_in_passes_that_are_cut_short(runs, make, step) -> None:
    runs.check(make, step, steps_per_epoch=3)


def torchdata_loader(**options: Any) -> Any:
    module = pytest.importorskip("torchdata.stateful_dataloader", reason="needs torchdata")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it calls what torch has deprecated
        return module.StatefulDataLoader(batch_size=4, **options)


@pytest.mark.parametrize("step", [3, 7, 9])
@pytest.mark.parametrize("workers", [0, slow(2)])
def test_a_stateful_dataloader_of_torchdata_goes_on(runs, workers, step) -> None:
    data = TensorDataset(INPUTS, TARGETS)
    runs.check(lambda: torchdata_loader(dataset=data, shuffle=True, num_workers=workers), step)


@pytest.mark.parametrize("step", [3, 6, 8])
def test_a_stateful_dataloader_goes_on_in_passes_that_are_cut_short(runs, step) -> None:
    runs.check(lambda: torchdata_loader(dataset=DATA, shuffle=True), step, steps_per_epoch=3)


def test_a_stateful_dataloader_over_a_stream_with_a_state_goes_on(runs) -> None:
    runs.check(lambda: torchdata_loader(dataset=StatefulStream()), 9)


# ---- anything else


class Plain:
    """A loader without a state that draws from the generators of this process."""

    def __iter__(self):
        for batch in tiny_batches(7):
            drawn = random.random() + float(np.random.rand()) + float(torch.rand(()))
            yield batch[0] + drawn, batch[1]


def function():
    yield from Plain()


class Mine(DataLoader):
    """A loader of a user's own class."""


class Stream(IterableDataset):
    def __iter__(self):
        for idx in range(NUM):
            yield INPUTS[idx] + random.random(), TARGETS[idx]


# CI: each kind once; one on the other device.
@pytest.mark.soak_cases("*-fake-*", "*-cpu-3", "!object-fake-3")
@pytest.mark.slow_cases("*-fake-9", "stream, *", "subclass, workers-cpu-9")
@pytest.mark.parametrize("step", [9, slow(3)])
@pytest.mark.parametrize("backend", ["cpu", "fake"])
@pytest.mark.parametrize(
    "make",
    [
        Plain,
        lambda: function,
        lambda: Mine(Augmented(), 4, shuffle=True),
        lambda: DataLoader(Stream(), 4),
        lambda: Mine(Augmented(), 4, shuffle=True, num_workers=2),
        lambda: DataLoader(Stream(), 4, num_workers=1),
    ],
    ids=["object", "function", "subclass", "stream", "subclass, workers", "stream, worker"],
)
def test_a_loader_without_a_state_goes_on_too(runs, make, backend, step) -> None:
    runs.check(make, step, device=backend)


def test_an_iterator_that_all_passes_share_goes_on(runs) -> None:
    def make():
        return iter(tiny_batches(40))

    runs.check(make, 8, steps_per_epoch=5)


# ---- parts of batches


class SaveWithin(Callback):
    """Writes a checkpoint after some forward passes, wherever in a step, and ends the run."""

    def __init__(self, num: int) -> None:
        self.num = num

    def on_train_batch_end(self, trainer, model, outputs, batch, batch_idx):
        if trainer.data.num_batches == self.num:
            trainer.save_checkpoint()
            raise Interrupted


# CI: each kind at the first parts; later ones, and another epoch, with one of them.
@pytest.mark.soak_cases("*-[34]", "*-1[456]", "*-33", "!Stateful-14", "!Plain-16", "!Stateful-33")
@pytest.mark.slow_cases("*-2", "*-4", "*-14", "*-33")
@pytest.mark.parametrize("num", [1, 2, 3, 4, 14, 15, 16, 33])
@pytest.mark.parametrize("make", [Stateful, lambda: DataLoader(DATA, 4, shuffle=True), Plain])
def test_a_checkpoint_between_parts_of_a_batch_is_resumed_from(runs, make, num) -> None:
    def trainer(name, *callbacks):
        flags = GlobalFlags(**{"csx.performance.micro_batch_size": 2})
        accumulating = TrainingLoop(num_epochs=3, grad_accum_steps=2)
        return runs.trainer(
            name,
            flags,
            *callbacks,
            checkpoint=Checkpoint(steps=100),
            loop=accumulating,
            loggers=[],
        )

    whole, rest = Jitter(), Jitter()
    unbroken = trainer("unbroken", whole)
    unbroken.fit(make())
    with pytest.raises(Interrupted):
        trainer("broken", Jitter(), SaveWithin(num)).fit(make())
    again = trainer("broken", rest)
    again.fit(make())
    assert rest.seen == whole.seen[num:]
    assert differing(weights_of(again), weights_of(unbroken)) == []
