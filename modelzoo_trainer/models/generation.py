"""Drawing the next token from the scores of a language model."""

import torch
from torch import Generator, Tensor


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
