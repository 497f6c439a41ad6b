"""The tokenizer of an evaluation, an object of `transformers`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from modelzoo_trainer.errors import ConfigError, reason_of, suggest
from modelzoo_trainer.zoo.hugging_face.folders import (
    SETTINGS_PATTERNS,
    local_folder,
    transformers_library,
)

_OWNER: Final = "EleutherEvalHarness"


def load_tokenizer(file: str | None, name_or_path: str | None, eos_id: int | None) -> Any:
    """Return a tokenizer with an end-of-text token.

    Args:
        file: A `tokenizer.json`; excludes `name_or_path`.
        name_or_path: A folder, or a name on the Hugging Face Hub.
        eos_id: The token that ends a text; None = the tokenizer's.

    Raises:
        ConfigError: If it cannot be loaded, or has no such token.
    """
    transformers = transformers_library(f"{_OWNER}.tokenizer_file_path")
    if file is not None:
        path = Path(file).expanduser()
        if not path.is_file():
            raise ConfigError(
                f"{_OWNER}.tokenizer_file_path: {file!r} is not a file. Pass a tokenizer.json."
            )
        try:
            found: Any = transformers.PreTrainedTokenizerFast(tokenizer_file=str(path))
        except Exception as error:  # the library raises nothing narrower
            why = reason_of(error)
            raise ConfigError(
                f"{_OWNER}.tokenizer_file_path: {file!r} is not a file of the library tokenizers "
                f"({why}). Pass a tokenizer.json."
            ) from error
    else:
        found = _from_folder(transformers, str(name_or_path))
    if eos_id is not None:
        token = found.convert_ids_to_tokens(eos_id) if 0 <= eos_id < len(found) else None
        if token is None:
            raise ConfigError(
                f"{_OWNER}.eos_id: {eos_id} is not a token of the tokenizer, which has "
                f"{len(found)}. Give the id of the token that ends a text."
            )
        found.eos_token = token
    if found.eos_token_id is None:
        raise ConfigError(f"{_OWNER}: the tokenizer has no end-of-text token. Set eos_id.")
    return found


def _from_folder(transformers: Any, name: str) -> Any:
    key = f"{_OWNER}.pretrained_model_name_or_path"
    folder = local_folder(name, key=key, patterns=SETTINGS_PATTERNS)
    try:
        return transformers.AutoTokenizer.from_pretrained(folder)
    except Exception as error:  # the library raises nothing narrower
        text = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigError(
            f"{key}: {name!r} has no tokenizer that can be loaded ({text}). Give the folder of a "
            f"tokenizer, or tokenizer_file_path and eos_id."
        ) from error


def choose_chat_template(tokenizer: Any, name: bool | str) -> None:
    """Choose the template for chats, and check that there is one.

    Args:
        tokenizer: Its `chat_template` is replaced by the chosen one.
        name: The name of one of several; True = the only one, or the default; False = none.

    Raises:
        ConfigError: If the tokenizer has none, or none of that name.
    """
    if name is False:
        return
    found = tokenizer.chat_template
    if not found:
        raise ConfigError(
            f"{_OWNER}.eeh_args.apply_chat_template: the tokenizer has no chat template. Use the "
            f"tokenizer of a chat model, or remove apply_chat_template."
        )
    if isinstance(name, str):
        if not isinstance(found, dict) or name not in found:
            advice = suggest(name, found) if isinstance(found, dict) else "It has one: use true."
            raise ConfigError(
                f"{_OWNER}.eeh_args.apply_chat_template: the tokenizer has no chat template named "
                f"{name!r}. {advice}"
            )
        tokenizer.chat_template = found[name]


def check_vocabulary(tokenizer: Any, model: Any) -> None:
    """Raise a `ConfigError` if the model has no embedding for a token."""
    largest = max(tokenizer.get_vocab().values(), default=0)
    size = getattr(model, "vocab_size", None)
    if isinstance(size, int) and largest >= size:
        raise ConfigError(
            f"{_OWNER}: the tokenizer has the token id {largest}, but the vocab_size of the model "
            f"is {size}. Use the tokenizer of the model's training data."
        )
