"""Generation with models of `transformers`: what each keeps of the tokens before.

Dimension letters: B batch, T tokens, V vocabulary size.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

_CACHES: Final = ("past_key_values", "cache_params")
"""Parameters of a model's forward, and keys of its output, for what it keeps."""


class TokensSoFar:
    """The tokens so far, and what a model keeps of them, prepared as its `generate` does.

    Args:
        model: A model of `transformers` for which `cache_name` is not None.
        logits: Returns the logits of all tokens, (B, T, V), for a model that keeps nothing of them.
    """

    def __init__(self, model: Any, logits: Callable[[Tensor], Tensor]) -> None:
        from transformers import DynamicCache

        self._model = model
        self._logits = logits
        self._keeps = True
        self._tokens: Tensor | None = None
        self._kept: dict[str, Any] = {"use_cache": True, "attention_mask": None}
        if getattr(model, "_supports_default_dynamic_cache", lambda: True)():
            name = cache_name(model)
            assert name is not None  # an argument's condition
            self._kept[name] = DynamicCache(config=model.config.get_text_config(decoder=True))

    def last_logits(self, input_ids: Tensor) -> Tensor:
        """Add tokens and return the logits after the last one.

        Shapes:
            input_ids: (B, T) integer; T = 1 from the second call on. Returns: (B, V).
        """
        model, is_first = self._model, self._tokens is None
        tokens = input_ids.long()
        if self._tokens is not None:
            tokens = torch.cat((self._tokens, tokens), dim=1)
        self._tokens = tokens
        if not self._keeps:
            return self._logits(tokens)[:, -1]
        given = model.prepare_inputs_for_generation(
            tokens,
            next_sequence_length=None if is_first else 1,
            is_first_iteration=is_first,
            **self._kept,
        )
        output = model(**given, return_dict=True)
        self._keeps = any(output.get(name) is not None for name in _CACHES)
        self._kept = model._update_model_kwargs_for_generation(output, self._kept)
        scores: Tensor = output.logits
        return scores[:, -1]


def cache_name(model: Any) -> str | None:
    """Return the parameter of a model's forward for its cache; None = it does not use one."""
    if not callable(getattr(model, "prepare_inputs_for_generation", None)):
        return None
    known = inspect.signature(model.forward).parameters
    return next((name for name in _CACHES if name in known), None)
