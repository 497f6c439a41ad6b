"""Which checkpoints an optimizer takes, and what it says of those that are not quite its own."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from torch.optim.lr_scheduler import ExponentialLR, OneCycleLR

from modelzoo_trainer import Callback, Checkpoint
from modelzoo_trainer.core.parts.optimizer_facts import check_shapes, names_of, settings_of
from modelzoo_trainer.errors import CheckpointMismatch, ConfigError
from modelzoo_trainer.optim import OPTIMIZERS
from modelzoo_trainer.optim.param_groups import make_param_groups
from modelzoo_trainer.zoo.models.freezing import ModelFreezer
from tests.doubles import TinyModel, tiny_batches

BATCHES = tiny_batches(20)


class Wide(TinyModel):
    """A `TinyModel` with layers of other sizes under the same names."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = torch.nn.Linear(3, 5)
        self.head = torch.nn.Linear(5, 1)


class Square(TinyModel):
    """A `TinyModel` with two layers of one size."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
        self.head = torch.nn.Linear(3, 1)


class Tied(Square):
    def __init__(self) -> None:
        super().__init__()
        self.hidden[1].weight = self.hidden[0].weight


class Forgetful(Callback):
    """Takes out of a checkpoint what the first formats do not have."""

    def preprocess_checkpoint(self, trainer, state_dict):
        for name in ("kind", "names", "settings"):
            del state_dict["optimizer"][name]


def adamw(**settings: Any) -> Any:
    return lambda model: torch.optim.AdamW(model.parameters(), **({"lr": 0.01} | settings))


def reversed_adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(reversed(list(model.parameters())), lr=0.01)


@pytest.fixture
def run(trainer_of):
    """A function that trains to a step in one folder, and returns the trainer."""

    def train(max_steps: int, *callbacks: Any, is_strict: bool = True, **settings: Any) -> Any:
        checkpoint = Checkpoint(steps=5, disable_strict_checkpoint_loading=not is_strict)
        trainer = trainer_of(*callbacks, checkpoint=checkpoint, max_steps=max_steps, **settings)
        trainer.fit(BATCHES)
        return trainer

    return train


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


# ---- settings


def test_the_settings_of_the_checkpoint_hold_with_a_warning(run, caplog) -> None:
    run(5, optimizer=adamw(weight_decay=0.1))
    trainer = run(10, optimizer=adamw(lr=0.5, betas=(0.8, 0.9), weight_decay=0.1))
    [group] = trainer.optimizer.param_groups
    assert (group["lr"], group["betas"]) == (0.01, (0.9, 0.999))
    [warning] = warnings_in(caplog)
    assert warning.startswith(
        "optimizer: lr is 0.5 (checkpoint: 0.01), betas is (0.8, 0.9) (checkpoint: (0.9, 0.999)). "
        "Using the checkpoint's settings"
    )


def test_the_settings_that_held_are_those_of_the_next_checkpoint(run, caplog) -> None:
    run(5, optimizer=adamw())
    run(10, optimizer=adamw(lr=0.5))
    caplog.clear()
    run(15, optimizer=adamw())
    assert warnings_in(caplog) == []
    run(20, optimizer=adamw(lr=0.5))
    assert "lr is 0.5 (checkpoint: 0.01)" in caplog.text


def test_new_settings_can_be_set_as_the_warning_says(run) -> None:
    class Faster(Callback):
        def on_fit_start(self, trainer, train_dataloader, val_dataloader, loop):
            trainer.optimizer.param_groups[0]["lr"] = 0.5

    run(5, optimizer=adamw())
    assert run(10, Faster(), optimizer=adamw()).optimizer.param_groups[0]["lr"] == 0.5


def test_what_a_schedule_writes_is_not_warned_of(run, caplog) -> None:
    settings = {"schedulers": lambda optimizer: ExponentialLR(optimizer, 0.9)}
    run(5, optimizer=adamw(), **settings)
    run(10, optimizer=adamw(), **settings)
    assert warnings_in(caplog) == []


def test_what_a_schedule_does_not_write_is_warned_of(run, caplog) -> None:
    settings = {"schedulers": lambda optimizer: ExponentialLR(optimizer, 0.9)}
    run(5, optimizer=adamw(), **settings)
    run(10, optimizer=adamw(weight_decay=0.5, betas=(0.8, 0.9)), **settings)
    [warning] = warnings_in(caplog)
    assert "lr is" not in warning
    assert "weight_decay is 0.5 (checkpoint: 0.01)" in warning
    assert "betas is (0.8, 0.9)" in warning


def test_a_schedule_that_cycles_the_momentum_owns_it(run, caplog) -> None:
    settings = {"schedulers": lambda optimizer: OneCycleLR(optimizer, 0.1, 20)}
    run(5, optimizer=adamw(), **settings)
    run(10, optimizer=adamw(betas=(0.8, 0.999)), **settings)
    assert warnings_in(caplog) == []


def test_settings_are_plain_values_of_what_is_computed() -> None:
    model = TinyModel()
    made = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.1), foreach=False)
    [settings] = settings_of(made)
    assert settings == {
        "betas": (0.9, 0.999),
        "eps": 1e-08,
        "weight_decay": 0,
        "amsgrad": False,
        "maximize": False,
        "decoupled_weight_decay": False,
    }


def test_an_older_checkpoint_is_taken_as_it_is(run, caplog) -> None:
    run(5, optimizer=adamw())
    trainer = run(10, Forgetful(), optimizer=adamw(lr=0.5))
    assert trainer.optimizer.param_groups[0]["lr"] == 0.01
    assert warnings_in(caplog) == []


# ---- names


def test_another_order_of_the_parameters_is_refused(run) -> None:
    run(5, optimizer=adamw(), model=Square)
    with pytest.raises(CheckpointMismatch, match=r"parameter 0 is 'head.bias', .* 'hidden.0.weig"):
        run(10, optimizer=reversed_adamw, model=Square)


def test_without_state_the_order_of_the_parameters_is_all_the_same(run) -> None:
    run(5, model=Square)
    settings = {"optimizer": lambda model: torch.optim.SGD(reversed([*model.parameters()]), lr=0.1)}
    assert run(10, model=Square, **settings).global_step == 10


def test_the_names_are_those_of_the_bare_model() -> None:
    model = TinyModel()
    compiled = torch.compile(torch.nn.ModuleDict({"module": model}), backend="eager")
    names = names_of(compiled, adamw()(model))
    assert names == [["hidden.weight", "hidden.bias", "head.weight", "head.bias"]]


def test_a_tied_parameter_has_one_name() -> None:
    model = Tied()
    assert names_of(model, adamw()(model)) == [
        ["hidden.0.weight", "hidden.0.bias", "hidden.1.bias", "head.weight", "head.bias"]
    ]


def test_parameters_that_are_not_the_models_have_no_names() -> None:
    model = TinyModel()
    extra = torch.nn.Parameter(torch.zeros(2))
    assert names_of(model, torch.optim.SGD([*model.parameters(), extra], lr=0.1)) is None


def test_a_group_that_is_added_later_is_named_in_the_next_checkpoint(run) -> None:
    class Unfreeze(Callback):
        def on_train_batch_start(self, trainer, model, batch, batch_idx):
            if len(trainer.optimizer.param_groups) == 1 and trainer.global_step == 7:
                trainer.optimizer.add_param_group({"params": model.head.parameters()})

    class Noting(Callback):
        sizes: ClassVar[list[list[int]]] = []

        def on_save_checkpoint(self, trainer, state_dict):
            self.sizes.append([len(names) for names in state_dict["optimizer"]["names"]])

    noting = Noting()
    run(10, Unfreeze(), noting, optimizer=lambda model: adamw()(model.hidden))
    assert noting.sizes == [[2], [2, 2]]


# ---- shapes


@pytest.mark.parametrize(
    "optimizer", [adamw(), lambda model: torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)]
)
def test_state_of_another_shape_is_refused_before_it_is_used(run, optimizer) -> None:
    run(5, optimizer=optimizer)
    match = r"of hidden.weight has the shape \(4, 3\).* parameter \(5, 3\)"
    with pytest.raises(CheckpointMismatch, match=match):
        run(10, optimizer=optimizer, model=Wide, is_strict=False)


@pytest.mark.parametrize(
    "optimizer",
    [
        *(OPTIMIZERS[name] for name in OPTIMIZERS if name != "AdamBase"),
        *(torch.optim.Adafactor, torch.optim.ASGD, torch.optim.RAdam, torch.optim.Rprop),
    ],
)
def test_the_shapes_of_an_optimizers_own_state_fit(optimizer) -> None:
    model = TinyModel()
    made = optimizer(model.parameters(), lr=0.01)
    model(BATCHES[0])[0].backward()
    made.step()
    check_shapes(made, made.state_dict(), None)


# ---- steps


def test_an_optimizer_that_needs_a_closure_is_refused_at_set_up(trainer_of) -> None:
    with pytest.raises(ConfigError, match=r"LBFGS .*closure"):
        trainer_of(optimizer=lambda model: torch.optim.LBFGS(model.parameters()))


@pytest.mark.parametrize("given", [torch.optim.Adam, partial(torch.optim.Adam, lr=0.1)])
def test_an_optimizer_class_is_refused_with_what_to_write(trainer_of, given) -> None:
    with pytest.raises(
        ConfigError, match=r"the class Adam, .*lambda model: Adam\(model.parameters"
    ):
        trainer_of(optimizer=given)


# ---- parameters


def test_a_callable_that_takes_the_model_for_its_parameters_gets_a_note(trainer_of) -> None:
    with pytest.raises(TypeError) as caught:
        trainer_of(optimizer=lambda params: torch.optim.SGD(params, lr=0.1))
    assert "called with the model (a TinyModel)" in "".join(caught.value.__notes__)


def test_an_optimizer_with_none_of_the_models_parameters_is_refused(trainer_of) -> None:
    other = TinyModel()
    trainer = trainer_of(optimizer=lambda model: adamw()(other))
    with pytest.raises(
        ConfigError, match=r"none of its 4 parameters .*\(4 parameters\).*AdamW\(model\.param"
    ):
        trainer.fit(BATCHES)
    assert trainer.global_step == 0


def test_an_instance_that_has_the_parameters_of_another_model_is_refused(trainer_of) -> None:
    with pytest.raises(ConfigError, match="none of its 4 parameters"):
        trainer_of(model=TinyModel(), optimizer=adamw()(TinyModel())).fit(BATCHES)


def test_foreign_parameters_and_missing_ones_are_counted_in_a_warning(trainer_of, caplog) -> None:
    def mixed(model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD([*model.hidden.parameters(), *TinyModel().parameters()], lr=0.1)

    trainer = trainer_of(optimizer=mixed, num_steps=1)
    trainer.fit(BATCHES)
    trainer.fit(BATCHES)
    foreign, missing = warnings_in(caplog)
    assert "4 of its 6 parameters" in foreign
    assert "2 of the model's 4 trainable parameters" in missing
    assert "head.weight, head.bias" in missing


def frozen_in_part(model: torch.nn.Module) -> torch.optim.Optimizer:
    ModelFreezer(getattr(model, "_orig_mod", model)).freeze()
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)


def grouped(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(make_param_groups(model, weight_decay=0.1), lr=0.1)


@pytest.mark.parametrize("optimizer", [frozen_in_part, grouped, adamw()])
@pytest.mark.parametrize(
    "model", [TinyModel, Tied, lambda: torch.compile(TinyModel(), backend="eager")]
)
@pytest.mark.slow_cases(every=4)
def test_frozen_grouped_tied_and_compiled_parameters_are_neither_foreign_nor_missing(
    trainer_of, caplog, optimizer, model
) -> None:
    trainer_of(optimizer=optimizer, model=model, max_steps=1).fit(BATCHES)
    assert warnings_in(caplog) == []


def test_an_optimizer_of_frozen_parameters_alone_is_refused(trainer_of) -> None:
    def frozen(model: torch.nn.Module) -> torch.optim.Optimizer:
        return adamw()(model.hidden.requires_grad_(False))

    with pytest.raises(ConfigError, match=r"none of its 2 .* 2 other .*head\.weight, head\.bias"):
        trainer_of(optimizer=frozen).fit(BATCHES)

    class Unfreezing(Callback):
        def on_train_start(self, trainer, model, train_dataloader, loop, loop_idx):
            model.hidden.requires_grad_(True)

    trainer_of(Unfreezing(), optimizer=frozen, max_steps=1).fit(BATCHES)


def test_parameters_that_a_callbacks_optimizer_trains_are_not_missing(trainer_of, caplog) -> None:
    class Stepping(Callback):
        def setup(self, trainer):
            self.optimizer = adamw()(trainer.model.head)

        def on_after_optimizer_step(self, trainer, model, optimizer):
            self.optimizer.step()

    trainer = trainer_of(Stepping(), optimizer=lambda model: adamw()(model.hidden), max_steps=1)
    trainer.fit(BATCHES)
    assert not any("in no optimizer" in line for line in warnings_in(caplog))


def test_a_group_that_is_added_when_a_fit_starts_is_not_missing(trainer_of, caplog) -> None:
    class Adding(Callback):
        def on_fit_start(self, trainer, train_dataloader, val_dataloader, loop):
            trainer.optimizer.add_param_group({"params": trainer.model.head.parameters()})

    optimizer = lambda model: adamw()(model.hidden)  # noqa: E731
    trainer_of(Adding(), optimizer=optimizer, max_steps=1).fit(BATCHES)
    assert warnings_in(caplog) == []


def test_a_dry_run_has_other_parameters_than_an_optimizer_that_was_given(trainer_of) -> None:
    model = TinyModel()
    trainer = trainer_of(model=model, optimizer=adamw()(model), device="meta", max_steps=1)
    trainer.fit(BATCHES)
    assert trainer.global_step == 1


class UnfreezeLater(Callback):
    def on_train_batch_start(self, trainer, model, batch, batch_idx):
        if trainer.global_step == 3:
            model.requires_grad_(True)


def test_parameters_that_are_unfrozen_later_without_an_optimizer_are_told(trainer_of, caplog):
    def only_trainable(model):
        first, *rest = model.parameters()
        first.requires_grad_(False)
        return torch.optim.SGD(rest, lr=0.1)

    trainer_of(UnfreezeLater(), optimizer=only_trainable, num_steps=15).fit(tiny_batches(5))
    told = [one for one in caplog.messages if "are in no optimizer" in one]
    assert len(told) == 1
    assert "1 of the model's" in told[0]
