"""Routing of tokens to experts, and the loss that balances them.

Dimension letters: B batch, T positions, H hidden size, E routed experts, K = `top_k` experts of a
token, L layers.
"""

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from modelzoo_trainer.zoo.models.autocast import without_autocast
from modelzoo_trainer.zoo.models.moe_settings import BalancedOver, MoeSettings, RouterNonlinearity

SHARES_KEY: Final = "expert_shares"
LOSS_KEY: Final = "load_balancing_loss"
"""Outputs of a decoder in training."""


class Routing(NamedTuple):
    """Which experts a token uses, and statistics for the load balancing loss.

    Shapes:
        ids: (B, T, K) int64, the chosen experts. weights: (B, T, K) float32, of these.
        shares, probabilities: (B, E) float32, over the counted tokens of a sequence: the share of
        tokens that chose an expert (the sum over experts is `top_k`), and the mean of its
        probability before the choice, which is None if routing is not learned.
    """

    ids: Tensor
    weights: Tensor
    shares: Tensor
    probabilities: Tensor | None


class Statistics(NamedTuple):
    """What a layer returns of its `Routing`."""

    shares: Tensor
    probabilities: Tensor | None


class Router(nn.Module):
    """Choose the experts of each token.

    With scores g = W x and the two nonlinearities r and w of g, the `top_k` experts with the
    largest r are chosen. Their weights are the values of w, normalized: w_e / (sum of the chosen w
    + `null_expert_bias`).
    """

    def __init__(self, settings: MoeSettings, hidden_size: int) -> None:
        super().__init__()
        self.settings = settings
        self.weight: nn.Parameter | None = None
        self.bias: nn.Parameter | None = None
        if settings.routing_algorithm == "learned":
            self.weight = nn.Parameter(torch.empty(settings.num_experts, hidden_size))
            if settings.router_use_bias:
                self.bias = nn.Parameter(torch.empty(settings.num_experts))

    def forward(
        self,
        hidden: Tensor,
        token_ids: Tensor,
        counted: Tensor | None,
        places: Tensor | None = None,
    ) -> Routing:
        """Return the routing of each token.

        `counted`: nonzero where a token counts for `shares` and `probabilities`; None = all count.
        `places`: of the tokens in their rows; None = 0, 1, ...

        Shapes:
            hidden: (B, T, H) floating. token_ids, counted: (B, T) integer. places: (T,) integer.

        Cost:
            No host read, no data-dependent shape.
        """
        settings = self.settings
        probabilities = None
        if settings.routing_algorithm == "learned":
            probabilities, ids, values = self._choose(hidden)
        elif settings.routing_algorithm == "hash":
            ids = (token_ids % settings.num_experts).long().unsqueeze(-1)
            values = torch.ones(ids.shape, device=hidden.device)
        else:
            ids = self._by_position(token_ids, places)
            values = torch.full(ids.shape, 1 / settings.top_k, device=hidden.device)
        zeros = torch.zeros(
            (*token_ids.shape, settings.num_experts), dtype=values.dtype, device=values.device
        )
        means = None if probabilities is None else _mean_of_tokens(probabilities, counted)
        return Routing(
            ids=ids,
            weights=values,
            shares=_mean_of_tokens(zeros.scatter(-1, ids, 1.0), counted),
            probabilities=means,
        )

    def _choose(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the probabilities (B, T, E); ids and weights of the chosen experts (B, T, k)."""
        settings = self.settings
        scores = self._scores(hidden)
        probabilities = self._nonlinearity(settings.router_selection_nonlinearity)(scores)
        values, ids = probabilities.topk(settings.top_k, dim=-1)
        if settings.expert_weighting_nonlinearity != settings.router_selection_nonlinearity:
            weighting = self._nonlinearity(settings.expert_weighting_nonlinearity)
            values = weighting(scores).gather(-1, ids)
        if settings.expert_weighting_normalization:
            total = values.sum(dim=-1, keepdim=True) + settings.null_expert_bias
            values = values / total.clamp(min=torch.finfo(total.dtype).tiny)
        return probabilities, ids, values

    def _scores(self, hidden: Tensor) -> Tensor:
        """Return the scores (B, T, E), at least float32 from here on."""
        assert self.weight is not None
        precise = torch.promote_types(hidden.dtype, torch.float32)
        if not self.settings.router_fp32:
            return functional.linear(hidden, self.weight, self.bias).to(precise)
        bias = None if self.bias is None else self.bias.to(precise)
        with without_autocast(hidden.device.type):
            return functional.linear(hidden.to(precise), self.weight.to(precise), bias)

    def _nonlinearity(self, name: RouterNonlinearity) -> Callable[[Tensor], Tensor]:
        if name == "sinkhorn":
            return self._sinkhorn
        return torch.sigmoid if name == "sigmoid" else _softmax

    def _sinkhorn(self, scores: Tensor) -> Tensor:
        """Balance experts and positions of each sequence, by logarithms; without gradient."""
        with torch.no_grad():
            balanced = scores.detach()
            for _ in range(self.settings.sinkhorn_n_iters):
                balanced = balanced - balanced.logsumexp(dim=-1, keepdim=True)
                balanced = balanced - balanced.logsumexp(dim=1, keepdim=True)
            return balanced.exp()

    def _by_position(self, token_ids: Tensor, places: Tensor | None) -> Tensor:
        settings, device = self.settings, token_ids.device
        if places is None:
            places = torch.arange(token_ids.shape[1], device=device)
        ids = (
            places.unsqueeze(-1) + torch.arange(settings.top_k, device=device)
        ) % settings.num_experts
        return ids.expand(token_ids.shape[0], -1, -1)


def _softmax(scores: Tensor) -> Tensor:
    return scores.softmax(dim=-1)


def _mean_of_tokens(values: Tensor, counted: Tensor | None) -> Tensor:
    """Return the means over the counted positions, (B, T, E) to (B, E); 0 where none counts."""
    if counted is None:
        return values.mean(dim=1)
    mask = (counted != 0).to(values.dtype).unsqueeze(-1)
    return (values * mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1)


def routing_metrics(
    settings: MoeSettings, routed: Sequence[Statistics], counted: Tensor | None
) -> dict[str, Tensor]:
    """Return the use of the experts and, with a coefficient, the load balancing loss without it.

    `routed`: of each layer. `counted`: as for `Router`.

    Shapes:
        expert_shares: (L, E) float32, of the choices of the counted tokens; the sum over experts
        is 1. load_balancing_loss: (), float32.
    """
    share = torch.stack([layer.shares for layer in routed])
    if counted is None:
        share = share.mean(dim=1)
    else:
        share = (share * _weights_of_sequences(counted, share.dtype)).sum(dim=1)
    metrics = {SHARES_KEY: share / settings.top_k}
    if settings.load_balancing_loss_coef:
        metrics[LOSS_KEY] = load_balancing_loss(
            [layer.shares for layer in routed],
            [layer.probabilities for layer in routed if layer.probabilities is not None],
            counted,
            settings.load_balancing_loss_over,
        )
    return metrics


def _weights_of_sequences(counted: Tensor, dtype: torch.dtype) -> Tensor:
    """Return each sequence's share of the counted tokens, (B, 1)."""
    num_tokens = (counted != 0).sum(dim=1, keepdim=True).to(dtype)
    return num_tokens / num_tokens.sum().clamp(min=1)


def load_balancing_loss(
    shares: Sequence[Tensor],
    probabilities: Sequence[Tensor],
    counted: Tensor | None,
    over: BalancedOver,
) -> Tensor:
    """Return the load balancing loss, which is least where all experts are used equally.

    With f and p, the means over layers of the shares and probabilities, it is E * sum_e f_e p_e:
    of each sequence, averaged over those with counted tokens (`over="sequence"`, as in the Model
    Zoo); or with f and p over all counted tokens (`over="batch"`, as for Mixtral in Transformers,
    after the Switch Transformer, arXiv:2101.03961, equation 4). With equal use it is `top_k`.

    Args:
        shares: Of each layer, as in `Routing`.
        probabilities: Of each layer, as in `Routing`.
        counted: As for `Router`.
        over: Over what the experts are balanced.

    Shapes:
        shares, probabilities: (B, E) float32. counted: (B, T) integer. Returns: (), float32.
    """
    share = torch.stack(tuple(shares)).mean(dim=0)
    probability = torch.stack(tuple(probabilities)).mean(dim=0)
    num_experts = share.shape[-1]
    if over == "sequence":
        products = num_experts * (share * probability).sum(dim=-1)
        if counted is None:
            return products.mean()
        has_tokens = (counted != 0).any(dim=1)  # where none counts, the product is 0
        return products.sum() / has_tokens.sum().clamp(min=1)
    if counted is None:
        share, probability = share.mean(dim=0), probability.mean(dim=0)
    else:
        weight = _weights_of_sequences(counted, share.dtype)
        share, probability = (share * weight).sum(dim=0), (probability * weight).sum(dim=0)
    return num_experts * (share * probability).sum()
