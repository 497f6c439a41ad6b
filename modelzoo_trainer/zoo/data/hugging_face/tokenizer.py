"""The tokenizer of a dataset, and whether a model fits it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.data.hugging_face.examples import Task
from modelzoo_trainer.zoo.data.hugging_face.source import OWNER
from modelzoo_trainer.zoo.hugging_face.folders import HUB_NAME, local_folder
from modelzoo_trainer.zoo.rows.tokenizers import HUB_FILES, Tokenizer, tokenizer_at

_KEY: Final = f"{OWNER}.tokenizer"


def load_tokenizer(given: str, eos_token: str | None, pad_token: str | None) -> Tokenizer:
    """Return a tokenizer; see `require_tokens` for those that a task needs.

    Args:
        given: A folder, a tokenizer.json file, or a name of the Hub.
        eos_token: Replaces the one of the folder.
        pad_token: Replaces the one of the folder.

    Raises:
        ConfigError: If it cannot be loaded, or has no such token.
    """
    path = Path(given).expanduser()
    if not path.is_file():
        path = local_folder(given, key=_KEY, patterns=HUB_FILES)
    texts = {"eos_token": eos_token, "pad_token": pad_token}
    try:
        found = tokenizer_at(
            path, {key: text for key, text in texts.items() if text is not None}, key=_KEY
        )
    except ConfigError as error:
        text = str(error)
        raise ConfigError(text if text.startswith(OWNER) else f"{_KEY}: {text}") from error
    return found


def require_tokens(tokenizer: Tokenizer, given: str, task: Task) -> None:
    """Check that a tokenizer has a token that fills rows, and one that ends documents.

    Classes and preferences need none at the end: what the tokenizer or the chat template writes
    ends them.

    Args:
        tokenizer: Of the data processor.
        given: What it is called in messages.
        task: What the rows are.

    Raises:
        ConfigError: If one is missing.
    """
    where = Path(given).expanduser()
    or_folder = ", or give the folder of the tokenizer instead of its file" * where.is_file()
    if tokenizer.eos_id is None and task not in ("classification", "preference"):
        raise ConfigError(
            f"{_KEY}: {given!r} does not say which token ends a document. Set eos_token{or_folder}."
        )
    if tokenizer.pad_id is None:
        raise ConfigError(
            f"{_KEY}: {given!r} does not say which token fills rows. Set pad_token{or_folder}."
        )


def missing_tokenizer(given: str) -> list[str]:
    """Return a message if there is no such file or folder, and it is no name of the Hub."""
    if Path(given).expanduser().exists():
        return []
    if HUB_NAME.fullmatch(given) and not given.endswith(".json"):
        return []
    return [
        f"{_KEY}: {given!r} does not exist. Give a folder, a tokenizer.json file, or a name of "
        f"the Hub."
    ]


@dataclass(frozen=True, slots=True)
class FitCheck:
    """Compares a tokenizer and the length of rows with the limits of a model.

    Args:
        name: The tokenizer, for messages.
        vocab_size: One more than its largest id.
        length: Tokens per row.
    """

    name: str
    vocab_size: int
    length: int

    def __call__(self, vocab_size: int | None, max_position_embeddings: int | None) -> None:
        """Check the limits; None = the model has none.

        Raises:
            ConfigError: If the model is too small.
        """
        if vocab_size is not None and vocab_size < self.vocab_size:
            raise ConfigError(
                f"{_KEY}: {self.name!r} has {self.vocab_size} tokens, but the model's vocab_size "
                f"is {vocab_size}. Use the tokenizer of the model; or enlarge the model: "
                f"resize_token_embeddings: {self.vocab_size} with hf_causal_lm or hf_model and a "
                f"folder, else vocab_size."
            )
        if max_position_embeddings is not None and max_position_embeddings < self.length:
            raise ConfigError(
                f"{OWNER}.max_sequence_length is {self.length}, but the model's "
                f"max_position_embeddings is {max_position_embeddings}. Decrease "
                f"max_sequence_length, or increase max_position_embeddings."
            )
