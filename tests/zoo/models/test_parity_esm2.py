"""Logits and gradients of ESM-2 are those of transformers, with the same weights."""

from typing import Any

import pytest
import torch

from tests.zoo.models.bert_cases import CASES, batch_of, make
from tests.zoo.models.test_parity_bert import NAMES

pytestmark = pytest.mark.slow

OTHER_NAMES = {
    "attention.LayerNorm": "attention_norm",
    "LayerNorm": "ffn_norm",
    "encoder.emb_layer_norm_after": "encoder.final_norm",
    "embeddings.layer_norm": "encoder.embedding_norm",
}


def our_name(theirs: str) -> str | None:
    """Return our name of a parameter; None if there is none."""
    name, prefix = theirs.removeprefix("esm."), ""
    if name.startswith("encoder.layer."):
        number, _, name = name.removeprefix("encoder.layer.").partition(".")
        prefix = f"encoder.layers.{number}."
    module, _, kind = name.rpartition(".")
    ours = OTHER_NAMES.get(module, NAMES.get(module))
    return None if ours is None else f"{prefix}{ours}.{kind}"


@pytest.mark.parametrize("token_dropout", [False, True])
@pytest.mark.parametrize("norm_before", [False, True])
def test_logits_and_gradients_are_those_of_transformers(token_dropout, norm_before) -> None:
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    case: dict[str, Any] = CASES["esm2"]
    config = transformers.EsmConfig(
        vocab_size=51,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=14,
        position_embedding_type="rotary",
        pad_token_id=case["pad_token_id"],
        mask_token_id=case["mask_token_id"],
        token_dropout=token_dropout,
        emb_layer_norm_before=norm_before,
        layer_norm_eps=1e-5,
        attn_implementation="eager",
    )
    theirs = transformers.EsmForMaskedLM(config).double().eval()
    ours = make("esm2", token_dropout=token_dropout, embedding_layer_norm=norm_before)
    ours = ours.double().eval()
    generator = torch.Generator().manual_seed(1)
    left = dict(ours.named_parameters())
    pairs = []
    with torch.no_grad():
        for name, param in theirs.named_parameters():
            mean = 1.0 if "norm" in name.lower() and name.endswith("weight") else 0.0
            drawn = torch.randn(param.shape, generator=generator, dtype=torch.float64)
            param.copy_(drawn * 0.2 + mean)
            own = our_name(name)
            if own in left:
                left[own].copy_(param)
                pairs.append((param, left.pop(own)))
    assert not left
    batch = batch_of(case)
    batch["input_ids"][:, 2:5] = case["mask_token_id"]
    batch["input_ids"] = torch.where(
        batch["attention_mask"] != 0, batch["input_ids"], case["pad_token_id"]
    )
    expected = theirs(
        input_ids=batch["input_ids"].long(), attention_mask=batch["attention_mask"]
    ).logits
    found = ours(batch)["logits"]
    is_token = batch["attention_mask"] != 0
    torch.testing.assert_close(found[is_token], expected[is_token], rtol=1e-6, atol=1e-6)
    expected[is_token].square().sum().backward()
    found[is_token].square().sum().backward()
    for param, own in pairs:
        size = max(1.0, param.grad.abs().max().item())
        torch.testing.assert_close(own.grad, param.grad, rtol=0, atol=1e-6 * size)
