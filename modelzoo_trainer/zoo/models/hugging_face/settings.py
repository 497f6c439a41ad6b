"""Settings that `hf_causal_lm` and `hf_model` share, and the settings of their architecture."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from modelzoo_trainer.base.dtypes import Float
from modelzoo_trainer.errors import ConfigError, suggest
from modelzoo_trainer.zoo.hugging_face.folders import (
    SETTINGS_PATTERNS,
    local_folder,
    needs_remote_code,
    read_config,
    transformers_library,
    weight_files,
)
from modelzoo_trainer.zoo.models.hugging_face.overrides import (
    check_keys,
    overridden,
    reason_of_library,
)

FOLDER_KEY: Final = "pretrained_model_name_or_path"

InitDevice = Literal["cpu", "meta"]


@dataclass(frozen=True, kw_only=True)
class HfSettings:
    """Where a model of `transformers` comes from; the fields are explained in `HfCausalLm`."""

    pretrained_model_name_or_path: str | None = None
    config: dict[str, Any] | None = None
    pretrained: bool | None = None
    revision: str | None = None
    config_overrides: dict[str, Any] | None = None
    attn_implementation: str | None = None
    dtype: Float = "float32"
    init_device: InitDevice = "cpu"
    peft_config: dict[str, Any] | None = None
    resize_token_embeddings: int | None = None
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        if (self.pretrained_model_name_or_path is None) == (self.config is None):
            given = "neither" if self.config is None else "both"
            raise ConfigError(
                f"{FOLDER_KEY} (a folder, or a name of the Hub) and config (settings with "
                f"model_type): {given} given. Set one of them."
            )
        if self.config is None:
            return
        if self.resize_token_embeddings is not None:
            raise ConfigError(
                f"resize_token_embeddings ({self.resize_token_embeddings}) enlarges the weights of "
                f"a folder, but config makes a model from scratch. Set vocab_size in config."
            )
        for key in ("pretrained", "revision", "trust_remote_code"):
            if getattr(self, key):
                raise ConfigError(
                    f"{key} ({getattr(self, key)!r}) has no effect with config, which makes a "
                    f"model from scratch. Remove {key}, or set {FOLDER_KEY} instead of config."
                )

    @property
    def has_weights(self) -> bool:
        """Whether the model starts from the weights of a folder."""
        return self.config is None and self.pretrained is not False

    def folder(self) -> Path | None:
        """Return the local folder, downloaded if it is on the Hub; None with `config`.

        Raises:
            ConfigError: If it is missing, or has no weights although these are needed.
        """
        given = self.pretrained_model_name_or_path
        if given is None:
            return None
        patterns = None if self.has_weights else SETTINGS_PATTERNS
        found = local_folder(given, key=FOLDER_KEY, revision=self.revision, patterns=patterns)
        read_config(found, key=FOLDER_KEY)
        if self.has_weights:
            weight_files(
                found, key=FOLDER_KEY, otherwise="train from initial values: pretrained: false"
            )
        return found

    @property
    def is_here(self) -> bool:
        """Whether the settings of the architecture can be read without a network."""
        given = self.pretrained_model_name_or_path
        return given is None or Path(given).expanduser().exists() or given.startswith((".", "/"))


def architecture(settings: HfSettings, folder: Path | None) -> Any:
    """Return the `PreTrainedConfig` of a model, with `config_overrides`.

    Args:
        settings: The settings of the model.
        folder: The local folder; None with `config`.

    Raises:
        ConfigError: If the architecture is unknown or needs remote code, a key is unknown, or a
            value is invalid.
    """
    library = transformers_library(FOLDER_KEY)
    made = _made(library, settings) if folder is None else _read(library, settings, folder)
    if settings.config_overrides:
        given = settings.config if folder is None else read_config(folder, key=FOLDER_KEY)
        made = overridden(made, given or {}, settings.config_overrides)
    if not getattr(made, "return_dict", True):
        raise ConfigError(
            "return_dict is false in the settings of the model, but its outputs are read by name. "
            "Remove it, or set config_overrides: {return_dict: true}."
        )
    return made


def uses_remote_code(library: Any, settings: HfSettings, folder: Path | None) -> bool:
    """Return whether a model runs code of its repository.

    Raises:
        ConfigError: If it does and `trust_remote_code` is false.
    """
    if folder is None:
        return False
    config = read_config(folder, key=FOLDER_KEY)
    if not needs_remote_code(config, library.CONFIG_MAPPING):
        return False
    if not settings.trust_remote_code:
        raise ConfigError(
            f"{FOLDER_KEY}: the architecture {config.get('model_type')!r} of {str(folder)!r} is "
            f"Python code in its repository, which would run with all your rights. Read it, and "
            f"set trust_remote_code: true to run it, or choose an architecture of transformers."
        )
    return True


def _made(library: Any, settings: HfSettings) -> Any:
    given = dict(settings.config or {})
    kind = given.pop("model_type", None)
    if kind is None:
        raise ConfigError(
            "config.model_type is missing. Set it to an architecture of transformers, such as "
            "llama."
        )
    return _construct(_class_of(library, kind, "config.model_type"), given, "config")


def _read(library: Any, settings: HfSettings, folder: Path) -> Any:
    found = read_config(folder, key=FOLDER_KEY)
    if uses_remote_code(library, settings, folder):
        return library.AutoConfig.from_pretrained(folder, trust_remote_code=True)
    kind = found.get("model_type")
    if kind is None:
        raise ConfigError(
            f"{FOLDER_KEY}: {str(folder / 'config.json')!r} has no model_type, so it is not of a "
            f"model of transformers. Give the folder that save_pretrained wrote."
        )
    _class_of(library, kind, f"{FOLDER_KEY}: model_type of {str(folder / 'config.json')!r}")
    try:
        return library.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # of several classes of the library
        raise ConfigError(
            f"{FOLDER_KEY}: transformers rejects {str(folder / 'config.json')!r}: "
            f"{reason_of_library(error)}. Correct the file."
        ) from error


def _class_of(library: Any, kind: Any, where: str) -> Any:
    known = library.CONFIG_MAPPING
    if kind not in known:
        raise ConfigError(
            f"{where}: {kind!r} is not an architecture of transformers {library.__version__}. "
            f"{suggest(str(kind), known)}"
        )
    return known[kind]


def _construct(cls: Any, given: Mapping[str, Any], where: str) -> Any:
    """Make settings of an architecture; the library ignores unknown keys, this refuses them."""
    check_keys(cls, None, given, where)
    try:
        return cls(**copy.deepcopy(dict(given)))
    except Exception as error:  # of several classes of the library
        raise ConfigError(
            f"{where}: transformers rejects it: {reason_of_library(error)}."
        ) from error
