"""Logits and gradients of BERT and RoBERTa are those of transformers, with the same weights."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from modelzoo_trainer.zoo.models.bert.pretraining import Bert
from tests.zoo.models.bert_cases import CASES, SIZES, batch_of

pytestmark = pytest.mark.slow

NAMES = {
    "embeddings.word_embeddings": "encoder.token_embeddings",
    "embeddings.position_embeddings": "encoder.position_embeddings",
    "embeddings.token_type_embeddings": "encoder.segment_embeddings",
    "embeddings.LayerNorm": "encoder.embedding_norm",
    "attention.self.query": "attention.q_proj",
    "attention.self.key": "attention.k_proj",
    "attention.self.value": "attention.v_proj",
    "attention.output.dense": "attention.o_proj",
    "attention.output.LayerNorm": "attention_norm",
    "intermediate.dense": "ffn.up_proj",
    "output.dense": "ffn.down_proj",
    "output.LayerNorm": "ffn_norm",
    "pooler.dense": "encoder.pooler",
    "cls.predictions.transform.dense": "mlm_dense",
    "cls.predictions.transform.LayerNorm": "mlm_norm",
    "cls.predictions": "lm_head",
    "cls.seq_relationship": "nsp_head",
    "lm_head.dense": "mlm_dense",
    "lm_head.layer_norm": "mlm_norm",
    "lm_head": "lm_head",
}


def translated(tensors: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield their tensors under our names."""
    for name, value in tensors.items():
        inner = name.removeprefix("bert.").removeprefix("roberta.")
        prefix = ""
        if inner.startswith("encoder.layer."):
            number, _, inner = inner.removeprefix("encoder.layer.").partition(".")
            prefix = f"encoder.layers.{number}."
        module, _, kind = inner.rpartition(".")
        yield f"{prefix}{NAMES[module]}.{kind}", value


def pair(case: str, kind: str) -> tuple[nn.Module, Bert]:
    """Return their model and ours, in eval mode and float64, with the same weights."""
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    settings: dict[str, Any] = {**SIZES, **CASES[case]}
    is_roberta = bool(settings.get("disable_nsp"))
    offset = settings.get("pad_token_id", 0) + 1 if is_roberta else 0
    stem = kind.removesuffix("ForPreTraining").removesuffix("ForMaskedLM")
    config = getattr(transformers, f"{stem}Config")(
        vocab_size=51,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=12 + offset,
        type_vocab_size=1 if is_roberta else 2,
        layer_norm_eps=1e-5,
        pad_token_id=settings.get("pad_token_id", 0),
        attn_implementation="eager",
    )
    theirs = getattr(transformers, kind)(config).double().eval()
    pooled_by = None if is_roberta else "tanh"
    ours = Bert(**settings, pooler_nonlinearity=pooled_by).double().eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, param in theirs.named_parameters():
            mean = 1.0 if "norm" in name.lower() and name.endswith("weight") else 0.0
            drawn = torch.randn(param.shape, generator=generator, dtype=torch.float64)
            param.copy_(drawn * 0.2 + mean)
            if is_roberta and "token_type" in name:  # they add row 0, ours has no segments
                param.zero_()
        params = dict(ours.named_parameters())
        for name, value in translated(dict(theirs.named_parameters())):
            if name in params:
                params.pop(name).copy_(value)
    assert not params
    return theirs, ours


@pytest.mark.parametrize(
    ("case", "kind"), [("bert", "BertForPreTraining"), ("roberta", "RobertaForMaskedLM")]
)
def test_logits_and_gradients_are_those_of_transformers(case: str, kind: str) -> None:
    theirs, ours = pair(case, kind)
    batch = batch_of(CASES[case])
    keys = ("input_ids", "attention_mask", "token_type_ids")
    output = theirs(**{key: batch[key] for key in keys if key in batch})
    found = ours(batch)
    expected = output.prediction_logits if case == "bert" else output.logits
    is_token = batch["attention_mask"] != 0
    torch.testing.assert_close(found["logits"][is_token], expected[is_token])
    sums = [expected[is_token].square().sum(), found["logits"][is_token].square().sum()]
    if case == "bert":
        classes = output.seq_relationship_logits
        torch.testing.assert_close(found["nsp_logits"], classes)
        sums = [sums[0] + classes.sum(), sums[1] + found["nsp_logits"].sum()]
    torch.autograd.backward(sums)
    grads = {name: param.grad for name, param in theirs.named_parameters()}
    for name, expected_grad in translated(grads):
        if "segment" in name and not ours.segments:
            continue
        grad = ours.get_parameter(name).grad
        size = expected_grad.abs().max().item()
        torch.testing.assert_close(grad, expected_grad, rtol=0, atol=1e-9 * max(size, 1.0))
