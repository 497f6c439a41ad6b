"""What can be trained on, and where in it a run is."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from modelzoo_trainer import Callback, ConfigError
from tests.doubles import Recorder, Scale, constant_batches, tiny_batches


class Batches(Callback):
    """Writes down the first number of every batch of `Scale`, and its index."""

    def __init__(self) -> None:
        self.values: list[float] = []
        self.indices: list[int] = []

    def on_train_batch_start(self, trainer, model, batch, batch_idx):
        self.values.append(batch.flatten()[0].item())
        self.indices.append(batch_idx)


class Endless:
    """An iterable that never ends."""

    def __iter__(self):
        while True:
            yield torch.ones(2)


class WithoutLength:
    """An iterable without a length that can be iterated again."""

    def __iter__(self):
        return iter(constant_batches(1, 2, 3))


class Misjudged(WithoutLength):
    """One whose length is wrong."""

    def __len__(self) -> int:
        return 7


def test_the_index_of_a_batch_begins_anew_in_each_epoch(trainer_of) -> None:
    batches = Batches()
    trainer_of(batches, model=Scale, num_epochs=2).fit(constant_batches(1, 2, 3))
    assert batches.values == [1, 2, 3, 1, 2, 3]
    assert batches.indices == [0, 1, 2, 0, 1, 2]


def test_the_index_goes_on_over_stages_within_an_epoch(trainer_of) -> None:
    batches = Batches()
    trainer_of(batches, model=Scale, eval_frequency=2).fit(constant_batches(1, 2, 3, 4, 5))
    assert batches.indices == [0, 1, 2, 3, 4]


def test_an_iterable_without_a_length_is_trained_on(trainer_of) -> None:
    trainer = trainer_of(model=Scale, num_epochs=2)
    trainer.fit(WithoutLength())
    assert (trainer.global_step, trainer.data.epoch) == (6, 2)


def test_an_iterable_without_a_length_has_a_last_batch(trainer_of) -> None:
    trainer = trainer_of(model=Scale, grad_accum_steps=2)
    trainer.fit(WithoutLength())
    assert trainer.global_step == 2


def test_a_callable_makes_the_dataloader(trainer_of) -> None:
    batches = Batches()
    trainer_of(batches, model=Scale).fit(lambda: constant_batches(1, 2))
    assert batches.values == [1, 2]


def test_a_callable_that_makes_a_generator_serves_several_epochs(trainer_of) -> None:
    def batches():
        yield from constant_batches(1, 2)

    trainer = trainer_of(model=Scale, num_epochs=3)
    trainer.fit(batches)
    assert trainer.global_step == 6


def test_a_generator_is_trained_on_once(trainer_of) -> None:
    trainer = trainer_of(model=Scale)
    trainer.fit(iter(constant_batches(1, 2)))
    assert trainer.global_step == 2


def test_a_generator_in_a_second_epoch_is_refused_with_advice(trainer_of) -> None:
    with pytest.raises(
        ConfigError,
        match=r"^train_dataloader yielded 2 batches and cannot be iterated again\. Pass a callable",
    ):
        trainer_of(model=Scale, num_epochs=2).fit(iter(constant_batches(1, 2)))


def test_an_endless_iterable_is_trained_on_for_some_steps(trainer_of) -> None:
    trainer = trainer_of(model=Scale, max_steps=5)
    trainer.fit(Endless())
    assert trainer.global_step == 5


def test_an_epoch_of_an_endless_iterable_may_have_a_length(trainer_of) -> None:
    recorder = Recorder()
    trainer = trainer_of(recorder, model=Scale, num_epochs=3, steps_per_epoch=2)
    trainer.fit(Endless())
    assert trainer.global_step == 6
    assert recorder.count("on_train_epoch_end") == 3


def test_steps_per_epoch_counts_steps_and_not_batches(trainer_of) -> None:
    batches = Batches()
    trainer = trainer_of(batches, model=Scale, num_epochs=2, steps_per_epoch=2, grad_accum_steps=2)
    trainer.fit(constant_batches(1, 2, 3, 4, 5, 6))
    assert batches.values == [1, 2, 3, 4, 1, 2, 3, 4]
    assert trainer.global_step == 4


def test_steps_per_epoch_beyond_the_data_ends_with_the_data(trainer_of) -> None:
    trainer = trainer_of(model=Scale, num_epochs=2, steps_per_epoch=10)
    trainer.fit(constant_batches(1, 2, 3))
    assert trainer.global_step == 6


def nothing() -> list[torch.Tensor]:
    return []


@pytest.mark.parametrize(
    "empty",
    [[], (), iter(()), nothing, list],
    ids=["list", "tuple", "iterator", "function", "class"],
)
def test_an_empty_dataloader_is_refused(trainer_of, empty) -> None:
    with pytest.raises(
        ConfigError, match=r"^train_dataloader yields no batch\. Check the data, th"
    ):
        trainer_of(max_steps=2).fit(empty)


def undersized() -> DataLoader:
    return DataLoader(TensorDataset(torch.ones(3)), batch_size=4, drop_last=True)


@pytest.mark.parametrize("length", [{"num_epochs": 2}, {"num_epochs": 2, "max_steps": 3}, {}])
@pytest.mark.parametrize("empty", [[], nothing, undersized], ids=["list", "function", "drop_last"])
def test_an_empty_dataloader_is_refused_by_a_run_of_epochs(trainer_of, empty, length) -> None:
    loop = {"num_epochs": None} | length
    with pytest.raises(ConfigError, match=r"^train_dataloader yields no batch\."):
        trainer_of(**loop).fit(empty)


class Samples(Dataset):
    """A data set with indices."""

    def __getitem__(self, index: int) -> torch.Tensor:
        if index >= 4:
            raise IndexError
        return torch.ones(1, 1)

    def __len__(self) -> int:
        return 4


class Rows:
    """What torch's loaders take for a data set without its being one."""

    def __iter__(self):
        return iter([torch.ones(1, 1)] * 4)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.ones(1, 1)

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        return [torch.ones(1, 1) for _ in indices]


DATA_SETS = [Samples(), Subset(Samples(), [0, 1]), Rows(), Samples, lambda: Samples()]


@pytest.mark.parametrize("data_set", DATA_SETS)
def test_a_data_set_given_as_a_dataloader_is_refused(trainer_of, data_set) -> None:
    kinds = r"(Samples|Subset|Rows)"
    with pytest.raises(ConfigError, match=rf"^train_dataloader got .*{kinds}.*DataLoader\("):
        trainer_of(model=Scale).fit(data_set)
    with pytest.raises(ConfigError, match=rf"^val_dataloader got .*{kinds}.*DataLoader\("):
        trainer_of(model=Scale).validate(data_set)
    with pytest.raises(ConfigError, match=rf"^val_dataloader got .*{kinds}.*DataLoader\("):
        trainer_of(model=Scale).fit(constant_batches(1), data_set)


@pytest.mark.parametrize("wrap", [list, tuple, lambda found: found[0]])
def test_a_data_set_for_validation_is_refused_before_the_first_step(trainer_of, wrap) -> None:
    recorder = Recorder()
    with pytest.raises(ConfigError, match=r"^val_dataloader got the dataset Samples"):
        trainer_of(recorder, model=Scale).fit(constant_batches(1), wrap([Samples()]))
    assert recorder.count("on_train_start") == 0


def test_an_iterable_data_set_that_yields_batches_is_a_dataloader(trainer_of, caplog) -> None:
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(constant_batches(1, 2, 3))

    trainer = trainer_of(model=Scale)
    trainer.fit(Stream())
    assert trainer.global_step == 3
    assert "Stream is an IterableDataset without a DataLoader" in caplog.text


def test_a_length_that_is_not_implemented_is_unknown(trainer_of) -> None:
    class Endless:
        def __iter__(self):
            return iter(constant_batches(1, 2, 3))

        def __len__(self):
            raise NotImplementedError

    trainer = trainer_of(model=Scale, num_epochs=1)
    trainer.fit(Endless())
    assert trainer.global_step == 3


def test_a_callable_that_returns_nothing_more_is_not_told_to_be_one(trainer_of) -> None:
    batches = iter(constant_batches(1, 2))
    with pytest.raises(ConfigError, match="train_dataloader yields no batch"):
        trainer_of(model=Scale, num_epochs=2).fit(lambda: batches)


@pytest.mark.parametrize("given", [{"x": [1]}, "train.csv"])
def test_what_is_no_sequence_of_batches_is_refused(trainer_of, given) -> None:
    with pytest.raises(ConfigError, match=r"^train_dataloader got a (dict|str)"):
        trainer_of(model=Scale).fit(given)


def test_a_torch_dataloader_that_drops_all_is_refused(trainer_of) -> None:
    loader = DataLoader(TensorDataset(torch.ones(3)), batch_size=4, drop_last=True)
    with pytest.raises(ConfigError, match=r"whether drop_last with this batch_size drops all"):
        trainer_of(max_steps=2).fit(loader)


@pytest.mark.parametrize("loader", [7, None])
def test_what_cannot_be_iterated_is_refused(trainer_of, loader) -> None:
    with pytest.raises(ConfigError, match=rf"^train_dataloader got {loader}, which is not itera"):
        trainer_of().fit(loader)


def test_a_length_that_is_too_long_does_not_mislead(trainer_of) -> None:
    trainer = trainer_of(model=Scale, grad_accum_steps=2)
    trainer.fit(Misjudged())
    assert trainer.global_step == 2


def test_an_iterable_dataset_is_trained_on(trainer_of) -> None:
    class Counting(IterableDataset):
        def __iter__(self):
            return iter(torch.arange(6.0))

    batches = Batches()
    trainer_of(batches, model=Scale, num_epochs=2).fit(DataLoader(Counting(), batch_size=4))
    assert batches.values == [0, 4, 0, 4]


def test_an_error_of_the_dataloader_comes_through(trainer_of) -> None:
    def broken():
        yield torch.ones(2)
        raise LookupError("lost")

    with pytest.raises(LookupError, match=r"^lost"):
        trainer_of(model=Scale).fit(broken)


def test_a_shuffle_depends_on_seed_and_epoch_alone(trainer_of, tmp_path) -> None:
    def orders(seed: int, name: str, *, validates: bool) -> list[float]:
        batches = Batches()
        trainer = trainer_of(
            batches, model=Scale, num_epochs=2, seed=seed, model_dir=tmp_path / name
        )
        torch.rand(3)
        loader = DataLoader(torch.arange(12.0), batch_size=2, shuffle=True)
        trainer.fit(loader, constant_batches(1) if validates else None)
        return batches.values

    first = orders(1, "first", validates=False)
    assert orders(1, "again", validates=True) == first
    assert orders(2, "other", validates=False) != first
    assert first[:6] != first[6:]


def test_set_epoch_is_called_for_each_pass(trainer_of) -> None:
    class Told(WithoutLength):
        def __init__(self) -> None:
            self.epochs = []

        def set_epoch(self, epoch):
            self.epochs.append(epoch)

    told = Told()
    trainer_of(model=Scale, num_epochs=3).fit(told)
    assert told.epochs == [0, 1, 2]


def test_the_position_is_that_of_batches_that_were_consumed(trainer_of) -> None:
    trainer = trainer_of(max_steps=4)
    trainer.fit(tiny_batches(3))
    data = trainer.data
    assert (data.epoch, data.batch_idx, data.num_batches) == (1, 1, 4)


def test_a_checkpoint_from_beyond_the_end_of_a_pass_says_so(trainer_of, tmp_path) -> None:
    first = trainer_of(max_steps=3, model_dir=tmp_path / "first")
    first.fit(tiny_batches(4))
    path = first.save_checkpoint()
    second = trainer_of(num_epochs=2, steps_per_epoch=2, model_dir=tmp_path / "second")
    with pytest.raises(ConfigError, match=r"loop\.steps_per_epoch ends an epoch after 2"):
        second.fit(tiny_batches(4), ckpt_path=path)


def test_the_model_is_no_argument_of_fit(trainer_of) -> None:
    trainer = trainer_of()
    batches = tiny_batches(2)
    calls = (
        lambda: trainer.fit(trainer.model, batches),
        lambda: trainer.fit(trainer.model, batches, batches),
        lambda: trainer.fit(batches, trainer.model),
        lambda: trainer.validate(trainer.model),
        lambda: trainer.test(trainer.model, batches),
        lambda: trainer.predict(trainer.model, batches),
    )
    for call in calls:
        with pytest.raises(ConfigError, match=r"dataloader got .*TinyModel.*Trainer\(model="):
            call()
    assert trainer.global_step == 0


@pytest.mark.parametrize("is_fitted", [False, True])
def test_what_needs_the_data_of_a_fit_says_so_outside_of_one(trainer_of, is_fitted) -> None:
    trainer = trainer_of(model=Scale)
    if is_fitted:
        trainer.fit(constant_batches(1))
    for call in (
        lambda: trainer.data.skip_samples(1),
        lambda: trainer.data.end_epochs_after(1, "mine"),
        trainer.data.explain_empty,
    ):
        with pytest.raises(ConfigError, match="no training data outside of fit"):
            call()
    assert (trainer.data.ends_batch, trainer.data.num_parts) == (True, 1)
