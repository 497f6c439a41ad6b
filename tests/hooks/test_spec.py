"""Declared hooks, and validation of listeners."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from modelzoo_trainer import HOOKS, Callback, HookError, Hooks
from modelzoo_trainer.callback import check_callback
from modelzoo_trainer.hooks.foreign import INSTEAD
from modelzoo_trainer.hooks.spec import Phase, hook


@pytest.fixture
def _declared_as_before() -> Iterator[None]:
    before = dict(HOOKS)
    yield
    HOOKS.clear()
    HOOKS.update(before)


def test_every_hook_is_documented() -> None:
    assert [name for name, spec in HOOKS.items() if not spec.doc.startswith("Called ")] == []


# ---- refused when the class is defined


def test_a_misspelt_hook_is_refused_with_a_suggestion() -> None:
    with pytest.raises(
        HookError,
        match=r"^Mine\.on_train_batch_edn is not a hook\. Did you mean 'on_train_batch_end'\?$",
    ):

        class Mine(Callback):
            def on_train_batch_edn(self, trainer, model, outputs, batch, batch_idx):
                pass


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("on_train_step_finish", "on_train_step_end"),
        ("on_train_epoch_complete", "on_train_epoch_end"),
        ("on_validate_batch_begin", "on_validate_batch_start"),
        ("on_post_backward", "on_after_backward"),
        ("on_pre_optimizer_step", "on_before_optimizer_step"),
        ("on_training_begin", "on_train_start"),
        ("on_train_step_finsh", "on_train_step_end"),
        ("on_validate_begins", "on_validate_start"),
        ("on_train_step_done", "on_train_step_end"),
    ],
)
def test_a_hook_in_other_words_is_refused_with_a_suggestion(given: str, meant: str) -> None:
    def method(self, trainer):
        pass

    with pytest.raises(HookError, match=rf"Mine\.{given} is not a hook.*'{meant}'"):
        type("Mine", (Callback,), {given: method})
    with pytest.raises(HookError, match=rf"Duck\.{given} is not a hook.*'{meant}'"):
        check_callback(type("Duck", (), {given: method})())


@pytest.mark.parametrize(
    "name",
    ["on_my_eval_start", "on_eval_batch_end", "on_exam_begin", "on_export_finish", "pre_process"],
)
def test_a_custom_hook_is_not_taken_for_a_declared_one(name: str) -> None:
    kind = type("Mine", (Callback,), {name: lambda self: None})
    check_callback(kind())


@pytest.mark.parametrize("name", sorted(INSTEAD))
def test_a_hook_of_another_trainer_is_refused_with_ours(name: str) -> None:
    def method(self, *anything):
        pass

    ours = INSTEAD[name]
    assert ours in HOOKS
    assert name not in HOOKS
    takes = ", ".join(["self", *HOOKS[ours].parameters])
    found = rf"Mine\.{name} is not a hook.*'{ours}'.*def {ours}\({takes}\)"
    with pytest.raises(HookError, match=found):
        type("Mine", (Callback,), {name: method})
    with pytest.raises(HookError, match=rf"Duck\.{name} is not a hook.*'{ours}'"):
        check_callback(type("Duck", (), {name: method})())


@pytest.mark.parametrize(
    "name", sorted(name for name, ours in INSTEAD.items() if ours == "on_validate_end")
)
def test_the_end_of_a_validation_elsewhere_leads_to_the_hook_with_its_metrics(name: str) -> None:
    takes = ", ".join(["self", *HOOKS["on_metrics"].parameters])
    with pytest.raises(
        HookError, match=rf"'on_metrics': def on_metrics\({takes}\).*'{INSTEAD[name]}'"
    ):
        type("Mine", (Callback,), {name: lambda self, *anything: None})


def test_a_hook_without_metrics_elsewhere_does_not_lead_to_the_one_with_metrics() -> None:
    with pytest.raises(HookError) as caught:
        type("Mine", (Callback,), {"on_validation_start": lambda self, *anything: None})
    assert "on_metrics" not in str(caught.value)


@pytest.mark.usefixtures("_declared_as_before")
def test_a_declared_event_may_be_called_like_the_hook_of_another_trainer() -> None:
    class Theirs(Callback):
        @hook(Phase.RUN)
        def on_validation_end(self, trainer):
            """Called by their loop."""

    class Mine(Theirs):
        def on_validation_end(self, trainer):
            pass

    check_callback(Mine())


def test_a_custom_loop_may_call_the_hooks_of_another_trainer() -> None:
    seen = []

    class Mine:
        def on_epoch_end(self, epoch):
            seen.append(epoch)

    Hooks(Mine(), events=["on_epoch_end"]).call("on_epoch_end", epoch=3)
    assert seen == [3]


@pytest.mark.parametrize(
    ("hook_name", "parameters"),
    [
        ("on_train_epoch_end", "trainer, pl_module"),
        ("on_fit_end", "trainer, pl_module"),
        ("on_metrics", "args, state, control"),
        ("on_metrics", "trainer, logs, state"),
        ("on_train_batch_start", "args, state, control, logs"),
    ],
)
def test_a_parameter_with_another_meaning_in_other_trainers_is_refused(
    hook_name: str, parameters: str
) -> None:
    method = eval(f"lambda self, {parameters}: None")  # of the lines above
    passes = ", ".join(HOOKS[hook_name].parameters)
    with pytest.raises(HookError) as caught:
        type("Mine", (Callback,), {hook_name: method})
    assert f"Mine.{hook_name} takes ({parameters})" in str(caught.value)
    assert f"({passes})" in str(caught.value)


def test_their_names_of_the_same_arguments_are_accepted() -> None:
    class Mine(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            pass

        def on_save_checkpoint(self, trainer, state):
            pass

        def on_metrics(self, trainer, logs, step):
            pass

        def on_fit_end(self, *args):
            pass

        def on_train_end(self, trainer, *args, **kwargs):
            pass

    check_callback(Mine())


def test_a_hook_with_too_few_parameters_is_refused() -> None:
    with pytest.raises(
        HookError,
        match=r"^Mine\.on_train_step_end takes \(trainer, batch\), but the hook passes "
        r"\(trainer, model, outputs, batch\)\.$",
    ):

        class Mine(Callback):
            def on_train_step_end(self, trainer, batch):
                pass


def test_a_hook_with_a_parameter_too_many_is_refused() -> None:
    with pytest.raises(HookError, match=r"on_fit_end takes \(trainer, loop, extra\)"):

        class Mine(Callback):
            def on_fit_end(self, trainer, loop, extra):
                pass


def test_a_hook_with_swapped_parameters_is_refused() -> None:
    with pytest.raises(HookError, match=r"takes \(trainer, model, batch, outputs\), but"):

        class Mine(Callback):
            def on_train_step_end(self, trainer, model, batch, outputs):
                pass


def test_a_hook_may_name_its_parameters_otherwise_and_have_more_with_defaults() -> None:
    class Mine(Callback):
        def on_train_step_end(self, the_trainer, net, out, data, extra=None):
            pass

    check_callback(Mine())


def test_a_hook_may_take_all_it_is_passed_as_a_tuple() -> None:
    class Mine(Callback):
        def on_train_step_end(self, *passed):
            pass

    check_callback(Mine())


def test_a_mixins_misspelt_hook_is_refused_as_well() -> None:
    class Mixin:
        def on_fit_strat(self, trainer, train_dataloader, val_dataloader, loop):
            pass

    with pytest.raises(
        HookError, match=r"on_fit_strat is not a hook\. Did you mean 'on_fit_start'"
    ):

        class Mine(Mixin, Callback):
            pass


def test_methods_with_other_names_are_the_callbacks_own() -> None:
    class Mine(Callback):
        on_color = "red"

        def on_exam_start(self, anything):
            pass

        def train_batch_end(self):
            pass

    check_callback(Mine())


# ---- refused when the callback is registered


def test_a_hook_set_on_the_instance_is_refused() -> None:
    class Mine(Callback):
        pass

    mine = Mine()
    mine.on_fit_end = print
    with pytest.raises(HookError, match=r"^Mine: the hook on_fit_end was set on the instance"):
        check_callback(mine)


def test_a_class_in_the_place_of_an_instance_is_refused() -> None:
    class Mine(Callback):
        pass

    with pytest.raises(HookError, match=r"got the class Mine\. Pass an instance: Mine\(\)\.$"):
        check_callback(Mine)


def test_a_class_with_required_arguments_is_refused_with_their_names() -> None:
    class Mine(Callback):
        def __init__(self, metric, *more, mode, k=1, **others) -> None:
            pass

    with pytest.raises(HookError, match=r"instance: Mine\(metric=\.\.\., mode=\.\.\.\)\.$"):
        check_callback(Mine)


def test_an_object_without_hooks_is_refused() -> None:
    with pytest.raises(HookError, match=r"got 7 of type int, which has no hook\. Subclass "):
        check_callback(7)


def test_an_object_of_another_class_is_checked_like_a_callback() -> None:
    class Duck:
        def on_fit_end(self, trainer):
            pass

    with pytest.raises(HookError, match=r"^Duck\.on_fit_end takes \(trainer\), but"):
        check_callback(Duck())


def test_an_object_of_another_class_may_not_misspell_a_hook() -> None:
    class Duck:
        def on_train_step_ned(self, trainer, model, outputs, batch):
            pass

    with pytest.raises(HookError, match=r"^Duck\.on_train_step_ned is not a hook\. Did you mean"):
        check_callback(Duck())


# ---- hooks that others declare


@pytest.mark.usefixtures("_declared_as_before")
def test_a_third_party_declares_a_hook_on_its_own_callback() -> None:
    class Extended(Callback):
        @hook(Phase.RUN)
        def on_export(self, trainer, path):
            """Called when the model was exported.

            More about it.
            """

    declared = HOOKS["on_export"]
    assert (declared.phase, declared.parameters) == (Phase.RUN, ("trainer", "path"))
    assert declared.doc == "Called when the model was exported."


@pytest.mark.usefixtures("_declared_as_before")
def test_a_declared_hook_of_a_third_party_is_checked_everywhere() -> None:
    class Extended(Callback):
        @hook(Phase.RUN)
        def on_export(self, trainer, path):
            """Called when the model was exported."""

    with pytest.raises(HookError, match=r"Mine\.on_export takes \(path\), but the hook passes"):

        class Mine(Callback):
            def on_export(self, path):
                pass


@pytest.mark.usefixtures("_declared_as_before")
def test_a_second_declaration_with_other_parameters_is_refused() -> None:
    with pytest.raises(HookError, match=r"Late\.on_fit_end declares \(trainer, result\), but the"):

        class Late(Callback):
            @hook(Phase.RUN)
            def on_fit_end(self, trainer, result):
                """Called with the result."""
