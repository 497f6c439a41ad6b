"""Invalid settings are reported by name."""

import inspect
import typing
from typing import Any

import pytest

from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.models.decoder_names import Gpt2, Llama
from modelzoo_trainer.zoo.models.gpt2 import Gpt2Settings


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"vocab_size": 0}, "vocab_size: expected an integer > 0, got 0"),
        ({"num_hidden_layers": -2}, r"num_hidden_layers: .* integer .* \[1, .*, got -2"),
        ({"dropout_rate": 1.0}, r"dropout_rate: expected a number in \[0, 1\), got 1.0"),
        ({"attention_dropout_rate": -0.1}, "attention_dropout_rate: .*, got -0.1"),
        ({"hidden_size": 30}, r"hidden_size \(30\) is not a multiple of num_heads \(12\)"),
        (
            {"extra_attention_params": {"num_kv_groups": 4}},
            "Set attention_module: multiquery_attention",
        ),
        (
            {
                "attention_module": "multiquery_attention",
                "extra_attention_params": {"num_kv_groups": 5},
            },
            r"num_kv_groups \(5\) does not divide num_heads \(12\)",
        ),
        (
            {
                "attention_module": "multiquery_attention",
                "extra_attention_params": {"num_kv_group": 4},
            },
            "extra_attention_params.num_kv_group: no such setting. Did you mean 'num_kv_groups'?",
        ),
        (
            {"position_embedding_type": "rotary", "rotary_dim": 7},
            "rotary_dim is 7; it must be even, at least 2 and at most 64",
        ),
        ({"position_embedding_type": "rotary", "rotary_dim": 66}, "rotary_dim is 66"),
        (
            {"position_embedding_type": "relative", "num_relative_attention_buckets": 256},
            "num_relative_attention_buckets is 256, but must be 2 to 255",
        ),
        (
            {"position_embedding_type": "alibi", "pos_scaling_type": "llama3"},
            "pos_scaling_type 'llama3' .*requires position_embedding_type: rotary, .* alibi",
        ),
        ({"attention_sliding_window_length": 0}, "attention_sliding_window_length: .*, got 0"),
        ({"rope_theta": 0.0}, "rope_theta: expected a number > 0, got 0.0"),
        ({"pos_scaling_factor": 0.5}, "pos_scaling_factor: expected a number >= 1, got 0.5"),
        (
            {
                "position_embedding_type": "rotary",
                "pos_scaling_type": "llama3",
                "pos_scaling_extra_args": {"low_freq": 1.0},
            },
            "pos_scaling_extra_args.low_freq: no such setting. Did you mean 'low_freq_factor'?",
        ),
        ({"pos_scaling_extra_args": {"beta_fast": 1.0}}, "beta_fast.*position_embedding_type"),
        ({"pos_scaling_type": "yarn"}, "'yarn'.*position_embedding_type: rotary"),
        ({"mup_base_hidden_size": 256}, "mup_base_filter_size is None: muP requires both"),
        (
            {"mup_base_hidden_size": 0, "mup_base_filter_size": 4},
            "base_hidden_size: .* >= 1 .*, got 0",
        ),
        ({"initializer_range": 0.0}, "initializer_range: expected a number > 0, got 0.0"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Gpt2Settings(**settings)


@pytest.mark.parametrize("model", [Gpt2])
def test_the_constructor_is_a_schema(model: type) -> None:
    signature = inspect.signature(model)
    annotations = typing.get_type_hints(model.__init__)  # type: ignore[misc]  # of the class, not an instance

    kinds = {parameter.kind for parameter in signature.parameters.values()}

    assert kinds == {inspect.Parameter.KEYWORD_ONLY}
    assert signature.parameters.keys() <= annotations.keys()
    assert not any(isinstance(annotation, str) for annotation in annotations.values())


def test_the_name_of_a_llama_in_programs_is_another_name_of_the_class() -> None:
    assert Llama is Gpt2


BOTH = "embd_pdrop and embedding_dropout_rate are both given"


def test_a_setting_under_two_names_is_refused() -> None:
    given: dict[str, Any] = {"embd_pdrop": 0.1, "embedding_dropout_rate": 0.2}
    with pytest.raises(ConfigError, match=BOTH):
        Gpt2Settings(**given)
    with pytest.raises(ConfigError, match=BOTH):
        Gpt2.check_arguments(**given)


def test_a_setting_under_its_other_name_is_the_same_setting() -> None:
    settings = Gpt2Settings(embd_pdrop=0.25)
    assert (settings.embedding_dropout_rate, settings.embd_pdrop) == (0.25, None)
    assert Gpt2Settings(embd_pdrop=None).embedding_dropout_rate is None
