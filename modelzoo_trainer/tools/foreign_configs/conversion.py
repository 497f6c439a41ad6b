"""Convert a file of another training library to the format of this package."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeAlias

from modelzoo_trainer.config.loader import read_file, to_yaml
from modelzoo_trainer.config.positions import to_plain
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.tools.foreign_configs.findings import Findings
from modelzoo_trainer.tools.foreign_configs.interpolation import resolve
from modelzoo_trainer.tools.foreign_configs.llm_foundry import conversion as llm_foundry
from modelzoo_trainer.tools.foreign_configs.torchtune import conversion as torchtune

Convert: TypeAlias = Callable[[dict[str, Any], set[str], Findings, int | None], dict[str, Any]]

LIBRARIES: Final[dict[str, Convert]] = {
    llm_foundry.NAME: llm_foundry.convert,
    torchtune.NAME: torchtune.convert,
}
"""Conversions by the name of the library."""
_SIGNS: Final[dict[str, Callable[[dict[str, Any]], bool]]] = {
    llm_foundry.NAME: llm_foundry.is_llm_foundry,
    torchtune.NAME: torchtune.is_torchtune,
}


def convert_file(
    path: Path, *, library: str | None = None, steps_per_epoch: int | None = None
) -> tuple[str, Findings]:
    """Return the converted file, with what to know about it.

    The text begins with the list of keys that have no counterpart, as comments.

    Args:
        path: The file of the other library.
        library: A key of `LIBRARIES`; None = found by the keys of the file.
        steps_per_epoch: Optimizer steps of an epoch, which turns lengths in epochs into steps
            where only steps are accepted; None = unknown.

    Raises:
        ConfigError: If the file cannot be read, is of no known library, refers to what it does not
            have, or has an invalid value.
    """
    content = to_plain(read_file(path))
    if not isinstance(content, dict):
        raise ConfigError(
            f"{path}: expected a mapping, a training file of {' or '.join(LIBRARIES)}."
        )
    library = library or _library_of(content, path)
    findings = Findings()
    try:
        values, named = resolve(content)
        trainer = LIBRARIES[library](values, named, findings, steps_per_epoch)
    except ConfigError as error:
        problems = "\n".join(f"{path}: {line}" for line in str(error).splitlines())
        raise ConfigError(problems) from None
    return _written(trainer, path, library, findings), findings


def _library_of(content: dict[str, Any], path: Path) -> str:
    if "trainer" in content:
        raise ConfigError(f"{path} already has the section trainer: it needs no conversion.")
    for library, is_its in _SIGNS.items():
        if is_its(content):
            return library
    raise ConfigError(
        f"{path} looks like a file of none of {', '.join(LIBRARIES)}. Name the library with "
        f"--from, if it is one of them."
    )


def _written(trainer: dict[str, Any], path: Path, library: str, findings: Findings) -> str:
    head = [f"Converted from {path.name} of {library} by `modelzoo-trainer config convert`."]
    lines = list(findings.lines())
    if lines:
        head += ["", *lines]
    comments = "\n".join(f"# {line}".rstrip() for line in head)
    return f"{comments}\n{to_yaml({'trainer': trainer})}"
