"""How a run gets back to its place in the data, and what it says about that."""

from __future__ import annotations

import logging
import random
from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from modelzoo_trainer import Callback, Checkpoint
from modelzoo_trainer.loading.source import Checksums
from tests.doubles import Scale, constant_batches

NUM_LOADED: Counter[int] = Counter()  # no attribute of a data set, where it would be its state


class Counted(Dataset):
    """Counts the samples that are loaded."""

    def __init__(self, num: int = 20) -> None:
        self.num = num
        NUM_LOADED[id(self)] = 0

    @property
    def num_loaded(self) -> int:
        return NUM_LOADED[id(self)]

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, idx: int) -> torch.Tensor:
        NUM_LOADED[id(self)] += 1
        return torch.tensor(float(idx))


class Plain:
    def __iter__(self):
        return iter(constant_batches(*range(10)))


class Own(Plain):
    """One with a state of its own, which it can refuse."""

    refuses = False

    def __init__(self) -> None:
        self.position = 0
        self.num_states = 0

    def __iter__(self):
        while self.position < 10:
            self.position += 1
            yield torch.full((2,), float(self.position))
        self.position = 0

    def state_dict(self):
        self.num_states += 1
        return {"position": self.position}

    def load_state_dict(self, state):
        if self.refuses:
            raise KeyError("num_workers")
        self.position = state["position"]


class Values(Callback):
    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_batch_start(self, trainer, model, batch, batch_idx):
        self.values.append(batch.flatten()[0].item())


def train(trainer_of, loader: Any, *callbacks: Any, steps: int, **settings: Any) -> Any:
    """Return a trainer that has gone on to so many steps."""
    settings = {"checkpoint": Checkpoint(steps=1), "model": Scale} | settings
    trainer = trainer_of(*callbacks, max_steps=steps, **settings)
    trainer.fit(loader)
    return trainer


def warnings_of(caplog) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def test_no_sample_is_loaded_to_get_back_to_a_place(trainer_of) -> None:
    train(trainer_of, DataLoader(Counted(4000), batch_size=1, shuffle=True), steps=20)
    data = Counted(4000)
    train(trainer_of, DataLoader(data, batch_size=1, shuffle=True), steps=22)
    assert data.num_loaded == 2


def test_a_loader_that_is_read_from_its_beginning_is_warned_of_once(trainer_of, caplog) -> None:
    train(trainer_of, Plain(), steps=4)
    assert warnings_of(caplog) == []
    train(trainer_of, Plain(), steps=22)
    [warned] = warnings_of(caplog)
    facts = ("train_dataloader (Plain)", "4 batches", "DataLoader", "state_dict()")
    assert [fact for fact in facts if fact not in warned] == []


@pytest.mark.parametrize(
    "make", [Own, lambda: constant_batches(*range(10)), lambda: DataLoader(Counted(), 2)]
)
def test_others_are_not_warned_of(trainer_of, caplog, make) -> None:
    train(trainer_of, make(), steps=4)
    train(trainer_of, make(), steps=6)
    assert warnings_of(caplog) == []


def test_an_order_that_depends_on_time_is_warned_of(trainer_of, caplog) -> None:
    def make() -> DataLoader[Any]:
        return DataLoader(Counted(), 2, num_workers=2, in_order=False)

    train(trainer_of, make(), steps=4)
    train(trainer_of, make(), steps=5)
    first, second = warnings_of(caplog)
    assert "train_dataloader has in_order=False" in first
    assert "train_dataloader has in_order=False" in second
    assert "first 4 of the epoch are skipped" in second


@pytest.mark.parametrize(
    ("loader", "said"),
    [
        (
            DataLoader(Counted(30), 2),
            ["30 samples, 15 batches per epoch", "20 samples, 10 batches per epoch"],
        ),
        (
            DataLoader(Counted(20), 4),
            ["batches of 4, 5 batches per epoch", "batches of 2, 10 batches per epoch"],
        ),
        (
            constant_batches(*range(12)),
            ["12 batches per epoch", "10 batches per epoch"],
        ),
    ],
)
def test_a_change_of_the_data_is_warned_of_with_both_figures(
    trainer_of, caplog, loader, said
) -> None:
    train(trainer_of, DataLoader(Counted(20), 2), steps=3)
    train(trainer_of, loader, steps=4)
    [warned] = [text for text in warnings_of(caplog) if "data has changed" in text]
    assert [figure in warned for figure in said] == [True, True]


def test_data_that_ends_before_the_place_ends_the_epoch_with_a_warning(trainer_of, caplog) -> None:
    train(trainer_of, DataLoader(Counted(20), 2), steps=6)
    trainer = train(trainer_of, DataLoader(Counted(10), 2), steps=8)
    assert (trainer.global_step, trainer.data.epoch, trainer.data.batch_idx) == (8, 1, 2)
    [warned, _] = warnings_of(caplog)
    assert "after batch 6 of epoch 1, but train_dataloader has only 5 batches" in warned


@pytest.mark.parametrize(
    ("before", "now", "num", "again"), [(4, 7, 2, 6), (4, 2, 10, 0), (5, 3, 8, 1)]
)
@pytest.mark.slow_cases(every=4)
def test_another_batch_size_continues_after_the_samples_trained_on(
    trainer_of, caplog, before, now, num, again
) -> None:
    train(trainer_of, DataLoader(Counted(28), before), steps=5)
    trainer = train(trainer_of, DataLoader(Counted(28), now), steps=6)
    assert (trainer.data.epoch, trainer.data.batch_idx) == (0, num + 1)
    found = [text for text in warnings_of(caplog) if "trained on again" in text]
    assert len(found) == bool(again)
    assert all(f" {again} samples of epoch 1" in text for text in found)


def test_a_state_that_the_loader_refuses_is_explained(trainer_of) -> None:
    class Refusing(Own):
        refuses = True

    train(trainer_of, Own(), steps=3)
    with pytest.raises(KeyError) as caught:
        train(trainer_of, Refusing(), steps=4)
    assert "state of train_dataloader" in caught.value.__notes__[0]


def test_a_checkpoint_of_the_first_format_is_loaded(trainer_of) -> None:
    class Old(Callback):
        def preprocess_checkpoint(self, trainer, state_dict):
            old = state_dict["dataloader"]
            names = ("epoch", "batch_idx", "num_batches")
            state_dict["dataloader"] = {name: old[name] for name in names}

    train(trainer_of, DataLoader(Counted(), 2), steps=3)
    values = Values()
    trainer = train(trainer_of, DataLoader(Counted(), 2), values, Old(), steps=5)
    assert values.values == [6, 8]
    assert trainer.data.num_batches == 5


def test_a_state_without_one_of_the_loader_is_read_from_the_beginning(trainer_of, caplog) -> None:
    train(trainer_of, DataLoader(Counted(), 2), steps=3)
    values = Values()
    train(trainer_of, Own(), values, steps=5)
    assert values.values == [4, 5]
    assert any("3 batches are loaded and dropped" in said for said in warnings_of(caplog))


def test_a_checkpoint_made_after_the_fit_has_the_loaders_state(trainer_of, tmp_path) -> None:
    first = train(trainer_of, Own(), steps=3, checkpoint=None)
    path = first.save_checkpoint()
    values = Values()
    second = trainer_of(values, model=Scale, max_steps=5, model_dir=tmp_path / "second")
    second.fit(Own(), ckpt_path=path)
    assert values.values == [4, 5]


def test_a_second_fit_begins_a_pass(trainer_of) -> None:
    values = Values()
    trainer = trainer_of(values, model=Scale, num_steps=3)
    loader = DataLoader(Counted(), 2)
    trainer.fit(loader)
    trainer.fit(loader)
    assert values.values == [0, 2, 4, 0, 2, 4]
    assert trainer.data.epoch == 1


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.slow_cases(every=4)
def test_workers_end_with_the_fit(trainer_of, fails, persistent) -> None:
    workers = []

    class Look(Callback):
        def on_train_batch_start(self, trainer, model, batch, batch_idx):
            workers.extend(trainer.data._data._source._positioned._iterator.workers)
            if fails:
                raise LookupError

    loader = DataLoader(Counted(), 2, num_workers=2, persistent_workers=persistent)
    trainer = trainer_of(Look(), model=Scale, max_steps=2)
    try:
        trainer.fit(loader)
    except LookupError:
        assert fails
    assert len(workers) >= 2
    for worker in workers:
        worker.join(30)  # one that was late has been killed, and may end a moment later
    assert not any(worker.is_alive() for worker in workers)


def test_a_fit_leaves_the_loader_that_was_given_as_it_was(trainer_of) -> None:
    generator = torch.Generator().manual_seed(1)
    loader = DataLoader(Counted(), 2, shuffle=True, generator=generator)
    before = dict(vars(loader))
    train(trainer_of, loader, steps=3)
    assert vars(loader) == before
    assert torch.equal(generator.get_state(), torch.Generator().manual_seed(1).get_state())


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_what_a_callback_draws_is_the_same_in_each_run(trainer_of, tmp_path, workers) -> None:
    class Noise(Counted):
        def __getitem__(self, idx):
            return torch.tensor(idx + random.random())

    class Drawn(Callback):
        def __init__(self):
            self.numbers = []

        def on_train_batch_start(self, trainer, model, batch, batch_idx):
            self.numbers.append((batch.tolist(), random.random(), torch.rand(()).item()))

    seen = []
    for number in range(2):
        drawn = Drawn()
        random.seed(4), torch.manual_seed(4)
        loader = DataLoader(Noise(), 4, shuffle=True, num_workers=workers)
        train(trainer_of, loader, drawn, steps=7, model_dir=tmp_path / str(number))
        seen.append(drawn.numbers)
    assert seen[0] == seen[1]
    assert len({number for _, number, _ in seen[0]}) == 7


def test_data_that_draws_nothing_leaves_the_generators_alone(trainer_of) -> None:
    class Drawn(Callback):
        def __init__(self):
            self.numbers = []

        def on_train_start(self, trainer, model, train_dataloader, loop, loop_idx):
            random.seed(3)

        def on_train_batch_start(self, trainer, model, batch, batch_idx):
            self.numbers.append(random.random())

    drawn = Drawn()
    train(trainer_of, DataLoader(torch.arange(20.0), 2, shuffle=True), drawn, steps=12)
    expected = random.Random(3)
    assert drawn.numbers == [expected.random() for _ in range(12)]


def test_a_checkpoint_loaded_by_hand_gives_the_loader_its_state(
    trainer_of, tmp_path, caplog
) -> None:
    path = train(trainer_of, Own(), steps=3, checkpoint=None).save_checkpoint()
    values = Values()
    second = trainer_of(values, model=Scale, max_steps=5, model_dir=tmp_path / "second")
    second.load_checkpoint(path)
    second.fit(Own(), ckpt_path=None)
    assert values.values == [4, 5]
    assert warnings_of(caplog) == []


def test_a_checksum_is_computed_when_it_is_saved_of_the_values_as_they_were_fetched() -> None:
    batch = {"b": torch.arange(40.0).reshape(4, 10), "a": [torch.tensor([1, 2]), "text"]}
    checksums = Checksums()
    checksums.begin({})
    assert not checksums.add(3, batch)
    compute = checksums.state(3)["batches"]
    batch["b"].zero_()
    assert compute() == {"num": 3, "checksum": 3783655111}  # of checkpoints before


@pytest.mark.parametrize(
    "change",
    [
        lambda batch: batch.t(),
        lambda batch: batch.bfloat16(),
        lambda batch: batch.bfloat16().sum(),
        lambda batch: batch.clone().requires_grad_(),
        lambda batch: torch.view_as_complex(batch.reshape(-1, 2)).conj(),
        lambda batch: torch.view_as_complex(batch.reshape(-1, 2)).conj().imag,
        lambda batch: batch.to_sparse(),
        lambda batch: batch.to("meta"),
    ],
)
def test_any_tensor_has_a_checksum_and_another_value_another(change) -> None:
    batch = torch.arange(1.0, 41).reshape(4, 10)
    before, after = Checksums(), Checksums()
    before.add(1, change(batch))
    after.begin({"batches": before.state(1)["batches"]})
    assert not after.add(1, change(batch))
    has_values = change(batch).layout is torch.strided and not change(batch).is_meta
    assert after.add(1, change(batch + 1)) == has_values
