"""Which layers have a sliding window: `layer_types` of config.json, in both directions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from modelzoo_trainer.zoo.conversion.readers import ConfigReader, SettingsReader
from modelzoo_trainer.zoo.models.context import windowed_layers

SLIDING: Final = "sliding_attention"
FULL: Final = "full_attention"


def read_windows(config: ConfigReader, window: int | None, usual: Sequence[str]) -> dict[str, Any]:
    """Return our settings of the sliding window.

    Args:
        config: The file.
        window: Number of keys that a query sees in layers with a window; None = no layer has one.
        usual: The kinds of the layers if the file has no `layer_types`.

    Raises:
        ConfigError: If the layers neither are all of one kind nor alternate.
    """
    kinds = config.items("layer_types") or list(usual)
    if len(kinds) != len(usual):
        config.refuse("layer_types", f"there are {len(usual)} layers")
    if any(one not in (SLIDING, FULL) for one in kinds):
        config.refuse("layer_types", f"supported: {SLIDING} and {FULL}")
    if SLIDING not in kinds:
        return {}
    if window is None:
        config.refuse("layer_types", f"{SLIDING} without a length of the window")
    settings: dict[str, Any] = {"attention_sliding_window_length": window}
    if FULL not in kinds:
        return settings
    first = kinds[0]
    second = FULL if first == SLIDING else SLIDING
    if kinds != [first if number % 2 == 0 else second for number in range(len(kinds))]:
        config.refuse("layer_types", "supported: all layers of one kind, or every other one")
    settings["sliding_window_every_other_decoder_layer"] = True
    pattern = "sliding_window_first" if first == SLIDING else "full_attention_first"
    return settings | {"sliding_window_every_other_decoder_layer_pattern": pattern}


def write_windows(settings: SettingsReader) -> tuple[int | None, list[str]]:
    """Return the length of the sliding window, if there is one, and the kinds of the layers."""
    window = settings.take("attention_sliding_window_length")
    settings.take("sliding_window_every_other_decoder_layer")
    settings.take("sliding_window_every_other_decoder_layer_pattern")
    if window is None:
        return None, [FULL] * settings.settings.num_hidden_layers
    return window, [SLIDING if one else FULL for one in windowed_layers(settings.settings)]
