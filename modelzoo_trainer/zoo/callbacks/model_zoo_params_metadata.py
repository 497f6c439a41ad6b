"""Metadata of checkpoints: the model and its settings."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from typing_extensions import override

from modelzoo_trainer import __version__
from modelzoo_trainer.callback import Callback, StateDict
from modelzoo_trainer.errors import ConfigError

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer

_KEY: Final = "__metadata__"
_NAME: Final = "ModelZooParamsMetadata.params"


class ModelZooParamsMetadata(Callback):
    """Save the run's settings in its checkpoints, and restore the settings of a loaded one.

    A checkpoint gets the entry `__metadata__`: a list with one mapping of `version`, `model_name`
    and `params`. `trainer.metadata` comes from the checkpoint that was loaded last; None if it has
    none.

    Args:
        params: JSON values by name, saved unchanged; None = the configuration file without its
            secrets, if there is one.

    Raises:
        ConfigError: If a value cannot be represented in JSON.
    """

    def __init__(self, params: dict[str, Any] | None = None) -> None:
        if params is not None:
            if not isinstance(params, dict):
                raise ConfigError(f"{_NAME} is {params!r}; it must be a mapping.")
            _check_plain(params)
        self.params = copy.deepcopy(params)

    def take_config(self, config: Mapping[str, Any]) -> None:
        """Save the settings of the configuration file, unless `params` was given.

        Values are JSON values without secrets; non-finite numbers become strings.
        """
        if self.params is None:
            self.params = {key: _savable(value) for key, value in config.items()}

    @override
    def on_save_checkpoint(self, trainer: Trainer, state_dict: StateDict) -> None:
        entry = {
            "version": __version__,
            "model_name": self._model_name(trainer),
            "params": copy.deepcopy(self.params),
        }
        state_dict[_KEY] = [entry]

    def _model_name(self, trainer: Trainer) -> str:
        """Return the model's name in the configuration file, or else its class's."""
        found: Any = self.params
        for key in ("trainer", "init", "model"):
            found = found.get(key) if isinstance(found, Mapping) else None
        if isinstance(found, Mapping):
            name = found.get("name", found.get("model_name"))
            if isinstance(name, str):
                return name
        return type(trainer.model).__name__

    @override
    def preprocess_checkpoint(self, trainer: Trainer, state_dict: StateDict) -> None:
        trainer.metadata = state_dict.pop(_KEY, None)


def _savable(value: Any) -> Any:
    """Return a copy that can be written as JSON."""
    if isinstance(value, Mapping):
        return {str(key): _savable(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_savable(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _check_plain(value: Any, path: str = _NAME) -> None:
    """Check that a value can be saved as JSON and read again unchanged.

    Raises:
        ConfigError: If it cannot.
    """
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise ConfigError(f"{path} has the key {key!r}; keys must be strings.")
            _check_plain(item, f"{path}.{key}")
    elif isinstance(value, list):
        for idx, item in enumerate(value):
            _check_plain(item, f"{path}[{idx}]")
    elif not (value is None or isinstance(value, (str, int, float))):
        raise ConfigError(
            f"{path} is {value!r}; it must consist of mappings, lists, strings, numbers, true, "
            f"false and null."
        )
    elif isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{path} is {value}; numbers must be finite.")
