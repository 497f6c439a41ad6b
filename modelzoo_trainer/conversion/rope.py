"""Rotary positions in config.json, in both directions.

Transformers 5 has all in `rope_parameters`; before, `rope_theta` and `rope_scaling` were keys.
"""

from __future__ import annotations

from typing import Any, Final

from modelzoo_trainer.conversion.readers import ConfigReader, SettingsReader
from modelzoo_trainer.errors import ConfigError

_LLAMA3: Final = ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
_YARN: Final = ("original_max_position_embeddings", "beta_fast", "beta_slow", "truncate")


def read_rope(config: ConfigReader, *, theta: float = 10000.0) -> dict[str, Any]:
    """Return our settings for the rotary positions of a config.json, without `rotary_dim`.

    `theta`: the base of the wavelengths if the file has none.

    Raises:
        ConfigError: If they are scaled in a way that has no counterpart.
    """
    key = "rope_parameters" if config.has("rope_parameters") else "rope_scaling"
    given = {**config.mapping("rope_parameters", {}), **config.mapping("rope_scaling", {})}
    base = config.number("rope_theta", theta)
    base = float(given.pop("rope_theta", base))
    kind = given.pop("rope_type", given.pop("type", "default")) or "default"
    given.pop("type", None)
    if given.pop("partial_rotary_factor", 1.0) != 1.0:
        config.refuse(key, "partial_rotary_factor")
    settings: dict[str, Any] = {"position_embedding_type": "rotary", "rope_theta": base}
    if kind == "default":
        return settings
    if kind not in ("linear", "llama3", "yarn"):
        config.refuse(key, "supported: default, linear, llama3 and yarn")
    factor = given.pop("factor", None)
    if not isinstance(factor, int | float):
        raise ConfigError(f"{key}.factor is {factor!r}; expected a number.")
    settings |= {"pos_scaling_type": kind, "pos_scaling_factor": float(factor)}
    extra = {name: given.pop(name) for name in _keys(kind) if given.get(name) is not None}
    if kind == "yarn":
        magnitude = given.pop("attention_factor", None)
        if magnitude is not None:
            extra |= {"mscale_a": 0.0, "mscale_b": float(magnitude)}
        extra.setdefault(
            "original_max_position_embeddings", config.integer("max_position_embeddings")
        )
    if given:
        config.refuse(key, f"{next(iter(given))} with rope_type {kind}")
    return settings | ({"pos_scaling_extra_args": extra} if extra else {})


def _keys(kind: str) -> tuple[str, ...]:
    return {"linear": (), "llama3": _LLAMA3, "yarn": _YARN}[kind]


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
    if kind == "longrope":
        settings.refuse("pos_scaling_type", "its factors depend on the length of a batch there")
    scaling: dict[str, Any] = {"rope_type": kind, "factor": float(factor)}
    if kind == "linear" and factor == 1:
        scaling = {"rope_type": "default"}
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
