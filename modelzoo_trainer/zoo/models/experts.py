"""Feed-forward networks; each token uses some of them: a mixture of experts.

Dimension letters: B batch, T positions, H hidden size, F filter size, E routed experts, A all
experts: the routed ones, then the shared ones.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from modelzoo_trainer.zoo.models.feed_forward import GATED, Nonlinearity, activation_of
from modelzoo_trainer.zoo.models.initializers import Initializer
from modelzoo_trainer.zoo.models.moe_settings import MoeSettings
from modelzoo_trainer.zoo.models.routing import Router, Routing


class Experts(nn.Module):
    """The feed-forward networks, whose weights are stacked in one tensor each.

    All experts process all tokens: shapes do not depend on the routing, at the cost of A / top_k
    times the operations of the experts that are used.

    Attributes:
        up, gate: (A, F, H); gate only with a gated nonlinearity. down: (A, H, F).
        up_bias, gate_bias: (A, F), down_bias: (A, H), or None.
        idle_share: The share of the operations whose results have the weight 0.
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

        self.idle_share = num_idle / num_experts
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
        self, hidden: Tensor, weights: Tensor, input_weights: Tensor | None = None
    ) -> Tensor:
        """Return the weighted sum of the experts' outputs; each has its own dropout.

        Args:
            hidden: The inputs of all experts.
            weights: Of each expert's output.
            input_weights: Of each expert's input; None = 1.

        Shapes:
            hidden: (B, T, H). weights, input_weights: (B, T, A). Returns: (B, T, H).

        Cost:
            No host read. Activations in memory: as for A feed-forward networks.
        """
        wide = self._widened(hidden, self.up, self.up_bias, input_weights)
        if self.gate is None:
            wide = self.activation(wide)
        else:
            gates = self._widened(hidden, self.gate, self.gate_bias, input_weights)
            wide = wide * self.activation(gates)
        inner: Tensor = wide.flatten(0, 1).transpose(0, 1)
        down = self.down.transpose(1, 2)
        if self.down_bias is None:
            outputs = torch.bmm(inner, down)
        else:
            outputs = torch.baddbmm(self.down_bias.unsqueeze(1), inner, down)
        factors = weights.flatten(0, 1).t().unsqueeze(-1).to(outputs.dtype)
        weighted = self.dropout(outputs) * factors
        # The type is given as autocast would convert to float32 first.
        total: Tensor = weighted.sum(dim=0, dtype=weighted.dtype)
        return total.view_as(hidden)

    @staticmethod
    def _widened(
        hidden: Tensor, matrices: Tensor, biases: Tensor | None, input_weights: Tensor | None
    ) -> Tensor:
        """Return the product with each expert's matrix, (B, T, A, F), as one matrix product."""
        num, width = matrices.shape[:2]
        if input_weights is None:
            flat = None if biases is None else biases.flatten()
            product = functional.linear(hidden, matrices.flatten(0, 1), flat)
            return product.view(*hidden.shape[:2], num, width)
        product = functional.linear(hidden, matrices.flatten(0, 1))
        scaled = product.view(*hidden.shape[:2], num, width) * input_weights.unsqueeze(-1).to(
            product.dtype
        )
        return scaled if biases is None else scaled + biases.to(scaled.dtype)


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
        self, hidden: Tensor, token_ids: Tensor, counted: Tensor | None
    ) -> tuple[Tensor, Routing]:
        """Return the transformed states, of the same shape, and the routing.

        `counted`: as for `Router`.

        Shapes:
            hidden: (B, T, H) floating. token_ids, counted: (B, T) integer.
        """
        routing = self.router(hidden, token_ids, counted)
        weights = self._with_shared(routing.weights)
        if self.settings.probability_before_ffn:
            output = self.experts(hidden, self._with_shared(routing.chosen), weights)
        else:
            output = self.experts(hidden, weights)
        return output, routing

    def _with_shared(self, weights: Tensor) -> Tensor:
        """Append the weight 1 of shared experts."""
        num = self.settings.num_shared
        return functional.pad(weights, (0, num), value=1.0) if num else weights
