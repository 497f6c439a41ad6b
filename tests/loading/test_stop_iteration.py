"""A StopIteration of user code is an error with its place: it ends no epoch, validation or run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from backends.prefetch import LookAhead, PlainLane, placed
from modelzoo_trainer import Callback
from tests.doubles import Scale

NUM = 16
SIZE = 4


class Points(Dataset):
    """Its source ends after six samples."""

    def __init__(self) -> None:
        self.source = iter(range(6))

    def __len__(self) -> int:
        return NUM

    def __getitem__(self, idx: int) -> torch.Tensor:
        return torch.full((1,), float(next(self.source)))


class Together(Points):
    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        return [self[idx] for idx in indices]


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return (torch.tensor(float(idx)) for idx in range(NUM))


class NoStream(Stream):
    """Raises before there is an iterator."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter([next(iter(()))])


def raising(samples: list[torch.Tensor]) -> torch.Tensor:
    if samples[0] >= 2 * SIZE:
        next(iter(()))
    return torch.stack(samples)


def raising_init(worker_id: int) -> None:
    next(iter(()))


class Wrapped(DataLoader):
    """A subclass, which creates torch's iterator at its first batch."""

    def __iter__(self) -> Iterator[Any]:
        yield from super().__iter__()


class Order:
    """A sampler that raises before there is an iterator."""

    def __len__(self) -> int:
        return NUM

    def __iter__(self) -> Iterator[int]:
        return iter([next(iter(()))])


class NoIterator:
    def __iter__(self) -> Iterator[Any]:
        return iter([next(iter(()))])


WITH_WORKERS: dict[str, Callable[..., Any]] = {
    "getitem": lambda **workers: DataLoader(Points(), SIZE, **workers),
    "getitems": lambda **workers: DataLoader(Together(), SIZE, **workers),
    "unbatched": lambda **workers: DataLoader(Points(), batch_size=None, **workers),
    "collate": lambda **workers: DataLoader(range(NUM), SIZE, collate_fn=raising_ints, **workers),
    "subclass": lambda **workers: Wrapped(Points(), SIZE, **workers),
    "subclass of a stream": lambda **workers: Wrapped(
        Stream(), SIZE, collate_fn=raising, **workers
    ),
    "collate of a stream": lambda **workers: DataLoader(
        Stream(), SIZE, collate_fn=raising, **workers
    ),
    "iter of a stream": lambda **workers: DataLoader(NoStream(), SIZE, **workers),
    "sampler": lambda **workers: DataLoader(range(NUM), SIZE, sampler=Order(), **workers),
}
WITHOUT_WORKERS: dict[str, Callable[..., Any]] = {
    "iter": NoIterator,
    "function": lambda: lambda: iter([next(iter(()))]),
}


def raising_ints(samples: list[int]) -> torch.Tensor:
    return raising([torch.tensor(float(sample)) for sample in samples])


def cases() -> Iterator[Any]:
    for name, make in WITH_WORKERS.items():
        yield pytest.param(make, {}, id=name)
        for num in (1, 2):
            marks = () if (name, num) == ("collate of a stream", 2) else pytest.mark.slow
            yield pytest.param(make, {"num_workers": num}, id=f"{name}-{num}", marks=marks)
    init = {"num_workers": 2, "worker_init_fn": raising_init}
    yield pytest.param(lambda **w: DataLoader(range(NUM), SIZE, **w), init, id="init")
    yield pytest.param(lambda **w: DataLoader(Stream(), SIZE, **w), init, id="init of a stream")
    for name, make in WITHOUT_WORKERS.items():
        yield pytest.param(make, {}, id=name)


@pytest.mark.parametrize(("make", "workers"), list(cases()))
@pytest.mark.slow_cases(every=4)
def test_one_of_a_loader_is_an_error_of_a_training(trainer_of, make, workers) -> None:
    with pytest.raises(RuntimeError, match="StopIteration"):
        trainer_of(model=Scale, num_epochs=2).fit(make(**workers))


@pytest.mark.parametrize(("make", "workers"), list(cases()))
@pytest.mark.slow_cases(every=4)
def test_one_of_a_loader_is_an_error_of_a_validation(trainer_of, make, workers) -> None:
    with pytest.raises(RuntimeError, match="StopIteration"):
        trainer_of(model=Scale, num_epochs=2).validate(make(**workers))


@pytest.mark.parametrize("workers", [0, 1])
def test_the_batch_and_its_samples_are_named(trainer_of, workers) -> None:
    trainer = trainer_of(model=Scale, num_epochs=1)
    with pytest.raises(RuntimeError, match="StopIteration") as caught:
        trainer.fit(DataLoader(Points(), SIZE, num_workers=workers))
    place = "raised while train_dataloader loaded batch 1 of epoch 1, samples 4, 5, 6, 7"
    assert place in caught.value.__notes__
    assert trainer.global_step == 1


def test_the_batch_of_a_validation_is_named(trainer_of) -> None:
    with pytest.raises(RuntimeError, match="StopIteration") as caught:
        trainer_of(model=Scale).validate(DataLoader(Points(), SIZE))
    assert "raised while a DataLoader loaded batch 1" in caught.value.__notes__


def hook(name: str) -> Callback:
    def raise_it(self: Callback, *_: Any) -> None:
        next(iter(()))

    raise_it.__code__ = raise_it.__code__.replace(co_name=name)
    return type("Raising", (Callback,), {name: raise_it})()


@pytest.mark.parametrize("name", ["on_train_batch_end", "on_validate_batch_end", "on_fit_start"])
def test_one_of_a_hook_is_an_error(trainer_of, name) -> None:
    data = [torch.ones(2)] * 3
    with pytest.raises(RuntimeError, match="StopIteration") as caught:
        trainer_of(hook(name), model=Scale, num_epochs=2).fit(data, data)
    assert any(note.startswith(f"raised in Raising.{name}") for note in caught.value.__notes__)


class Raising(Scale):
    def forward(self, batch: torch.Tensor) -> Any:
        return super().forward(batch) if batch[0] < 3 else next(iter(()))


def test_one_of_a_model_is_an_error(trainer_of) -> None:
    data = [torch.full((4,), float(idx)) for idx in range(5)]
    trainer = trainer_of(model=Raising, num_epochs=2)
    with pytest.raises(RuntimeError, match="StopIteration"):
        trainer.fit(data)
    with pytest.raises(RuntimeError, match="StopIteration"):
        trainer.validate(data)


class Check(Scale):
    def check_batch(self, batch: torch.Tensor) -> None:
        next(iter(()))


def test_one_of_a_check_of_the_first_batch_is_an_error(trainer_of) -> None:
    with pytest.raises(RuntimeError, match="StopIteration"):
        trainer_of(model=Check, num_epochs=2).fit([torch.ones(2)] * 3)


def test_one_of_a_schedule_is_an_error(trainer_of) -> None:
    def factor(step: int) -> float:
        return 1.0 if step < 2 else next(iter(()))

    trainer = trainer_of(
        model=Scale,
        num_epochs=2,
        schedulers=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, factor),
    )
    with pytest.raises(RuntimeError, match="StopIteration"):
        trainer.fit([torch.ones(2)] * 3)


def refuse_second(batch: int) -> int:
    return batch if batch != 1 else next(iter(()))


@pytest.mark.parametrize(
    "move",
    [
        lambda data: placed(data, refuse_second),
        lambda data: LookAhead(data, PlainLane(refuse_second)),
    ],
)
def test_one_of_moving_a_batch_is_an_error(move) -> None:
    batches = move([0, 1, 2])
    assert next(batches) == 0
    with pytest.raises(RuntimeError, match="StopIteration"):
        next(batches)
