"""Initial values: drawn where they are needed, and not where a checkpoint replaces them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from modelzoo_trainer import Callback, Checkpoint, Trainer, TrainingLoop
from modelzoo_trainer.callbacks import CheckLoss, KeepNCheckpoints, LoadCheckpointStates
from modelzoo_trainer.checkpointing import load
from modelzoo_trainer.loggers import JsonlLogger
from modelzoo_trainer.zoo.models.decoder_names import Llama
from tests.zoo.models.llama_settings import LLAMA

SIZES: dict[str, Any] = {
    "vocab_size": 20,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_heads": 2,
    "filter_size": 24,
    "max_position_embeddings": 8,
}


class Made:
    """Makes a decoder; `makes` says so before it is made."""

    makes = Llama

    def __init__(self, **changes: Any) -> None:
        self.settings = {**SIZES, **LLAMA, **changes}

    def __call__(self) -> nn.Module:
        return Llama(**self.settings)


class Adam:
    """Makes an optimizer; `makes` says so, as in a run of a file."""

    makes = torch.optim.AdamW

    def __call__(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=0.01)


BATCH = {
    "input_ids": torch.arange(16).reshape(2, 8) % 20,
    "labels": torch.arange(1, 17).reshape(2, 8) % 20,
}


def trainer_in(
    folder: Path, num_steps: int = 2, *, fits_next: bool = True, **options: Any
) -> Trainer:
    """Return a trainer; `fits_next`: a fit follows at once, as in a run of a file."""
    given: dict[str, Any] = {
        "model": Made(),
        "device": "cpu",
        "seed": 1,
        "optimizer": Adam(),
        "loop": TrainingLoop(max_steps=num_steps, eval_frequency=None),
        "checkpoint": Checkpoint(steps=2),
        **options,
    }
    if fits_next and given["checkpoint"] is not None:
        given["checkpoint"].expected = ...
    return Trainer(model_dir=folder, **given)


def values_of(trainer: Trainer) -> dict[str, Tensor]:
    tensors = (*trainer.model.named_parameters(), *trainer.model.named_buffers())
    return {name: value.detach().clone() for name, value in tensors}


def num_drawn(trainer: Trainer) -> int | None:
    return trainer.backend.initial_values.num_drawn


def size_of(trainer: Trainer) -> int:
    return sum(param.numel() for param in trainer.model.parameters())


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(
        torch.equal(value, expected[name]) for name, value in found.items()
    )


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    """Return the folder of a run with a checkpoint of step 2."""
    with trainer_in(tmp_path / "run") as trainer:
        trainer.fit([BATCH])
    return tmp_path / "run"


def test_a_new_run_draws_each_number_once(tmp_path: Path) -> None:
    with trainer_in(tmp_path) as trainer:
        assert num_drawn(trainer) == size_of(trainer)
        assert all(value.isfinite().all() for value in values_of(trainer).values())


def test_the_numbers_depend_on_the_seed_alone(tmp_path: Path) -> None:
    values = []
    for number, seed in enumerate((1, 1, 2)):
        with trainer_in(tmp_path / str(number), seed=seed) as trainer:
            values.append(values_of(trainer))
    assert same(values[0], values[1])
    assert not same(values[0], values[2])


def test_a_restart_draws_nothing_and_continues_with_the_same_bits(
    trained: Path, tmp_path: Path
) -> None:
    with trainer_in(tmp_path / "whole", 4) as whole:
        whole.fit([BATCH])
    with trainer_in(trained, 4) as trainer:
        assert num_drawn(trainer) == 0
        trainer.fit([BATCH])
        assert num_drawn(trainer) == 0
        assert same(values_of(trainer), values_of(whole))


def test_an_object_has_its_values_and_is_left_alone(trained: Path) -> None:
    with trainer_in(trained, model=Made()()) as trainer:
        assert num_drawn(trainer) is None


@pytest.mark.parametrize("use", ["load", "validate", "save"])
def test_without_the_checkpoint_it_gets_the_numbers_of_a_new_run(
    trained: Path, tmp_path: Path, use: str
) -> None:
    with trainer_in(tmp_path / "new") as new:
        expected = values_of(new)
    with trainer_in(trained) as trainer:
        assert num_drawn(trainer) == 0
        if use == "load":
            trainer.load_checkpoint(None)
        elif use == "validate":
            trainer.validate([BATCH], ckpt_path=None)
        else:
            saved = trainer.save_checkpoint()
            assert same(load(saved)["model"], trainer.model.state_dict())
        assert same(values_of(trainer), expected)
        assert num_drawn(trainer) == size_of(trainer)


def test_only_the_optimizer_is_loaded(trained: Path, tmp_path: Path) -> None:
    with trainer_in(tmp_path / "new") as new:
        expected = values_of(new)
    with trainer_in(trained, callbacks=[LoadCheckpointStates("optimizer")]) as trainer:
        trainer.load_checkpoint(trained / "checkpoint_2")
        assert same(values_of(trainer), expected)


def test_a_program_may_use_the_weights_before_a_fit(trained: Path) -> None:
    with trainer_in(trained, fits_next=False) as trainer:
        assert num_drawn(trainer) == size_of(trainer)


class Reader(Callback):
    """Of a user: it may read weights in `setup`."""

    def setup(self, trainer: Trainer) -> None:
        pass


class Declared(Reader):
    reads_weights_early = False

    def setup(self, trainer: Trainer) -> None:
        pass


class OwnLog(JsonlLogger):
    """Of a user, with a hook of its own; what its base class says does not count."""

    def post_setup(self, trainer: Trainer) -> None:
        pass


class OwnSgd(torch.optim.SGD):
    """Of a user: its constructor may copy weights."""


class MakesOwn(Adam):
    makes = OwnSgd


EARLY: dict[str, dict[str, Any]] = {
    "callback": {"callbacks": [Reader()]},
    "logger": {"loggers": [OwnLog()]},
    "optimizer": {"optimizer": MakesOwn()},
    "optimizer of a function": {"optimizer": lambda model: OwnSgd(model.parameters(), lr=0.1)},
    "sparsity": {"sparsity": {"sparsity": 0.5}},
    "function around a method": {"callbacks": [("post-create-optimizer", lambda self, made: made)]},
}


@pytest.mark.parametrize("what", EARLY)
def test_what_may_read_weights_early_finds_values(trained: Path, what: str) -> None:
    with trainer_in(trained, **EARLY[what]) as trainer:
        assert all(value.isfinite().all() for value in trainer.model.parameters())


@pytest.mark.parametrize("callback", [Declared(), CheckLoss(), KeepNCheckpoints(2)])
def test_a_callback_that_reads_none_does_not_cost_a_draw(trained: Path, callback: Any) -> None:
    with trainer_in(trained, callbacks=[callback]) as trainer:
        assert num_drawn(trainer) == 0


def test_a_function_around_the_creation_gets_a_model_with_values(tmp_path: Path) -> None:
    seen: list[bool] = []

    def look(self: Any, model: nn.Module) -> nn.Module:
        seen.append(any(param.is_meta for param in model.parameters()))
        return model

    with trainer_in(tmp_path, callbacks=[("post-create-model", look)]) as trainer:
        assert num_drawn(trainer) is None
    assert seen == [False]


class Mine(Llama):
    """Of a user: its constructor sets a value."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        nn.init.constant_(self.lm_head.weight, 3.0)


class MakesMine(Made):
    makes = Mine

    def __call__(self) -> nn.Module:
        return Mine(**self.settings)


def test_what_the_constructor_of_a_user_sets_is_kept(tmp_path: Path) -> None:
    with trainer_in(tmp_path, model=MakesMine()) as trainer:
        assert (trainer.model.get_parameter("lm_head.weight") == 3.0).all()


def test_missing_entries_are_drawn_if_only_what_fits_is_loaded(trained: Path) -> None:
    options = {"model": Made(vocab_size=24), "callbacks": [LoadCheckpointStates("model")]}
    with trainer_in(trained, **options) as trainer:
        assert num_drawn(trainer) == 0
        trainer.checkpoint.disable_strict_checkpoint_loading = True
        trainer.load_checkpoint(trained / "checkpoint_2")
        assert all(value.isfinite().all() for value in trainer.model.parameters())


def test_what_fits_may_be_less_than_all(trained: Path) -> None:
    checkpoint = Checkpoint(disable_strict_checkpoint_loading=True)
    options = {"model": Made(vocab_size=24), "callbacks": [LoadCheckpointStates("model")]}
    with trainer_in(trained, checkpoint=checkpoint, **options) as trainer:
        assert num_drawn(trainer) == size_of(trainer)
        trainer.load_checkpoint(trained / "checkpoint_2")
        assert all(param.isfinite().all() for param in trainer.model.parameters())


def test_a_checkpoint_that_diverged_is_not_replaced_by_random_numbers(trained: Path) -> None:
    with trainer_in(trained, 3) as trainer:
        trainer.load_checkpoint(...)
        with torch.no_grad():
            trainer.model.get_parameter("lm_head.weight").fill_(torch.nan)
        trainer.global_step = 3
        trainer.save_checkpoint()
    with trainer_in(trained, 3) as trainer:
        trainer.load_checkpoint(...)
        trainer.load_checkpoint(None)
        assert trainer.model.get_parameter("lm_head.weight").isnan().all()


def test_no_checkpoint_is_expected_where_none_is_loaded(trained: Path) -> None:
    checkpoint = Checkpoint(autoload_last_checkpoint=False)
    with trainer_in(trained, checkpoint=checkpoint) as trainer:
        assert num_drawn(trainer) == size_of(trainer)
