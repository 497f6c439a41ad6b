"""Which mode the settings ask for."""

from __future__ import annotations

from importlib import import_module
from typing import Final

from modelzoo_trainer.base.exports import load
from modelzoo_trainer.errors import ConfigError, suggest
from modelzoo_trainer.zoo.rows.interface import Mode
from modelzoo_trainer.zoo.rows.sections import PreprocessingSettings

_HERE: Final = "modelzoo_trainer.zoo.rows.modes"
_OBJECTIVES: Final = {
    None: "pretraining:PretrainingMode",
    "pretraining": "pretraining:PretrainingMode",
    "fim": "fill_in_the_middle:FillInTheMiddleMode",
    "mlm": "masking:MaskedMode",
    "bert_pretraining": "bert_pretraining:BertPretrainingMode",
}
"""Of mode `pretraining`, by `dataset.training_objective`."""
_VSL: Final = {"pretraining": "vsl_pretraining:VslPretrainingMode"}
_MODES: Final = {
    "finetuning": "finetuning:FinetuningMode",
    "dpo": "dpo:DpoMode",
    "nlg": "nlg:NlgMode",
}


def mode_of(settings: PreprocessingSettings) -> type[Mode]:
    """Return the class of the mode that the settings ask for.

    Raises:
        ConfigError: If there is none.
    """
    name = settings.setup.mode
    if name == "custom":
        return _users_own(settings.setup.token_generator)
    if name != "pretraining":
        return _class(f"{_HERE}.{_MODES[name]}")
    objective = settings.dataset.training_objective
    if objective not in _OBJECTIVES:
        raise ConfigError(
            f"dataset.training_objective: {objective!r} is not known. "
            f"{suggest(str(objective), [one for one in _OBJECTIVES if one])}"
        )
    if settings.dataset.use_vsl and objective in (None, "pretraining"):
        return _class(f"{_HERE}.{_VSL['pretraining']}")
    return _class(f"{_HERE}.{_OBJECTIVES[objective]}")


def _class(path: str) -> type[Mode]:
    found: type[Mode] = load(path)
    return found


def _users_own(path: str | None) -> type[Mode]:
    module, separator, name = (path or "").partition(":")
    if not separator:
        raise ConfigError(
            f"setup.token_generator: mode 'custom' requires module:Class, got {path!r}."
        )
    try:
        found = getattr(import_module(module), name, None)
    except ImportError as error:
        raise ConfigError(
            f"setup.token_generator: {module!r} cannot be imported: {error}."
        ) from error
    if found is None or not hasattr(found, "encode"):
        raise ConfigError(
            f"setup.token_generator: {path!r} is not a mode: it needs the attributes of "
            "modelzoo_trainer.zoo.rows.preprocessing.interface.Mode."
        )
    mode: type[Mode] = found
    return mode
