"""Rotary positions in config.json, in both directions.

Transformers 5 has all in `rope_parameters`; before, `rope_theta` and `rope_scaling` were keys.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

from modelzoo_trainer.zoo.conversion.readers import ConfigReader, SettingsReader, is_finite

_LLAMA3: Final = ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
_YARN: Final = ("original_max_position_embeddings", "beta_fast", "beta_slow", "truncate")
_LONGROPE: Final = ("original_max_position_embeddings", "long_factor", "short_factor")
_KEYS: Final = {"linear": (), "llama3": _LLAMA3, "yarn": _YARN, "longrope": _LONGROPE}
"""The further keys of each kind of scaling, under the same name on both sides."""


def read_rope(
    config: ConfigReader, *, theta: float = 10000.0, is_partial: bool = False
) -> dict[str, Any]:
    """Return our settings for the rotary positions of a config.json, without `rotary_dim`.

    Args:
        config: The file.
        theta: The base of the wavelengths if the file has none.
        is_partial: Whether only a part of each head may be rotated: see `rotated_share`.

    Raises:
        ConfigError: If they are scaled in a way that has no counterpart.
    """
    key, given = _parameters(config)
    base = float(given.pop("rope_theta", config.number("rope_theta", theta)))
    kind = given.pop("rope_type", given.pop("type", "default")) or "default"
    given.pop("type", None)
    share = given.pop("partial_rotary_factor", None)
    if not is_partial and share not in (None, 1):
        config.refuse(key, "partial_rotary_factor")
    settings: dict[str, Any] = {"position_embedding_type": "rotary", "rope_theta": base}
    if kind == "default":
        return settings
    if kind not in _KEYS:
        config.refuse(key, f"supported: default, {', '.join(_KEYS)}")
    return settings | {"pos_scaling_type": kind} | _read_scaling(config, key, kind, given)


def _read_scaling(
    config: ConfigReader, key: str, kind: str, given: dict[str, Any]
) -> dict[str, Any]:
    """Return our settings for a kind of scaling; `given`: its keys, all of which must be known."""
    extra = {name: given.pop(name) for name in _KEYS[kind] if given.get(name) is not None}
    length = config.integer("max_position_embeddings", None)
    if kind != "linear" and length is not None:
        extra.setdefault("original_max_position_embeddings", length)
    factor, magnitude = given.pop("factor", None), given.pop("attention_factor", None)
    if kind == "yarn":
        derived = _yarn_magnitude(factor, given)
        magnitude = derived if magnitude is None else magnitude
    if given:
        config.refuse(key, f"{next(iter(given))} with rope_type {kind}")
    if kind == "longrope":
        _check_one_length(config, key, extra, length)
        extra["attention_factor"] = _longrope_magnitude(extra, length, factor, magnitude)
        return {"pos_scaling_extra_args": extra}
    if factor is None or factor < 1:
        config.reject(f"{key}.factor", factor, "a number >= 1")
    if magnitude is not None:
        if kind != "yarn" or (factor <= 1 and magnitude != 1):
            config.refuse(key, f"attention_factor with rope_type {kind} and factor {factor}")
        extra |= {"mscale_a": 0.0, "mscale_b": float(magnitude)}
    settings: dict[str, Any] = {"pos_scaling_factor": float(factor)}
    return settings | ({"pos_scaling_extra_args": extra} if extra else {})


def rotated_share(config: ConfigReader, default: float, *, alias: str) -> float:
    """Return the share of each head that is rotated.

    `alias`: its key in files of transformers before 5.
    """
    key, given = _parameters(config)
    share = config.number(alias, default)
    if "partial_rotary_factor" in given:
        alias, share = f"{key}.partial_rotary_factor", given["partial_rotary_factor"]
    if not 0 < share <= 1:
        config.reject(alias, share, "a number above 0 and at most 1")
    return float(share)


def _parameters(config: ConfigReader) -> tuple[str, dict[str, Any]]:
    """Return the name of the key, and what is in it, or in both if a file has both."""
    given = dict(config.mapping("rope_parameters", {}))
    before = config.mapping("rope_scaling", {})
    for name, value in before.items():
        if given.setdefault(name, value) != value:
            config.refuse("rope_scaling", f"rope_parameters has another {name}")
    key = "rope_parameters" if config.has("rope_parameters") else "rope_scaling"
    found = {name: value for name, value in given.items() if value is not None}
    for name, value in found.items():
        kind, fits = _KINDS.get(name, ("", lambda one: True))
        if not fits(value):
            config.reject(f"{key}.{name}", value, kind)
    return key, found


def _is_positive(value: Any) -> bool:
    return is_finite(value) and value > 0


def _is_list(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_positive, value))


_POSITIVE: Final = (
    *("rope_theta", "factor", "attention_factor", "beta_fast", "partial_rotary_factor"),
    *_LLAMA3,
)
_KINDS: Final[dict[str, tuple[str, Callable[[Any], bool]]]] = {
    **dict.fromkeys(_POSITIVE, ("a number > 0", _is_positive)),
    **dict.fromkeys(("beta_slow", "mscale", "mscale_all_dim"), ("a finite number", is_finite)),
    **dict.fromkeys(("long_factor", "short_factor"), ("a list of numbers > 0", _is_list)),
    **dict.fromkeys(("rope_type", "type"), ("a string", lambda one: isinstance(one, str))),
    "truncate": ("a boolean", lambda one: isinstance(one, bool)),
}
"""What the keys are, and a check of it."""


def _yarn_magnitude(factor: Any, given: dict[str, Any]) -> float | None:
    """Return the factor on cosines and sines if a file has it for both its parts; as DeepSeek."""
    parts = given.pop("mscale", None), given.pop("mscale_all_dim", None)
    if not all(parts) or not isinstance(factor, int | float) or factor <= 1:
        return None
    over, under = (0.1 * float(part) * math.log(factor) + 1 for part in parts)
    return over / under


def _check_one_length(
    config: ConfigReader, key: str, extra: dict[str, Any], length: int | None
) -> None:
    """Refuse factors that transformers chooses by the length of each batch."""
    is_long = length is None or length > extra["original_max_position_embeddings"]
    if is_long and extra.get("long_factor") != extra.get("short_factor"):
        config.refuse(key, "which factors are used depends on the length of a batch there")


def _longrope_magnitude(
    extra: dict[str, Any], length: int | None, factor: float | None, magnitude: float | None
) -> float:
    """Return the factor on cosines and sines, as transformers derives it."""
    if magnitude is not None:
        return float(magnitude)
    original = extra["original_max_position_embeddings"]
    ratio = (length or original) / original if factor is None else factor
    return 1.0 if ratio <= 1 else math.sqrt(1 + math.log(ratio) / math.log(original))


def write_rope(settings: SettingsReader) -> dict[str, Any]:
    """Return the keys of config.json for our rotary positions.

    Raises:
        ConfigError: If they are scaled in a way that has no counterpart.
    """
    settings.expect("position_embedding_type", "rotary")
    kind = settings.take("pos_scaling_type").lower()
    factor = settings.take("pos_scaling_factor")
    extra = dict(settings.take("pos_scaling_extra_args") or {})
    theta = float(settings.take("rope_theta"))
    scaling: dict[str, Any] = {"rope_type": kind, "factor": float(factor)}
    if kind == "linear" and factor == 1:
        scaling = {"rope_type": "default"}
    elif kind == "longrope":
        scaling |= _write_longrope(settings, extra)
    elif kind == "llama3":
        scaling |= dict(zip(_LLAMA3, (1.0, 4.0, 8192), strict=True))
        scaling |= {key: extra.pop(key) for key in _LLAMA3 if key in extra}
    elif kind == "yarn":
        if extra.pop("extrapolation_factor", 1) != 1:
            settings.refuse("pos_scaling_extra_args", "extrapolation_factor")
        if {"mscale_a", "mscale_b"} & extra.keys():
            extra.pop("mscale_a", None), extra.pop("mscale_b", None)
            rotary = settings.settings.rotary()
            assert rotary is not None
            scaling["attention_factor"] = rotary.scaling.magnitude
        scaling |= {key: extra.pop(key) for key in _YARN if key in extra}
    length = scaling.get("original_max_position_embeddings")
    if length is not None:
        scaling["original_max_position_embeddings"] = int(length)
    config: dict[str, Any] = {"rope_parameters": {"rope_theta": theta, **scaling}}
    config["rope_theta"] = theta
    config["rope_scaling"] = None if scaling["rope_type"] == "default" else dict(scaling)
    return config


def _write_longrope(settings: SettingsReader, extra: dict[str, Any]) -> dict[str, Any]:
    rotary = settings.settings.rotary()
    assert rotary is not None
    length = settings.settings.max_position_embeddings
    original = extra["original_max_position_embeddings"]
    if length > original and extra["long_factor"] != extra["short_factor"]:
        settings.refuse("pos_scaling_type", "its factors depend on the length of a batch there")
    return {
        **{key: extra[key] for key in _LONGROPE},
        "factor": max(length / original, 1.0),
        "attention_factor": rotary.scaling.magnitude,
    }
