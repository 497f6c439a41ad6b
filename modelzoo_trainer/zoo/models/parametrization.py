"""Initialization and scaling of a decoder: standard or muP.

muP (maximal update parametrization) transfers the optimal learning rate of a narrow model to a
wide one. With m = hidden_size / mup_base_hidden_size and f the same ratio of filter sizes:

                       initial std of weights     learning rate   logits
    queries, keys, values, up      m ** -0.5          1 / m
    output of attention    m ** -0.5 * (2L) ** -0.5   1 / m
    output of feed-forward f ** -0.5 * (2L) ** -0.5   1 / f
    output layer                                                  alpha / m

As in the Model Zoo, muP scales both outputs from the default initializer, not from `initializer`,
unless they have their own; `output_layer_initializer` then applies to attention only.

The GPT-J class has rules of its own: a given initializer is used unchanged, with muP too, only the
default one is scaled; the feed-forward layers follow `output_layer_initializer`, not `initializer`;
and without muP the outputs have no factor for depth.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from modelzoo_trainer.zoo.models.decoder_settings import DecoderSettings
from modelzoo_trainer.zoo.models.initializers import (
    Initializer,
    InitializerSetting,
    normal,
    read_initializer,
    truncated_normal,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LrAdjustmentGroup:
    """Parameters whose learning rate is multiplied by a factor."""

    param_filter_patterns: tuple[str, ...]  # globs on parameter names
    scale: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderInitializers:
    """The initializers of a decoder's weights; biases start at 0."""

    embedding: Initializer
    projection: Initializer
    ffn_input: Initializer
    attention_output: Initializer
    ffn_output: Initializer
    router: Initializer
    lm_head: Initializer


def make_initializers(settings: DecoderSettings) -> DecoderInitializers:
    """Return the initializers for the settings.

    Raises:
        ConfigError: If one is unknown, or muP cannot scale it.
    """

    def read(argument: str, setting: InitializerSetting | None) -> Initializer | None:
        return None if setting is None else read_initializer(argument, setting)

    experts = settings.experts
    given = _Given(
        embedding=read("embedding_initializer", settings.embedding_initializer),
        projection=read("initializer", settings.initializer),
        ffn_input=read("ffn_initializer", settings.ffn_initializer),
        output=read("output_layer_initializer", settings.output_layer_initializer),
        ffn_output=read("ffn_output_layer_initializer", settings.ffn_output_layer_initializer),
        router=read("moe.gate_initializer", experts.gate_initializer if experts else None),
    )
    if settings.initializer_rules == "gptj":
        return _of_gptj(settings, given)
    return _of_gpt2(settings, given)


class _Given(NamedTuple):
    """The initializers in the settings; None where there is none."""

    embedding: Initializer | None
    projection: Initializer | None
    ffn_input: Initializer | None
    output: Initializer | None
    ffn_output: Initializer | None
    router: Initializer | None


def _of_gpt2(settings: DecoderSettings, given: _Given) -> DecoderInitializers:
    default = truncated_normal(settings.initializer_range)
    depth = (2 * settings.num_hidden_layers) ** -0.5
    width, filter_width = _width_ratio(settings), _filter_ratio(settings)
    projection, output, ffn_output = given.projection, given.output, given.ffn_output
    ffn_input = given.ffn_input or projection
    if settings.uses_mup:
        output = (output or default).scaled(depth).scaled(width**-0.5)
        ffn_output = (ffn_output or default).scaled(depth).scaled(filter_width**-0.5)
    else:  # a given initializer is used unchanged
        ffn_output = ffn_output or output or ffn_input or default.scaled(depth)
        output = output or projection or default.scaled(depth)
    return DecoderInitializers(
        embedding=given.embedding or default,
        projection=(projection or default).scaled(width**-0.5),
        ffn_input=(ffn_input or default).scaled(width**-0.5),
        attention_output=output,
        ffn_output=ffn_output,
        router=projection or given.router or default,
        lm_head=normal(settings.initializer_range),
    )


def _of_gptj(settings: DecoderSettings, given: _Given) -> DecoderInitializers:
    default = truncated_normal(settings.initializer_range)
    narrower = default.scaled(_width_ratio(settings) ** -0.5)
    depth = (2 * settings.num_hidden_layers) ** -0.5 if settings.uses_mup else 1.0
    ffn_output = default.scaled(depth).scaled(_filter_ratio(settings) ** -0.5)
    return DecoderInitializers(
        embedding=given.embedding or default,
        projection=given.projection or narrower,
        ffn_input=given.ffn_input or given.output or narrower,
        attention_output=given.output or narrower.scaled(depth),
        ffn_output=given.ffn_output or given.output or ffn_output,
        router=given.router or default,
        lm_head=normal(settings.initializer_range),
    )


def attention_scale(settings: DecoderSettings) -> float:
    """Return the factor on query-key products."""
    if settings.attention_type == "dot_product":
        return settings.attention_logits_alpha
    by_d = settings.scale_qk_dot_by_d
    power = -1.0 if (settings.uses_mup if by_d is None else by_d) else -0.5
    return settings.attention_logits_alpha * float(settings.head_dim**power)


def logits_scale(settings: DecoderSettings) -> float:
    """Return the factor on the logits."""
    if not settings.uses_mup:
        return settings.output_logits_scale or 1.0
    alpha = settings.output_logits_alpha or 1.0
    power = 1.0 if settings.scale_output_logits_by_d else 0.5
    return float(alpha / _width_ratio(settings) ** power)


def lr_adjustment_groups(settings: DecoderSettings) -> Mapping[str, LrAdjustmentGroup]:
    """Return the groups of parameters whose learning rate muP adjusts.

    The user can set `embedding` and, except in the GPT-J class, `decoder_kernel` (all of the
    following).
    """
    attention = ("*layers.*.attention.*_proj.weight",)
    ffn_input = ("*layers.*.ffn.up_proj.weight", "*layers.*.ffn.gate_proj.weight")
    ffn_output = ("*layers.*.ffn.down_proj.weight",)
    by_width, by_filter = 1 / _width_ratio(settings), 1 / _filter_ratio(settings)

    def group(patterns: tuple[str, ...], scale: float = 1.0) -> LrAdjustmentGroup:
        return LrAdjustmentGroup(param_filter_patterns=patterns, scale=scale)

    groups = {"embedding": group(("*_embeddings.weight",))}
    if settings.initializer_rules == "gpt2":
        groups["decoder_kernel"] = group(attention + ffn_input + ffn_output)
    return groups | {
        "decoder_attention": group(attention, by_width),
        "decoder_input_ffn": group(ffn_input, by_width),
        "decoder_output_ffn": group(ffn_output, by_filter),
    }


def _width_ratio(settings: DecoderSettings) -> float:
    return settings.hidden_size / (settings.mup_base_hidden_size or settings.hidden_size)


def _filter_ratio(settings: DecoderSettings) -> float:
    return settings.filter_size / (settings.mup_base_filter_size or settings.filter_size)
