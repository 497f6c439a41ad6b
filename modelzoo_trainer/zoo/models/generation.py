"""Generate tokens one by one, with the keys and values of the tokens so far.

Dimension letters: B batch, T tokens, V vocabulary size.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Generator, Tensor

from modelzoo_trainer.zoo.models.kv_cache import KeyValueCache


class Generating(Protocol):
    """What `extend_tokens` needs of a language model."""

    max_position_embeddings: int

    def logits(self, input_ids: Tensor) -> Tensor:
        """Return the logits at every position, (B, T, V)."""

    def make_caches(self, length: int) -> Sequence[KeyValueCache] | None:
        """Return the cache of each layer for up to `length` tokens; None = it cannot use one."""

    def last_logits(
        self, input_ids: Tensor, caches: Sequence[KeyValueCache], position: Tensor | None
    ) -> Tensor:
        """Return the logits after the last token, (B, V), and store keys and values.

        `position`: (1,), of the one token in `input_ids`; None = these are the first tokens.
        """


def extend_tokens(
    model: Generating,
    input_ids: Tensor,
    num: int,
    draw: Callable[[Tensor], Tensor],
    *,
    use_cache: bool = True,
) -> Tensor:
    """Return the given tokens and `num` more.

    When the context is full, the oldest token is dropped at each step. All positions then change,
    so that from there on all tokens are computed again at each step.

    `draw`: the next token of each row from its logits, (B, V) to (B, 1).

    Shapes:
        input_ids: (B, T) integer. Returns: (B, T + num), same type.
    """
    limit, tokens = model.max_position_embeddings, input_ids
    caches: Sequence[KeyValueCache] | None = None
    if use_cache and tokens.shape[1] <= limit:
        caches = model.make_caches(min(limit, tokens.shape[1] + num))
    position = None
    for _ in range(num):
        length = tokens.shape[1]
        if caches is None or length > limit:
            caches = None  # frees the memory
            scores = model.logits(tokens[:, -limit:])[:, -1]
        else:
            scores = model.last_logits(
                tokens if position is None else tokens[:, -1:], caches, position
            )
            position = torch.full((1,), length, device=tokens.device)  # of the token to be drawn
        tokens = torch.cat((tokens, draw(scores).to(tokens.dtype)), dim=1)
    return tokens


def draw_next(
    scores: Tensor, temperature: float, top_k: int | None, generator: Generator | None
) -> Tensor:
    """Sample one token per sequence.

    `temperature`: 0 = greedy. `top_k`: sample among the `top_k` most likely; None = all.
    `generator`: on the device of `scores`; None = the global one.

    Shapes:
        scores: (B, V) floating. Returns: (B, 1), int64.
    """
    if temperature == 0:
        return scores.argmax(dim=-1, keepdim=True)
    scores = scores.float() / temperature
    if top_k is not None and top_k < scores.shape[-1]:
        least_kept = scores.topk(top_k, dim=-1).values[:, -1:]
        scores = scores.masked_fill(scores < least_kept, float("-inf"))
    return torch.multinomial(scores.softmax(dim=-1), 1, generator=generator)
