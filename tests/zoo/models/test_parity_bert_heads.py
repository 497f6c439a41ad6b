"""Logits and gradients of the heads of BERT are those of transformers, with the same weights."""

from typing import Any

import pytest
import torch
from torch import nn

from modelzoo_trainer.zoo.models.bert.classifier import BertClassifier
from modelzoo_trainer.zoo.models.bert.token_heads import BertTokenClassifier
from tests.zoo.models.bert_cases import SIZES, batch_of
from tests.zoo.models.test_parity_bert import translated

pytestmark = pytest.mark.slow


def ours_of(kind: str) -> nn.Module:
    if kind == "BertForTokenClassification":
        return BertTokenClassifier(**SIZES, num_classes=3, encoder_output_dropout_rate=0.0)
    settings: dict[str, Any] = {**SIZES, "pooler_nonlinearity": "tanh", "task_dropout": 0.0}
    return BertClassifier(**settings, num_labels=3, problem_type="single_label_classification")


@pytest.mark.parametrize("kind", ["BertForSequenceClassification", "BertForTokenClassification"])
def test_logits_and_losses_are_those_of_transformers(kind: str) -> None:
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    config = transformers.BertConfig(
        vocab_size=51,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=12,
        layer_norm_eps=1e-5,
        num_labels=3,
        attn_implementation="eager",
    )
    theirs = getattr(transformers, kind)(config).double().eval()
    ours = ours_of(kind).double().eval()
    left = dict(ours.named_parameters())
    pairs = []
    with torch.no_grad():
        ours.classifier.load_state_dict(theirs.classifier.state_dict())
        inner = {f"bert.{name}": one for name, one in theirs.bert.named_parameters()}
        for name, value in translated(inner):
            pairs.append((left.pop(name), value))
            pairs[-1][0].copy_(value)
    assert sorted(left) == ["classifier.bias", "classifier.weight"]
    batch = batch_of({})
    keys = ("input_ids", "attention_mask", "token_type_ids")
    given = {key: batch[key].long() for key in keys}
    is_sequence = kind == "BertForSequenceClassification"
    labels = torch.arange(4) % 3 if is_sequence else torch.arange(48).view(4, 12) % 3
    found = ours(given | {"labels": labels})
    expected = theirs(**given, labels=labels)
    if is_sequence:
        torch.testing.assert_close(found["logits"], expected.logits)
        torch.testing.assert_close(found["loss"].double(), expected.loss, rtol=1e-5, atol=1e-6)
        found["loss"].backward()
        expected.loss.backward()
        for one, two in pairs:
            assert one.grad is not None
            torch.testing.assert_close(one.grad, two.grad, rtol=1e-4, atol=1e-6)
    else:
        is_token = batch["attention_mask"] != 0
        torch.testing.assert_close(found["logits"][is_token], expected.logits[is_token])
