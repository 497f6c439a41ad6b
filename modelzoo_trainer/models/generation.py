"""Drawing the next token from the scores of a language model."""

import torch
from torch import Generator, Tensor

from modelzoo_trainer.errors import ConfigError


def draw_next(
    scores: Tensor, temperature: float, top_k: int | None, generator: Generator | None
) -> Tensor:
    """Return one token for every sequence.

    `temperature`: below 1 likelier tokens are preferred; 0 always takes the likeliest. `top_k`:
    draw only among the `top_k` likeliest; not given, among all. `generator`: random numbers, on
    the device of `scores`; not given, the global ones.

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


def check_generation(
    input_ids: Tensor, max_new_tokens: int, temperature: float, top_k: int | None
) -> None:
    """Check the arguments of `generate`.

    `input_ids`: (batch, tokens), with at least one token. `max_new_tokens`: at least 0.
    `temperature`: at least 0. `top_k`: at least 1, if given.

    Raises:
        ConfigError: For the first that is out of range.
    """
    if input_ids.dim() != 2 or input_ids.shape[1] < 1:
        raise ConfigError(
            f"input_ids has the shape {tuple(input_ids.shape)}; generate needs (batch, tokens) "
            "with at least one token."
        )
    if max_new_tokens < 0:
        raise ConfigError(f"max_new_tokens is {max_new_tokens}; it must be at least 0.")
    if temperature < 0:
        raise ConfigError(f"temperature is {temperature}; it must be at least 0.")
    if top_k is not None and top_k < 1:
        raise ConfigError(f"top_k is {top_k}; it must be at least 1, or not set.")
