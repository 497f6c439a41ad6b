"""What an evaluation needs to know of a model: its longest input, and how its texts end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from modelzoo_trainer.errors import ConfigError

_OWNER: Final = "EleutherEvalHarness"
_NO_LIMIT: Final = 2**31 - 1  # what models say that have no limit
_DEFAULT: Final = 2048  # as in lm_eval
# Of a generation_config.json: what changes the tokens of greedy generation.
_CHANGING: Final = frozenset(
    {
        *("bad_words_ids", "begin_suppress_tokens", "diversity_penalty", "forced_bos_token_id"),
        *("forced_eos_token_id", "guidance_scale", "length_penalty", "min_length"),
        *("min_new_tokens", "no_repeat_ngram_size", "num_beams", "penalty_alpha"),
        *("repetition_penalty", "sequence_bias", "suppress_tokens"),
    }
)

_NEUTRAL: Final[tuple[Any, ...]] = (None, 0, 1, [], {})


def require_language_model(model: Any) -> None:
    """Raise a `ConfigError` if a model has no logits of tokens."""
    if not callable(getattr(model, "logits", None)):
        raise ConfigError(
            f"{_OWNER}: {type(model).__name__} has no method logits(input_ids) that returns the "
            f"logits of the next token at every position. Use a language model, or remove the "
            f"callback."
        )


def longest_input(model: Any, given: int | None) -> int:
    """Return the maximum number of tokens of an input; `given`: None = the model's.

    Raises:
        ConfigError: If it is not known, or more than the model has positions.
    """
    limit = getattr(model, "max_position_embeddings", None)
    if isinstance(limit, int) and limit >= _NO_LIMIT:
        return given or _DEFAULT
    length = given or limit
    if length is None or (isinstance(limit, int) and length > limit):
        raise ConfigError(
            f"{_OWNER}.max_sequence_length: expected at most max_position_embeddings of the model "
            f"({limit}), got {given}. Set it to the length of the training data."
        )
    return int(length)


def require_own_scores(model: Any, batch_size: int) -> None:
    """Raise a `ConfigError` if a row's scores depend on the other rows of its batch."""
    experts = getattr(model, "experts", None)
    names = ("router_selection_nonlinearity", "expert_weighting_nonlinearity")
    is_by_batch = "sinkhorn" in [getattr(experts, name, None) for name in names]
    if is_by_batch and batch_size > 1:
        raise ConfigError(
            f"{_OWNER}.batch_size: {batch_size} with sinkhorn routing, where scores depend on the "
            f"other rows of a batch. Set batch_size: 1."
        )


def generation_settings(model: Any) -> tuple[list[int], list[str]]:
    """Return the tokens that end a text by the model's own settings, and settings not applied.

    Models of `transformers` have such settings, from `generation_config.json`.
    """
    config = getattr(getattr(model, "model", None), "generation_config", None)
    if config is None:
        return [], []
    ends = config.eos_token_id
    ends = [] if ends is None else list(ends) if isinstance(ends, Sequence) else [int(ends)]
    given = {name: getattr(config, name, None) for name in sorted(_CHANGING)}
    changing = [name for name, value in given.items() if value not in _NEUTRAL]
    return ends, changing
