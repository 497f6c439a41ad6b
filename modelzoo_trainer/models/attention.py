"""Causal self-attention with optional grouped keys and values.

Dimension letters: B batch, T positions, H hidden size, N heads, G groups of keys and values,
D head dimension (H = N * D).
"""

from torch import Tensor, nn
from torch.nn import functional

from modelzoo_trainer.models.decoder_settings import DecoderSettings
from modelzoo_trainer.models.parametrization import attention_scale
from modelzoo_trainer.models.rotary import rotate


class Attention(nn.Module):
    """Causal multi-head self-attention."""

    def __init__(self, settings: DecoderSettings) -> None:
        super().__init__()
        size, rate = settings.hidden_size, settings.attention_dropout_rate
        self.head_dim = settings.head_dim
        self.is_grouped = settings.num_kv_groups != settings.num_heads
        self.scale = attention_scale(settings)
        self.dropout_rate = settings.dropout_rate if rate is None else rate
        kv_size = settings.head_dim * settings.num_kv_groups
        bias = settings.use_projection_bias_in_attention
        self.q_proj = nn.Linear(size, size, bias=bias)
        self.k_proj = nn.Linear(size, kv_size, bias=bias)
        self.v_proj = nn.Linear(size, kv_size, bias=bias)
        self.o_proj = nn.Linear(size, size, bias=settings.use_ffn_bias_in_attention)

    def forward(self, hidden: Tensor, angles: tuple[Tensor, Tensor] | None) -> Tensor:
        """Return the attention output.

        Shapes:
            hidden: (B, T, H). Returns: the same.
        """
        # The number of heads is inferred: with tensor parallelism, a rank has only some of them.
        queries, keys, values = (
            projection(hidden).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        if angles is not None:
            queries, keys = rotate(queries, *angles), rotate(keys, *angles)
        attended = functional.scaled_dot_product_attention(
            queries,
            keys,
            values,
            dropout_p=self.dropout_rate if self.training else 0.0,
            is_causal=True,
            scale=self.scale,
            enable_gqa=self.is_grouped,
        )
        output: Tensor = self.o_proj(attended.transpose(1, 2).flatten(-2))
        return output
