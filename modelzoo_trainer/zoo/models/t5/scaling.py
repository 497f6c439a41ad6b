"""Initial weights and scales of encoder-decoder models: T5, the Transformer, and muP.

Initial weights, with L the number of layers of the encoder or the decoder; Xavier
is uniform, and the numbers are its gain:

                            T5, normal with std          muP, factor        Transformer
    embeddings              1                            d_model ** -0.5    truncated normal, std 1
    queries                 (d_model * d_kv) ** -0.5     1                  Xavier, 1/3 d_kv ** -0.5
    keys, values            d_model ** -0.5              1                  Xavier, 1/3
    output of attention     d_model ** -0.5              (2L) ** -0.5       Xavier, 1/3
    input of feed-forward   d_model ** -0.5              1                  Xavier
    output of feed-forward  d_ff ** -0.5                 (2L) ** -0.5       Xavier
    untied output layer     1                            d_model ** -0.5    normal, std 1

With m = d_model / mup_base_d_model, f and k the same ratios of d_ff and d_kv, muP multiplies

    embeddings              by d_model ** 0.5            learning rate by m ** -0.5
    output layer                                         m ** -0.5
    logits                  by alpha * m ** -0.5
    attention               scores by 1 / m              m ** -0.5
    feed-forward                                         input 1 / m, output 1 / f

and with mup_base_d_kv: no factor of scores, queries, keys and values 1 / m, output 1 / k, which
starts from (num_heads * d_kv) ** -0.5 in place of d_model ** -0.5.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from modelzoo_trainer.zoo.models.initializers import Initializer, normal, truncated_normal
from modelzoo_trainer.zoo.models.parametrization import LrAdjustmentGroup
from modelzoo_trainer.zoo.models.t5.settings import T5Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerInitializers:
    """The initializers of the layers of an encoder or a decoder; biases start at 0."""

    queries: Initializer
    keys_and_values: Initializer
    attention_output: Initializer
    ffn_input: Initializer
    ffn_output: Initializer


def layer_initializers(settings: T5Settings, *, is_decoder: bool) -> LayerInitializers:
    """Return the initializers of the layers."""
    size, d_kv = settings.d_model, settings.d_kv
    if settings.use_transformer_initialization:
        return LayerInitializers(
            queries=_xavier(d_kv**-0.5 / 3),
            keys_and_values=_xavier(1 / 3),
            attention_output=_xavier(1 / 3),
            ffn_input=_xavier(1.0),
            ffn_output=_xavier(1.0),
        )
    width = normal(settings.initializer_factor * size**-0.5)
    narrow = normal(settings.initializer_factor * settings.d_ff**-0.5)
    depth, fan_in = 1.0, size
    if settings.uses_mup:
        depth = (2 * settings.num_layers(is_decoder=is_decoder)) ** -0.5
        if settings.mup_base_d_kv is not None:
            fan_in = settings.num_heads * d_kv
    return LayerInitializers(
        queries=width.scaled(d_kv**-0.5),
        keys_and_values=width,
        attention_output=width.scaled(depth * (size / fan_in) ** 0.5),
        ffn_input=width,
        ffn_output=narrow.scaled(depth),
    )


def embedding_initializer(settings: T5Settings) -> Initializer:
    """Return the initializer of the embeddings."""
    if settings.use_transformer_initialization:
        return truncated_normal(1.0)
    return lm_head_initializer(settings)


def lm_head_initializer(settings: T5Settings) -> Initializer:
    """Return the initializer of an output layer with weights of its own."""
    power = -0.5 if settings.uses_mup else 0.0
    return normal(settings.initializer_factor * settings.d_model**power)


def embeddings_scale(settings: T5Settings) -> float:
    """Return the factor on the embeddings."""
    alpha = 1.0 if settings.embeddings_alpha is None else settings.embeddings_alpha
    return float(alpha * settings.d_model ** (0.5 if settings.uses_mup else 0.0))


def attention_scale(settings: T5Settings, *, is_decoder: bool) -> float:
    """Return the factor on query-key products of the encoder or the decoder."""
    of, uses_mup = settings, settings.uses_mup
    alpha = of.decoder_attention_logits_alpha if is_decoder else of.encoder_attention_logits_alpha
    by_d = of.scale_decoder_qk_dot_by_d if is_decoder else of.scale_encoder_qk_dot_by_d
    if not uses_mup and not of.use_transformer_initialization:
        return alpha  # T5 has the factor in the initial weights of queries
    power = -1.0 if (uses_mup if by_d is None else by_d) else -0.5
    width = 1.0 if of.mup_base_d_kv is not None else _width_ratio(of)
    return float(alpha * of.d_kv**power / width)


def logits_scale(settings: T5Settings) -> float:
    """Return the factor on the states that the output layer gets."""
    if settings.uses_mup:
        power = 1.0 if settings.scale_output_logits_by_d else 0.5
        return float((settings.output_logits_alpha or 1.0) / _width_ratio(settings) ** power)
    return float(settings.d_model**-0.5) if settings.share_embedding_weights else 1.0


def lr_groups(settings: T5Settings) -> Mapping[str, LrAdjustmentGroup]:
    """Return the groups of parameters whose learning rate muP adjusts; all 1 without muP."""
    width = _width_ratio(settings)
    qkv = output = width**-0.5
    if settings.mup_base_d_kv is not None:
        qkv, output = 1 / width, settings.mup_base_d_kv / settings.d_kv
    narrow = (settings.mup_base_d_ff or settings.d_ff) / settings.d_ff

    def group(scale: float, *patterns: str) -> LrAdjustmentGroup:
        return LrAdjustmentGroup(param_filter_patterns=patterns, scale=scale)

    groups = {"embedding": group(width**-0.5, "*_embeddings.weight")}
    for stack in ("encoder", "decoder"):
        layers = f"*{stack}.layers.*"
        inputs = tuple(f"{layers}attention.{letter}_proj.weight" for letter in "qkv")
        widening = (f"{layers}ffn.up_proj.weight", f"{layers}ffn.gate_proj.weight")
        groups[f"{stack}_qkv_projection"] = group(qkv, *inputs)
        groups[f"{stack}_output_projection"] = group(output, f"{layers}attention.o_proj.weight")
        groups[f"{stack}_input_ffn"] = group(1 / width, *widening)
        groups[f"{stack}_output_ffn"] = group(narrow, f"{layers}ffn.down_proj.weight")
    return groups | {"lm_head": group(width**-0.5, "*lm_head.weight")}


def _xavier(gain: float) -> Initializer:
    """Return a uniform distribution whose variance is gain ** 2 * 2 / (fan in + fan out)."""
    return Initializer(name="xavier_uniform", options={"gain": gain})


def _width_ratio(settings: T5Settings) -> float:
    return settings.d_model / (settings.mup_base_d_model or settings.d_model)
