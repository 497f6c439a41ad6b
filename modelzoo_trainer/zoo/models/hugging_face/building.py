"""Build a model of `transformers`: from scratch, or with the weights of a folder."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch.nn import Module

from modelzoo_trainer.base.dtypes import torch_dtype
from modelzoo_trainer.errors import ConfigError, suggest
from modelzoo_trainer.zoo.hugging_face.folders import transformers_library
from modelzoo_trainer.zoo.models.hugging_face.adapters import add_adapters, check_peft
from modelzoo_trainer.zoo.models.hugging_face.causality import check_causal
from modelzoo_trainer.zoo.models.hugging_face.initializing import check_adapters_on_meta
from modelzoo_trainer.zoo.models.hugging_face.matching import (
    check_files,
    check_missing,
    check_shapes,
    unused,
    warn_of_unused,
)
from modelzoo_trainer.zoo.models.hugging_face.resizing import (
    refuse_without_values,
    resize,
    warn_of_untrained,
)
from modelzoo_trainer.zoo.models.hugging_face.settings import (
    FOLDER_KEY,
    HfSettings,
    architecture,
    uses_remote_code,
)

CAUSAL: Final = "AutoModelForCausalLM"
_GENERATION: Final = "generation_config.json"
_MASKED: Final = "AutoModelForMaskedLM"


def check_settings(settings: HfSettings, auto_class: str) -> None:
    """Check the settings of a model without building it, and without a network.

    Raises:
        ConfigError: As `build`, except for what only the weights show.
    """
    library = transformers_library(FOLDER_KEY)
    cls = auto_class_of(library, auto_class)
    if settings.peft_config is not None:
        check_peft(settings.peft_config)
    if not settings.is_here:
        return
    folder = settings.folder()
    if uses_remote_code(library, settings, folder):
        return  # its settings are code, too
    config = architecture(settings, folder)
    if settings.has_weights:
        _refuse_quantized(config, f"{FOLDER_KEY}: {str(folder)!r}")
    _check_task(cls, auto_class, settings, config)


def build(
    settings: HfSettings, auto_class: str, *, may_start_anew: bool
) -> tuple[Module, list[str]]:
    """Return a model, and its tensors that the weights of the folder lack.

    Args:
        settings: The settings of the model.
        auto_class: A class of `transformers` that is named `AutoModel...`.
        may_start_anew: Whether tensors that the weights lack get initial values, such as the head
            of a classifier.

    Raises:
        ConfigError: If a setting is invalid, or the folder or its weights do not fit.
    """
    library = transformers_library(FOLDER_KEY)
    cls = auto_class_of(library, auto_class)
    folder = settings.folder()
    is_remote = uses_remote_code(library, settings, folder)
    _warn_of_code(settings, folder, is_remote=is_remote)
    config = architecture(settings, folder)
    if settings.has_weights:
        _refuse_quantized(config, f"{FOLDER_KEY}: {str(folder)!r}")
    if not is_remote:
        _check_task(cls, auto_class, settings, config)
    options: dict[str, Any] = {"dtype": torch_dtype(settings.dtype)}
    if is_remote:
        options["trust_remote_code"] = True
    if settings.attn_implementation is not None:
        options["attn_implementation"] = settings.attn_implementation
    is_deferred = is_built_on_meta(settings)
    device = torch.device("meta") if is_deferred else nullcontext()
    if is_deferred and settings.peft_config is not None:
        check_adapters_on_meta(check_peft(settings.peft_config))
    model: Module
    missing: list[str] = []
    with _quiet(library), _naming(settings), device:
        if folder is None or not settings.has_weights or is_deferred or _is_planned():
            model = cls.from_config(config, **options)
            _read_generation(library, model, folder)
        else:
            model, missing = _loaded(cls, folder, config, options, may_start_anew=may_start_anew)
        _resize(model, settings, has_values=not (is_deferred or _is_planned()))
        if settings.peft_config is not None:
            add_adapters(model, settings.peft_config)
    return model, missing


def _resize(model: Any, settings: HfSettings, *, has_values: bool) -> None:
    num = settings.resize_token_embeddings
    if num is None:
        return
    if settings.has_weights and not has_values and not _is_planned():
        refuse_without_values(str(settings.folder()))
    before = model.config.get_text_config().vocab_size
    resize(model, num, has_values=has_values)
    if settings.peft_config is not None:
        warn_of_untrained(settings.peft_config, num - before)


def _read_generation(library: Any, model: Any, folder: Path | None) -> None:
    """Give a model the settings of generation of a folder, as loading its weights does."""
    if folder is not None and model.can_generate() and (folder / _GENERATION).is_file():
        model.generation_config = library.GenerationConfig.from_pretrained(folder)


def is_built_on_meta(settings: HfSettings) -> bool:
    """Return whether a model is built without values, which it gets when it is distributed."""
    if _is_planned():
        return False
    return settings.init_device == "meta" or torch.empty(0).is_meta


def _warn_of_code(settings: HfSettings, folder: Path | None, *, is_remote: bool) -> None:
    if is_remote:
        warnings.warn(
            f"trust_remote_code is true: {str(folder)!r} runs Python code of its repository.",
            stacklevel=5,
        )
    elif settings.trust_remote_code:
        warnings.warn(
            f"trust_remote_code is true, but transformers has the architecture of {str(folder)!r}, "
            f"so it has no effect. Remove it.",
            stacklevel=5,
        )


def auto_class_of(library: Any, name: str) -> Any:
    """Return a class that makes models of a task.

    Raises:
        ConfigError: If the library has no such class.
    """
    known = [one for one in dir(library) if one.startswith("AutoModel")]
    if name not in known:
        raise ConfigError(
            f"auto_class: {name!r} is not a class of transformers {library.__version__} that makes "
            f"models of a task. {suggest(name, known)}"
        )
    return getattr(library, name)


def _check_task(cls: Any, auto_class: str, settings: HfSettings, config: Any) -> None:
    if type(config) not in cls._model_mapping:
        where = FOLDER_KEY if auto_class == CAUSAL else "auto_class"
        raise ConfigError(
            f"{where}: {auto_class} has no model for the architecture {config.model_type!r}. Use "
            f"another auto_class (with name: hf_model), or another model."
        )
    if auto_class == CAUSAL:
        check_causal(config, "config_overrides" if settings.config is None else "config")
    elif auto_class != _MASKED and _makes_a_language_model(cls, config):
        refuse_language_model(
            f"{auto_class}, which makes a language model of {config.model_type!r}"
        )


def _makes_a_language_model(cls: Any, config: Any) -> bool:
    """Return whether a class makes the same model as the language models' class, of text alone."""
    language = transformers_library(FOLDER_KEY).AutoModelForCausalLM._model_mapping
    is_same = (
        type(config) in language and cls._model_mapping[type(config)] is language[type(config)]
    )
    return is_same and not type(config).sub_configs


def refuse_language_model(auto_class: str) -> None:
    """Raise the error for a class that makes language models in `hf_model`.

    Args:
        auto_class: The class, and what it makes.

    Raises:
        ConfigError: Always.
    """
    raise ConfigError(
        f"auto_class is {auto_class}. Use name: hf_causal_lm for it, which knows packed documents, "
        f"weights of tokens and generation; with shift_labels: true for batches of the collators "
        f"of transformers."
    )


def _is_planned() -> bool:
    """Return whether tensors are fake, so that only their shapes matter."""
    return torch._guards.detect_fake_mode() is not None


def _loaded(
    cls: Any, folder: Path, config: Any, options: dict[str, Any], *, may_start_anew: bool
) -> tuple[Module, list[str]]:
    """Return a model with the weights of a folder, and the tensors that these lack."""
    try:
        model, found = cls.from_pretrained(
            folder,
            config=config,
            ignore_mismatched_sizes=True,  # they are refused below, with their shapes
            output_loading_info=True,
            local_files_only=True,
            **options,
        )
    except Exception:
        check_files(folder)  # if a file is the reason, this error names it
        raise
    check_shapes(str(folder), found["mismatched_keys"])
    missing, others = sorted(found["missing_keys"]), unused(model, found["unexpected_keys"])
    kind = type(model).__name__
    if missing:
        check_missing(str(folder), kind, missing, others, may_start_anew=may_start_anew)
    warn_of_unused(str(folder), kind, others)
    return model, missing


def _refuse_quantized(config: Any, where: str) -> None:
    """Refuse settings of quantized weights: a part of them would be read as the weights."""
    given = getattr(config, "quantization_config", None)
    if given is None:
        return
    read = given.get if isinstance(given, Mapping) else partial(getattr, given)
    raise ConfigError(
        f"{where}: the weights are quantized (quantization_config: {read('quant_method', None)}), "
        f"which cannot be trained. Give the folder of the model before it was quantized; if its "
        f"weights are not, set config_overrides: {{quantization_config: null}}."
    )


@contextmanager
def _quiet(library: Any) -> Iterator[None]:
    """Context manager: no progress bars and tables of the library."""
    logging = library.logging
    level, had_bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if had_bar:
            logging.enable_progress_bar()


@contextmanager
def _naming(settings: HfSettings) -> Iterator[None]:
    """Context manager: errors of the library name the setting that causes them."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:  # of many classes of the library
        text = str(error) or type(error).__name__
        if "attention implementation" in text or "attn_implementation" in text:
            raise ConfigError(
                f"attn_implementation: {settings.attn_implementation!r} does not work with this "
                f"architecture ({text.splitlines()[0]}). Omit it, or set eager."
            ) from error
        where = "config" if settings.config is not None else FOLDER_KEY
        if "Padding_idx" in text:
            text += ". Set pad_token_id to a token below vocab_size, or to null"
        raise ConfigError(f"{where}: transformers cannot build the model: {text}") from error
