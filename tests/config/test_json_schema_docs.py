"""What editors show of a docstring."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from modelzoo_trainer.base.constraints import checked_dataclass, without_effect
from modelzoo_trainer.config.json_schema.components import argument_texts, summary


class Base:
    """A base.

    Args:
        size: Of the base.
        name (str, optional): What it is called:
            two words,
            at most. None = none.
        left, right: Two sides.

    Raises:
        ValueError: Never.
    """


class Derived(Base):
    """Something derived.

    Its size is its own.

    Args:
        size: Of the whole, True or not.
    """


class Silent(Derived, OrderedDict[str, int]):
    pass


@dataclass
class Record:
    size: int


def function(size: int) -> None:
    """Do it.

    Args:
        size: How often.
    """


def test_the_first_line_says_what_a_class_is():
    assert [summary(one) for one in (Derived, Silent, function)] == [
        "Something derived.",
        "Something derived.",
        "Do it.",
    ]


def test_the_lines_of_an_argument_are_joined_and_put_as_a_file_has_it():
    assert argument_texts(Base) == {
        "size": "Of the base.",
        "name": "What it is called: two words, at most. null = none.",
        "left": "Two sides.",
        "right": "Two sides.",
    }


def test_a_class_says_more_than_its_bases():
    texts = argument_texts(Silent)
    assert texts["size"] == "Of the whole, true or not."
    assert texts["left"] == "Two sides."


def test_a_function_has_arguments_too():
    assert argument_texts(function) == {"size": "How often."}


def test_a_dataclass_without_a_docstring_says_nothing():
    assert summary(Record) == ""
    assert argument_texts(Record) == {}


@checked_dataclass(kw_only=True)
class Published:
    """It takes old arguments.

    Args:
        steps: No effect; see `size`.
    """

    size: int
    steps: Any = without_effect("the loop decides")
    cache: bool = without_effect("there is none", default=True)


def test_an_argument_without_effect_needs_no_text():
    assert argument_texts(Published) == {"steps": "No effect; see `size`.", "cache": "No effect."}
    assert Published(size=1).cache is True
