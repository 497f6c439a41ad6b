"""The family gpt2 against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.zoo.hugging_face.conversions import check_family

pytestmark = pytest.mark.slow
transformers = pytest.importorskip("transformers", reason="needs transformers")

SIZES: dict[str, Any] = {
    "vocab_size": 99,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"n_inner": 48, "tie_word_embeddings": False},
        {"scale_attn_weights": False, "activation_function": "relu"},
        {"scale_attn_by_inverse_layer_idx": True, "activation_function": "gelu"},
    ],
    ids=["plain", "untied", "unscaled", "by_layer"],
)
def test_gpt2_is_converted_both_ways(options: dict[str, Any], tmp_path: Path) -> None:
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**(SIZES | options)))
    check_family("gpt2", model, tmp_path)
