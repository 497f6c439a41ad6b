"""Fill the templates of job files.

A placeholder is `@NAME@`, as `$` and braces belong to the languages of the job files. Its value is
a text, or a list of lines if it is alone in its line: each gets its indentation, none removes it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Final, TypeAlias

Value: TypeAlias = "str | Sequence[str]"

_PLACEHOLDER: Final = re.compile(r"@([A-Z][A-Z_]*)@")
_ALONE: Final = re.compile(r"^([ \t]*)@([A-Z][A-Z_]*)@[ \t]*\n", re.MULTILINE)
_TEMPLATES: Final = "modelzoo_trainer.tools.launch.templates"


def template_names() -> list[str]:
    """Return the names of the shipped templates."""
    entries = (entry for entry in files(_TEMPLATES).iterdir() if entry.is_file())
    return sorted(entry.name for entry in entries if not entry.name.endswith(".py"))


def read_template(name: str) -> str:
    """Return the text of a shipped template."""
    return (files(_TEMPLATES) / name).read_text(encoding="utf-8")


def render(template: str, values: Mapping[str, Value]) -> str:
    """Return a template's text with its placeholders filled.

    Raises:
        ValueError: If a placeholder has no value, or a value no placeholder, or a list of lines is
            the value of a placeholder that is not alone in its line.
    """
    placeholders = set(_PLACEHOLDER.findall(template))
    if missing := sorted(placeholders - values.keys()):
        raise ValueError(f"no value for {', '.join(missing)}")
    if unknown := sorted(values.keys() - placeholders):
        raise ValueError(f"no placeholder for {', '.join(unknown)}")

    def lines(match: re.Match[str]) -> str:
        value = values[match[2]]
        given = [value] if isinstance(value, str) else value
        return "".join(f"{match[1]}{line}\n" if line else "\n" for line in given)

    def text(match: re.Match[str]) -> str:
        value = values[match[1]]
        if not isinstance(value, str):
            raise ValueError(f"{match[1]} has a list of lines, but is not alone in its line")
        return value

    # Piece by piece, so that a value that looks like a placeholder stays what it is.
    rendered, end = [], 0
    for match in _ALONE.finditer(template):
        rendered += [_PLACEHOLDER.sub(text, template[end : match.start()]), lines(match)]
        end = match.end()
    return "".join([*rendered, _PLACEHOLDER.sub(text, template[end:])])
