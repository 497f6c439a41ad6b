"""Self-attention of a decoder with optional grouped keys and values.

Dimension letters: B batch, T positions, H hidden size, N heads, G groups of keys and values,
D head dimension (N * D is H unless `attention_inner_dim` is given).
"""

from functools import partial

from torch import Tensor, nn

from modelzoo_trainer.zoo.models.attend import attend
from modelzoo_trainer.zoo.models.context import Context
from modelzoo_trainer.zoo.models.decoder_settings import DecoderSettings
from modelzoo_trainer.zoo.models.feed_forward import make_norm
from modelzoo_trainer.zoo.models.parametrization import attention_scale
from modelzoo_trainer.zoo.models.rotary import rotate
from modelzoo_trainer.zoo.models.split_rows import attend_own


class Attention(nn.Module):
    """Multi-head self-attention over the keys that the forward pass makes visible.

    `is_windowed`: whether the layer has the sliding window.
    """

    def __init__(self, settings: DecoderSettings, *, is_windowed: bool = False) -> None:
        super().__init__()
        size, rate = settings.hidden_size, settings.attention_dropout_rate
        self.head_dim = settings.head_dim
        self.is_windowed = is_windowed
        self.scale = attention_scale(settings)
        self.softcap = settings.attention_logit_softcapping
        self.dropout_rate = settings.dropout_rate if rate is None else rate
        self.implementation = settings.attention
        inner_size = settings.head_dim * settings.num_heads
        kv_size = settings.head_dim * settings.num_kv_groups
        bias = settings.use_projection_bias_in_attention
        self.q_proj = nn.Linear(size, inner_size, bias=bias)
        self.k_proj = nn.Linear(size, kv_size, bias=bias)
        self.v_proj = nn.Linear(size, kv_size, bias=bias)
        self.q_norm: nn.Module | None = None
        self.k_norm: nn.Module | None = None
        if settings.attention_qk_norm is not None:  # its weights are those of all heads
            kind, epsilon = settings.attention_qk_norm, settings.layer_norm_epsilon
            self.q_norm = make_norm(kind, self.head_dim, epsilon)
            self.k_norm = make_norm(kind, self.head_dim, epsilon)
        self.o_proj = nn.Linear(inner_size, size, bias=settings.use_ffn_bias_in_attention)

    def forward(self, hidden: Tensor, context: Context, factor: Tensor | None = None) -> Tensor:
        """Return the attention output.

        `factor`: of the scores, besides the scale that all layers have.

        Shapes:
            hidden: (B, T, H). factor: (). Returns: as hidden.
        """
        # The number of heads is inferred: with tensor parallelism, a rank has only some of them.
        queries, keys, values = (
            projection(hidden).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.q_norm is not None and self.k_norm is not None:
            queries, keys = _normed(queries, self.q_norm), _normed(keys, self.k_norm)
        if context.angles is not None:
            queries, keys = rotate(queries, *context.angles), rotate(keys, *context.angles)
        if factor is not None:
            queries = queries * factor
        if context.cache is not None:
            keys, values = context.cache.extend(keys, values, context.position)
        attend_all = attend if context.parallel is None else partial(attend_own, context.parallel)
        attended = attend_all(
            queries,
            keys,
            values,
            scale=self.scale,
            visible=context.visible[int(self.is_windowed)],
            softcap=self.softcap,
            dropout=self.dropout_rate if self.training else 0.0,
            implementation=self.implementation,
        )
        output: Tensor = self.o_proj(attended.transpose(1, 2).flatten(-2))
        return output


def _normed(states: Tensor, norm: nn.Module) -> Tensor:
    """Return normalized states, of the same dtype also with autocast.

    They are normalized in the dtype of the weights: torch has no fused norm of two dtypes.
    """
    weight = norm.weight  # None without parameters
    wide = states.to(weight.dtype) if isinstance(weight, Tensor) else states
    normed: Tensor = norm(wide)
    return normed.to(states.dtype)
