"""Steps that compile when nothing should be new: which are silent, and what is said of others."""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest
import torch

from backends import BackendError
from backends.xla.recompilation import RecompilationError, RecompilationWatch, shapes_of

TRAIN, VALIDATE = (0, False), (1, False)
BY_BATCH, LAST = (0, True), (0, False)
A, B, C = ("x (8, 4)",), ("x (5, 4)",), ("x (2, 4)",)


class Runtime:
    """Counts as the device's runtime has them, and a watch over them."""

    def __init__(self, policy: Any = "warn") -> None:
        self.num = 0
        self.names: list[str] = []
        self.watch = RecompilationWatch(policy, lambda: self.num, lambda: list(self.names))

    def step(
        self,
        shapes: tuple[str, ...] = A,
        kind: Any = TRAIN,
        *,
        compiles: bool = True,
        ends_window: bool = True,
    ) -> None:
        self.num += compiles
        self.watch.shapes = shapes
        self.watch.look(kind, ends_window=ends_window)


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Any:
    """A function that returns the messages so far."""
    caplog.set_level(logging.WARNING, logger="modelzoo_trainer.backends.recompilation")
    return lambda: [record.getMessage() for record in caplog.records]


# ---- what is expected


def test_the_first_three_steps_may_compile(said) -> None:
    runtime = Runtime()
    for _ in range(3):
        runtime.step()
    assert (said(), runtime.watch.num_late) == ([], 0)


def test_steps_that_do_not_compile_are_silent_whatever_their_shapes(said) -> None:
    runtime = Runtime()
    for shapes in (A, A, A, A, B, A, C):
        runtime.step(shapes, compiles=False)
    assert (said(), runtime.watch.num_late) == ([], 0)


def test_each_kind_of_step_has_three_of_its_own(said) -> None:
    runtime = Runtime()
    for _ in range(3):
        runtime.step(kind=TRAIN)
    for _ in range(3):
        runtime.step(B, kind=VALIDATE)
    assert (said(), runtime.watch.num_late) == ([], 0)


def test_what_was_compiled_before_the_beginning_belongs_to_no_step(said) -> None:
    runtime = Runtime()
    for _ in range(3):
        runtime.step(compiles=False)
    runtime.num = 7
    runtime.names = ["aten::foo"]
    runtime.watch.begin()
    runtime.step(compiles=False)
    assert (said(), runtime.watch.num_late) == ([], 0)


def test_what_is_passed_over_belongs_to_no_step(said) -> None:
    runtime = Runtime()
    for _ in range(3):
        runtime.step()
    runtime.num += 1
    runtime.watch.skip_pending()
    runtime.step(compiles=False)
    assert (said(), runtime.watch.num_late) == ([], 0)


def test_a_fallback_is_told_of_though_compilations_were_skipped(said) -> None:
    runtime = Runtime()
    runtime.names.append("aten::foo")
    runtime.watch.skip_pending()
    runtime.step(compiles=False)
    assert len(said()) == 1


# ---- what is not


def test_other_shapes_are_named_with_those_before_and_the_remedy(said) -> None:
    runtime = Runtime()
    runtime.step(("input_ids (8, 64)", "labels (8,)"))
    runtime.step(("input_ids (5, 64)", "labels (8,)"))
    [message] = said()
    facts = ("input_ids (5, 64) after input_ids (8, 64)", "drop_last: true", "PadToBuckets")
    assert [fact for fact in facts if fact not in message] == []
    assert "labels" not in message


def test_other_shapes_are_said_once_and_counted_each_time(said) -> None:
    runtime = Runtime()
    for shapes in (A, B, C):
        runtime.step(shapes)
    assert (len(said()), runtime.watch.num_late) == (1, 2)


def test_the_second_step_of_other_shapes_may_compile_as_well(said) -> None:
    runtime = Runtime()
    for shapes in (A, B, B, B):
        runtime.step(shapes)
    assert (len(said()), runtime.watch.num_late) == (1, 1)


def test_other_shapes_are_found_among_steps_of_the_same_kind_alone(said) -> None:
    runtime = Runtime()
    runtime.step(A, TRAIN)
    runtime.step(B, VALIDATE)
    runtime.step(A, TRAIN)
    assert said() == []


def test_of_many_shapes_four_are_shown(said) -> None:
    runtime = Runtime()
    runtime.step(tuple(f"x{idx} (8,)" for idx in range(6)))
    runtime.step(tuple(f"x{idx} (5,)" for idx in range(6)))
    [message] = said()
    assert "x0 (5,), x1 (5,), x2 (5,), x3 (5,) and 2 more after x0 (8,)" in message


def test_a_tensor_that_is_no_more_in_the_batch_is_named(said) -> None:
    runtime = Runtime()
    runtime.step(("x (8,)", "mask (8,)"))
    runtime.step(("x (8,)",))
    assert "nothing after mask (8,)." in said()[0]


def test_a_fourth_step_of_the_same_shapes_that_compiles_is_told_of(said) -> None:
    runtime = Runtime()
    for _ in range(4):
        runtime.step()
    [message] = said()
    assert "shapes of batches have not changed" in message
    assert "PT_XLA_DEBUG_LEVEL=2" in message


def test_graphs_of_the_same_shapes_are_said_once_and_counted_each_time(said) -> None:
    runtime = Runtime()
    for _ in range(6):
        runtime.step()
    assert (len(said()), runtime.watch.num_late) == (1, 3)


def test_several_graphs_of_one_step_are_one_late_step() -> None:
    runtime = Runtime()
    for _ in range(3):
        runtime.step()
    runtime.num += 4
    runtime.step()
    assert runtime.watch.num_late == 1


def test_both_causes_are_told_of(said) -> None:
    runtime = Runtime()
    for shapes in (A, A, A, A, B):
        runtime.step(shapes)
    assert [re.findall("have(?: not)? changed", message) for message in said()] == [
        ["have not changed"],
        ["have changed"],
    ]


def test_shapes_that_return_after_their_first_steps_compile_for_another_cause(said) -> None:
    runtime = Runtime()
    for _ in range(3):
        runtime.step(A)
    runtime.step(B, compiles=False)
    runtime.step(A)
    assert len(said()) == 1
    assert "shapes of batches have not changed" in said()[0]


# ---- policies


def test_an_error_is_raised_if_that_is_asked_for(said) -> None:
    runtime = Runtime("error")
    runtime.step(A)
    with pytest.raises(RecompilationError, match=r"shapes .* x \(5, 4\) after x \(8, 4\)\."):
        runtime.step(B)
    assert said() == []


def test_an_error_is_raised_each_time_for_its_own_step() -> None:
    runtime = Runtime("error")
    for _ in range(3):
        runtime.step()
    for _ in range(2):
        with pytest.raises(RecompilationError, match=r"shapes of batches have not changed"):
            runtime.step()
    runtime.step(compiles=False)
    assert runtime.watch.num_late == 2


def test_a_recompilation_error_is_a_backend_error() -> None:
    assert issubclass(RecompilationError, BackendError)


def test_what_is_ignored_is_counted(said) -> None:
    runtime = Runtime("ignore")
    for shapes in (A, A, A, A, B):
        runtime.step(shapes)
    runtime.names.append("aten::foo")
    runtime.step(B, compiles=False)
    assert (said(), runtime.watch.num_late) == ([], 2)


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(
        BackendError,
        match=r"backend\.recompilation: .*'warn', 'error' or 'ignore'.*'raise'",
    ):
        Runtime("raise")


# ---- accumulation


def window(runtime: Runtime, *, compiles: bool = True) -> None:
    """Take a step of four batches."""
    for _ in range(3):
        runtime.step(kind=BY_BATCH, ends_window=False, compiles=compiles)
    runtime.step(kind=LAST, compiles=compiles)


def test_all_batches_of_the_first_three_windows_may_compile(said) -> None:
    runtime = Runtime("error")
    for _ in range(3):
        window(runtime)
    assert runtime.watch.num_late == 0


def test_a_batch_of_the_fourth_window_may_not(said) -> None:
    runtime = Runtime()
    for _ in range(3):
        window(runtime, compiles=False)
    runtime.step(kind=BY_BATCH, ends_window=False)
    assert (len(said()), runtime.watch.num_late) == (1, 1)


def test_the_last_batch_of_the_fourth_window_may_not(said) -> None:
    runtime = Runtime()
    for _ in range(3):
        window(runtime, compiles=False)
    for _ in range(3):
        runtime.step(kind=BY_BATCH, ends_window=False, compiles=False)
    assert said() == []
    runtime.step(kind=LAST)
    assert (len(said()), runtime.watch.num_late) == (1, 1)


def test_other_shapes_within_a_window_are_told_of(said) -> None:
    runtime = Runtime()
    runtime.step(A, BY_BATCH, ends_window=False)
    runtime.step(B, BY_BATCH, ends_window=False)
    assert "x (5, 4) after x (8, 4)" in said()[0]


# ---- fallbacks


def test_fallbacks_are_told_of_with_their_names(said) -> None:
    runtime = Runtime()
    runtime.step(compiles=False)
    runtime.names += ["aten::median", "aten::_unique2", "aten::median"]
    runtime.step(compiles=False)
    [message] = said()
    assert ": aten::_unique2, aten::median. " in message


def test_each_fallback_is_told_of_once(said) -> None:
    runtime = Runtime()
    for name in ("aten::median", "aten::median", "aten::_unique2", "aten::median"):
        runtime.names.append(name)
        runtime.step(compiles=False)
    first, second = said()
    assert ": aten::median. " in first
    assert ": aten::_unique2. " in second


# ---- the shapes of a batch

ITEM = torch.zeros(8, 4)


@pytest.mark.parametrize(
    ("batch", "shapes"),
    [
        (ITEM, ("(8, 4)",)),
        (torch.tensor(1), ("()",)),
        ({"x": ITEM, "y": torch.zeros(8)}, ("x (8, 4)", "y (8,)")),
        ((ITEM, torch.zeros(8)), ("[0] (8, 4)", "[1] (8,)")),
        ([ITEM, torch.zeros(8)], ("[0] (8, 4)", "[1] (8,)")),
        ({"text": {"ids": ITEM, "mask": ITEM}}, ("text.ids (8, 4)", "text.mask (8, 4)")),
        (({"x": ITEM}, torch.zeros(2)), ("[0].x (8, 4)", "[1] (2,)")),
        ({"x": [ITEM, ITEM]}, ("x[0] (8, 4)", "x[1] (8, 4)")),
        (({"x": ITEM, "y": ITEM}, True, 17), ("x (8, 4)", "y (8, 4)")),
        (((ITEM, torch.zeros(8)), False, 3), ("[0] (8, 4)", "[1] (8,)")),
        ((ITEM, False, 3), ("(8, 4)",)),
        (("name", 3, None), ()),
        ({"name": "x", "x": ITEM}, ("x (8, 4)",)),
        ((None, ITEM, ITEM), ("[1] (8, 4)", "[2] (8, 4)")),
        ({}, ()),
        (None, ()),
        ("text", ()),
    ],
)
def test_shapes_have_the_names_of_their_tensors(batch: Any, shapes: tuple[str, ...]) -> None:
    assert shapes_of(batch) == shapes
