"""What fit and validate do, and do again."""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn

from modelzoo_trainer import (
    Callback,
    Checkpoint,
    CheckpointError,
    ConfigError,
    HookError,
    Trainer,
    TrainingLoop,
    ValidationLoop,
)
from tests.doubles import (
    History,
    Recorder,
    Scale,
    TinyModel,
    constant_batches,
    differing,
    make_trainer,
    sgd,
    tiny_batches,
    weights_of,
)

# ---- twice


def test_a_second_fit_trains_as_many_steps_again(trainer_of) -> None:
    trainer = trainer_of(num_steps=3)
    trainer.fit(tiny_batches(2))
    trainer.fit(tiny_batches(2))
    assert trainer.global_step == 6


def test_a_second_fit_trains_as_many_epochs_again(trainer_of) -> None:
    trainer = trainer_of(num_epochs=2)
    trainer.fit(tiny_batches(3))
    trainer.fit(tiny_batches(3))
    assert (trainer.global_step, trainer.data.epoch) == (12, 4)


def test_a_second_fit_with_max_steps_has_nothing_left_to_do(trainer_of) -> None:
    recorder = Recorder()
    trainer = trainer_of(recorder, max_steps=3)
    trainer.fit(tiny_batches(2))
    trainer.fit(tiny_batches(2))
    assert trainer.global_step == 3
    assert (recorder.count("on_fit_end"), recorder.count("on_train_step_end")) == (2, 3)


def test_a_second_fit_equals_the_rest_of_one_fit(trainer_of, tmp_path) -> None:
    twice = trainer_of(num_epochs=1)
    twice.fit(tiny_batches(3))
    twice.fit(tiny_batches(3))
    once = trainer_of(num_epochs=2, model_dir=tmp_path / "once")
    once.fit(tiny_batches(3))
    assert differing(weights_of(twice), weights_of(once)) == []


class Once(Callback):
    """Raises once, in one hook, when a number of batches were seen."""

    def __init__(self, name: str, num_batches: int) -> None:
        self.name = name
        self.num_batches = num_batches
        self.has_raised = False

    def _maybe(self, name, trainer):
        if (
            name == self.name
            and not self.has_raised
            and trainer.data.num_batches == self.num_batches
        ):
            self.has_raised = True
            raise LookupError("lost")

    def on_before_forward(self, trainer, model, batch, args, kwargs):
        self._maybe("on_before_forward", trainer)

    def on_after_backward(self, trainer, model, outputs):
        self._maybe("on_after_backward", trainer)

    def on_train_batch_end(self, trainer, model, outputs, batch, batch_idx):
        self._maybe("on_train_batch_end", trainer)

    def on_step_boundary(self, trainer):
        self._maybe("on_step_boundary", trainer)


@pytest.mark.parametrize(
    ("name", "num_batches", "steps"),
    [
        ("on_before_forward", 2, 1),
        ("on_after_backward", 2, 1),
        ("on_train_batch_end", 2, 2),
        ("on_step_boundary", 2, 2),
    ],
)
def test_a_fit_after_an_exception_in_a_hook_trains_the_rest(
    trainer_of, name, num_batches, steps
) -> None:
    trainer = trainer_of(Once(name, num_batches), num_epochs=1)
    with pytest.raises(LookupError):
        trainer.fit(tiny_batches(3))
    assert trainer.global_step == steps
    trainer.fit(tiny_batches(3))
    assert trainer.global_step == 3
    trainer.fit(tiny_batches(3))  # finished before
    assert trainer.global_step == 6


class Fragile(Scale):
    """Raises in its third forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.num = 0

    def forward(self, batch):
        self.num += 1
        if self.num == 3:
            raise LookupError("lost")
        return super().forward(batch)


def test_a_fit_after_an_exception_of_the_model_trains(trainer_of) -> None:
    trainer = trainer_of(model=Fragile)
    with pytest.raises(LookupError):
        trainer.fit(constant_batches(1, 1, 1))
    trainer.fit(constant_batches(1, 1, 1))
    assert trainer.global_step == 3
    assert trainer.model.weight.item() == pytest.approx(0.7)


def test_gradients_of_a_window_that_was_cut_off_are_not_used(trainer_of) -> None:
    trainer = trainer_of(Once("on_after_backward", 2), model=Scale, grad_accum_steps=3)
    with pytest.raises(LookupError):
        trainer.fit(constant_batches(100, 100, 100))
    trainer.fit(constant_batches(1, 2, 3))
    assert trainer.model.weight.item() == pytest.approx(1 - 0.1 * 2)


def test_gradients_of_a_step_that_was_cut_off_are_not_used(trainer_of) -> None:
    trainer = trainer_of(Once("on_after_backward", 1), model=Scale)
    with pytest.raises(LookupError):
        trainer.fit(constant_batches(100))
    trainer.fit(constant_batches(2))
    assert trainer.model.weight.item() == pytest.approx(1 - 0.1 * 2)


# ---- freed


def is_freed_after_use(build) -> bool:
    trainer = build()
    trainer.fit(tiny_batches(3), tiny_batches(1))
    reference = weakref.ref(trainer)
    del trainer
    gc.collect()
    return reference() is None


def test_a_trainer_is_freed_after_use(tmp_path) -> None:
    assert is_freed_after_use(lambda: make_trainer(tmp_path, loggers=History()))


def test_a_trainer_is_freed_although_a_callback_stores_it(tmp_path) -> None:
    class Storing(Callback):
        def setup(self, trainer):
            self.trainer = trainer

    assert is_freed_after_use(lambda: make_trainer(tmp_path, Storing()))


def test_a_trainer_is_freed_after_an_exception(tmp_path) -> None:
    trainer = make_trainer(tmp_path, Once("on_after_backward", 1))
    with contextlib.suppress(LookupError):  # pytest.raises would keep the traceback alive
        trainer.fit(tiny_batches(1))
    reference = weakref.ref(trainer)
    del trainer
    gc.collect()
    assert reference() is None


def test_a_trainer_that_is_freed_has_finalized(tmp_path) -> None:
    recorder = Recorder()
    assert is_freed_after_use(lambda: make_trainer(tmp_path, recorder))
    assert recorder.count("finalize") == 1


def test_a_trainer_does_not_outlive_a_global_callback_or_the_other_way_round(tmp_path) -> None:
    with Recorder() as recorder:
        assert is_freed_after_use(lambda: make_trainer(tmp_path))
    assert recorder.count("finalize") == 1


# ---- the model and its outputs


class Returning(nn.Module):
    """Returns what a function makes of one parameter."""

    def __init__(self, function) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.function = function

    def forward(self, batch):
        return self.function(self.weight)


@pytest.mark.parametrize(
    ("function", "names"),
    [
        (lambda weight: weight.sum(), ["loss"]),
        (lambda weight: weight.sum().reshape(1), ["loss"]),
        (lambda weight: (weight.sum(), weight), ["loss", "logits"]),
        (lambda weight: [weight.sum(), weight], ["loss", "logits"]),
        (lambda weight: {"loss": weight.sum(), "extra": 7}, ["loss", "extra"]),
    ],
    ids=["tensor", "tensor of one element", "pair", "list of two", "mapping"],
)
def test_an_output_becomes_a_mapping(trainer_of, function, names) -> None:
    seen = []

    class Looking(Callback):
        def on_train_batch_end(self, trainer, model, outputs, batch, batch_idx):
            seen.append(list(outputs))

    trainer = trainer_of(Looking(), model=Returning(function))
    trainer.fit(tiny_batches(1))
    assert seen == [names]
    assert trainer.model.weight.tolist() == pytest.approx([0.9, 0.9])


def test_an_output_without_a_loss_cannot_be_trained_on(trainer_of) -> None:
    trainer = trainer_of(model=Returning(lambda weight: {"scores": weight}))
    with pytest.raises(
        ConfigError,
        match=r"^Returning returned no 'loss' to train on \(it returned: scores\)\. Return",
    ) as raised:
        trainer.fit(tiny_batches(1))
    assert raised.value.__suppress_context__  # no KeyError before it


def test_a_tensor_of_several_elements_is_no_loss(trainer_of) -> None:
    trainer = trainer_of(model=Returning(lambda weight: weight))
    with pytest.raises(ConfigError, match=r"shape \(2,\), which is not a loss"):
        trainer.fit(tiny_batches(1))


@pytest.mark.parametrize("accumulated", [1, 2])
def test_a_loss_of_several_elements_is_refused(trainer_of, accumulated) -> None:
    trainer = trainer_of(
        model=Returning(lambda weight: {"loss": weight}), grad_accum_steps=accumulated
    )
    with pytest.raises(
        ConfigError, match=r"returned a 'loss' of shape \(2,\); it must be a tensor with one elem"
    ):
        trainer.fit(tiny_batches(2))


def test_a_pair_with_the_logits_first_is_refused_with_the_right_order(trainer_of) -> None:
    trainer = trainer_of(model=Returning(lambda weight: (weight, weight.sum())))
    with pytest.raises(ConfigError, match=r"shape \(2,\).* swapped.*\(loss, logits\)") as caught:
        trainer.fit(tiny_batches(1))
    assert "mean()" not in str(caught.value)


@pytest.mark.parametrize("is_from_file", [False, True])
def test_an_override_is_proposed_only_where_a_program_makes_the_trainer(
    trainer_of, is_from_file
) -> None:
    trainer = trainer_of(model=Returning(lambda weight: weight))
    trainer.is_from_file = is_from_file
    with pytest.raises(ConfigError, match=r"\(loss, logits\)") as caught:
        trainer.fit(tiny_batches(1))
    assert ("override compute_loss" in str(caught.value)) != is_from_file
    assert ("wraps" in str(caught.value)) == is_from_file


def test_a_loss_that_is_a_number_is_refused(trainer_of) -> None:
    trainer = trainer_of(model=Returning(lambda weight: {"loss": 0.5}))
    with pytest.raises(ConfigError, match=r"returned a 'loss' of 0\.5; it must be a tensor"):
        trainer.fit(tiny_batches(1))


@pytest.mark.parametrize("accumulated", [1, 2])
def test_a_loss_without_a_graph_is_refused_as_detached(trainer_of, accumulated) -> None:
    trainer = trainer_of(
        model=Returning(lambda weight: weight.detach().sum()), grad_accum_steps=accumulated
    )
    with pytest.raises(ConfigError, match=r"loss of Returning does not require a gradient"):
        trainer.fit(tiny_batches(2))


def test_an_output_of_three_parts_is_refused(trainer_of) -> None:
    trainer = trainer_of(model=Returning(lambda weight: (weight.sum(), weight, weight)))
    with pytest.raises(
        ConfigError, match=r"^The model returned a tuple of length 3\. Return the los"
    ):
        trainer.fit(tiny_batches(1))


def test_no_model_is_refused(tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"^model got None\. Pass a torch.nn.Module, or a call"):
        Trainer(device="cpu", model_dir=tmp_path)


def test_a_callable_that_makes_no_model_is_refused(trainer_of) -> None:
    with pytest.raises(
        ConfigError, match=r"^model: the callable returned 7\. Return a torch.nn.Mod"
    ):
        trainer_of(model=lambda: 7)


def test_a_modes_of_modules_after_fit_are_those_of_training(trainer_of) -> None:
    trainer = trainer_of()
    trainer.fit(tiny_batches(1), tiny_batches(1))
    assert [part.training for part in trainer.model.modules()] == [True] * 4


# ---- what a trainer is made of


def test_fit_without_an_optimizer_is_refused(trainer_of) -> None:
    with pytest.raises(ConfigError, match=r"^fit requires an optimizer\b"):
        trainer_of(optimizer=None).fit(tiny_batches(1))


def test_an_optimizer_that_cannot_know_the_model_is_refused(trainer_of) -> None:
    with pytest.raises(ConfigError, match=r"^optimizer is an instance, but model is a function"):
        trainer_of(optimizer=sgd(Scale()))


def test_an_optimizer_of_a_module_that_exists_is_used(trainer_of) -> None:
    model = Scale()
    trainer_of(model=model, optimizer=sgd(model)).fit(constant_batches(2))
    assert model.weight.item() == pytest.approx(0.8)


def test_something_else_in_the_place_of_an_optimizer_is_refused(trainer_of) -> None:
    with pytest.raises(
        ConfigError, match=r"^optimizer got 'adam'\. Pass a torch.optim.Optimizer, a"
    ):
        trainer_of(optimizer="adam")


def test_a_device_and_a_backend_exclude_each_other(trainer_of) -> None:
    from backends import make_backend

    with pytest.raises(ConfigError, match=r"^device \('cpu'\) and a Backend object are both given"):
        trainer_of(device="cpu", backend=make_backend("cpu"))


def test_the_wrong_kind_of_part_is_refused(trainer_of) -> None:
    with pytest.raises(ConfigError, match=r"^loop got 7\. Pass an instance of LoopCallback"):
        trainer_of(loop=7)


@pytest.mark.parametrize(
    ("given", "advice"),
    [
        ({"loop": 10}, r"loop got 10\. .*TrainingLoop\(num_steps=10\)"),
        ({"precision": "bf16"}, r"precision got 'bf16'\. .*MixedPrecision\(\) for bfloat16"),
        ({"checkpoint": 50}, r"checkpoint got 50\. .*Checkpoint\(steps=50\)"),
        ({"logging": 5}, r"logging got 5\. .*Logging\(log_steps=5\)"),
        ({"autorestart": True}, r"autorestart got True\. .*AutoRestart\(max_num_restarts="),
    ],
)
def test_a_number_or_name_in_the_place_of_a_part_is_refused_with_what_to_write(
    trainer_of, given, advice
) -> None:
    with pytest.raises(ConfigError, match=advice):
        trainer_of(**given)


@pytest.mark.parametrize("given", ["tensorboard", ["tensorboard"]])
def test_the_name_of_a_logger_is_refused_as_loggers(trainer_of, given) -> None:
    with pytest.raises(HookError, match=r"^loggers got 'tensorboard' .*TensorBoardLogger\(\)"):
        trainer_of(loggers=given)


@pytest.mark.parametrize(
    ("args", "advice"),
    [
        (("runs/x",), r"got 'runs/x'.* Trainer\(model_dir=\.\.\.\)"),
        ((Path("runs/x"),), r"Trainer\(model_dir="),
        ((TinyModel(),), r"Trainer\(model="),
        ((sgd(TinyModel()),), r"Trainer\(optimizer="),
    ],
)
def test_an_argument_without_a_name_is_refused_with_its_likely_name(args, advice) -> None:
    with pytest.raises(TypeError, match=advice):
        Trainer(*args)


def test_a_subclass_whose_constructor_is_decorated_takes_arguments_without_names() -> None:
    def decorated(function):
        def called(*args, **kwargs):
            return function(*args, **kwargs)

        return called

    class Own(Trainer):
        @decorated
        def __init__(self, model):
            super().__init__(model=model, device="cpu")

    model = TinyModel()
    assert Own(model).model is model


def test_a_callback_that_is_set_by_name_is_refused(trainer_of) -> None:
    trainer = trainer_of()
    with pytest.raises(TypeError, match=r"Use trainer\.add_callback\(callback\)"):
        trainer.callbacks["mine"] = Callback()


def test_a_frequency_may_be_written_as_a_float() -> None:
    assert TrainingLoop(max_steps=2000, eval_frequency=1e3).eval_frequency == 1000


def test_a_callback_among_the_loggers_is_called(trainer_of) -> None:
    seen = []

    class Mine(Callback):
        def on_metrics(self, trainer, metrics, step):
            seen.append(step)

    trainer = trainer_of(loggers=[Mine()])
    trainer.fit(tiny_batches(2))
    assert seen == [1, 2]
    assert [logger.name for logger in trainer.loggers] == ["ProgressLogger"]


@pytest.mark.parametrize(
    ("given", "advice"),
    [
        ({"epochs": 3}, r"'epochs'. Write loop=TrainingLoop\(num_epochs=3\)"),
        ({"max_epochs": 3}, r"TrainingLoop\(num_epochs=3\)"),
        ({"max_steps": 7}, r"loop=TrainingLoop\(max_steps=7\)"),
        ({"gradient_accumulation_steps": 2}, r"TrainingLoop\(grad_accum_steps=2\)"),
        ({"autoload_last_checkpoint": False}, r"checkpoint=Checkpoint\(autoload_last_"),
        ({"gradient_clip_val": 1.0}, r"Precision\(enabled=False, max_gradient_norm=1.0\)"),
        ({"train_dataloader": []}, r"trainer\.fit\(\.\.\., train_dataloader="),
        ({"scheduler": None}, "Did you mean 'schedulers'"),
    ],
)
def test_an_argument_that_belongs_elsewhere_is_refused_with_where(given, advice) -> None:
    with pytest.raises(TypeError, match=advice):
        Trainer(model=TinyModel(), **given)


def test_a_subclass_may_take_arguments_of_its_own(tmp_path) -> None:
    class Named(Trainer):
        def __init__(self, name: str, *, epochs: int, **settings):
            super().__init__(**settings)
            self.name, self.epochs = name, epochs

    with Named("gan", epochs=3, model=TinyModel(), model_dir=tmp_path) as trainer:
        assert (trainer.name, trainer.epochs) == ("gan", 3)
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'name'"):
        Named(epochs=3)


class Unreduced(TinyModel):
    """Returns the loss of each sample."""

    def forward(self, batch):
        return self.head(torch.tanh(self.hidden(batch[0]))) - batch[1]


class Detached(TinyModel):
    def forward(self, batch):
        return super().forward(batch)[0].detach()


def frozen_model() -> torch.nn.Module:
    return TinyModel().requires_grad_(False)


@pytest.mark.parametrize(
    ("model", "told"),
    [
        (
            Unreduced,
            r"Unreduced returned a tensor of shape \(4, 1\), which is not a loss.*mean\(\)",
        ),
        (frozen_model, r"model is frozen: none of the 4 parameters of TinyModel"),
        (Detached, r"loss of Detached does not require.* detached.*without detach\(\)"),
    ],
)
def test_an_unreduced_a_frozen_and_a_detached_loss_are_told_apart(trainer_of, model, told) -> None:
    with pytest.raises(ConfigError, match=told):
        trainer_of(model=model).fit(tiny_batches(1))


def test_an_unreduced_loss_under_its_name_is_refused_with_its_shape(trainer_of) -> None:
    class Named(Unreduced):
        def forward(self, batch):
            return {"loss": super().forward(batch)}

    with pytest.raises(ConfigError, match=r"shape \(4, 1\); .*loss\.mean\(\)"):
        trainer_of(model=Named).fit(tiny_batches(1))


def test_a_loss_that_compute_loss_forgets_to_return_is_an_error(tmp_path) -> None:
    class Forgetful(Trainer):
        def compute_loss(self, outputs, batch):
            outputs["loss"].mul(2)

    trainer = Forgetful(model=TinyModel(), optimizer=sgd, model_dir=tmp_path / "run")
    with trainer, pytest.raises(ValueError, match=r"Forgetful\.compute_loss returned None"):
        trainer.fit(tiny_batches(1))


class Keyword(torch.nn.Module):
    """Takes what a batch holds, and not the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 1)

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        return self.layer(inputs.float()).mean()


class Inputs(Keyword):
    """Takes one argument, whose name is no key of a batch."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x.float()).mean()


DICT_BATCHES = [{"inputs": torch.ones(2, 3), "targets": torch.ones(2, 1)}]


def note_of(error: BaseException) -> str:
    """Return the one note of how the model was called."""
    [note] = [note for note in error.__notes__ if "the model was called" in note]
    return note


@pytest.mark.parametrize(
    ("model", "batches", "kind", "told", "call"),
    [
        (lambda: torch.nn.Sequential(torch.nn.Linear(3, 1)), tiny_batches(1), TypeError,
         "the batch is a tuple of Tensor (4, 3), Tensor (4, 1).", "self.model(batch[0])"),
        (lambda: torch.nn.Sequential(torch.nn.Linear(3, 1)), [[*tiny_batches(1)[0]]], TypeError,
         "the batch is a list of Tensor (4, 3), Tensor (4, 1).", "self.model(batch[0])"),
        (Inputs, DICT_BATCHES, AttributeError,
         "the batch is a dict of 'inputs': Tensor (2, 3), 'targets': Tensor (2, 1).",
         "self.model(batch['inputs'])"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("method", ["fit", "validate"])
def test_a_model_that_takes_no_whole_batch_gets_a_note_of_what_the_batch_is(
    trainer_of, model, batches, kind, told, call, method
) -> None:
    with pytest.raises(kind) as caught:
        getattr(trainer_of(model=model), method)(batches)
    note = note_of(caught.value)
    assert "model(batch)" in note
    assert told in note
    assert call in note
    assert "call_model" not in note  # no other call fits its signature


def test_a_model_that_fails_later_or_was_given_arguments_gets_no_other_call_as_advice(
    trainer_of,
) -> None:
    class Unpack(Callback):
        def on_before_forward(self, trainer, model, batch, args, kwargs):
            args.clear()
            kwargs.update(batch)

    trainer = trainer_of(Unpack(), model=Keyword)
    trainer.fit(DICT_BATCHES)
    with pytest.raises(TypeError, match="unexpected") as caught:
        trainer.fit([{"input": torch.ones(2, 3)}])
    note = note_of(caught.value)
    assert note.endswith("on_before_forward; the batch is a dict of 'input': Tensor (2, 3).")
    with pytest.raises(TypeError, match="not NoneType") as caught:
        trainer_of().fit([*tiny_batches(2), (None, None)])
    assert note_of(caught.value).endswith("the batch is a tuple of NoneType, NoneType.")


def test_fit_needs_a_training_loop(trainer_of) -> None:
    with pytest.raises(ConfigError, match=r"^fit requires a TrainingLoop, .* a Valida"):
        trainer_of(loop=ValidationLoop()).fit(tiny_batches(1))


def test_a_file_in_the_place_of_model_dir_is_refused(trainer_of, tmp_path) -> None:
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(ConfigError, match=r"^model_dir .*taken' cannot be used: .*Choose a "):
        trainer_of(model_dir=tmp_path / "taken")


def test_a_trainer_stays_in_its_folder_when_the_process_goes_elsewhere(
    trainer_of, tmp_path, monkeypatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    trainer = trainer_of(model_dir="mine", checkpoint=Checkpoint(steps=1), max_steps=1)
    monkeypatch.chdir(tmp_path / "elsewhere")
    trainer.fit(tiny_batches(1))
    assert (tmp_path / "mine" / "checkpoint_1").is_dir()
    assert not list((tmp_path / "elsewhere").iterdir())


def test_a_step_that_was_left_half_done_is_not_saved(trainer_of) -> None:
    class Fail(Callback):
        def on_after_optimizer_step(self, trainer, model, optimizer):
            if trainer.global_step == 2:
                raise KeyboardInterrupt

    trainer = trainer_of(Fail(), max_steps=4, checkpoint=Checkpoint(steps=2))
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(tiny_batches(4))
    with pytest.raises(CheckpointError, match=r"the step after global_step 2\b"):
        trainer.save_checkpoint()
    trainer.load_checkpoint(trainer.model_dir / "checkpoint_2")
    assert trainer.save_checkpoint().name.startswith("checkpoint_2")


@pytest.mark.parametrize("state", [{1, 2}, Path("x"), 1j, {1.5: 2}])
def test_a_state_that_cannot_be_saved_is_refused_before_the_first_step(trainer_of, state) -> None:
    class Odd(Callback):
        def state_dict(self):
            return {"odd": state}

        def load_state_dict(self, state_dict):
            pass

    recorder = Recorder()
    trainer = trainer_of(Odd(), recorder, checkpoint=Checkpoint(steps=100))
    with pytest.raises(ConfigError, match=r"^checkpoints cannot be written: .*Odd\.odd"):
        trainer.fit(tiny_batches(1))
    assert recorder.count("on_train_start") == 0


def test_a_state_that_is_saved_but_never_loaded_is_told(trainer_of, caplog) -> None:
    class Half(Callback):
        def state_dict(self):
            return {}

    trainer_of(Half(), checkpoint=Checkpoint(steps=100)).fit(tiny_batches(1))
    assert "Half has state_dict, but no load_state_dict" in caplog.text


def test_two_trainers_in_a_second_have_a_folder_each(trainer_of) -> None:
    first, second = trainer_of(), trainer_of()
    assert first.artifact_dir != second.artifact_dir
    assert (second.model_dir / "logs" / "latest").resolve() == second.artifact_dir.resolve()


def test_an_attribute_that_is_asked_for_too_early_says_who_sets_it(trainer_of) -> None:
    class Early(Callback):
        def pre_setup(self, trainer):
            trainer.optimizer.zero_grad()

    with pytest.raises(
        AttributeError, match=r"^trainer\.optimizer is not set yet: OptimizerCallback in setup sets"
    ):
        trainer_of(Early())


def test_an_unknown_attribute_is_named(trainer_of) -> None:
    with pytest.raises(AttributeError, match=r"^Trainer has no attribute 'optimiser'\."):
        _ = trainer_of().optimiser


def test_a_callback_that_scales_the_loss_scales_the_update(trainer_of, tmp_path) -> None:
    class ScaleLoss(Callback):
        def on_before_backward(self, trainer, model, outputs):
            outputs["loss"] = 2 * outputs["loss"]

    plain = trainer_of(model_dir=tmp_path / "plain")
    start = weights_of(plain)
    plain.fit(tiny_batches(1))
    scaled = trainer_of(ScaleLoss())
    scaled.fit(tiny_batches(1))
    updates = [
        torch.stack([(after[name] - start[name]).abs().sum() for name in start])
        for after in (weights_of(plain), weights_of(scaled))
    ]
    assert torch.allclose(updates[1], 2 * updates[0], rtol=1e-5)


def test_a_doubled_loss_of_one_weight_doubles_the_update_exactly(trainer_of) -> None:
    class ScaleLoss(Callback):
        def on_before_backward(self, trainer, model, outputs):
            outputs["loss"] = 2 * outputs["loss"]

    half = trainer_of(
        ScaleLoss(), model=Scale, optimizer=lambda m: torch.optim.SGD(m.parameters(), 0.125)
    )
    half.fit(constant_batches(1))
    assert half.model.weight.item() == 0.75


def test_a_callback_may_change_how_the_model_is_called(trainer_of) -> None:
    class Doubling(Callback):
        def on_before_forward(self, trainer, model, batch, args, kwargs):
            args[0] = 2 * args[0]

    trainer = trainer_of(Doubling(), model=Scale)
    trainer.fit(constant_batches(1))
    assert trainer.model.weight.item() == pytest.approx(0.8)


def test_options_that_exclude_each_other_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"^loop: set either .*num_steps=10 and num_epochs=3"):
        TrainingLoop(num_steps=10, num_epochs=3)


@pytest.mark.parametrize(
    "name",
    ["num_steps", "max_steps", "num_epochs", "steps_per_epoch", "eval_steps", "grad_accum_steps"],
)
@pytest.mark.parametrize("value", [0, -1, 1.5, True])
def test_a_count_that_is_not_positive_is_refused(name, value) -> None:
    given = str(value).lower()
    text = rf"^loop\.{name}: expected an integer > 0.*, got {given}\.$"
    with pytest.raises(ConfigError, match=text):
        TrainingLoop(**{name: value})


@pytest.mark.parametrize("value", [-1, -0.5, 1.5, True, "often", float("nan")])
def test_a_frequency_that_does_not_fit_is_refused(value) -> None:
    with pytest.raises(
        ConfigError, match=r"^loop\.eval_frequency: .* an integer >= 0, a fraction .*, got "
    ):
        TrainingLoop(eval_frequency=value)


def test_the_earlier_name_of_a_padding_batch_works(trainer_of) -> None:
    trainer = trainer_of()
    assert trainer.is_filler is trainer.is_padding is False


class Has(Callback):
    """Keeps its trainer."""

    def setup(self, trainer):
        self.trainer = trainer


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
@pytest.mark.parametrize("what", ["trainer", "callbacks", "a list with its callback"])
def test_a_trainer_is_not_copied(trainer_of, what, copied):
    owner = Has()
    trainer = trainer_of(owner)
    trainer.fit(tiny_batches(2))
    given = {"trainer": trainer, "callbacks": trainer.callbacks}.get(what, [owner])
    if what not in ("trainer", "callbacks") and copied is copy.copy:
        assert copied(given)[0].trainer is trainer
        return
    with pytest.raises(TypeError, match=r"cannot be copied or pickled.*copy.deepcopy\("):
        copied(given)
