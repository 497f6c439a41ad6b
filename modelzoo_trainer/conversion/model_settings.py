"""Find the settings of the model whose weights are converted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

from modelzoo_trainer.checkpointing.lazy_weights import is_checkpoint
from modelzoo_trainer.checkpointing.weights import read_part
from modelzoo_trainer.errors import CheckpointError, ConfigError, suggest
from modelzoo_trainer.models.decoder import Decoder
from modelzoo_trainer.models.decoder_settings import DecoderSettings
from modelzoo_trainer.models.inner_decoder import decoder_of

MODEL_YAML: Final = "model.yaml"
_METADATA: Final = "__metadata__"
_PREFERENCE: Final = "dpo"
_POLICY: Final = "policy_model"
_OF_RUN: Final = ("logs/latest/params.yaml",)
ReadYaml = Callable[[Path], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    """The settings of a decoder, and where they are from.

    The decoder is the whole model, or the policy of `dpo`.
    """

    name: str  # of the model in a configuration
    model_class: type[Decoder]
    arguments: Mapping[str, Any]  # of the constructor
    where: str
    prefix: str = ""  # of the names of its weights, as a part of another model

    @property
    def settings(self) -> DecoderSettings:
        """The settings, with defaults."""
        return self.model_class.settings_of(**self.arguments)


def find_settings(source: Path, params: Path | None, read_yaml: ReadYaml) -> ModelSettings:
    """Return the settings of the model of a checkpoint or of weights.

    Args:
        source: The checkpoint, or the file or folder of weights.
        params: A YAML file that has them; None = the first of: the metadata of the checkpoint
            (`ModelZooParamsMetadata`), model.yaml beside the weights, the log of the run.
        read_yaml: Reads a YAML file.

    Raises:
        ConfigError: If there are none, or they are not those of a decoder.
    """
    if params is not None:
        return _settings_in(read_yaml(params), str(params))
    for where, content in _candidates(source, read_yaml):
        return _settings_in(content, where)
    raise ConfigError(
        f"The settings of the model of {str(source)!r} are not known: it has no metadata "
        f"(callback ModelZooParamsMetadata), and there is neither {MODEL_YAML} nor the log of a "
        f"run beside it. Pass the configuration of the run: --params FILE."
    )


def _candidates(source: Path, read_yaml: ReadYaml) -> Iterator[tuple[str, object]]:
    if source.is_dir() and is_checkpoint(source):
        try:
            entry = read_part(source, _METADATA)[-1]
        except CheckpointError:
            entry = None
        if isinstance(entry, Mapping) and entry.get("params"):
            yield f"the metadata of {str(source)!r}", entry["params"]
    folder = source if source.is_dir() else source.parent
    places = [folder / MODEL_YAML]
    places += [
        parent / name for parent in (folder.parent, folder.parent.parent) for name in _OF_RUN
    ]
    for place in places:
        if place.is_file():
            yield str(place), read_yaml(place)


def _settings_in(content: object, where: str) -> ModelSettings:
    found = list(_models_in(content))
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
    given, key, prefix = found[0], "model", ""
    if str(given.get("name") or given.get("model_name")).lower() == _PREFERENCE:
        given, key, prefix = given.get(_POLICY) or {}, f"model.{_POLICY}", f"{_POLICY}."
    try:
        cls, arguments = decoder_of("model", given)
    except ConfigError as error:
        text = str(error).replace("model.model", key)
        raise ConfigError(
            f"{where}: {text} Only weights of decoders are converted; of models of transformers "
            f"the callback HuggingFaceCheckpoint writes folders."
        ) from None
    arguments = {key: value for key, value in arguments.items() if value is not None}
    known = [one.name for one in fields(cls.SETTINGS) if one.init]
    for name in arguments:
        if name not in known:
            raise ConfigError(
                f"{where}: {key}.{name}: no such setting. {suggest(str(name), known)}"
            )
    try:
        cls.check_arguments(**arguments)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    name = str(given.get("name") or given.get("model_name")).lower()
    return ModelSettings(
        name=name, model_class=cls, arguments=arguments, where=where, prefix=prefix
    )


def _models_in(content: object) -> Iterator[Mapping[str, Any]]:
    """Yield the sections `model` of a configuration."""
    if isinstance(content, list):
        for item in content:
            yield from _models_in(item)
    elif isinstance(content, Mapping):
        model = content.get("model")
        if isinstance(model, Mapping):
            yield model
            return
        for key in ("trainer", "init"):
            yield from _models_in(content.get(key))
