"""The heads of BERT for classes of sequences, tokens and sentences."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.models.bert.classifier import BertClassifier
from modelzoo_trainer.zoo.models.bert.token_heads import BertSummarizer, BertTokenClassifier
from tests.zoo.models.bert_cases import NO_DROPOUT, SIZES, batch_of

CLASSIFIER: dict[str, Any] = {"problem_type": "single_label_classification", "task_dropout": 0.1}
TOKENS: dict[str, Any] = {"num_classes": 5, "encoder_output_dropout_rate": 0.1}


def inputs():
    keys = ("input_ids", "attention_mask", "token_type_ids")
    batch = batch_of({})
    return {key: batch[key] for key in keys}


def classifier(num_labels=3, **changes):
    torch.manual_seed(2)
    return BertClassifier(**SIZES, **{**CLASSIFIER, "num_labels": num_labels, **changes}).eval()


def test_the_loss_of_classes() -> None:
    model = classifier()
    labels = torch.tensor([0, 2, 1, 1])
    output = model(inputs() | {"labels": labels})
    pooled = model.encoder.pool(model.encoder(inputs()))
    logits = pooled @ model.classifier.weight.T + model.classifier.bias
    torch.testing.assert_close(output["logits"], logits)
    torch.testing.assert_close(output["loss"], functional.cross_entropy(logits, labels))
    again = model(inputs() | {"labels": labels[:, None]})
    torch.testing.assert_close(again["loss"], output["loss"])
    assert "accuracy" not in model.train()(inputs() | {"labels": labels})


def test_the_losses_of_numbers_and_of_several_labels() -> None:
    model = classifier(1, problem_type="regression")
    labels = torch.tensor([0.5, -1.0, 2.0, 0.0])
    output = model(inputs() | {"labels": labels})
    torch.testing.assert_close(output["loss"], (output["logits"][:, 0] - labels).square().mean())
    assert set(output) == {"loss", "logits"}
    model = classifier(2, problem_type="multi_label_classification")
    labels = torch.tensor([[0, 1], [1, 1], [0, 0], [1, 0]])
    output = model(inputs() | {"labels": labels})
    shares = output["logits"].sigmoid()
    expected = -torch.where(labels == 1, shares.log(), (1 - shares).log()).mean()
    torch.testing.assert_close(output["loss"], expected)


def test_metrics_of_matched_and_mismatched_rows() -> None:
    model = classifier(2)
    logits = model(inputs() | {"labels": torch.zeros(4).int()})["logits"]
    labels = logits.argmax(dim=-1)
    labels[3] = 1 - labels[3]
    matched = torch.tensor([1, 0, 0, 1])
    batch = inputs() | {"labels": labels, "is_matched": matched, "is_mismatched": 1 - matched}
    found = model.validation_means(model(batch), batch)
    numbers = {name: (float(value), float(weight)) for name, (value, weight, _) in found.items()}
    assert numbers == {
        "accuracy": (0.75, 4.0),
        "f1_score": (0.75, 4.0),
        "accuracy_matched": (0.5, 2.0),
        "accuracy_mismatched": (1.0, 2.0),
    }


@pytest.mark.parametrize("includes_padding", [None, True])
def test_the_loss_of_tokens(includes_padding) -> None:
    torch.manual_seed(2)
    settings = {**TOKENS, "include_padding_in_loss": includes_padding, "loss_weight": 3.0}
    model = BertTokenClassifier(**SIZES, **settings).eval()
    batch = inputs()
    labels = torch.arange(48).view(4, 12) % 5
    labels[0, 0] = -100
    mask = torch.ones(4, 12) if includes_padding else batch["attention_mask"]
    output = model(batch | {"labels": labels, "loss_mask": mask})
    losses = functional.cross_entropy(
        output["logits"].transpose(1, 2), labels, reduction="none", ignore_index=-100
    )
    expected = 3 * (losses * mask).sum() / 4 / (12 if includes_padding else 1)
    torch.testing.assert_close(output["loss"], expected)
    counts = mask * (labels != -100)
    hits = (output["logits"].argmax(-1) == labels) * counts
    torch.testing.assert_close(output["accuracy"], hits.sum() / counts.sum())
    means = model.validation_means(output, batch | {"labels": labels, "loss_mask": mask})
    assert means["accuracy"][1] == counts.sum()
    if not includes_padding:
        torch.testing.assert_close(model(batch | {"labels": labels})["loss"], expected)


def test_the_loss_of_sentences() -> None:
    torch.manual_seed(2)
    model = BertSummarizer(**SIZES, loss_weight=0.5).eval()
    places = torch.tensor([[0, 3, 0]] * 4)
    weights = torch.tensor([[1.0, 1.0, 0.0]] * 4)
    labels = torch.tensor([[0, 1, 0], [1, 1, 1], [0, 0, 1], [1, 0, 0]])
    batch = inputs() | {"cls_indices": places, "cls_weights": weights, "labels": labels}
    output = model(batch)
    states = model.encoder(inputs())[:, [0, 3, 0]]
    logits = states @ model.classifier.weight.T + model.classifier.bias
    torch.testing.assert_close(output["logits"], logits)
    losses = functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    torch.testing.assert_close(output["loss"], 0.5 * losses[:, :2].sum() / 4)
    assert model.validation_means(output, batch)["accuracy"][1] == 8
    assert BertSummarizer(**SIZES, use_cls_bias=False).classifier.bias is None
    with pytest.raises(ConfigError, match=r"cls_weights of \(4, 2\)"):
        model(batch | {"cls_weights": weights[:, 1:]})


MODELS: Any = {
    "sequences": lambda: BertClassifier(**SIZES, **CLASSIFIER, num_labels=3),
    "tokens": lambda: BertTokenClassifier(**SIZES, **TOKENS),
    "sentences": lambda: BertSummarizer(**SIZES),
}


@pytest.mark.parametrize("kind", MODELS)
def test_initial_values_names_and_lacking_labels(kind) -> None:
    torch.manual_seed(5)
    model = MODELS[kind]()
    assert model.classifier.bias.eq(0).all()
    assert 0.01 < model.classifier.weight.std() < 0.03
    assert model.published_name("classifier.weight") == "model.classifier.weight"
    names = [model.published_name(name) for name, _ in model.named_parameters()]
    assert all(name and name.startswith(("model.bert.", "model.classifier.")) for name in names)
    with pytest.raises(ConfigError, match=r"without \['labels'"):
        model(inputs())
    reset = {id(part) for step, _ in model.reset_steps() for part in step.parameters()}
    assert reset == {id(one) for one in model.parameters()}


def test_defaults_differ_from_those_of_pretraining() -> None:
    tokens = MODELS["tokens"]()
    assert (tokens.dropout_rate, tokens.attention_dropout_rate) == (0.0, 0.0)
    assert tokens.encoder.pooler is None
    sizes = {key: value for key, value in SIZES.items() if key != "vocab_size"}
    assert BertClassifier(**sizes, **CLASSIFIER, num_labels=2).vocab_size == 30522


@pytest.mark.parametrize("mup", [{}, {"mup_base_hidden_size": 16, "mup_base_filter_size": 32}])
def test_settings_of_logits_have_no_effect_on_a_head_and_no_other_is_advised(mup) -> None:
    with pytest.warns(UserWarning, match="the logits of this head") as found:
        BertSummarizer(**SIZES, **mup, output_logits_alpha=2.0, scale_output_logits_by_d=False)
    messages = sorted(str(one.message) for one in found)
    assert [one.partition(" ")[0] for one in messages] == [
        "output_logits_alpha",
        "scale_output_logits_by_d",
    ]
    assert not any("mup_base" in one for one in messages)


def test_a_head_without_a_pooler_needs_no_activation_of_one() -> None:
    BertTokenClassifier(**SIZES, **TOKENS, encoder_nonlinearity="swiglu")
    BertSummarizer(**SIZES, encoder_nonlinearity="swiglu")
    with pytest.warns(UserWarning, match=r"pooler_nonlinearity \(tanh\) has no effect"):
        BertTokenClassifier(**SIZES, **TOKENS, pooler_nonlinearity="tanh")
    with pytest.raises(ConfigError, match=r"pooler_nonlinearity.*swiglu"):
        classifier(encoder_nonlinearity="swiglu")


def test_labels_of_another_number_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"shape \(4, 2\), but 4 labels.*num_labels 3"):
        classifier()(inputs() | {"labels": torch.zeros(4, 2).int()})


def test_dropout_acts_before_the_classifier() -> None:
    model = classifier(**NO_DROPOUT, attention_dropout_rate=0.0, task_dropout=0.5).train()
    batch = inputs() | {"labels": torch.zeros(4).int()}
    assert not torch.equal(model(batch)["logits"], model(batch)["logits"])
