"""Vectors and gradients of dpr are those of transformers, with the same weights."""

import pytest
import torch

from modelzoo_trainer.zoo.models.bert.dpr import Dpr
from tests.zoo.models.bert_cases import SIZES, batch_of
from tests.zoo.models.test_parity_bert import translated

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("kind", ["question", "ctx"])
def test_vectors_and_gradients_are_those_of_transformers(kind: str) -> None:
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    config = transformers.DPRConfig(
        vocab_size=51,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=12,
        projection_dim=0,
        attn_implementation="eager",
    )
    stem = "DPRQuestionEncoder" if kind == "question" else "DPRContextEncoder"
    theirs = getattr(transformers, stem)(config).double().eval()
    inner = getattr(theirs, "question_encoder" if kind == "question" else "ctx_encoder").bert_model
    settings = {**SIZES, "layer_norm_epsilon": 1e-12}
    model = Dpr(q_encoder=settings, ctx_encoder=settings).double().eval()
    ours = model.encoders[f"{kind}_encoder"]
    left = dict(ours.named_parameters(prefix="encoder"))
    pairs = []
    with torch.no_grad():
        for name, value in translated(
            {f"bert.{key}": one for key, one in inner.named_parameters()}
        ):
            value.normal_(std=0.2)
            if name in left:  # theirs has a pooler that is not used
                left[name].copy_(value)
                pairs.append((left.pop(name), value))
    assert not left
    batch = batch_of({})
    given = {key: batch[key].long() for key in ("input_ids", "attention_mask", "token_type_ids")}
    vectors = model.question_vectors if kind == "question" else model.context_vectors
    found, expected = vectors(given), theirs(**given).pooler_output
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    weights = torch.randn(found.shape, generator=torch.Generator().manual_seed(1)).double()
    (found * weights).sum().backward()
    (expected * weights).sum().backward()
    for one, two in pairs:
        assert one.grad is not None
        torch.testing.assert_close(one.grad, two.grad, rtol=1e-4, atol=1e-6)
