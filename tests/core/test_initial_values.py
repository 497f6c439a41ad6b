"""Initial values: drawn where they are needed, and not where a checkpoint replaces them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from modelzoo_trainer import Checkpoint, Trainer, TrainingLoop
from modelzoo_trainer.callbacks import LoadCheckpointStates
from modelzoo_trainer.checkpointing import load
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


BATCH = {
    "input_ids": torch.arange(16).reshape(2, 8) % 20,
    "labels": torch.arange(1, 17).reshape(2, 8) % 20,
}


def trainer_in(folder: Path, num_steps: int = 2, **options: Any) -> Trainer:
    given: dict[str, Any] = {
        "model": Made(),
        "device": "cpu",
        "seed": 1,
        "optimizer": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
        "loop": TrainingLoop(max_steps=num_steps, eval_frequency=None),
        "checkpoint": Checkpoint(steps=2),
        **options,
    }
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


def test_weights_that_a_user_has_set_are_kept(trained: Path) -> None:
    with trainer_in(trained) as trainer:
        weight = trainer.model.get_parameter("lm_head.weight")
        with torch.no_grad():
            weight.fill_(3.0)
        trainer.load_checkpoint(None)
        assert (weight == 3.0).all()
        others = [value for value in values_of(trainer).values() if value.is_floating_point()]
        assert all(value.isfinite().all() for value in others)


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
