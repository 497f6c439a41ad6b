"""What a family of Hugging Face models is, and which there are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Final, Literal

from torch import nn

from modelzoo_trainer.errors import ConfigError, suggest
from modelzoo_trainer.zoo.conversion.readers import (
    OF_SEQ2SEQ,
    ConfigReader,
    ModelReader,
    SettingsReader,
)
from modelzoo_trainer.zoo.conversion.rules import Rule
from modelzoo_trainer.zoo.models.decoder import Decoder
from modelzoo_trainer.zoo.models.registry import model_class

_MODULES: Final = (
    *(
        "llama",
        "qwen",
        "mixtral",
        "gemma2",
        "gpt2",
        "bloom",
        "gpt_bigcode",
        "gptj",
        "gpt_neox",
        "falcon",
    ),
)
"""The modules of `families`, in the order in which they are tried for a model without a name."""
_OTHERS: Final = ("bert", "esm", "t5", "vit")
"""Families of models that are not decoders."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Models of Hugging Face that one of our decoders computes.

    Attributes:
        name: The name for `--family`; also the `model_type` of config.json unless given.
        architecture: The class there; `config.json` has its name.
        model_name: The name of our decoder in a configuration.
        settings_of: Gives the constructor arguments of our decoder for a config.json; refuses what
            has no counterpart.
        config_of: Gives the content of config.json for our settings, without `architectures`,
            `model_type`, `vocab_size` and `dtype`; refuses what has no counterpart.
        rules: Gives the rules of all tensors for our settings, except the output layer if it
            shares the weights of the embedding.
        base_prefix: What precedes the names of the tensors of the model without its output layer:
            files of such a model lack it.
        head: The name of the weight of the output layer there.
        embedding: The name of the weight of the embedding there.
        dropped: Patterns of full names of tensors there that follow from the settings.
        same: Full names of tensors there that repeat another one.
        model_type: The `model_type` of config.json; "" = the name.
        other_model_types: Types in older files, which are read but not written.
        kind: What the model is; of all but decoders `config_of` gives the `vocab_size`, if any.
        applies: Whether a config.json of this `model_type` is of this family and not of the one
            without this function.
    """

    name: str
    architecture: str
    model_name: str
    settings_of: Callable[[ConfigReader], dict[str, Any]]
    config_of: Callable[[Any], dict[str, Any]]
    rules: Callable[[Any], Sequence[Rule]]
    base_prefix: str
    embedding: str
    head: str = "lm_head.weight"
    dropped: tuple[str, ...] = field(default=())
    same: Mapping[str, str] = field(default_factory=dict)
    model_type: str = ""
    other_model_types: tuple[str, ...] = ()
    applies: Callable[[Mapping[str, Any]], bool] | None = None
    kind: Literal["decoder", "encoder", "seq2seq"] = "decoder"

    @property
    def model_class(self) -> Any:
        """The class of our model."""
        return model_class(self.model_name)

    @property
    def generates(self) -> bool:
        """Whether the model generates tokens."""
        return self.kind != "encoder"

    @property
    def _instead(self) -> str:
        return "hf_causal_lm" if self.kind == "decoder" else "hf_model"

    def read_config(self, config: Mapping[str, Any], where: str) -> dict[str, Any]:
        """Return the constructor arguments of our decoder for a config.json.

        `where`: the file, for messages.

        Raises:
            ConfigError: For the first option that has no counterpart.
        """
        options = {"disabled": OF_SEQ2SEQ} if self.kind == "seq2seq" else {}
        reader = ConfigReader(config, where, self.name, self._instead, **options)
        arguments = self.settings_of(reader)
        reader.finish()
        try:
            self.model_class.check_arguments(**arguments)
        except ConfigError as error:
            raise ConfigError(
                f"{where}: the model {self.model_name} of modelzoo_trainer cannot have these "
                f"settings: {error} Use this model as it is, with model.name: {self._instead}."
            ) from None
        return arguments

    def make_config(self, settings: Any) -> dict[str, Any]:
        """Return the content of config.json for our settings, without `dtype`.

        Raises:
            ConfigError: For the first setting that has no counterpart.
        """
        own = {
            "architectures": [self.architecture],
            "model_type": self.model_type or self.name,
        }
        if self.kind != "decoder":
            return own | self._config_of_model(settings)
        reader = SettingsReader(settings, self.name)
        if not isinstance(settings, self.model_class.SETTINGS):
            raise ConfigError(
                f"Models of the family {self.name} of Hugging Face are decoders of the class "
                f"{self.model_class.__name__} here, got the settings of another class."
            )
        config = self.config_of(reader)
        reader.take("vocab_size")
        reader.finish()
        return {**own, "vocab_size": settings.vocab_size, **config}

    def _config_of_model(self, settings: Any) -> dict[str, Any]:
        if type(settings) is not self.model_class:
            raise ConfigError(
                f"Models of the family {self.name} of Hugging Face are models of the class "
                f"{self.model_class.__name__} here, got {type(settings).__name__}."
            )
        reader = ModelReader(settings, self.name)
        config = self.config_of(reader)
        reader.finish()
        return config


def families() -> dict[str, Family]:
    """Return all families of decoders by name."""
    return _families(_MODULES)


def other_families() -> dict[str, Family]:
    """Return the families of other models by name."""
    return _families(_OTHERS)


def _families(modules: Sequence[str]) -> dict[str, Family]:
    found: dict[str, Family] = {}
    for module in modules:
        for family in import_module(f"modelzoo_trainer.zoo.conversion.families.{module}").FAMILIES:
            found[family.name] = family
    return found


def family_named(name: str, *, where: str) -> Family:
    """Return a family by its name, which is the `model_type` of config.json.

    Raises:
        ConfigError: If there is none.
    """
    known, others = families(), other_families()
    if name in known:
        return known[name]
    close = suggest(name, [*known, *others])
    meant = f"{close} " if close.startswith("Did you mean") else ""
    raise ConfigError(
        f"{where}: model_type {name!r} has no decoder here. {meant}Supported: "
        f"{', '.join(sorted(known))}; and other models: {', '.join(sorted(others))}. Use such a "
        f"model as it is, with model.name: hf_causal_lm or hf_model."
    )


def family_of(config: Mapping[str, Any], *, where: str) -> Family:
    """Return the family of a config.json.

    `where`: the file, for messages.

    Raises:
        ConfigError: If there is none.
    """
    name = config.get("model_type")
    if not isinstance(name, str):
        raise ConfigError(
            f"{where}: model_type is {name!r}; expected a string, such as 'llama'. Is the file "
            f"complete?"
        )
    found: Family | None = None
    for family in (*families().values(), *other_families().values()):
        types = (family.model_type or family.name, *family.other_model_types)
        if name not in types:
            continue
        if family.applies is None:
            found = found or family
        elif family.applies(config):
            return family
    return found or family_named(name, where=where)


def family_for(settings: Any, name: str | None) -> tuple[Family, dict[str, Any]]:
    """Return the family of our settings, and its config.json.

    Args:
        settings: Of our decoder.
        name: The name of the decoder in its configuration; tried first. None = not known.

    Raises:
        ConfigError: If none fits, with the first setting without counterpart of the one that is
            tried first.
    """
    refusal: ConfigError | None = None
    is_other = isinstance(settings, nn.Module) and not isinstance(settings, Decoder)
    known = _families_like(settings) if is_other else families()
    for family in _in_order(known, name):
        try:
            return family, family.make_config(settings)
        except ConfigError as error:
            refusal = refusal or error
    tried = ", ".join(known)
    raise ConfigError(f"{refusal} No other family fits either; tried: {tried}.")


def _families_like(model: nn.Module) -> dict[str, Family]:
    """Return the families of the class of a model that is not a decoder."""
    others = other_families()
    found = {name: one for name, one in others.items() if type(model) is one.model_class}
    if not found:
        classes = sorted({one.model_class.__name__ for one in others.values()})
        raise ConfigError(
            f"{type(model).__name__} has no family of Hugging Face here; {', '.join(classes)} and "
            f"the decoders have."
        )
    return found


def _in_order(families: Mapping[str, Family], name: str | None) -> Iterator[Family]:
    known = list(families.values())
    yield from (family for family in known if family.model_name == name)
    yield from (family for family in known if family.model_name != name)
