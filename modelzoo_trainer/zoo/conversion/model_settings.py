"""Find the settings of the model whose weights are converted, and of its adapters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from modelzoo_trainer.base.regular_files import require_inside
from modelzoo_trainer.checkpointing.lazy_weights import is_checkpoint
from modelzoo_trainer.checkpointing.weights import read_part
from modelzoo_trainer.errors import CheckpointError, ConfigError
from modelzoo_trainer.zoo.conversion.engine import settings_of
from modelzoo_trainer.zoo.models.inner_decoder import decoder_of
from modelzoo_trainer.zoo.models.lora import LoraConfig, configs_of
from modelzoo_trainer.zoo.models.registry import model_class

MODEL_YAML: Final = "model.yaml"
_METADATA: Final = "__metadata__"
_PREFERENCE: Final = "dpo"
_THEIRS: Final = ("hf_causal_lm", "hf_model")
OTHERS: Final = (
    *("bert", "bert/classifier", "bert/extractive_summarization", "bert/token_classifier"),
    *("esm2", "t5", "transformer", "vision_transformer"),
)
"""Models besides decoders whose weights are converted."""
_NAMES: Final = ("name", "model_name")
_LORA: Final = "Lora"
_POLICY: Final = "policy_model"
_PARAMS: Final = "params.yaml"
_OF_RUN: Final = f"logs/latest/{_PARAMS}"
ModelsIn = Callable[[Path | Mapping[str, Any], str], Sequence[tuple[Mapping[str, Any], object]]]
"""Gives the settings of each model of a YAML file, or of its content, as `check` accepts them, and
the callbacks beside it; the second argument is the name of the content in messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    """The settings of a model, and where they are from.

    The model is the whole one, or the policy of `dpo`.
    """

    name: str  # of the model in a configuration
    model_class: Any
    arguments: Mapping[str, Any]  # of the constructor
    where: str
    prefix: str = ""  # of the names of its weights, as a part of another model
    root: RootSettings | None = None  # the whole model with its adapters

    @property
    def settings(self) -> Any:
        """The settings of a decoder, with defaults, or another model without values."""
        return settings_of(self.model_class, self.arguments)


@dataclass(frozen=True, slots=True, kw_only=True)
class RootSettings:
    """The settings of the model of a run, and of the adapters of the callback `Lora`."""

    name: str
    arguments: Mapping[str, Any]  # of the constructor
    lora: tuple[LoraConfig, ...]
    where: str
    is_given: bool = False  # by the user, not by the checkpoint

    @property
    def policy(self) -> Mapping[str, Any] | None:
        """The settings of the policy of `dpo`; None of other models."""
        return (self.arguments.get(_POLICY) or {}) if self.name == _PREFERENCE else None

    @property
    def is_of_transformers(self) -> bool:
        """Whether the model, or the policy, is one of `transformers`."""
        return (self.name if self.policy is None else _name_of(self.policy)) in _THEIRS


def find_settings(
    source: Path, params: Path | None, models_in: ModelsIn
) -> ModelSettings | RootSettings:
    """Return the settings of the model of a checkpoint or of weights.

    Args:
        source: The checkpoint, or the file or folder of weights.
        params: A YAML file that has them; None = the first of: the metadata of the checkpoint
            (`ModelZooParamsMetadata`), model.yaml beside the weights, the log of the run.
        models_in: Reads the models of a file.

    Raises:
        ConfigError: If there are none, or they are invalid.

    Returns:
        The settings of a decoder, or of the model of a run that is one of `transformers`.
    """
    if params is not None:
        return _settings_in(models_in(params, str(params)), str(params), is_given=True)
    for where, content in _candidates(source):
        return _settings_in(models_in(content, where), where)
    raise ConfigError(
        f"The settings of the model of {str(source)!r} are not known: it has no metadata "
        f"(callback ModelZooParamsMetadata), and there is neither {MODEL_YAML} nor the log of a "
        f"run beside it. Pass the configuration of the run: --params FILE."
    )


def _candidates(source: Path) -> Iterator[tuple[str, Path | Mapping[str, Any]]]:
    if source.is_dir() and is_checkpoint(source):
        try:
            entry = read_part(source, _METADATA)[-1]
        except CheckpointError:
            entry = None
        if isinstance(entry, Mapping) and entry.get("params"):
            yield f"the metadata of {str(source)!r}", entry["params"]
    folder = source if source.is_dir() else source.parent
    places = [folder / MODEL_YAML]
    places += [parent / _OF_RUN for parent in (folder.parent, folder.parent.parent)]
    for place in places:
        if place.is_file():
            require_inside(place, place.parents[2] if place.name == _PARAMS else folder)
            yield str(place), place


def _settings_in(
    found: Sequence[tuple[Mapping[str, Any], object]], where: str, *, is_given: bool = False
) -> ModelSettings | RootSettings:
    if not found:
        raise ConfigError(
            f"{where}: has no section model. Pass the configuration of the run that made the "
            f"weights: --params FILE."
        )
    if any(one != found[0] for one in found):
        raise ConfigError(
            f"{where}: has {len(found)} trainers with different models. Pass a file with the "
            f"section model of the one that made the weights: --params FILE."
        )
    given, callbacks = found[0]
    try:
        lora = tuple(_adapters_in(callbacks))
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    root = RootSettings(
        name=_name_of(given),
        arguments={key: value for key, value in given.items() if key not in _NAMES},
        lora=lora,
        where=where,
        is_given=is_given,
    )
    return root if root.is_of_transformers else _decoder_settings(root, given)


def _decoder_settings(root: RootSettings, given: Mapping[str, Any]) -> ModelSettings:
    where, key, prefix = root.where, "model", ""
    if root.name in OTHERS:
        return _model_settings(root)
    if root.policy is not None:
        given, key, prefix = root.policy, f"model.{_POLICY}", f"{_POLICY}."
    try:
        cls, arguments = decoder_of("model", given, others=() if prefix else (*OTHERS, *_THEIRS))
    except ConfigError as error:
        text = str(error).replace("model.model", key)
        raise ConfigError(
            f"{where}: {text} Only weights of decoders, {', '.join((*OTHERS, *_THEIRS))} and "
            f"{_PREFERENCE} are converted."
        ) from None
    arguments = {key: value for key, value in arguments.items() if value is not None}
    try:
        cls.check_arguments(**arguments)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    return ModelSettings(
        name=_name_of(given),
        model_class=cls,
        arguments=arguments,
        where=where,
        prefix=prefix,
        root=root,
    )


def _model_settings(root: RootSettings) -> ModelSettings:
    """Return the settings of a model that is not a decoder."""
    cls: Any = model_class(root.name)
    arguments = {key: value for key, value in root.arguments.items() if value is not None}
    try:
        cls.check_arguments(**arguments)
    except (ConfigError, TypeError) as error:
        raise ConfigError(f"{root.where}: {error}") from None
    return ModelSettings(
        name=root.name, model_class=cls, arguments=arguments, where=root.where, root=root
    )


def _name_of(section: Mapping[str, Any]) -> str:
    return str(section.get("name") or section.get("model_name")).lower()


def _adapters_in(callbacks: object) -> Iterator[LoraConfig]:
    """Yield the settings of the callback `Lora`."""
    for one in callbacks if isinstance(callbacks, list) else ():
        for name, arguments in one.items() if isinstance(one, Mapping) else ():
            if str(name).rpartition(".")[2] == _LORA and isinstance(arguments, Mapping):
                yield from configs_of(arguments.get("lora_params"))
