"""More tokens than the weights of a folder have: rows that are added to embeddings."""

from __future__ import annotations

import warnings
from typing import Any, Final

from modelzoo_trainer.errors import ConfigError

RESIZE_KEY: Final = "resize_token_embeddings"


def resize(model: Any, num: int, *, has_values: bool) -> None:
    """Give a model embeddings and an output layer of more tokens; shared weights stay shared.

    Args:
        model: A model of `transformers`.
        num: How many tokens it has then.
        has_values: Whether it has weights, and the new rows get values like the others.

    Raises:
        ConfigError: If it has no tokens, or more of them.
    """
    try:
        before = model.get_input_embeddings().num_embeddings
    except (AttributeError, NotImplementedError):
        raise ConfigError(
            f"{RESIZE_KEY} ({num}): {type(model).__name__} has no embeddings of tokens. Remove it."
        ) from None
    if num < before:
        raise ConfigError(
            f"{RESIZE_KEY} is {num}, but the model has {before} tokens already, and would lose "
            f"some. Remove it: a tokenizer may have fewer tokens than its model."
        )
    if num > before:
        model.resize_token_embeddings(num, mean_resizing=has_values)


def refuse_without_values(folder: str) -> None:
    """Raise the error for a model whose weights are loaded after it is built.

    Raises:
        ConfigError: Always.
    """
    raise ConfigError(
        f"{RESIZE_KEY} requires the weights of {folder!r} when the model is built, but init_device "
        f"is meta. Set init_device: cpu, or write a folder with the resized model once: "
        f"model.resize_token_embeddings(...) and model.save_pretrained(...) of transformers."
    )


def warn_of_untrained(peft_config: dict[str, Any], num_new: int) -> None:
    """Warn if new tokens keep their initial embeddings, because only adapters are trained."""
    known = [*(peft_config.get("modules_to_save") or ()), *_targets(peft_config)]
    if num_new and not any("embed" in name or "wte" in name for name in known):
        warnings.warn(
            f"{RESIZE_KEY}: the embeddings of {num_new} new tokens are not trained, because only "
            f"adapters are. To train them, name the embeddings and the output layer in "
            f"peft_config.modules_to_save, such as [embed_tokens, lm_head].",
            stacklevel=6,
        )


def _targets(peft_config: dict[str, Any]) -> list[str]:
    given = peft_config.get("target_modules") or ()
    return [given] if isinstance(given, str) else list(given)
