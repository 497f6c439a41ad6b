"""Normalized queries and keys: `attention_qk_norm`."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from backends.errors import BackendError
from backends.parallel.tensor_parallel import split_layers
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.conversion.cerebras import rules_of
from modelzoo_trainer.zoo.models.context import Context
from modelzoo_trainer.zoo.models.decoder_names import Gpt2
from modelzoo_trainer.zoo.models.visible import Visible
from tests.zoo.models.decoder_cases import NO_DROPOUT, SIZES
from tests.zoo.models.formulas import normed, projected

PLAIN = Context(angles=None, visible=(Visible(), Visible()))
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


@pytest.mark.parametrize("norm_type", ["rmsnorm", "layernorm"])
def test_each_head_of_queries_and_keys_is_normalized(norm_type: str) -> None:
    attention: Any = make(attention_qk_norm=norm_type).layers[0].get_submodule("attention")
    for norm in (attention.q_norm, attention.k_norm):
        for param in norm.parameters():
            assert param.shape == (8,)
            torch.nn.init.normal_(param)
    states = torch.randn(2, 12, 32, dtype=torch.float64)
    queries, keys, values = (
        projected(states, getattr(attention, f"{part}_proj")).view(2, 12, 4, 8).transpose(1, 2)
        for part in "qkv"
    )
    scores = normed(queries, attention.q_norm) @ normed(keys, attention.k_norm).mT / 8**0.5
    future = torch.ones(12, 12, dtype=torch.bool).triu(1)
    joined = scores.masked_fill(future, float("-inf")).softmax(-1) @ values
    expected = projected(joined.transpose(1, 2).flatten(2), attention.o_proj)

    torch.testing.assert_close(attention(states, PLAIN), expected)


def test_norms_of_heads_keep_the_dtype_of_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def see(queries: Tensor, keys: Tensor, values: Tensor, **_: Any) -> Tensor:
        seen.extend([queries.dtype, keys.dtype, values.dtype])
        return queries

    monkeypatch.setattr("modelzoo_trainer.zoo.models.attention.attend", see)
    attention = make().float().layers[0].get_submodule("attention")
    with torch.autocast("cpu", torch.bfloat16), warnings.catch_warnings():
        warnings.simplefilter("error")  # of torch: a norm of two dtypes is not fused
        attention(torch.randn(2, 12, 32), PLAIN)

    assert seen == [torch.bfloat16] * 3


def test_generation_with_a_cache_is_that_without() -> None:
    model = make(position_embedding_type="rotary")
    found = model.generate(IDS[:, :4], 6, temperature=0)

    assert torch.equal(found, model.generate(IDS[:, :4], 6, temperature=0, use_cache=False))


def test_a_plan_that_splits_heads_without_their_norms_is_refused() -> None:
    model = make()
    plan = {key: style for key, style in model.tensor_plan.items() if not key.endswith("k_norm")}

    class Two:
        def size(self) -> int:
            return 2

    with pytest.raises(BackendError, match=r"layers\.\*\.attention\.k_norm: own_part"):
        split_layers(model, plan, Two())  # type: ignore[arg-type]  # its size is all that is read


def test_the_norms_have_no_published_name_as_they_have_no_effect_there() -> None:
    with pytest.raises(ConfigError, match=r"q_norm.*no name in the Cerebras Model Zoo"):
        rules_of(make(), {"layers.0.attention.q_norm.weight": (8,)})
