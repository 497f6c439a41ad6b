"""Token ids that a mode cannot do without."""

from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.rows.tokenizers import Tokenizer


def require_eos(tokenizer: Tokenizer) -> int:
    """Return the id of the token that ends a document.

    Raises:
        ConfigError: If there is none.
    """
    if tokenizer.eos_id is None:
        raise ConfigError(
            "The tokenizer has no token that ends a document. Set processing.eos_id to its id, or "
            "eos_token in tokenizer_params."
        )
    return tokenizer.eos_id


def require_pad(tokenizer: Tokenizer) -> int:
    """Return the id that fills rows.

    Raises:
        ConfigError: If there is none.
    """
    if tokenizer.pad_id is None:
        raise ConfigError("The tokenizer has no token for padding. Set processing.pad_id.")
    return tokenizer.pad_id


def require_token(tokenizer: Tokenizer, text: str | None, key: str) -> int:
    """Return the id of a token that a setting names.

    Raises:
        ConfigError: If the setting is missing, or the vocabulary has no such token.
    """
    if text is None:
        raise ConfigError(f"{key} is missing. Set it to a token of the tokenizer.")
    found = tokenizer.id_of(text)
    if found is None:
        raise ConfigError(f"{key}: {text!r} is not a token of the tokenizer.")
    return found
