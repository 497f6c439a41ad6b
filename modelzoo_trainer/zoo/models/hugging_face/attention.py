"""What a query sees in models of `transformers`: packed documents, padding, sliding windows.

Their models make masks from a mask or positions of two dimensions, and look at the values for it.
Here the masks of four dimensions are made, which these models take as they are. Of the families in
`FAMILIES` it is tested that packed documents have the same logits as each document alone.

Dimension letters: B batch, T positions.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.models.masks import POSITIONS_KEY, visible_keys

FAMILIES: Final = frozenset(
    {
        "cohere",
        "cohere2",
        "exaone4",
        "falcon",
        "gemma",
        "gemma2",
        "gemma3_text",
        "gpt2",
        "gpt_bigcode",
        "gpt_neox",
        "gptj",
        "granite",
        "helium",
        "llama",
        "ministral",
        "mistral",
        "mixtral",
        "nemotron",
        "olmo",
        "olmo2",
        "olmoe",
        "persimmon",
        "phi",
        "phi3",
        "qwen2",
        "qwen2_moe",
        "qwen3",
        "qwen3_moe",
        "stablelm",
        "starcoder2",
    }
)
"""Values of `model_type` whose attention takes masks of four dimensions."""

_FULL: Final = "full_attention"
_SLIDING: Final = "sliding_attention"


class NoCache:
    """Stands for a cache of keys and values that is empty and keeps nothing.

    Without a cache, their models search the positions for packed documents, which is a host read.
    """

    is_compileable = False

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of cached tokens."""
        return 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Return the position of the first query."""
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Return the number of keys, and the position of the first."""
        return query_length, 0

    def update(
        self, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Return the keys and values that attention sees: the given ones."""
        return keys, values


def makes_masks(config: Any) -> bool:
    """Return whether masks can be made for a model with these settings."""
    return (
        config.model_type in FAMILIES
        and not getattr(config, "alibi", False)
        and config._attn_implementation in ("eager", "sdpa")
        and set(getattr(config, "layer_types", None) or (_FULL,)) <= {_FULL, _SLIDING}
        and not has_expert_loss(config)
    )


def has_expert_loss(config: Any) -> bool:
    """Return whether a model has a loss of experts, which takes a mask of padding alone."""
    return bool(getattr(config, "output_router_logits", False))


def attention_masks(
    config: Any,
    length: int,
    like: Tensor,
    *,
    spans: Tensor | None = None,
    padding: Tensor | None = None,
) -> Any:
    """Return the masks that a model takes, or None if it is causal and nothing else.

    Args:
        config: Settings of the model, for which `makes_masks` is true.
        length: Number of positions T.
        like: A tensor with the device and the type of the states.
        spans: For each key, the largest distance at which it is seen; None = any.
        padding: Nonzero for keys that no query sees; None = all are seen.

    Shapes:
        spans, padding: (B, T). Returns: (B, 1, T, T), by type of layer if there are two; bool, or
        with eager attention what is added to the scores.

    Cost:
        No host read, no data-dependent shape.
    """
    if spans is None and padding is None:
        return None  # causal, with the model's own window

    def mask(window: int | None) -> Tensor | None:
        visible = visible_keys(length, like.device, window=window, spans=spans, padding=padding)
        return visible if config._attn_implementation == "sdpa" else _added(visible, like.dtype)

    window = getattr(config, "sliding_window", None) or None
    types = getattr(config, "layer_types", None)
    if not types:
        return mask(window)
    if _SLIDING not in types:
        return mask(None)
    return {_FULL: mask(None), _SLIDING: mask(window)}


def spans_of_positions(position_ids: Tensor) -> Tensor:
    """Return the spans of documents whose positions begin again, as their collators pack them.

    Shapes:
        position_ids: (B, T) integer. Returns: (B, T), int64.
    """
    length = position_ids.shape[1]
    begins = position_ids[:, 1:] != position_ids[:, :-1] + 1
    places = torch.arange(length, device=position_ids.device)
    # The first beginning after each key; `length` if there is none.
    nexts = torch.where(begins, places[1:], length).flip(1).cummin(dim=1).values.flip(1)
    ends = torch.nn.functional.pad(nexts, (0, 1), value=length)
    return ends - 1 - places


def refuse_packing(config: Any, key: str) -> ConfigError:
    """Return the error for packed documents that a model would not keep apart.

    Args:
        config: Settings of the model.
        key: Of the batch, which shows the documents: `attention_span` or `position_ids`.
    """
    off = "switch packing off in the data processor"
    if key == POSITIONS_KEY:
        off += f", or leave {key} out of the batch if each row is one document"
    implementation = config._attn_implementation
    if has_expert_loss(config):
        return ConfigError(
            f"The batch has {key} (packed documents), which the loss of experts "
            f"(output_router_logits: true) of {config.model_type!r} does not take. Set "
            f"config_overrides: {{output_router_logits: false}}, or {off}."
        )
    if config.model_type in FAMILIES and implementation not in ("eager", "sdpa"):
        return ConfigError(
            f"The batch has {key} (packed documents), which attn_implementation "
            f"{implementation!r} does not keep apart. Set attn_implementation: sdpa or eager, or "
            f"{off}."
        )
    return ConfigError(
        f"The batch has {key} (packed documents), but it is not known how {config.model_type!r} "
        f"with these settings keeps documents apart. Use one of {', '.join(sorted(FAMILIES))}, or "
        f"{off}."
    )


def _added(visible: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return what is added to the scores: 0 where a key is seen."""
    if visible is None:
        return None
    zeros = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return zeros.masked_fill(~visible, torch.finfo(dtype).min)
