"""Normalized queries and keys: `attention_qk_norm`."""

from typing import Any

import pytest
import torch

from backends.errors import BackendError
from backends.parallel.tensor_parallel import split_layers
from modelzoo_trainer.conversion.cerebras import rules_of
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.models.decoder_names import Gpt2
from tests.models.decoder_cases import NO_DROPOUT, SIZES

IDS = torch.arange(24).view(2, 12) * 7 % 51


def make(**changes: Any) -> Gpt2:
    torch.manual_seed(0)
    return Gpt2(**{**SIZES, **NO_DROPOUT, "attention_qk_norm": "rmsnorm", **changes}).double()


def test_the_scale_of_queries_and_keys_does_not_matter() -> None:
    model = make(layer_norm_epsilon=1e-12)
    expected = model.logits(IDS)
    with torch.no_grad():
        for layer in model.layers:
            layer.get_parameter("attention.q_proj.weight").mul_(3)
            layer.get_parameter("attention.k_proj.weight").mul_(0.2)

    torch.testing.assert_close(model.logits(IDS), expected, rtol=1e-9, atol=1e-9)
    assert not torch.equal(make(attention_qk_norm=None).logits(IDS), expected)


def test_generation_with_a_cache_is_that_without() -> None:
    model = make(position_embedding_type="rotary")
    found = model.generate(IDS[:, :4], 6, temperature=0)

    assert torch.equal(found, model.generate(IDS[:, :4], 6, temperature=0, use_cache=False))


def test_attention_is_not_split_over_processes() -> None:
    model = make()
    assert not any("attention" in pattern for pattern in model.tensor_plan)
    plan = {**model.tensor_plan, "layers.*.attention.q_proj": "colwise"}

    class Two:
        def size(self) -> int:
            return 2

    with pytest.raises(BackendError, match=r"q_proj.*attention_qk_norm"):
        split_layers(model, plan, Two())  # type: ignore[arg-type]  # its size is all that is read


def test_the_norms_have_no_published_name_as_they_have_no_effect_there() -> None:
    with pytest.raises(ConfigError, match=r"q_norm.*no name in the Cerebras Model Zoo"):
        rules_of(make(), {"layers.0.attention.q_norm.weight": (8,)})
