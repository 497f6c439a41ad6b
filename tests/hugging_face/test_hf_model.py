"""Models of `transformers` for other tasks than language models."""

from typing import Any

import pytest
import torch

from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.models.hugging_face.model import HfModel

pytest.importorskip("transformers", reason="needs transformers")
pytestmark = pytest.mark.slow

BERT: dict[str, Any] = {
    "model_type": "bert",
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "vocab_size": 100,
    "max_position_embeddings": 16,
}
TOKENS = torch.arange(1, 13, dtype=torch.int32).view(3, 4)


def test_classes_of_sequences() -> None:
    model = HfModel(
        auto_class="AutoModelForSequenceClassification", config={**BERT, "num_labels": 3}
    )
    batch = {"input_ids": TOKENS, "labels": torch.tensor([0, 1, 2], dtype=torch.int32)}
    outputs = model.eval()(batch)
    hits = outputs["logits"].argmax(-1) == batch["labels"]
    assert outputs["logits"].shape == (3, 3)
    assert "num_items" not in outputs
    torch.testing.assert_close(outputs["accuracy"], hits.float().mean())
    assert "accuracy" not in model.train()(batch)
    assert (model.vocab_size, model.max_position_embeddings) == (100, 16)


def test_labels_that_do_not_count_have_no_weight() -> None:
    model = HfModel(auto_class="AutoModelForTokenClassification", config=BERT).eval()
    labels = torch.tensor([[0, 1, -100, -100], [1, -100, 0, 1], [-100, -100, -100, -100]])
    batch = {"input_ids": TOKENS, "labels": labels.int()}
    outputs = model(batch)
    hits = (outputs["logits"].argmax(-1) == labels)[labels != -100]
    assert outputs["num_items"] == 5
    torch.testing.assert_close(outputs["accuracy"], hits.float().mean())
    means = model.validation_means(outputs, batch)
    assert means["accuracy"][1] == 5
    theirs = model.model(input_ids=TOKENS.long(), labels=labels).loss
    torch.testing.assert_close(outputs["loss"], theirs, atol=0, rtol=0)


def test_a_model_without_labels_has_no_loss() -> None:
    model = HfModel(auto_class="AutoModelForMaskedLM", config=BERT)
    assert list(model({"input_ids": TOKENS})) == ["logits"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"auto_class": "AutoModelForCausalLM"}, "hf_causal_lm"),
        (
            {"auto_class": "AutoModelForTokenClasification"},
            "mean 'AutoModelForTokenClassification'",
        ),
        ({"auto_class": "AutoModelForImageClassification"}, "no model for .*'bert'"),
        ({"auto_class": "AutoModel", "revision": "main"}, "revision .*no effect"),
    ],
)
def test_invalid_settings(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        HfModel(config=BERT, **options)
    with pytest.raises(ConfigError, match=message):
        HfModel.check_arguments(config=BERT, **options)


def test_batches_that_are_not_mappings_are_refused() -> None:
    model = HfModel(auto_class="AutoModel", config=BERT)
    with pytest.raises(ConfigError, match="mappings"):
        model((TOKENS,))
