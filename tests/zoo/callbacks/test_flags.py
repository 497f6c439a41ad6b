"""Flags of other hardware, which have no effect except one, and flags of torch."""

import pytest
import torch

from modelzoo_trainer import Callback, ValidationLoop
from modelzoo_trainer.base.devices import BackendError
from modelzoo_trainer.callbacks import GlobalFlags, ScopedTrainFlags, ScopedValidateFlags
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.callbacks import flags as flags_module
from modelzoo_trainer.zoo.callbacks.flags import (
    ScopedBigCodeEvalHarnessFlags,
    ScopedEleutherEvalHarnessFlags,
)
from tests.doubles import make_trainer, tiny_batches

SIZE = "csx.performance.micro_batch_size"


@pytest.mark.parametrize("cls", [GlobalFlags, ScopedTrainFlags, ScopedValidateFlags])
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"csx.performance.micro_batch_sise": 1}, f"is not a flag. Did you mean '{SIZE}'"),
        ({"micro_batch_size": 1}, "is not a flag."),
        ({SIZE: 0}, "is 0; expected an integer > 0, 'auto', 'explore'"),
        ({SIZE: True}, "is True; expected an integer"),
        ({SIZE: "all"}, "is 'all'; expected an integer"),
        ({SIZE: {"explore": {"min": 0}}}, "expected an integer > 0"),
        ({"csx.debug.execute_crd_memory_gi": "much"}, "is 'much'; expected an integer."),
    ],
)
def test_a_wrong_flag_is_refused(cls, flags, message):
    (name,) = flags
    with pytest.raises(ConfigError, match=f"{cls.__name__}.{name} ") as caught:
        cls(**flags)
    assert message in str(caught.value)


@pytest.mark.parametrize("value", ["auto", "explore", {"explore": {"min": 2, "max": 8}}, None])
def test_a_size_that_others_would_choose_leaves_batches_whole(value):
    flags = ScopedTrainFlags(**{SIZE: value})
    assert flags.micro_batch_size is None
    assert len(flags.notes) == (value is not None)


def test_what_has_no_effect_is_reported():
    flags = GlobalFlags(**{"csx.debug.execute_crd_memory_gi": 50, "csx.new.thing": 1, SIZE: 2})
    assert flags.notes == [
        "csx.debug.execute_crd_memory_gi, csx.new.thing: no effect on this hardware."
    ]


@pytest.mark.parametrize(
    ("callbacks", "sizes"),
    [
        ([GlobalFlags(**{SIZE: 2})], (2, 2)),
        ([GlobalFlags(**{SIZE: 2}), ScopedValidateFlags()], (2, 2)),
        ([ScopedValidateFlags(**{SIZE: 3}), GlobalFlags(**{SIZE: 2})], (2, 3)),
        ([ScopedTrainFlags(**{SIZE: None}), GlobalFlags(**{SIZE: 2})], (None, 2)),
        ([ScopedTrainFlags(**{SIZE: 4}), ScopedValidateFlags(**{SIZE: 3})], (4, 3)),
    ],
)
def test_scoped_flags_go_before_global_ones_in_any_order(tmp_path, callbacks, sizes):
    trainer = make_trainer(tmp_path, *callbacks)
    assert (trainer.data.micro_batch_size, trainer.val_micro_batch_size) == sizes


# ---- flags of torch


BENCHMARK = "torch.backends.cudnn.benchmark"
PRECISION = "torch.set_float32_matmul_precision"


class Look(Callback):
    """Record the precision of matrix products at several times."""

    def __init__(self):
        self.seen = {}

    def _note(self, moment):
        self.seen.setdefault(moment, torch.get_float32_matmul_precision())

    def on_fit_start(self, trainer, train_dataloader, val_dataloader, loop):
        self._note("fit")

    def on_train_step_start(self, trainer, model, batch):
        self._note("train")

    def on_validate_step_start(self, trainer, model, batch):
        self._note("validate")

    def on_fit_end(self, trainer, loop):
        self._note("end")


@pytest.mark.parametrize(
    ("flags", "seen"),
    [
        ([GlobalFlags], ["high", "high", "high", "high"]),
        ([ScopedTrainFlags], ["highest", "high", "highest", "highest"]),
        ([ScopedValidateFlags], ["highest", "highest", "high", "highest"]),
    ],
)
def test_a_switch_is_set_where_it_should_be(trainer_of, flags, seen):
    look = Look()
    trainer = trainer_of(look, *(cls(**{PRECISION: "high"}) for cls in flags))
    trainer.fit(tiny_batches(), tiny_batches(1))
    assert [look.seen[moment] for moment in ("fit", "train", "validate", "end")] == seen
    trainer.close()
    assert torch.get_float32_matmul_precision() == "highest"


def test_a_scoped_switch_goes_before_a_global_one(trainer_of):
    look = Look()
    callbacks = [ScopedTrainFlags(**{PRECISION: "medium"}), GlobalFlags(**{PRECISION: "high"})]
    trainer_of(look, *callbacks).fit(tiny_batches(), tiny_batches(1))
    assert look.seen == {"fit": "high", "train": "medium", "validate": "high", "end": "high"}


def test_a_switch_is_put_back_after_an_error(trainer_of):
    class Fails(Callback):
        def on_train_step_start(self, trainer, model, batch):
            raise ZeroDivisionError

    trainer = trainer_of(ScopedTrainFlags(**{PRECISION: "high", BENCHMARK: True}), Fails())
    with pytest.raises(ZeroDivisionError):
        trainer.fit(tiny_batches())
    assert torch.get_float32_matmul_precision() == "highest"
    assert torch.backends.cudnn.benchmark is False


def test_a_global_switch_is_put_back_if_the_set_up_fails(trainer_of):
    class Fails(Callback):
        def setup(self, trainer):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        trainer_of(GlobalFlags(**{PRECISION: "high"}), Fails())
    assert torch.get_float32_matmul_precision() == "highest"


def test_two_trainers_leave_the_switch_as_it_was(tmp_path):
    first = make_trainer(tmp_path / "a", GlobalFlags(**{PRECISION: "high"}))
    second = make_trainer(tmp_path / "b", GlobalFlags(**{PRECISION: "medium"}))
    first.close()
    assert torch.get_float32_matmul_precision() == "medium"
    second.close()
    assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("torch.backends.cudnn.benchmrk", True, "is not a known switch of torch"),
        ("backends.cudnn.benchmark", True, f"is not a flag. Did you mean '{BENCHMARK}'"),
        (BENCHMARK, "yes", "is 'yes'; expected true or false."),
    ],
)
def test_a_wrong_switch_is_refused(key, value, message):
    with pytest.raises(ConfigError, match=f"GlobalFlags.{key} {message}".replace("?", r"\?")):
        GlobalFlags(**{key: value})


def test_what_torch_refuses_has_its_place(trainer_of, monkeypatch):
    def refuse(values):
        raise BackendError("torch.set_num_threads: no")

    monkeypatch.setattr(flags_module, "held_switches", refuse)
    trainer = trainer_of(ScopedTrainFlags(**{"torch.set_num_threads": 2}))
    with pytest.raises(ConfigError, match=r"ScopedTrainFlags.torch.set_num_threads: no"):
        trainer.fit(tiny_batches())


def test_a_null_switch_is_not_set():
    flags = GlobalFlags(**{BENCHMARK: None})
    assert flags.switches == {}
    assert flags.notes == []


@pytest.mark.parametrize(
    ("cls", "hook"),
    [
        (ScopedEleutherEvalHarnessFlags, "eleuther_eval_harness"),
        (ScopedBigCodeEvalHarnessFlags, "bigcode_eval_harness"),
    ],
)
def test_flags_of_a_harness_count_in_its_validations_alone(trainer_of, cls, hook):
    seen = []

    class Sizes(Callback):
        def on_before_forward(self, trainer, model, batch, args, kwargs):
            seen.append((len(batch[0]), torch.get_float32_matmul_precision()))

    trainer = trainer_of(cls(**{SIZE: 2, PRECISION: "high"}), Sizes())
    trainer.validate(tiny_batches(1), loop=ValidationLoop(hook=hook))
    trainer.validate(tiny_batches(1))
    assert seen == [(2, "high"), (2, "high"), (4, "highest")]
    assert trainer.val_micro_batch_size is None
