"""Templates of job files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from modelzoo_trainer.tools.launch.render import render, template_names

JOBS = Path(__file__).resolve().parents[3] / "docs" / "jobs"


def test_the_files_of_the_docs_are_the_templates_with_example_values(maker: Any) -> None:
    written = {path.name: path.read_text(encoding="utf-8") for path in JOBS.iterdir()}
    assert written == maker.jobs(), "change the template, then run: python docs/make_jobs.py"


def test_each_template_is_in_the_docs() -> None:
    names = [name.removesuffix(".txt") for name in template_names()]
    assert names == sorted(path.name for path in JOBS.iterdir())


def test_lines_take_the_place_and_the_indentation_of_a_placeholder() -> None:
    template = "job @NAME@: @NAME@-0\n  @LINES@\nend @NAME@"
    text = render(template, {"NAME": "a", "LINES": ["one", "", "two"]})
    assert text == "job a: a-0\n  one\n\n  two\nend a"


def test_no_lines_remove_the_line() -> None:
    assert render("a\n  @LINES@\nb\n", {"LINES": []}) == "a\nb\n"


def test_other_signs_stay_as_they_are() -> None:
    text = 'echo "$PATH" ${A@Q} "$@" user@host.com @lower@\n'
    assert render(text, {}) == text


def test_a_value_is_not_filled_in_turn() -> None:
    values = {"NAME": "@OTHER@", "OTHER": "b", "LINES": ["@NAME@"]}
    assert render("@NAME@ @OTHER@\n@LINES@\n", values) == "@OTHER@ b\n@NAME@\n"


@pytest.mark.parametrize(
    ("template", "values", "message"),
    [
        ("@NODES@ @NAME@", {"NODES": "1"}, "no value for NAME"),
        ("@NODES@", {"NODES": "1", "NODE": "2"}, "no placeholder for NODE"),
        ("a @LINES@\n", {"LINES": ["x"]}, "LINES has a list of lines"),
    ],
)
def test_placeholders_and_values_must_match(
    template: str, values: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        render(template, values)
