"""Initial weights and scaling factors of muP."""

import pytest

from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.models.decoder_names import Gpt2
from modelzoo_trainer.zoo.models.decoder_settings import DecoderSettings
from modelzoo_trainer.zoo.models.gpt2 import Gpt2Settings
from modelzoo_trainer.zoo.models.gptj import GptJSettings
from modelzoo_trainer.zoo.models.parametrization import (
    attention_scale,
    logits_scale,
    lr_adjustment_groups,
    make_initializers,
)

WIDE = DecoderSettings(
    hidden_size=1024,
    num_heads=16,
    filter_size=2048,
    num_hidden_layers=8,
    initializer_range=0.08,
    mup_base_hidden_size=256,
    mup_base_filter_size=1024,
    output_logits_alpha=2.0,
    scale_qk_dot_by_d=True,
)
PLAIN = DecoderSettings(num_hidden_layers=8, num_heads=12, hidden_size=768)


def test_the_default_initializer_shrinks_with_depth_at_the_residual() -> None:
    start = make_initializers(PLAIN)

    assert start.projection.options["std"] == 0.02
    assert start.projection.options["b"] == 0.04
    assert start.attention_output.options["std"] == pytest.approx(0.02 / 4)
    assert start.ffn_output.options["a"] == pytest.approx(-0.04 / 4)


def test_a_given_initializer_is_taken_as_it_is() -> None:
    start = make_initializers(
        DecoderSettings(initializer={"name": "normal", "std": 0.5}, embedding_initializer="ones")
    )

    assert start.projection.options == {"mean": 0.0, "std": 0.5}
    assert start.attention_output == start.projection
    assert start.embedding.name == "ones"


def test_mup_starts_wide_models_with_smaller_weights() -> None:
    start = make_initializers(WIDE)

    assert start.embedding.options["std"] == 0.08
    assert start.projection.options["std"] == pytest.approx(0.08 / 2)
    assert start.attention_output.options["std"] == pytest.approx(0.08 / 4 / 2)
    assert start.ffn_output.options["std"] == pytest.approx(0.08 / 4 / 2**0.5)


def test_mup_refuses_an_initializer_without_a_deviation() -> None:
    settings = DecoderSettings(
        mup_base_hidden_size=256, mup_base_filter_size=1024, initializer="xavier_normal"
    )

    with pytest.raises(ConfigError, match="'xavier_normal' cannot be scaled"):
        make_initializers(settings)


def test_mup_divides_logits_by_the_width_ratio() -> None:
    assert logits_scale(WIDE) == 2.0 / 4
    assert logits_scale(PLAIN) == 1.0


def test_scores_are_divided_by_the_head_dimension_or_its_root() -> None:
    assert attention_scale(WIDE) == 1 / 64
    assert attention_scale(PLAIN) == 1 / 8


def test_mup_lowers_learning_rates_with_width() -> None:
    scales = {name: group.scale for name, group in lr_adjustment_groups(WIDE).items()}

    assert scales == {
        "embedding": 1.0,
        "decoder_kernel": 1.0,
        "decoder_attention": 1 / 4,
        "decoder_input_ffn": 1 / 4,
        "decoder_output_ffn": 1 / 2,
    }


def test_without_mup_no_learning_rate_is_adjusted() -> None:
    assert {group.scale for group in lr_adjustment_groups(PLAIN).values()} == {1.0}


def test_the_patterns_of_the_groups_match_all_kernels_of_the_layers() -> None:
    from fnmatch import fnmatch

    model = Gpt2(hidden_size=8, num_heads=2, filter_size=8, num_hidden_layers=1, vocab_size=9)
    groups = model.lr_adjustment_groups
    names = [name for name, param in model.named_parameters() if param.dim() == 2]

    matched = {
        group: [n for n in names if any(fnmatch(n, p) for p in groups[group].param_filter_patterns)]
        for group in groups
    }

    attention = [f"layers.0.attention.{part}_proj.weight" for part in "qkvo"]
    assert matched["embedding"] == ["token_embeddings.weight", "position_embeddings.weight"]
    assert matched["decoder_attention"] == attention
    assert matched["decoder_input_ffn"] == ["layers.0.ffn.up_proj.weight"]
    assert matched["decoder_output_ffn"] == ["layers.0.ffn.down_proj.weight"]
    assert set(matched["embedding"] + matched["decoder_kernel"]) == set(names)


def test_the_gptj_class_has_the_same_groups_but_for_that_of_all_kernels() -> None:
    given = {"mup_base_hidden_size": 192.0, "mup_base_filter_size": 1024.0}
    plain, parallel = Gpt2Settings(**given), GptJSettings(**given)  # type: ignore[arg-type]
    groups, others = lr_adjustment_groups(plain), lr_adjustment_groups(parallel)

    assert groups.keys() - others.keys() == {"decoder_kernel"}
    assert all(groups[name] == one for name, one in others.items())
    assert others["decoder_output_ffn"].scale == 1 / 3
