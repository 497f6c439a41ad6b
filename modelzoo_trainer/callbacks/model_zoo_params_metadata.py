"""Which model and settings a checkpoint is of."""

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
    """Puts the run's settings into its checkpoints, and gives back those of one that is loaded.

    A checkpoint gets `__metadata__`: a list with one mapping of `version`, `model_name` and
    `params`. That of the checkpoint that was loaded last is `trainer.metadata`; None if it has
    none.

    Args:
        params: Plain values by name, to be saved as they are; None = the whole file without its
            secrets in a run from one, else nothing.

    Raises:
        ConfigError: If there is a value that is not plain.
    """

    def __init__(self, params: dict[str, Any] | None = None) -> None:
        if params is not None:
            if not isinstance(params, dict):
                raise ConfigError(f"{_NAME} is {params!r}; it must be a mapping.")
            _check_plain(params)
        self.params = copy.deepcopy(params)

    def take_config(self, config: Mapping[str, Any]) -> None:
        """Save the settings of the file that the run is from, if there are no others.

        Values are plain, without secrets; numbers that are not finite become texts.
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
        """Return the model's name in the file, else that of its class."""
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
    """Return a copy that JSON can hold."""
    if isinstance(value, Mapping):
        return {str(key): _savable(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_savable(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _check_plain(value: Any, path: str = _NAME) -> None:
    """Check that a value can be saved as JSON, and be read again as it was.

    Raises:
        ConfigError: If it cannot.
    """
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise ConfigError(f"{path} has the key {key!r}; keys must be texts.")
            _check_plain(item, f"{path}.{key}")
    elif isinstance(value, list):
        for idx, item in enumerate(value):
            _check_plain(item, f"{path}[{idx}]")
    elif not (value is None or isinstance(value, (str, int, float))):
        raise ConfigError(
            f"{path} is {value!r}; it must be made of mappings, lists, texts, numbers, true, "
            f"false and null."
        )
    elif isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{path} is {value}; numbers must be finite.")
