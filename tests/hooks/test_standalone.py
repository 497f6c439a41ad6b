"""Callbacks in a custom loop, without a trainer."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
from torch import nn

from modelzoo_trainer import (
    Callback,
    HookError,
    Hooks,
    StopTraining,
    TrainingLoop,
    register_global_callback,
)
from modelzoo_trainer.callbacks import CheckLoss, EarlyStopping, SaveBest, TerminateOnNaN


class Log:
    """Record calls; no base class."""

    def __init__(self, name: str = "log") -> None:
        self.name = name
        self.seen: list[Any] = []

    def on_train_batch_end(self, loss: float) -> None:
        self.seen.append(loss)


class Count(Callback):
    """Count batches, and save the count."""

    def __init__(self) -> None:
        self.num = 0

    def on_train_batch_end(self, trainer, model, outputs, batch, batch_idx):
        self.num += 1

    def state_dict(self):
        return {"num": self.num}

    def load_state_dict(self, state_dict):
        self.num = state_dict["num"]


WHOLE = {"trainer": None, "model": None, "outputs": {}, "batch": 1, "batch_idx": 0}


def orders(*names: str) -> tuple[list[str], list[Any]]:
    """Return a list, and callbacks that append their names to it."""
    order: list[str] = []

    class Member:
        def __init__(self, name: str) -> None:
            self.name = name

        def on_it(self) -> None:
            order.append(self.name)

    return order, [Member(name) for name in names]


@pytest.mark.parametrize("kind", [list, tuple, deque, iter])
def test_any_iterable_of_callbacks_is_taken_in_order(kind) -> None:
    order, members = orders("a", "b")
    Hooks(kind(members)).call("on_it")
    assert order == ["a", "b"]


def test_a_single_object_and_a_module_that_is_iterable_are_one_callback() -> None:
    class Told(nn.Sequential):
        def on_it(self) -> None:
            order.append("module")

    order, [member] = orders("alone")
    Hooks(member).call("on_it")
    Hooks(Told(nn.Linear(1, 1))).call("on_it")
    assert order == ["alone", "module"]


def test_no_callbacks_are_fine() -> None:
    hooks = Hooks()
    hooks.call("anything", 1, two=2)
    assert list(hooks) == []


def test_a_declared_hook_of_a_callback_gets_what_is_passed_under_its_names() -> None:
    count = Count()
    Hooks(count).call("on_train_batch_end", **WHOLE, loss=3.0)
    assert count.num == 1


def test_a_declared_hook_that_lacks_its_trainer_is_refused_by_name() -> None:
    with pytest.raises(
        HookError,
        match=r"^Count\.on_train_batch_end requires 'trainer', but the call passes \(batch\)\.",
    ):
        Hooks(Count()).call("on_train_batch_end", batch=1)


def test_a_hook_that_a_callback_only_inherits_is_not_called() -> None:
    Hooks(Count()).call("on_fit_end", nobody_takes=1)


def test_the_same_object_is_called_once() -> None:
    log = Log()
    Hooks([log, log]).call("on_train_batch_end", loss=1)
    assert log.seen == [1]


def test_global_callbacks_come_after_the_users_and_before_models() -> None:
    order, [own, common] = orders("own", "global")

    class Model(nn.Module):
        def on_it(self) -> None:
            order.append("model")

    hooks = Hooks(own)
    hooks.add_model(Model())
    hooks.call("on_it")
    handle = register_global_callback(common)
    try:
        hooks.call("on_it")
        Hooks(use_global=False).call("on_it")
    finally:
        handle.remove()
    hooks.call("on_it")
    assert order == ["own", "model", "own", "global", "model", "own", "model"]


def test_a_callback_is_added_and_taken_out() -> None:
    hooks, log = Hooks(), Log()
    handle = hooks.add_callback(log)
    hooks.call("on_train_batch_end", loss=1)
    handle.remove()
    handle.remove()
    hooks.call("on_train_batch_end", loss=2)
    assert log.seen == [1]


def test_a_callback_added_during_a_call_takes_part_from_the_next_one() -> None:
    order, [late] = orders("late")

    class Adds:
        def on_it(self) -> None:
            hooks.add_callback(late)

    hooks = Hooks(Adds())
    hooks.call("on_it")
    assert order == []
    hooks.call("on_it")
    assert order == ["late"]


def test_a_class_and_a_core_callback_are_refused() -> None:
    with pytest.raises(HookError, match=r"^Hooks got the class Log\. Pass an instance: Log\(\)"):
        Hooks(Log)
    with pytest.raises(HookError, match=r"got \('post-forward', .* only with a Trainer"):
        Hooks([("post-forward", print)])
    with pytest.raises(HookError, match=r"^TrainingLoop works only with a Trainer"):
        Hooks([TrainingLoop(max_steps=1)])


def test_a_stop_request_is_raised_when_all_were_called() -> None:
    class Stops:
        def on_train_batch_end(self) -> None:
            raise StopTraining("enough")

    log = Log()
    with pytest.raises(StopTraining, match="enough"):
        Hooks([Stops(), log]).call("on_train_batch_end", loss=1)
    assert log.seen == [1]


def test_an_error_keeps_its_type_names_its_origin_and_ends_the_call() -> None:
    class Fails:
        def on_train_batch_end(self) -> None:
            raise LookupError("lost")

    log = Log()
    with pytest.raises(LookupError, match="lost") as caught:
        Hooks([Fails(), log]).call("on_train_batch_end", loss=1)
    assert caught.value.__notes__ == ["raised in Fails.on_train_batch_end"]
    assert log.seen == []


# ---- declared events of a loop


def test_a_misspelt_call_is_refused_where_the_events_are_declared() -> None:
    with pytest.raises(
        HookError, match=r"'on_epoch_edn' is not an event of this loop\. Did you mean"
    ):
        Hooks(events=["on_epoch_end"]).call("on_epoch_edn")
    Hooks(events="on_epoch_end").call("on_epoch_end")  # one name is a list of one


def test_an_event_of_the_loop_in_other_words_is_refused() -> None:
    class Mine:
        def on_step_finish(self):
            pass

    with pytest.raises(HookError, match=r"Mine\.on_step_finish.*'on_step_end'"):
        Hooks(Mine(), events=["on_step_end"])


def test_a_misspelt_method_is_refused_where_the_events_are_declared() -> None:
    class Misspelt:
        def on_epoch_edn(self) -> None: ...

    with pytest.raises(HookError, match=r"^Misspelt\.on_epoch_edn is not an event of this loop"):
        Hooks(Misspelt(), events=["on_epoch_end"])
    Hooks(Misspelt())


# ---- models


def test_a_model_is_called_once_however_often_and_however_wrapped_it_is_added() -> None:
    class Model(nn.Module):
        num = 0

        def on_it(self) -> None:
            self.num += 1

    model = Model()
    hooks = Hooks()
    hooks.add_model(model)
    hooks.add_model(nn.DataParallel(model))
    hooks.call("on_it")
    hooks.remove_callback(model)
    hooks.call("on_it")
    assert model.num == 1


def test_a_models_other_methods_are_no_hooks() -> None:
    model = nn.Linear(1, 1)
    hooks = Hooks()
    hooks.add_model(model)
    hooks.call("eval")
    assert model.training


# ---- state


def test_states_come_back_by_name_and_number() -> None:
    before = Hooks([Count(), Log(), Count()])
    before.call("on_train_batch_end", **WHOLE, loss=1)
    before.callbacks[2].num = 7
    state = before.state_dict()
    assert state == {"Count": {"num": 1}, "Count_2": {"num": 7}}
    after = Hooks([Count(), Log(), Count()])
    after.load_state_dict(state)
    assert after.state_dict() == state


def test_a_state_of_nobody_is_warned_of(caplog) -> None:
    Hooks(Log()).load_state_dict({"Count": {"num": 1}})
    assert "state of Count, which is not part of this run" in caplog.text


def test_a_loop_with_its_callbacks_continues_as_if_it_had_not_been_broken() -> None:
    def train(hooks: Hooks, batches: range) -> None:
        for batch in batches:
            hooks.call("on_train_batch_end", **(WHOLE | {"batch": batch}))

    whole, first, second = (Hooks(Count()) for _ in range(3))
    train(whole, range(5))
    train(first, range(2))
    second.load_state_dict(first.state_dict())
    train(second, range(2, 5))
    assert second.state_dict() == whole.state_dict()


@pytest.mark.parametrize(
    "kind", [CheckLoss, TerminateOnNaN, lambda: EarlyStopping("loss"), lambda: SaveBest("loss")]
)
def test_a_callback_that_would_do_nothing_without_a_trainer_is_refused(kind) -> None:
    with pytest.raises(HookError, match="works only with a Trainer"):
        Hooks(kind())
