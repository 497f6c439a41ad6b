"""Callbacks of a trainer: their order, names, changes, and errors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from modelzoo_trainer import (
    HOOKS,
    Callback,
    HookError,
    Logging,
    TrainingLoop,
    register_global_callback,
)
from modelzoo_trainer.callbacks import CheckLoss, ComputeNorm
from modelzoo_trainer.hooks.global_callbacks import global_callbacks
from modelzoo_trainer.hooks.spec import Phase, hook
from tests.doubles import History, Recorder, recorder_class, tiny_batches

# ---- order


@pytest.fixture(autouse=True)
def _no_global_callback_is_left() -> Iterator[None]:
    yield
    assert list(global_callbacks()) == []


class RecorderLoop(TrainingLoop):
    """A core callback that records its calls."""

    def __init__(self, calls: list[str]) -> None:
        super().__init__()
        self.calls = calls

    def on_fit_start(self, trainer, train_dataloader, val_dataloader, loop):
        self.calls.append("TrainingLoop")


class Said(Callback):
    """Record a word at the start of a fit."""

    def __init__(self, calls: list[str], word: str) -> None:
        self.calls = calls
        self.word = word

    def on_fit_start(self, trainer, train_dataloader, val_dataloader, loop):
        self.calls.append(self.word)


class SaidLogger(History):
    def __init__(self, calls: list[str], word: str) -> None:
        super().__init__()
        self.calls = calls
        self.word = word

    def on_fit_start(self, trainer, train_dataloader, val_dataloader, loop):
        self.calls.append(self.word)


def test_the_order_is_core_user_loggers_global(trainer_of) -> None:
    calls: list[str] = []
    with Said(calls, "global 1"), Said(calls, "global 2"):
        trainer_of(
            Said(calls, "user 1"),
            Said(calls, "user 2"),
            loop=RecorderLoop(calls),
            loggers=[SaidLogger(calls, "logger 1"), SaidLogger(calls, "logger 2")],
        ).fit(tiny_batches())
    assert calls == [
        "TrainingLoop",
        *("user 1", "user 2"),
        *("logger 1", "logger 2"),
        *("global 1", "global 2"),
    ]


def test_a_logger_among_the_callbacks_runs_with_the_loggers(trainer_of) -> None:
    calls: list[str] = []
    trainer = trainer_of(SaidLogger(calls, "logger"), Said(calls, "user"), progress="none")
    trainer.fit(tiny_batches())
    assert calls == ["user", "logger"]
    assert len(trainer.loggers) == 1


def test_the_documented_example_calls_core_then_user_then_global(trainer_of) -> None:
    calls: list[str] = []

    class MyComputeNorm(ComputeNorm):
        def on_fit_start(self, trainer, train_dataloader, val_dataloader, loop):
            calls.append("ComputeNorm")

    class MyCheckLoss(CheckLoss):
        def on_fit_start(self, trainer, train_dataloader, val_dataloader, loop):
            calls.append("CheckLoss")

    with MyCheckLoss():
        trainer_of(MyComputeNorm(), loop=RecorderLoop(calls)).fit(tiny_batches())
    assert calls == ["TrainingLoop", "ComputeNorm", "CheckLoss"]


def test_all_callbacks_lists_the_documented_example_in_order(trainer_of) -> None:
    with CheckLoss():
        trainer = trainer_of(ComputeNorm())
        kinds = [type(callback).__name__ for callback in trainer.all_callbacks]
    assert [k for k in kinds if k in ("TrainingLoop", "ComputeNorm", "CheckLoss")] == [
        "TrainingLoop",
        "ComputeNorm",
        "CheckLoss",
    ]


# ---- valid callbacks


def test_an_object_with_a_hook_is_a_callback(trainer_of) -> None:
    class Duck:
        ends = 0

        def on_fit_end(self, trainer, loop):
            self.ends += 1

    duck = Duck()
    trainer_of(duck).fit(tiny_batches())
    assert duck.ends == 1


def test_a_single_callback_needs_no_list(trainer_of) -> None:
    recorder = Recorder()
    trainer_of(callbacks=recorder).fit(tiny_batches())
    assert recorder.count("on_fit_end") == 1


def test_the_list_of_callbacks_is_copied(trainer_of) -> None:
    given = [Recorder()]
    trainer = trainer_of(callbacks=given)
    given.append(Recorder())
    assert len(trainer.get_callbacks(Recorder)) == 1


def test_any_iterable_of_callbacks_is_accepted(trainer_of) -> None:
    trainer = trainer_of(callbacks=(Recorder() for _ in range(2)))
    assert len(trainer.get_callbacks(Recorder)) == 2


def test_the_same_object_twice_runs_once_with_a_warning(trainer_of) -> None:
    recorder = Recorder()
    with pytest.warns(UserWarning, match="callbacks: the same Recorder object was given twice"):
        trainer = trainer_of(recorder, recorder)
    trainer.fit(tiny_batches())
    assert recorder.count("on_fit_end") == 1


def test_several_instances_of_a_class_have_numbered_names(trainer_of) -> None:
    first, second, third = Recorder(), Recorder(), Recorder()
    trainer = trainer_of(first, second, third)
    assert [trainer.get_callback_name(each) for each in (first, second, third)] == [
        "Recorder",
        "Recorder_2",
        "Recorder_3",
    ]


def test_an_object_that_is_both_the_users_and_global_runs_once(trainer_of) -> None:
    recorder = Recorder()
    with recorder:
        trainer_of(recorder).fit(tiny_batches())
    assert recorder.count("on_fit_end") == 1


def test_a_core_callback_among_the_users_is_refused(trainer_of) -> None:
    with pytest.raises(
        HookError, match=r"a TrainingLoop, which is a core callback\. Pass it by its"
    ):
        trainer_of(TrainingLoop())


def test_a_class_among_the_callbacks_is_refused(trainer_of) -> None:
    with pytest.raises(HookError, match=r"Pass an instance: Recorder\(\)"):
        trainer_of(Recorder)


# ---- global callbacks


def test_a_global_instance_is_part_of_trainers_that_exist_already(trainer_of) -> None:
    trainer = trainer_of()
    recorder = Recorder()
    handle = register_global_callback(recorder)
    trainer.fit(tiny_batches())
    handle.remove()
    trainer.fit(tiny_batches())
    assert recorder.count("on_fit_end") == 1


def test_a_handle_may_be_removed_twice() -> None:
    handle = register_global_callback(Recorder())
    handle.remove()
    handle.remove()
    assert list(global_callbacks()) == []


def test_a_class_is_registered_by_a_decorator_and_stays_a_class(trainer_of) -> None:
    ends = []

    @register_global_callback
    class Mine(Callback):
        def on_fit_end(self, trainer, loop):
            ends.append(trainer.global_step)

    trainer_of().fit(tiny_batches(3))
    Mine.global_callback_handle.remove()
    assert isinstance(Mine, type)
    assert ends == [3]


def test_a_misfit_is_not_registered() -> None:
    with pytest.raises(HookError, match="which has no hook"):
        register_global_callback(object())


def test_nested_use_of_one_object_is_safe(trainer_of) -> None:
    check = CheckLoss()
    trainer = trainer_of(check_loss=False)
    found = []
    with check:
        with check:
            found.append(len(trainer.get_callbacks(CheckLoss)))
        found.append(len(trainer.get_callbacks(CheckLoss)))
    found.append(len(trainer.get_callbacks(CheckLoss)))
    assert found == [1, 1, 0]


def test_an_exception_inside_with_takes_the_callback_back() -> None:
    with pytest.raises(ZeroDivisionError), CheckLoss():
        1 / 0  # noqa: B018  # raised on purpose
    assert list(global_callbacks()) == []


# ---- changes


def test_an_added_callback_is_set_up_and_can_be_removed(trainer_of) -> None:
    trainer = trainer_of()
    recorder = Recorder()
    handle = trainer.add_callback(recorder)
    trainer.fit(tiny_batches())
    handle.remove()
    handle.remove()
    trainer.fit(tiny_batches())
    assert recorder.names[:4] == ["pre_setup", "setup", "post_setup", "on_enter_fit"]
    assert recorder.count("on_fit_start") == 1


def test_adding_the_same_object_again_changes_nothing(trainer_of) -> None:
    recorder = Recorder()
    trainer = trainer_of(recorder)
    trainer.add_callback(recorder)
    assert recorder.names == ["pre_setup", "setup", "post_setup"]


def test_a_misfit_is_not_added(trainer_of) -> None:
    trainer = trainer_of()
    with pytest.raises(HookError, match="which has no hook"):
        trainer.add_callback(object())


def test_a_callback_added_during_a_hook_takes_part_from_the_next_call(trainer_of) -> None:
    seen = []
    late = Recorder()

    class Adding(Callback):
        def on_train_batch_start(self, trainer, model, batch, batch_idx):
            seen.append(late.count("on_train_batch_start"))
            trainer.add_callback(late)

    trainer_of(Adding()).fit(tiny_batches(3))
    assert seen == [0, 0, 1]
    assert late.names[3] == "on_train_step_start"


def test_a_callback_removed_during_a_hook_is_still_called_by_that_one(trainer_of) -> None:
    recorder = Recorder()

    class Removing(Callback):
        def on_train_batch_start(self, trainer, model, batch, batch_idx):
            trainer.remove_callback(recorder)

    trainer_of(Removing(), recorder).fit(tiny_batches(3))
    assert recorder.names[-1] == "on_train_batch_start"
    assert recorder.count("on_train_batch_start") == 1


def test_removing_a_callback_on_a_step_that_is_not_logged_logs_nothing(trainer_of) -> None:
    history = History()

    class Removing(Callback):
        def on_train_batch_start(self, trainer, model, batch, batch_idx):
            trainer.remove_callback(self)

    trainer_of(Removing(), ComputeNorm(), loggers=history, logging=Logging(log_steps=3)).fit(
        tiny_batches(6)
    )
    assert history.steps == [3, 6]


# ---- the end


def test_close_finalizes_once(trainer_of) -> None:
    recorder = Recorder()
    trainer = trainer_of(recorder)
    trainer.close()
    trainer.close()
    assert recorder.count("finalize") == 1


def test_leaving_with_closes_the_trainer(trainer_of) -> None:
    recorder = Recorder()
    with trainer_of(recorder) as trainer:
        trainer.fit(tiny_batches())
    assert recorder.names[-1] == "finalize"


def test_a_failed_set_up_finalizes_and_names_the_callback(trainer_of) -> None:
    recorder = Recorder()

    class Broken(Callback):
        def setup(self, trainer):
            raise LookupError("no such thing")

    with pytest.raises(LookupError) as caught:
        trainer_of(recorder, Broken())
    assert caught.value.__notes__ == ["raised in Broken.setup"]
    assert recorder.names == ["pre_setup", "setup", "finalize"]


# ---- firing hooks by name


class Evaluation(Callback):
    def __init__(self) -> None:
        self.got: list[Any] = []

    def on_my_event(self, trainer, value, scale=1):
        self.got.append((type(trainer).__name__, value, scale))


def test_a_declared_hook_is_called_with_the_trainer_first(trainer_of) -> None:
    seen: list[Any] = []
    trainer = trainer_of(Recorder(lambda name, passed: seen.append((name, passed))))
    seen.clear()
    trainer.call("run_validation", 4, is_last=True)
    assert seen == [("run_validation", (trainer, 4, True))]


def test_a_declared_hook_with_a_wrong_argument_is_refused(trainer_of) -> None:
    with pytest.raises(HookError, match=r"but takes \(loop_idx, is_last\)"):
        trainer_of().call("run_validation", 4, last=True)


def test_a_declared_hook_with_an_argument_too_few_is_refused(trainer_of) -> None:
    with pytest.raises(HookError, match=r"call\('run_validation'\) got \(4\), but takes"):
        trainer_of().call("run_validation", 4)


def test_a_custom_event_reaches_those_that_define_it(trainer_of) -> None:
    evaluation = Evaluation()
    trainer_of(evaluation, Recorder()).call("on_my_event", 3)
    assert evaluation.got == [("Trainer", 3, 1)]


def test_keywords_of_a_custom_event_are_filtered_by_name(trainer_of) -> None:
    evaluation = Evaluation()
    trainer_of(evaluation).call("on_my_event", value=3, scale=2, color="red")
    assert evaluation.got == [("Trainer", 3, 2)]


def test_a_listener_without_trainer_gets_the_arguments_alone(trainer_of) -> None:
    class Plain(Callback):
        got = ()

        def my_event(self, value, **others):
            self.got = (value, others)

    plain = Plain()
    trainer_of(plain).call("my_event", 3, color="red")
    assert plain.got == (3, {"color": "red"})


def test_a_custom_event_that_lacks_a_required_parameter_is_refused(trainer_of) -> None:
    with pytest.raises(
        HookError, match=r"^Evaluation\.on_my_event requires 'value', but the call passes \(color\)"
    ):
        trainer_of(Evaluation()).call("on_my_event", color="red")


def test_nothing_happens_if_nobody_listens(trainer_of) -> None:
    recorder = Recorder()
    trainer_of(recorder).call("on_my_event", 3)
    assert recorder.names == ["pre_setup", "setup", "post_setup"]


def test_an_object_with_an_event_may_have_other_methods_called_like_hooks(trainer_of) -> None:
    class Plain:
        def my_event(self): ...

        def metrics(self): ...

        def save_checkpoint(self): ...

    trainer_of(Plain())


def test_the_table_of_callbacks_gives_a_dict_and_cannot_be_changed(trainer_of) -> None:
    trainer = trainer_of(Recorder())
    assert trainer.callbacks.copy() == dict(trainer.callbacks)
    for change in (trainer.callbacks.clear, trainer.callbacks.popitem):
        with pytest.raises(TypeError, match=r"trainer\.remove_callback\("):
            change()


def test_a_near_miss_of_a_declared_hook_is_refused(trainer_of) -> None:
    with pytest.raises(HookError, match=r"^'on_fit_strat' is not a hook\. Did you mean 'on_fit_st"):
        trainer_of().call("on_fit_strat")


def test_a_call_of_a_declared_hook_in_other_words_is_refused(trainer_of) -> None:
    with pytest.raises(HookError, match=r"on_train_step_finish.*'on_train_step_end'"):
        trainer_of().call("on_train_step_finish")


def test_a_hook_that_a_third_party_declares_is_called(trainer_of) -> None:
    before = dict(HOOKS)
    paths = []

    class Extended(Callback):
        @hook(Phase.RUN)
        def on_export(self, trainer, path):
            """Called when the model was exported."""

    class Mine(Extended):
        def on_export(self, trainer, path):
            paths.append((trainer.global_step, path))

    try:
        trainer_of(Mine()).call("on_export", path="model.bin")
    finally:
        HOOKS.clear()
        HOOKS.update(before)
    assert paths == [(0, "model.bin")]


# ---- exceptions


class Raising(Callback):
    """Raise in one hook, at one step."""

    def __init__(self, name: str, step: int = 0) -> None:
        self.name = name
        self.step = step

    def _maybe(self, name: str, trainer: Any) -> None:
        if name == self.name and trainer.global_step == self.step:
            raise LookupError("lost")

    def on_train_batch_end(self, trainer, model, outputs, batch, batch_idx):
        self._maybe("on_train_batch_end", trainer)

    def on_train_step_end(self, trainer, model, outputs, batch):
        self._maybe("on_train_step_end", trainer)

    def on_validate_end(self, trainer, model, loop):
        self._maybe("on_validate_end", trainer)


def test_an_exception_keeps_its_type_and_gets_a_note_with_hook_and_step(trainer_of) -> None:
    with pytest.raises(LookupError, match=r"^lost") as caught:
        trainer_of(Raising("on_train_batch_end", step=2)).fit(tiny_batches(3))
    assert caught.value.__notes__ == ["raised in Raising.on_train_batch_end at global_step 2"]


def test_an_exception_of_the_model_gets_no_note_of_a_callback(trainer_of) -> None:
    with pytest.raises(RuntimeError, match="mat1 and mat2") as caught:
        trainer_of().fit([tuple(part[:, :1] for part in tiny_batches(1)[0])])
    assert not any("raised in" in note for note in getattr(caught.value, "__notes__", []))


def test_exception_hooks_go_from_the_inside_out(trainer_of) -> None:
    recorder = Recorder()
    with pytest.raises(LookupError):
        trainer_of(recorder, Raising("on_train_step_end")).fit(tiny_batches(3))
    assert recorder.names[-2:] == ["on_train_exception", "on_fit_exception"]


def test_an_exception_in_a_validation_of_a_fit_calls_two_exception_hooks(trainer_of) -> None:
    recorder = Recorder()
    with pytest.raises(LookupError):
        trainer_of(recorder, Raising("on_validate_end", 3)).fit(tiny_batches(3), tiny_batches(1))
    assert recorder.names[-2:] == ["on_validate_exception", "on_fit_exception"]
    assert recorder.count("on_train_exception") == 0


def test_an_exception_hook_receives_the_exception(trainer_of) -> None:
    seen: list[Any] = []

    class Catching(Callback):
        def on_fit_exception(self, trainer, exception):
            seen.append(exception)

    with pytest.raises(LookupError) as caught:
        trainer_of(Catching(), Raising("on_train_step_end")).fit(tiny_batches(3))
    assert seen == [caught.value]


def test_all_exception_hooks_run_although_one_fails(trainer_of) -> None:
    class Failing(Callback):
        def on_fit_exception(self, trainer, exception):
            raise OSError("disk full")

    recorder = Recorder()
    with pytest.raises(LookupError, match=r"^lost") as caught:
        trainer_of(Failing(), recorder, Raising("on_train_step_end")).fit(tiny_batches(3))
    assert recorder.count("on_fit_exception") == 1
    assert caught.value.__notes__[-1] == (
        "raised in Failing.on_fit_exception too: OSError: disk full"
    )


def test_stacks_unwind_after_the_exception_hooks(trainer_of) -> None:
    order: list[str] = []

    @contextmanager
    def noted(name: str) -> Iterator[None]:
        try:
            yield
        finally:
            order.append(f"{name} unwinds")

    class Entering(Callback):
        def on_enter_fit(self, trainer, stack, train_dataloader, val_dataloader, loop):
            stack.enter_context(noted("fit"))

        def on_enter_train(self, trainer, stack, train_dataloader, loop, loop_idx):
            stack.enter_context(noted("train"))

        def on_train_exception(self, trainer, exception):
            order.append("train exception")

        def on_fit_exception(self, trainer, exception):
            order.append("fit exception")

    with pytest.raises(LookupError):
        trainer_of(Entering(), Raising("on_train_step_end")).fit(tiny_batches(3))
    assert order == ["train exception", "train unwinds", "fit exception", "fit unwinds"]


def test_all_finalize_although_one_fails(trainer_of) -> None:
    class Failing(Callback):
        def finalize(self):
            raise OSError("disk full")

    recorder = Recorder()
    trainer = trainer_of(Failing(), recorder)
    with pytest.raises(OSError, match="disk full") as caught:
        trainer.close()
    assert recorder.count("finalize") == 1
    assert caught.value.__notes__ == ["raised in Failing.finalize"]


def test_two_recorders_of_two_classes_see_the_same(trainer_of) -> None:
    first, second = Recorder(), recorder_class("Other")()
    with second:
        trainer_of(first).fit(tiny_batches())
    assert first.names == second.names


@pytest.mark.parametrize("added", [Callback(), ("post-loss", lambda self, loss: loss)])
@pytest.mark.parametrize("method", ["append", "extend", "insert", "remove"])
def test_callbacks_of_a_trainer_do_not_change_like_a_list(trainer_of, method, added) -> None:
    advice = "remove_callback" if method == "remove" else "add_callback"
    with pytest.raises(AttributeError, match=rf"no {method}\. Use trainer\.{advice}\("):
        getattr(trainer_of().callbacks, method)(added)


def test_callbacks_of_a_trainer_are_a_dict_in_all_else(trainer_of) -> None:
    callbacks = trainer_of(Callback(), check_loss=False, progress="none").callbacks
    assert list(callbacks.copy())[-1] == "Callback"
    assert not hasattr(callbacks, "append")
    with pytest.raises(AttributeError, match="'CallbackList' object has no attribute 'sort'"):
        callbacks.sort()
