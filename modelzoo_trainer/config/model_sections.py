"""The models that a configuration describes, with the settings that `check` accepts."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Mapping as MappingOf
from dataclasses import replace
from pathlib import Path
from typing import Any

from modelzoo_trainer.config.legacy import convert_legacy, is_legacy
from modelzoo_trainer.config.loader import read_file
from modelzoo_trainer.config.names import Names
from modelzoo_trainer.config.positions import (
    FilePosition,
    Mapping,
    Place,
    Problems,
    from_plain,
    to_plain,
)
from modelzoo_trainer.config.sections import check_model, today_s
from modelzoo_trainer.config.shipped import shipped_names


def models_in(source: Path | MappingOf[str, Any], where: str) -> list[tuple[dict[str, Any], Any]]:
    """Return the settings of each model of a configuration, and the callbacks beside it.

    Settings are as `check` accepts and converts them: older names replaced, those without an effect
    left out. Of a class that is not shipped they are as given: it is not imported.

    Args:
        source: A YAML file, of the older layout too, or its content as plain values.
        where: The name of the content in messages, where it is not a file.

    Raises:
        ConfigError: If the file cannot be read, or a setting of a model is invalid; with the place.

    Cost: No model is built, no code of the configuration is run.
    """
    root = (
        read_file(source) if isinstance(source, Path) else from_plain(source, FilePosition(where))
    )
    if is_legacy(root):
        root = convert_legacy(root, Problems())  # other sections may be invalid
    names = replace(shipped_names(), try_model=_no_trial)
    return [
        (_settings_of(model, names), None if callbacks is None else to_plain(callbacks.node))
        for model, callbacks in _sections(Place.root(root))
    ]


def _no_trial(component: object) -> None:
    """Leave the model untried: code in the folder of one of `transformers` might run."""


def _sections(place: Place) -> Iterator[tuple[Place, Place | None]]:
    """Yield the sections `model`, each with the callbacks beside it."""
    for item in place.items():
        yield from _sections(item)
    model = place.key("model")
    if model is not None and isinstance(model.node, Mapping):
        yield model, place.key("callbacks")
        return
    for key in ("trainer", "init"):
        inner = place.key(key)
        if inner is not None:
            yield from _sections(inner)


def _settings_of(place: Place, names: Names) -> dict[str, Any]:
    if not _is_shipped(place, names):
        given: dict[str, Any] = to_plain(place.node)
        return given
    problems = Problems()
    component = check_model(place, names, problems)
    problems.raise_if_any()
    assert component is not None
    return {"name": _name_of(place), **component.arguments}


def _is_shipped(place: Place, names: Names) -> bool:
    """Return whether a model, and each model in its settings, has the name of a shipped one."""
    name = _name_of(place).lower()
    known = {one.lower(): one for one in names.models.names}
    if name not in known:
        return False
    keys = getattr(names.models.load(known[name]), "model_arguments", ())
    inner = [found for key in keys if (found := place.key(key)) is not None]
    return all(_is_shipped(one, names) for one in inner)


def _name_of(place: Place) -> str:
    name = place.key("name") or place.key("model_name")
    return "" if name is None else str(to_plain(today_s(name, Problems()).node))
