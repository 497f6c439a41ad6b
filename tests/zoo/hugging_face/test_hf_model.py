"""Models of `transformers` for other tasks than language models."""

from typing import Any

import pytest
import torch

from backends.deferred_init import materialize
from modelzoo_trainer import Trainer, TrainingLoop
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.models.hugging_face.model import HfModel
from tests.zoo.models.drawn_alike import check_drawn_alike

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


def test_a_loss_that_is_no_mean_over_labels_is_not_weighted_by_them() -> None:
    config: dict[str, Any] = {"model_type": "wav2vec2", "hidden_size": 16, "vocab_size": 20}
    config |= {"num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config |= {"conv_dim": [8], "conv_stride": [4], "conv_kernel": [4]}
    config |= {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2}
    model = HfModel(auto_class="AutoModelForCTC", config=config)
    labels = torch.tensor([[1, 2, 3], [4, 5, -100]])
    assert list(model({"input_values": torch.rand(2, 200), "labels": labels})) == ["loss", "logits"]


def test_classes_of_sequences() -> None:
    model = HfModel(
        auto_class="AutoModelForSequenceClassification", config={**BERT, "num_labels": 3}
    )
    batch = {"input_ids": TOKENS, "labels": torch.tensor([0, 1, 2], dtype=torch.int32)}
    outputs = model.eval()(batch)
    hits = outputs["logits"].argmax(-1) == batch["labels"]
    assert outputs["logits"].shape == (3, 3)
    assert outputs["num_items"] == 3
    torch.testing.assert_close(outputs["accuracy"], hits.float().mean())
    assert "accuracy" not in model.train()(batch)
    assert (model.vocab_size, model.max_position_embeddings) == (100, 16)


def test_rows_without_a_class_count_as_if_they_were_not_there() -> None:
    config = {**BERT, "num_labels": 3}
    model = HfModel(auto_class="AutoModelForSequenceClassification", config=config).eval()
    labels = torch.tensor([2, -100, 1])
    outputs = model({"input_ids": TOKENS, "labels": labels})
    others = model({"input_ids": TOKENS[[0, 2]], "labels": labels[[0, 2]]})
    for name in ("loss", "accuracy", "num_items"):
        torch.testing.assert_close(outputs[name], others[name])


@pytest.mark.parametrize("kind", ["SequenceClassification", "TokenClassification"])
def test_a_batch_without_a_label_has_loss_0_and_no_gradient(kind: str) -> None:
    model = HfModel(auto_class=f"AutoModelFor{kind}", config={**BERT, "num_labels": 3})
    shape = (3,) if kind == "SequenceClassification" else TOKENS.shape
    batch = {"input_ids": TOKENS, "labels": torch.full(shape, -100)}
    outputs = model(batch)
    torch.autograd.backward(outputs["loss"])
    grads = [one.grad for one in model.parameters() if one.grad is not None]
    assert (outputs["loss"], outputs["num_items"], model.count_labels(batch)) == (0, 0, 0)
    assert torch.stack([grad.abs().max() for grad in grads]).max() == 0


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


T5: dict[str, Any] = {
    "model_type": "t5",
    "vocab_size": 100,
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 16,
    "num_layers": 1,
    "num_heads": 2,
}


def test_an_encoder_with_a_decoder_is_made_from_settings() -> None:
    first = {"decoder_start_token_id": 0}
    model = HfModel(auto_class="AutoModelForSeq2SeqLM", config={**T5, **first}).eval()
    again = HfModel(auto_class="AutoModelForSeq2SeqLM", config=T5, config_overrides=first)
    outputs = model({"input_ids": TOKENS, "labels": TOKENS})
    assert outputs["num_items"] == TOKENS.numel()
    assert torch.isfinite(outputs["loss"])
    assert again.config.decoder_start_token_id == 0
    with pytest.raises(
        ConfigError, match=r"decoder_start_token_id is missing .*pad_token_id \(0\)"
    ):
        HfModel(auto_class="AutoModelForSeq2SeqLM", config=T5)


def test_pixels_without_a_class_do_not_count() -> None:
    config = {"model_type": "segformer", "num_encoder_blocks": 1, "depths": [1], "num_labels": 3}
    config |= {"sr_ratios": [1], "hidden_sizes": [8], "patch_sizes": [3], "strides": [2]}
    config |= {"num_attention_heads": [1], "mlp_ratios": [1], "decoder_hidden_size": 8}
    model = HfModel(auto_class="AutoModelForSemanticSegmentation", config=config)
    labels = torch.full((2, 8, 8), 255, dtype=torch.uint8)
    labels[:, 0, :3] = 1
    batch = {"pixel_values": torch.rand(2, 3, 8, 8), "labels": labels}
    assert model(batch)["num_items"] == 6


@pytest.mark.parametrize("problem", ["multi_label_classification", "regression"])
def test_integers_as_labels_that_are_numbers(problem: str) -> None:
    num = 3 if problem.startswith("multi") else 1
    config = {**BERT, "num_labels": num, "problem_type": problem}
    model = HfModel(auto_class="AutoModelForSequenceClassification", config=config).eval()
    labels = torch.arange(3 * num).view(3, num).squeeze(-1) % 2
    found = model({"input_ids": TOKENS, "labels": labels})
    assert "accuracy" not in found
    assert torch.equal(
        found["loss"], model({"input_ids": TOKENS, "labels": labels.float()})["loss"]
    )


def test_a_regression_has_no_accuracy() -> None:
    model = HfModel(
        auto_class="AutoModelForSequenceClassification", config={**BERT, "num_labels": 1}
    ).eval()
    assert "accuracy" not in model({"input_ids": TOKENS, "labels": torch.tensor([0, 1, 2])})


@pytest.mark.parametrize(
    ("adapters", "message"),
    [
        ({"peft_type": "ADALORA", "total_step": 9}, "ADALORA changes ranks .*Use LORA"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices .* Remove it"),
        ({"layer_replication": [[0, 1], [0, 1]]}, "layer_replication .* Remove it"),
    ],
)
def test_adapters_that_do_not_work_are_refused(adapters: dict[str, Any], message: str) -> None:
    pytest.importorskip("peft", reason="needs peft")
    with pytest.raises(ConfigError, match=message):
        HfModel.check_arguments(auto_class="AutoModel", config=BERT, peft_config=adapters)


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


GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 1, "n_head": 2, "vocab_size": 100}


def test_language_models_of_other_classes_are_refused() -> None:
    message = "AutoModelForPreTraining, which makes a language model of 'gpt2'.*hf_causal_lm"
    for make in (HfModel, HfModel.check_arguments):
        with pytest.raises(ConfigError, match=message):
            make(auto_class="AutoModelForPreTraining", config=GPT2)
    HfModel.check_arguments(auto_class="AutoModelForPreTraining", config=BERT)
    HfModel.check_arguments(auto_class="AutoModelForMaskedLM", config={"model_type": "xlm"})


@pytest.mark.parametrize("auto_class", ["AutoModelForMaskedLM", "AutoModelForTokenClassification"])
def test_batches_of_language_models_are_refused(auto_class: str, tmp_path: Any) -> None:
    options = {"num_labels": 100} if "Token" in auto_class else {}
    model = HfModel(auto_class=auto_class, config=BERT | options)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(1, 100, (4, 9), generator=generator).int()
    batch = {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:].clone()}
    ends = torch.ones_like(batch["labels"])
    ends[:, 5:] = 0
    batch["labels"][:, 4] = 0  # the end of a document
    trainer = Trainer(
        device="cpu",
        model=model,
        model_dir=tmp_path,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loop=TrainingLoop(max_steps=1),
    )
    for one in (batch, batch | {"attention_mask": ends}):
        with pytest.raises(ConfigError, match=r"labels .* are the next tokens.*hf_causal_lm"):
            trainer.fit([one])
    packed = batch | {"attention_span": ends, "labels": batch["input_ids"]}
    with pytest.raises(ConfigError, match="hf_causal_lm"):
        model.check_batch(packed)


def test_batches_of_other_tasks_are_not_taken_for_those_of_language_models() -> None:
    config = BERT | {"num_labels": 10}
    model = HfModel(auto_class="AutoModelForTokenClassification", config=config)
    ids = torch.tensor([[5, 6, 7, 0, 0, 0], [5, 1, 1, 0, 0, 0]])
    for labels in (ids % 2, torch.zeros_like(ids), ids, torch.full_like(ids, -100)):
        model.check_batch({"input_ids": ids, "labels": labels})
    model.check_batch({"input_ids": ids, "labels": torch.tensor([0, 1])})
    model.check_batch({"pixel_values": torch.rand(1, 3, 4, 4), "labels": torch.tensor([0])})


def test_padding_that_a_decoder_does_not_know_is_refused() -> None:
    task = "AutoModelForSequenceClassification"
    tokens, mask = TOKENS.clone(), torch.ones_like(TOKENS)
    tokens[0, 2:], mask[0, 2:] = 7, 0
    batch = {"input_ids": tokens, "attention_mask": mask, "labels": torch.tensor([0, 1, 0])}
    without = HfModel(auto_class=task, config=GPT2)
    with pytest.raises(ConfigError, match=r"'gpt2' classifies the last token .*Set pad_token_id"):
        without.check_batch(batch)
    without.check_batch({key: one[:1] for key, one in batch.items()})
    other = HfModel(auto_class=task, config=GPT2 | {"pad_token_id": 0})
    with pytest.raises(ConfigError, match=r"pad_token_id \(0\), but .*Set pad_token_id \(7\)"):
        other.check_batch(batch)
    known = HfModel(auto_class=task, config=GPT2 | {"pad_token_id": 7}).eval()
    known.check_batch(batch)
    alone = known({"input_ids": tokens[:1, :2]})["logits"]
    torch.testing.assert_close(known(batch)["logits"][:1], alone)
    HfModel(auto_class=task, config=BERT).check_batch(batch)


def test_tokens_and_classes_that_the_model_does_not_have_are_named() -> None:
    model = HfModel(auto_class="AutoModelForTokenClassification", config=BERT)
    batch = {"input_ids": TOKENS, "labels": torch.zeros_like(TOKENS)}
    model.check_batch(batch)
    with pytest.raises(ConfigError, match=r"token 112, .* has 100 \(0 to 99\)"):
        model.check_batch(batch | {"input_ids": TOKENS + 100})
    with pytest.raises(ConfigError, match=r"label 5, but num_labels is 2 \(0 to 1\)"):
        model.check_batch(batch | {"labels": torch.full_like(TOKENS, 5)})
    masked = HfModel(auto_class="AutoModelForMaskedLM", config=BERT)
    masked.check_batch(batch | {"labels": TOKENS})


def test_batches_that_are_not_mappings_are_refused() -> None:
    model = HfModel(auto_class="AutoModel", config=BERT)
    with pytest.raises(ConfigError, match="mappings"):
        model((TOKENS,))


PARENTS: dict[str, dict[str, Any]] = {
    "AutoModelForSpeechSeq2Seq": {
        "model_type": "whisper",
        "vocab_size": 64,
        "num_mel_bins": 8,
        "d_model": 32,
        "encoder_layers": 1,
        "decoder_layers": 1,
        "encoder_ffn_dim": 16,
        "decoder_ffn_dim": 16,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
        "pad_token_id": 1,
        "max_source_positions": 16,
        "max_target_positions": 16,
        "bos_token_id": 1,
        "eos_token_id": 1,
        "decoder_start_token_id": 1,
        "suppress_tokens": None,
        "begin_suppress_tokens": None,
    },
    "AutoModelForSequenceClassification": {
        "model_type": "t5",
        "vocab_size": 64,
        "d_model": 32,
        "d_kv": 8,
        "d_ff": 32,
        "num_layers": 1,
        "num_heads": 2,
        "decoder_start_token_id": 0,
    },
}


@pytest.mark.parametrize("kind", PARENTS)
def test_values_that_a_parent_draws_are_those_of_a_model_on_the_host(kind: str) -> None:
    """A module without parameters of its own may initialize those of its children."""
    expected = HfModel(auto_class=kind, config=dict(PARENTS[kind]))
    found = HfModel(auto_class=kind, config=dict(PARENTS[kind]), init_device="meta")
    materialize(found, torch.device("cpu"))
    check_drawn_alike(found, expected)
    if kind == "AutoModelForSpeechSeq2Seq":
        name = "model.model.encoder.embed_positions.weight"
        torch.testing.assert_close(found.get_parameter(name), expected.get_parameter(name))
