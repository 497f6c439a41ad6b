"""Constraints of arguments are checked in Python as well."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal, get_args, get_origin

import pytest

from modelzoo_trainer.base import constraints
from modelzoo_trainer.config.arguments import schema_of
from modelzoo_trainer.config.names import Names
from modelzoo_trainer.config.shipped import shipped_names
from modelzoo_trainer.optim.sparsity import ALGORITHMS, CURVES, UpdateAt, UpdateEvery

TABLES = ("models", "optimizers", "schedulers", "callbacks", "loggers", "processors")


def nameable(names: Names) -> Iterator[type]:
    """Yield the classes of this package that a configuration can name."""
    for table in TABLES:
        for name in getattr(names, table).names:
            yield getattr(names, table).load(name)
    yield from (*names.sections.values(), *ALGORITHMS.values(), *CURVES.values())
    yield from (UpdateAt, UpdateEvery)


def is_constrained(annotation: Any) -> bool:
    origin = get_origin(annotation)
    return origin in (Annotated, Literal) or any(map(is_constrained, get_args(annotation)))


def is_checked(cls: Any) -> bool:
    init = cls.__init__
    while init is not None:  # a schedule's is wrapped once more
        code = getattr(init, "__code__", None)
        if code is not None and code.co_filename == constraints.__file__:
            return True
        init = getattr(init, "__wrapped__", None)
    return False


@pytest.fixture(scope="module")
def classes() -> list[type]:
    return [cls for cls in nameable(shipped_names()) if cls.__module__.startswith("modelzoo_")]


def test_a_constructor_with_a_constrained_argument_is_checked_and_no_other(
    classes: list[type],
) -> None:
    constrained = {
        cls
        for cls in classes
        if any(is_constrained(one.annotation) for one in schema_of(cls).parameters.values())
    }
    unchecked = [cls.__name__ for cls in constrained if not is_checked(cls)]
    assert sorted(unchecked) == [], "these need @checked() or @checked_dataclass"
    needless = [cls.__name__ for cls in classes if cls not in constrained and is_checked(cls)]
    assert sorted(needless) == [], "no range, no choice: use a plain @dataclass(eq=False)"
    assert len(constrained) > 70
