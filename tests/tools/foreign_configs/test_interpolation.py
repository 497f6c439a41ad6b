"""References `${...}` between values."""

import pytest

from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.tools.foreign_configs.interpolation import resolve


def test_a_whole_value_keeps_its_type_and_a_part_becomes_text():
    values, named = resolve(
        {"a": {"b": 3, "c": [1, {"d": True}]}, "e": "${a.b}", "f": "x/${a.b}/${a.c[1].d}"}
    )
    assert values["e"] == 3
    assert values["f"] == "x/3/true"
    assert named == {"a.b", "a.c.1.d"}


def test_a_reference_may_name_a_mapping_with_references_in_it():
    values, _ = resolve({"a": {"b": "${c}"}, "c": "${d}", "d": 1.5, "e": "${a}"})
    assert values["e"] == {"b": 1.5}


def test_dots_at_the_beginning_are_relative_to_the_mapping():
    values, _ = resolve({"a": {"b": {"c": "${.d}", "d": 1, "e": "${..f}"}, "f": 2}})
    assert values["a"]["b"] == {"c": 1, "d": 1, "e": 2}


def test_a_reference_may_contain_another():
    values, _ = resolve({"size": "small", "widths": {"small": 8}, "width": "${widths.${size}}"})
    assert values["width"] == 8


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("${b}", "a: ${b} names nothing in the file"),
        ("${a}", "'${a}' refers to itself"),
        ("x${oc.env:HOME}", "a: ${oc.env:HOME} calls a resolver"),
        ("${", "is not a valid reference"),
    ],
)
def test_what_cannot_be_resolved_is_refused_with_its_key(value, said):
    with pytest.raises(ConfigError) as refused:
        resolve({"a": value})
    assert said in str(refused.value)
