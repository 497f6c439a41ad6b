"""Feed-forward networks; each token uses some of them: a mixture of experts.

Dimension letters: B batch, T positions, H hidden size, F filter size, A all experts: the routed
ones, then the shared ones; K experts of a token, N = B T K rows: a token for one of its experts.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from modelzoo_trainer.base.devices import grouped_linear, moved_rows
from modelzoo_trainer.zoo.models.autocast import product_dtype
from modelzoo_trainer.zoo.models.feed_forward import GATED, Nonlinearity, activation_of
from modelzoo_trainer.zoo.models.initializers import Initializer
from modelzoo_trainer.zoo.models.moe_settings import MoeSettings
from modelzoo_trainer.zoo.models.routing import Router, Routing


class Experts(nn.Module):
    """The feed-forward networks, whose weights are stacked in one tensor each.

    Tokens are sorted by expert, and each expert processes its own. The number of rows does not
    depend on the routing, which is not read.

    Attributes:
        up, gate: (A, F, H); gate only with a gated nonlinearity. down: (A, H, F).
        up_bias, gate_bias: (A, F), down_bias: (A, H), or None.
        num_idle: The number of experts that a token does not use.
    """

    def __init__(
        self,
        num_experts: int,
        num_idle: int,
        hidden_size: int,
        filter_size: int,
        nonlinearity: Nonlinearity,
        use_bias: bool,
        dropout_rate: float,
    ) -> None:
        super().__init__()

        def parameter(*sizes: int, exists: bool = True) -> nn.Parameter | None:
            return nn.Parameter(torch.empty(num_experts, *sizes)) if exists else None

        self.num_idle = num_idle
        has_gate = nonlinearity in GATED
        self.up = nn.Parameter(torch.empty(num_experts, filter_size, hidden_size))
        self.gate = parameter(filter_size, hidden_size, exists=has_gate)
        self.down = nn.Parameter(torch.empty(num_experts, hidden_size, filter_size))
        self.up_bias = parameter(filter_size, exists=use_bias)
        self.gate_bias = parameter(filter_size, exists=use_bias and has_gate)
        self.down_bias = parameter(hidden_size, exists=use_bias)
        self.activation = activation_of(nonlinearity)
        self.dropout = nn.Dropout(dropout_rate)

    @torch.no_grad()
    def draw(self, ffn_input: Initializer, ffn_output: Initializer) -> None:
        """Initialize expert by expert: up, gate, down; biases start at 0."""
        for number in range(self.up.shape[0]):
            ffn_input(self.up[number])
            if self.gate is not None:
                ffn_input(self.gate[number])
            ffn_output(self.down[number])
        for bias in (self.up_bias, self.gate_bias, self.down_bias):
            if bias is not None:
                nn.init.zeros_(bias)

    def forward(
        self,
        hidden: Tensor,
        weights: Tensor,
        ids: Tensor | None = None,
        *,
        weights_inputs: bool = False,
    ) -> Tensor:
        """Return the weighted sum of the outputs of each token's experts.

        Each expert has its own dropout. The sum is in the order of `ids`.

        Args:
            hidden: The inputs of all experts.
            weights: Of the experts of each token.
            ids: The experts of each token, all different; None = `weights` are of all experts, and
                those with the largest are used.
            weights_inputs: Whether weights multiply the inputs of experts, not their outputs.

        Shapes:
            hidden: (B, T, H). weights: (B, T, K); without ids (B, T, A). ids: (B, T, K), integer.
            Returns: (B, T, H).

        Cost:
            No host read, no data-dependent shape. Activations in memory: as for K feed-forward
            networks, and the inputs and outputs of each.
        """
        if ids is None:
            weights, ids = weights.topk(self.up.shape[0] - self.num_idle, dim=-1)
        dtype = product_dtype(hidden)
        by_expert = _sort(ids, self.up.shape[0])
        order, inverse = by_expert.order, by_expert.inverse
        tokens, factors = hidden.to(dtype).flatten(0, 1), weights.to(dtype).reshape(-1, 1)
        num_used = ids.shape[-1]
        rows = moved_rows(tokens, order, inverse, num_used)
        if weights_inputs:
            rows = rows * moved_rows(factors, order, inverse, 1)
        wide = _product(rows, self.up, self.up_bias, by_expert)
        if self.gate is None:
            wide = self.activation(wide)
        else:
            wide = wide * self.activation(_product(rows, self.gate, self.gate_bias, by_expert))
        outputs = self.dropout(_product(wide, self.down, self.down_bias, by_expert))
        outputs = moved_rows(outputs, inverse, order, 1)
        if not weights_inputs:
            outputs = outputs * factors
        outputs = outputs.view(-1, num_used, hidden.shape[-1])
        # The type is given as autocast would convert to float32 first.
        total: Tensor = outputs.sum(dim=1, dtype=outputs.dtype)
        return total.view_as(hidden)


class _ByExpert(NamedTuple):
    """The rows, sorted by expert.

    Shapes:
        order: (N,), the place of each sorted row before. inverse: (N,), where it is now. experts:
        (N,), of the sorted rows. ends: (A,), int32, the number of rows up to each expert's last.
    """

    order: Tensor
    inverse: Tensor
    experts: Tensor
    ends: Tensor


def _sort(ids: Tensor, num_experts: int) -> _ByExpert:
    places = torch.arange(ids.numel(), device=ids.device)
    num = max(1, ids.numel())
    # One number for both: the second result of a sort is no index for torch_xla.
    numbers = (ids.flatten() * num + places).sort().values
    experts, order = numbers // num, numbers % num
    inverse = torch.empty_like(order).scatter(0, order, places)
    ones = torch.ones_like(experts, dtype=torch.int32)
    sizes = torch.zeros(num_experts, dtype=torch.int32, device=ids.device)
    sizes = sizes.scatter_add(0, experts, ones)
    return _ByExpert(order, inverse, experts, sizes.cumsum(0, dtype=torch.int32))


def _product(rows: Tensor, matrices: Tensor, biases: Tensor | None, by_expert: _ByExpert) -> Tensor:
    """Return the product of each row with its expert's matrix, (N, I) to (N, O)."""
    product: Tensor = grouped_linear(rows, matrices.to(rows.dtype), by_expert.ends)
    if biases is None:
        return product
    precise = torch.promote_types(biases.dtype, torch.float32)  # for the sum of its gradients
    return product + biases.to(precise)[by_expert.experts].to(product.dtype)


class MixtureOfExperts(nn.Module):
    """A router and its experts."""

    def __init__(
        self,
        settings: MoeSettings,
        hidden_size: int,
        filter_size: int,
        nonlinearity: Nonlinearity,
        use_bias: bool,
        dropout_rate: float,
    ) -> None:
        super().__init__()
        self.settings = settings
        self.router = Router(settings, hidden_size)
        self.experts = Experts(
            settings.num_in_all,
            settings.num_experts - settings.top_k,
            hidden_size,
            filter_size,
            nonlinearity,
            use_bias,
            dropout_rate,
        )

    def draw(self, gate: Initializer, ffn_input: Initializer, ffn_output: Initializer) -> None:
        """Initialize the router, then the experts one by one; biases start at 0."""
        if self.router.weight is not None:
            gate(self.router.weight)
        if self.router.bias is not None:
            nn.init.zeros_(self.router.bias)
        self.experts.draw(ffn_input, ffn_output)

    def forward(
        self,
        hidden: Tensor,
        token_ids: Tensor,
        counted: Tensor | None,
        places: Tensor | None = None,
    ) -> tuple[Tensor, Routing]:
        """Return the transformed states, of the same shape, and the routing.

        `counted`, `places`: as for `Router`.

        Shapes:
            hidden: (B, T, H) floating. token_ids, counted: (B, T) integer. places: (T,) integer.
        """
        routing = self.router(hidden, token_ids, counted, places)
        ids, weights = self._with_shared(routing)
        before = self.settings.probability_before_ffn
        return self.experts(hidden, weights, ids, weights_inputs=before), routing

    def _with_shared(self, routing: Routing) -> tuple[Tensor, Tensor]:
        """Return ids and weights of each token's experts: the routed ones, then the shared."""
        first, num = self.settings.num_experts, self.settings.num_shared
        if not num:
            return routing.ids, routing.weights
        shared = torch.arange(first, first + num, device=routing.ids.device)
        ids = torch.cat((routing.ids, shared.expand(*routing.ids.shape[:2], num)), dim=-1)
        return ids, functional.pad(routing.weights, (0, num), value=1.0)
