"""Which checkpoints a model takes: compiled or not, of other sizes, with lazy layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from modelzoo_trainer import Callback, Checkpoint, checkpointing
from modelzoo_trainer.checkpointing.state_json import bare_names
from modelzoo_trainer.errors import CheckpointMismatch, ConfigError
from tests.doubles import TinyModel, differing, tiny_batches, weights_of

BATCHES = tiny_batches(20)


class OtherHead(TinyModel):
    """A `TinyModel` whose first layer alone is the same."""

    def __init__(self) -> None:
        super().__init__()
        self.top = self.head
        del self.head

    def forward(self, batch: Any) -> Any:
        inputs, targets = batch
        return ((self.top(torch.tanh(self.hidden(inputs))) - targets) ** 2).mean()


class Foreign(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, batch: Any) -> Any:
        return self.layer(batch[0]).mean()


class Lazy(TinyModel):
    """A `TinyModel` whose first layer learns its size from the first batch."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.LazyLinear(4)


def compiled() -> Any:
    return torch.compile(TinyModel(), backend="eager")


def partly_compiled() -> nn.Module:
    model = TinyModel()
    model.hidden = torch.compile(model.hidden, backend="eager")
    return model


def run(trainer_of: Any, model: Any, max_steps: int, *, is_strict: bool = True) -> Any:
    checkpoint = Checkpoint(steps=5, disable_strict_checkpoint_loading=not is_strict)
    trainer = trainer_of(model=model, max_steps=max_steps, checkpoint=checkpoint)
    trainer.fit(BATCHES)
    return trainer


@pytest.mark.parametrize(
    ("before", "now"),
    [
        (compiled, TinyModel),
        (TinyModel, compiled),
        (partly_compiled, compiled),
        (compiled, partly_compiled),
    ],
)
@pytest.mark.parametrize("is_strict", [True, False])
@pytest.mark.slow_cases(every=4)
def test_a_model_may_be_compiled_or_not_when_a_run_is_resumed(
    trainer_of, caplog, before, now, is_strict
) -> None:
    first = run(trainer_of, before, 5)
    second = trainer_of(
        model=now, checkpoint=Checkpoint(disable_strict_checkpoint_loading=not is_strict)
    )
    second.load_checkpoint(first.model_dir / "checkpoint_5")
    loaded, saved = second.model.parameters(), first.model.parameters()
    assert all(torch.equal(*pair) for pair in zip(loaded, saved, strict=True))
    assert "not loaded" not in caplog.text


@pytest.mark.parametrize("method", ["fit", "validate", "predict"])
def test_the_advice_on_another_model_holds_in_python_and_in_yaml(
    trainer_of, tmp_path, method
) -> None:
    run(trainer_of, TinyModel, 5)
    other = trainer_of(model=lambda: nn.Sequential(TinyModel()))
    with pytest.raises(CheckpointMismatch, match=r"unexpected   hidden\.bias") as refused:
        getattr(other, method)(BATCHES)
    for remedy in (
        "model_dir",
        "ckpt_path=None",
        "null",
        "Checkpoint(disable_strict_checkpoint_loading=True)",
        "checkpoint.disable_strict_checkpoint_loading: true",
    ):
        assert remedy in str(refused.value)


@pytest.mark.parametrize("model", [compiled, partly_compiled, TinyModel])
def test_what_is_saved_has_the_names_of_the_bare_model(trainer_of, model) -> None:
    trainer = run(trainer_of, model, 5)
    state = checkpointing.load(trainer.model_dir / "checkpoint_5")
    names = ["hidden.weight", "hidden.bias", "head.weight", "head.bias"]
    assert list(state["model"]) == names
    assert state["optimizer"]["names"] == [names]


def test_a_checkpoint_with_the_names_of_a_compiled_model_is_taken(trainer_of, tmp_path) -> None:
    class Before(Callback):
        """Names things as they were named when a compiled model was saved with its own names."""

        def preprocess_checkpoint(self, trainer, state_dict):
            model = state_dict["model"]
            state_dict["model"] = {f"_orig_mod.{name}": model[name] for name in model}

    first = run(trainer_of, TinyModel, 5)
    second = trainer_of(Before())
    second.load_checkpoint(first.model_dir / "checkpoint_5")
    assert differing(weights_of(second), weights_of(first)) == []


def test_a_model_that_nothing_fits_is_refused(trainer_of) -> None:
    run(trainer_of, TinyModel, 5)
    with pytest.raises(CheckpointMismatch, match=r"has hidden.weight \(4, 3\), .* run"):
        run(trainer_of, Foreign, 10, is_strict=False)


def test_what_fits_is_loaded_and_the_rest_is_named(trainer_of, caplog) -> None:
    first = run(trainer_of, TinyModel, 5)
    second = trainer_of(
        model=OtherHead, checkpoint=Checkpoint(disable_strict_checkpoint_loading=True)
    )
    second.load_checkpoint(first.model_dir / "checkpoint_5")
    assert torch.equal(second.model.hidden.weight, first.model.hidden.weight)
    assert "the checkpoint has no such entries: top.bias, top.weight." in caplog.text


@pytest.mark.parametrize("is_strict", [True, False])
def test_a_lazy_model_takes_its_sizes_from_a_checkpoint(trainer_of, caplog, is_strict) -> None:
    first = trainer_of(model=Lazy, max_steps=5)
    first.fit(BATCHES)
    path = first.save_checkpoint()
    second = trainer_of(
        model=Lazy, checkpoint=Checkpoint(disable_strict_checkpoint_loading=not is_strict)
    )
    second.load_checkpoint(path)
    assert differing(weights_of(second), weights_of(first)) == []
    assert "not loaded" not in caplog.text


@pytest.mark.parametrize(
    ("names", "bare"),
    [
        (["_orig_mod.a.w", "b._orig_mod.w"], ["a.w", "b.w"]),
        (["_orig_mod.module.a", "_orig_mod.module.b"], ["a", "b"]),
        (["module.a", "b"], ["module.a", "b"]),
        (["my_orig_mod.a"], ["my_orig_mod.a"]),
        (["_orig_mod.a", "a"], ["_orig_mod.a", "a"]),
        ([], []),
    ],
)
def test_wrappers_add_nothing_to_a_bare_name(names, bare) -> None:
    assert bare_names(names) == dict(zip(bare, names, strict=True))


class Scaling(Callback):
    """Has the output of a model multiplied."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def pre_setup(self, trainer):
        trainer.callbacks["model"].change(lambda model: Scaled(model, self.factor))


class Scaled(nn.Module):
    def __init__(self, inner: nn.Module, factor: float) -> None:
        super().__init__()
        self.inner = inner
        self.factor = factor

    def forward(self, batch: Any) -> Any:
        return self.factor * self.inner(batch)


@pytest.mark.parametrize("model", [TinyModel(), TinyModel], ids=["module", "callable"])
def test_changes_of_the_model_are_made_in_order(trainer_of, model) -> None:
    trainer = trainer_of(Scaling(2.0), Scaling(3.0), model=model)
    assert (trainer.model.factor, trainer.model.inner.factor) == (3.0, 2.0)
    assert isinstance(trainer.model.inner.inner, TinyModel)
    assert {id(p) for group in trainer.optimizer.param_groups for p in group["params"]} == {
        id(param) for param in trainer.model.parameters()
    }


def test_what_is_no_model_is_not_changed_but_refused(trainer_of) -> None:
    with pytest.raises(ConfigError, match="the callable returned 3"):
        trainer_of(Scaling(2.0), model=lambda: 3)
