"""Settings of an architecture of `transformers` with changed values."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import fields as fields_of
from typing import Any, Final

from modelzoo_trainer.errors import ConfigError, suggest

_WHERE: Final = "config_overrides"
_ROPE: Final = "rope_parameters"
_SCALING: Final = "rope_scaling"
_IN_ROPE: Final = ("rope_theta", "partial_rotary_factor")
_TYPES: Final = "layer_types"

# Keys that the library reads without a field of the class of settings.
_OTHER_KEYS: Final = (
    "decoder_start_token_id",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "head_dim",
    "num_labels",
    "partial_rotary_factor",
    "rope_scaling",
    "rope_theta",
    "tokenizer_class",
)
_INERT: Final = ("_name_or_path", "architectures", "model_type", "transformers_version")
_OF_THE_MODEL: Final = {
    "attn_implementation": "attn_implementation",
    "_attn_implementation": "attn_implementation",
    "dtype": "dtype",
    "torch_dtype": "dtype",
}


def overridden(config: Any, given: Mapping[str, Any], changes: Mapping[str, Any]) -> Any:
    """Return settings with changed values; a mapping changes only the keys that it has.

    They are made again, so that values that the library derives from others change, too.

    Args:
        config: The settings, of `transformers`.
        given: What they were made from, such as the content of `config.json`.
        changes: The new values, by key.

    Raises:
        ConfigError: If a key is unknown, or a value is invalid.
    """
    merged = _merged(config, given, changes, _WHERE)
    try:
        made = type(config).from_dict(merged)
        validate = getattr(made, "validate", None)
        if validate is not None:
            validate()
    except Exception as error:  # of several classes of the library
        raise ConfigError(f"{_WHERE}: transformers rejects it: {reason_of_library(error)}.") from (
            error
        )
    made._name_or_path = config._name_or_path
    return made


def _merged(
    config: Any, given: Mapping[str, Any], changes: Mapping[str, Any], where: str
) -> dict[str, Any]:
    """Return what settings with changed values are made from."""
    check_keys(type(config), config, changes, where)
    names = type(config).attribute_map
    before = {names.get(key, key): copy.deepcopy(one) for key, one in given.items()}
    merged = _without_derived(config, before, changes)
    for key, value in changes.items():
        name = names.get(key, key)
        merged[name] = _changed(config, before, name, value, f"{where}.{key}")
    return _with_rope(config, changes, merged, where)


def _changed(config: Any, before: Mapping[str, Any], name: str, value: Any, where: str) -> Any:
    """Return the new value of one setting."""
    if not isinstance(value, Mapping):
        return copy.deepcopy(value)
    own: Any = getattr(config, name, None)
    if hasattr(own, "to_dict"):
        there = before.get(name)
        return _merged(own, there if isinstance(there, Mapping) else own.to_dict(), value, where)
    return {**copy.deepcopy(own), **value} if isinstance(own, Mapping) else dict(value)


def _without_derived(
    config: Any, before: Mapping[str, Any], changes: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the settings without those that a file has although they follow from the others."""
    kept = dict(before)
    if _TYPES in kept and _TYPES not in changes:
        rest = {key: one for key, one in kept.items() if key != _TYPES}
        if getattr(type(config).from_dict(copy.deepcopy(rest)), _TYPES, None) == kept[_TYPES]:
            del kept[_TYPES]
    if "num_labels" in changes and len(kept.get("id2label") or ()) != changes["num_labels"]:
        kept.pop("id2label", None)
        kept.pop("label2id", None)
    return kept


def _with_rope(
    config: Any, changes: Mapping[str, Any], merged: dict[str, Any], where: str
) -> dict[str, Any]:
    """Put the older names of settings of rotary positions where the library reads them."""
    own = getattr(config, _ROPE, None)
    given = [key for key in (*_IN_ROPE, _SCALING, _ROPE) if key in changes]
    if not isinstance(own, Mapping) or not given:
        return merged
    fields = {one.name for one in fields_of(type(config))}
    rest = {key: one for key, one in merged.items() if key not in given or key in fields}
    rest.pop(_SCALING, None)  # it would replace the others
    has_types = any(isinstance(one, Mapping) for one in own.values())
    return rest | {_ROPE: (_rope_by_type if has_types else _rope)(config, changes, where)}


def _rope(config: Any, changes: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the changed settings of rotary positions."""
    params = dict(config.rope_parameters)
    if _SCALING in changes and changes[_SCALING] is None:
        params = {key: one for key, one in params.items() if key in _IN_ROPE}
    alone = {key: changes[key] for key in _IN_ROPE if key in changes}
    for new in (changes.get(_SCALING), changes.get(_ROPE), alone):
        params |= {"rope_type" if key == "type" else key: one for key, one in (new or {}).items()}
    return params


def _rope_by_type(config: Any, changes: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the changed settings of rotary positions, which each type of layer has.

    Raises:
        ConfigError: If it is not known which type of layer a value is for.
    """
    params = dict(config.rope_parameters)
    for key in (*_IN_ROPE, _SCALING):
        if key in changes:
            raise ConfigError(
                f"{where}.{key}: in {config.model_type!r} each type of layer has rotary positions "
                f"of its own ({', '.join(params)}). Set {_ROPE}: {{{min(params)}: {{...}}}}."
            )
    for key, new in (changes[_ROPE] or {}).items():
        params[key] = {**params.get(key, {}), **new} if isinstance(new, Mapping) else new
    return params


def check_keys(cls: Any, config: Any, given: Mapping[str, Any], where: str) -> None:
    """Refuse keys that are not settings of an architecture; the library ignores them.

    Args:
        cls: The class of the settings.
        config: The settings that are to change; None = they are made from `given`.
        given: Values by key.
        where: The setting that has them, for messages.

    Raises:
        ConfigError: If a key is unknown, or has no effect.
    """
    known = {one.name for one in fields_of(cls)} | set(cls.attribute_map) | set(_OTHER_KEYS)
    known |= set(getattr(cls, "sub_configs", ()))
    if config is not None:
        known |= set(config.to_dict())
    for key in given:
        if key in _OF_THE_MODEL:
            raise ConfigError(
                f"{where}.{key} has no effect here. Set {_OF_THE_MODEL[key]} of the model."
            )
        if key in _INERT and config is None:
            continue
        if key not in known or key in _INERT:
            raise ConfigError(
                f"{where}.{key}: no such setting of {cls.model_type!r}. "
                f"{suggest(str(key), known - set(_INERT))}"
            )


def reason_of_library(error: Exception) -> str:
    """Return the last line of an error of the library, which has the cause."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[-1] if lines else type(error).__name__).rstrip(".")
