"""Read the settings of a preprocessing file."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from modelzoo_trainer.config.arguments import check_value, schema_of
from modelzoo_trainer.config.former_paths import note_former_paths
from modelzoo_trainer.config.loader import read_file, read_text
from modelzoo_trainer.config.positions import Mapping, Node, Place, Problems, is_null, to_plain
from modelzoo_trainer.errors import suggest
from modelzoo_trainer.zoo.rows.modes.truncation import UNREAD
from modelzoo_trainer.zoo.rows.sections import SECTIONS, PreprocessingSettings

_SINGLE_NODE: Final = "preprocessing runs on one machine; set processes to use its cores"
_IMAGES: Final = "images are not supported; preprocess the text alone"
_REFUSED: Final = {
    "slurm": _SINGLE_NODE,
    "num_nodes": _SINGLE_NODE,
    "rank": _SINGLE_NODE,
    "image_dir": _IMAGES,
    "image_token": _IMAGES,
    "is_multimodal": _IMAGES,
    "max_num_img": _IMAGES,
    "num_patches": _IMAGES,
    "use_single_image_token": _IMAGES,
}
"""Keys that would change what is written, and why they cannot be used; false or 1 is harmless."""
_MODES: Final = {
    "embedding_training": "rows for embedding models are not supported",
    "embedding_generation": "rows for embedding models are not supported",
}


def read_settings(path: Path) -> tuple[PreprocessingSettings, list[str]]:
    """Return the settings of a file, and a note for each key that has no effect.

    Raises:
        ConfigError: If the file cannot be read or a value is invalid; all problems together.
    """
    return _settings(read_file(path), str(path))


def parse_settings(text: str, source: str = "settings") -> tuple[PreprocessingSettings, list[str]]:
    """Return the settings of YAML text, as `read_settings` does of a file."""
    return _settings(read_text(text, source), source)


def _settings(node: Node, source: str) -> tuple[PreprocessingSettings, list[str]]:
    problems = Problems()
    root = Place.root(node)
    if not isinstance(node, Mapping):
        problems.add(node.at, "", "expected the sections setup, processing and dataset.")
    for key, place in root.pairs():
        if key not in SECTIONS:
            what = f"no such section. {suggest(str(key), SECTIONS)}"
            problems.add(place.key_at, str(key), what)
    values = {name: _section(root, name, problems) for name in SECTIONS}
    _note_unread(root, problems)
    note_former_paths(root, problems)
    problems.raise_if_any()
    given = {name: to_plain(place.node) or {} for name, place in root.pairs()}
    notes = [str(note) for note in problems.notes]
    made = {name: kind(**values[name]) for name, kind in SECTIONS.items()}
    return PreprocessingSettings(**made, given=given, source=source), notes


def _note_unread(root: Place, problems: Problems) -> None:
    """Note a key that published files have and nothing reads."""
    place: Place | None = root
    for key in ("dataset", "truncate_to_msl", UNREAD):
        place = None if place is None else place.key(key)
    if place is not None:
        what = (
            "no effect (nor in the Cerebras Model Zoo): prompts keep their end, which is the "
            "default of prompt_truncation_mode. Write that key to keep their start."
        )
        problems.note(place.key_at, place.path, what)


def _section(root: Place, name: str, problems: Problems) -> dict[str, Any]:
    place = root.key(name)
    if place is None or is_null(place.node):
        if name == "setup":
            problems.add(root.node.at, name, "missing; it has mode and data.")
        return {}
    if not isinstance(place.node, Mapping):
        problems.add(place.node.at, name, "expected a mapping of settings.")
        return {}
    schema = schema_of(SECTIONS[name])
    values = {}
    for key, value in place.pairs():
        if _is_refused(key, value, problems) or is_null(value.node):
            continue
        if key in schema.parameters:
            values[key] = check_value(value, schema.parameters[key], problems)
        else:
            _report_unknown(key, value, name, problems)
    if name == "setup" and "mode" not in values:
        problems.add(place.key_at, "setup.mode", "missing; set it, for example to pretraining.")
    return values


def _is_refused(key: Any, value: Place, problems: Problems) -> bool:
    """Add a problem for a setting that would change the rows and is not supported."""
    plain = to_plain(value.node)
    why = None
    if key == "mode":
        why = _MODES.get(plain) if isinstance(plain, str) else None
    elif key in _REFUSED and (plain is True or plain not in (None, "", 0, 1)):
        why = _REFUSED[key]
    if why is not None:
        problems.add(value.key_at, value.path, f"{plain!r} cannot be used: {why}.")
    return why is not None


def _report_unknown(key: Any, value: Place, section: str, problems: Problems) -> None:
    homes = [name for name, kind in SECTIONS.items() if key in schema_of(kind).parameters]
    if homes:
        problems.add(value.key_at, value.path, f"belongs in section {homes[0]}; move it there.")
        return
    hint = suggest(str(key), schema_of(SECTIONS[section]).parameters)
    advice = f" {hint}" if hint.startswith("Did") else ""
    problems.note(value.key_at, value.path, f"unused: no such setting.{advice}")
