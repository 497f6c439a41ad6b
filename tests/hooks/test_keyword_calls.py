"""Arguments that a listener of an undeclared event receives."""

from __future__ import annotations

from typing import Any

import pytest

from modelzoo_trainer import HookError
from modelzoo_trainer.hooks.keyword_calls import KeywordCall, listener_of


def called(method: Any, *args: Any, **kwargs: Any) -> None:
    KeywordCall("Mine.on_it", method)(args, kwargs)


def test_defaults_hold_for_what_is_not_passed() -> None:
    got = []
    called(lambda a, b=2, *, c=3: got.append((a, b, c)), a=1, c=4, d=5)
    assert got == [(1, 2, 4)]


def test_a_variadic_method_takes_any_number_of_positional_arguments() -> None:
    got = []
    called(lambda first, *rest, k: got.append((first, rest, k)), 1, 2, 3, k=4, x=5)
    assert got == [(1, (2, 3), 4)]


def test_a_positional_only_name_may_also_be_a_keyword_of_others() -> None:
    got = []

    def method(a, /, **others):
        got.append((a, others))

    called(method, 1, a=2)
    assert got == [(1, {"a": 2})]


def test_a_keyword_only_parameter_is_not_given_by_place() -> None:
    with pytest.raises(HookError, match=r"^Mine\.on_it takes \(a, b\), but the call passes 2 "):
        called(lambda a, *, b: None, 1, 2)


def test_each_form_of_call_is_checked() -> None:
    got = []
    call = KeywordCall("Mine.on_it", lambda a, b: got.append((a, b)))
    call((), {"a": 1, "b": 2})
    call((1,), {"b": 2})
    call((), {"b": 2, "a": 1})
    with pytest.raises(HookError, match=r"requires 'a', but the call passes \(b\)"):
        call((), {"b": 2})
    call((1, 2), {})
    assert got == [(1, 2)] * 4


def test_a_builtin_without_a_signature_gets_everything() -> None:
    with pytest.raises(TypeError, match="'nope'"):
        called(max, 1, 2, nope=3)


def test_a_property_that_raises_attribute_error_is_no_method() -> None:
    class Mine:
        @property
        def on_it(self):
            raise AttributeError("not yet")

    assert listener_of(Mine(), "on_it") is None


def test_an_event_may_pass_what_is_called_trainer_or_name(trainer_of) -> None:
    class Mine:
        def on_it(self, trainer, name):
            got.append((trainer, name))

        def on_other(self, name, hook_name):
            got.append((name, hook_name))

    got: list[Any] = []
    trainer = trainer_of(Mine())
    trainer.call("on_it", trainer=trainer, name="a")
    trainer.call("on_other", name="b", hook_name="c")
    assert got == [(trainer, "a"), ("b", "c")]
