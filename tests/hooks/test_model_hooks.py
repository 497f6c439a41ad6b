"""Hooks that the model itself defines."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from modelzoo_trainer import Callback, HookError, Hooks, register_global_callback
from modelzoo_trainer.hooks.model_hooks import ModelHooks, unwrapped
from tests.doubles import TinyModel, sgd, tiny_batches


class Told(TinyModel):
    """Record the ends of batches."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[object] = []

    def on_train_batch_end(self, trainer, model, outputs, batch, batch_idx):
        self.seen.append(batch_idx)


def test_they_are_called_last_after_global_callbacks(trainer_of) -> None:
    order = []

    class Model(TinyModel):
        def on_fit_end(self, trainer, loop):
            order.append("model")

    class Mine(Callback):
        def __init__(self, name):
            self.name = name

        def on_fit_end(self, trainer, loop):
            order.append(self.name)

    handle = register_global_callback(Mine("global"))
    try:
        trainer_of(Mine("user"), model=Model).fit(tiny_batches(1))
    finally:
        handle.remove()
    assert order == ["user", "global", "model"]


def test_they_are_called_without_any_callback_of_the_user(trainer_of) -> None:
    model = Told()
    trainer = trainer_of(model=model)
    trainer.fit(tiny_batches(3))
    trainer.fit(tiny_batches(2))
    assert model.seen == [0, 1, 2, 0, 1]


def test_a_models_own_methods_called_setup_and_finalize_are_left_alone(trainer_of) -> None:
    class Model(TinyModel):
        def setup(self, stage):
            raise AssertionError("a model's own method")

        def finalize(self):
            raise AssertionError("a model's own method")

    trainer = trainer_of(model=Model)
    trainer.fit(tiny_batches(1))
    trainer.close()


def test_a_model_that_is_a_callback_too_is_called_once(trainer_of) -> None:
    model = Told()
    trainer_of(model, model=model).fit(tiny_batches(2))
    assert model.seen == [0, 1]


def test_a_model_that_becomes_a_callback_later_is_called_once(trainer_of) -> None:
    model = Told()
    trainer = trainer_of(model=model)
    handle = trainer.add_callback(model)
    trainer.fit(tiny_batches(1))
    handle.remove()
    trainer.fit(tiny_batches(1))
    assert model.seen == [0, 0]


def test_adding_and_removing_callbacks_keeps_them(trainer_of) -> None:
    model = Told()
    trainer = trainer_of(model=model)
    trainer.add_callback(Callback()).remove()
    trainer.fit(tiny_batches(1))
    assert model.seen == [0]


def test_a_model_without_hooks_costs_nothing(trainer_of) -> None:
    trainer = trainer_of()
    assert [type(cb).__name__ for cb in trainer.all_callbacks if "Hooks" in type(cb).__name__] == []


def test_another_signature_is_refused_at_set_up(trainer_of) -> None:
    class Model(TinyModel):
        def on_before_backward(self, loss):
            pass

    with pytest.raises(
        HookError,
        match=r"^Model\.on_before_backward takes \(loss\), but the hook passes \(trainer, model,",
    ):
        trainer_of(model=Model)


class Library(TinyModel):
    """A base class that documents its hooks, with other parameters and names."""

    def on_before_backward(self, loss):
        """Called before the backward pass."""

    def on_validation_start(self):
        pass

    def on_fit_end(self): ...

    def on_export(self, path, version):
        pass


def test_empty_methods_that_a_model_inherits_are_no_hooks(trainer_of) -> None:
    class Model(Library):
        pass

    trainer = trainer_of(model=Model)
    assert [cb for cb in trainer.all_callbacks if isinstance(cb, ModelHooks)] == []
    trainer.fit(tiny_batches(1))
    trainer.call("on_export", path="there")
    hooks = Hooks()
    hooks.add_model(trainer.model)
    hooks.call("on_export", path="there")


def test_what_a_model_writes_over_them_is_a_hook(trainer_of) -> None:
    class Model(Library):
        def on_fit_end(self, trainer, loop):
            self.is_told = True

    trainer = trainer_of(model=Model)
    trainer.fit(tiny_batches(1))
    assert trainer.model.is_told


def test_a_models_hook_of_another_trainer_is_refused(trainer_of) -> None:
    class Model(Library):
        def on_validation_epoch_end(self):
            pass

    with pytest.raises(HookError, match=r"^Model\.on_validation_epoch_end is .*'on_validate_end'"):
        trainer_of(model=Model)


def test_an_inherited_method_that_does_something_is_checked(trainer_of) -> None:
    class Base(Library):
        def on_fit_end(self):
            self.is_told = True

    class Derived(Base):
        pass

    with pytest.raises(HookError, match=r"^Derived\.on_fit_end takes \(\), but the hook passes"):
        trainer_of(model=Derived)


def test_a_misspelt_hook_is_refused_at_set_up(trainer_of) -> None:
    class Model(TinyModel):
        def on_fit_strat(self, trainer):
            pass

    with pytest.raises(
        HookError, match=r"^Model\.on_fit_strat is not a hook\. Did you mean 'on_fi"
    ):
        trainer_of(model=Model)


def test_a_custom_event_reaches_the_model(trainer_of) -> None:
    class Model(TinyModel):
        def on_export(self, path):
            self.path = path

    trainer = trainer_of(model=Model)
    trainer.call("on_export", path="there", by="me")
    trainer.call("eval")  # not an event
    assert trainer.model.path == "there"
    assert trainer.model.training


@pytest.mark.slow
def test_a_compiled_model_gets_what_the_model_itself_defines(trainer_of) -> None:
    model = Told()
    compiled = torch.compile(model, backend="eager")
    trainer_of(model=compiled, optimizer=sgd(model)).fit(tiny_batches(2))
    assert model.seen == [0, 1]


def test_a_wrapper_is_looked_through() -> None:
    model, compiled = TinyModel(), nn.Module()
    compiled._orig_mod = model  # as torch.compile stores it
    assert unwrapped(nn.DataParallel(compiled)) is model


def test_an_error_is_noted_with_the_models_class(trainer_of) -> None:
    class Model(TinyModel):
        def on_fit_end(self, trainer, loop):
            raise LookupError("lost")

    with pytest.raises(LookupError) as caught:
        trainer_of(model=Model).fit(tiny_batches(1))
    assert caught.value.__notes__[0] == "raised in Model.on_fit_end at global_step 1"


def test_its_weights_are_no_state_of_a_callback(trainer_of) -> None:
    assert trainer_of(model=Told).stateful_callbacks() == []


@pytest.mark.parametrize("device", ["meta", "fake"])
def test_it_works_where_values_cannot_be_read(trainer_of, device) -> None:
    trainer = trainer_of(model=Told, device=device)
    trainer.fit(tiny_batches(2))
    assert trainer.model.seen == [0, 1]
