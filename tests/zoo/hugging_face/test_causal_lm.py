"""Language models of `transformers` on the batches of the decoders here."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from modelzoo_trainer import Trainer, TrainingLoop
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.models.hugging_face.attention import FAMILIES
from modelzoo_trainer.zoo.models.hugging_face.causal_lm import HfCausalLm
from tests.zoo.hugging_face.hf_cases import SIZES, config_of, documents, language_batch, packed

transformers = pytest.importorskip("transformers", reason="needs transformers")
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("own_folder")]


def make(model_type: str = "llama", **options: Any) -> HfCausalLm:
    torch.manual_seed(0)
    return HfCausalLm(config=config_of(model_type), **options).eval()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    make().save_pretrained(path)
    return path


# CI: each kind of attention and of masks; the others compute as one of these.
@pytest.mark.soak_cases(
    "cohere",
    "exaone4",
    "gemma",
    "granite",
    "helium",
    "ministral",
    "nemotron",
    "olmo",
    "olmo2",
    "persimmon",
    "phi",
    "qwen2_moe",
    "qwen3*",
    "stablelm",
    "starcoder2",
)
@pytest.mark.parametrize("model_type", sorted(FAMILIES))
def test_packed_documents_do_not_see_each_other(model_type: str) -> None:
    model, docs = make(model_type), documents()
    row = packed(docs)
    with torch.no_grad():
        found = model.logits(**row)[0]
        alone = torch.cat([model.logits(doc[None])[0] for doc in docs])
        theirs = torch.cat([model.model(doc[None]).logits[0] for doc in docs])
        mixed = model.logits(row["input_ids"])[0]

    torch.testing.assert_close(found, alone, atol=1e-6, rtol=0)
    torch.testing.assert_close(alone, theirs, atol=0, rtol=0)
    assert (found - mixed).abs().max() > 1e-3


@pytest.mark.parametrize("model_type", ["llama", "mistral", "cohere2"])
def test_packed_documents_with_eager_attention(model_type: str) -> None:
    model, docs = make(model_type, attn_implementation="eager"), documents()
    with torch.no_grad():
        found = model.logits(**packed(docs))[0]
        alone = torch.cat([model.model(doc[None]).logits[0] for doc in docs])
    torch.testing.assert_close(found, alone, atol=1e-6, rtol=0)


def test_packed_documents_are_refused_where_they_would_be_mixed() -> None:
    config = {"model_type": "bloom", "hidden_size": 32, "n_layer": 1, "n_head": 4, "vocab_size": 99}
    model = HfCausalLm(config=config)
    with pytest.raises(ConfigError, match=r"attention_span .*'bloom'.*switch packing off"):
        model.logits(**packed(documents()))


def test_loss_is_that_of_the_library() -> None:
    model, batch = make(), language_batch()
    tokens = torch.cat((batch["input_ids"], batch["labels"][:, -1:]), dim=1).long()
    with torch.no_grad():
        outputs = model(batch)
        theirs = model.model(input_ids=tokens, labels=tokens).loss
    torch.testing.assert_close(outputs["loss"], theirs)
    assert outputs["num_items"] == batch["labels"].numel()
    hits = (outputs["logits"].argmax(-1) == batch["labels"]).float().mean()
    torch.testing.assert_close(outputs["accuracy"], hits)


def test_mask_weights_the_loss_and_restricts_no_attention() -> None:
    model, batch = make(), language_batch()
    weights = torch.zeros_like(batch["labels"])
    weights[:, 2] = 1
    weights[1, 5] = 3
    with torch.no_grad():
        plain, outputs = model(batch), model(batch | {"attention_mask": weights})
    torch.testing.assert_close(outputs["logits"], plain["logits"], atol=0, rtol=0)
    losses = functional.cross_entropy(
        plain["logits"].flatten(0, 1), batch["labels"].flatten().long(), reduction="none"
    )
    mean = (losses * weights.flatten()).sum() / weights.sum()
    torch.testing.assert_close(outputs["loss"], mean)
    assert outputs["num_items"] == weights.sum()


@pytest.mark.parametrize("side", ["left", "right"])
def test_shifted_labels_and_padding_are_those_of_the_library(side: str) -> None:
    model = make(shift_labels=True)
    tokens = language_batch()["input_ids"].long()
    mask = torch.ones_like(tokens)
    if side == "left":
        mask[0, :3] = 0
    else:
        mask[0, 5:] = 0
    labels = tokens.masked_fill(mask == 0, -100)
    labels[0, 3] = -100  # else predicted by padding
    batch = {"input_ids": tokens, "labels": labels, "attention_mask": mask}
    with torch.no_grad():
        outputs, theirs = model(batch), model.model(**batch)
    torch.testing.assert_close(outputs["loss"], theirs.loss)
    counts = mask.bool()
    torch.testing.assert_close(
        outputs["logits"][counts], theirs.logits[counts], atol=1e-6, rtol=1e-5
    )
    assert outputs["num_items"] == (labels[:, 1:] != -100).sum()
    means = model.validation_means(outputs, batch)
    assert means["accuracy"][1] == outputs["num_items"]


def test_flattened_documents_of_the_library_are_kept_apart() -> None:
    model, docs = make(shift_labels=True), documents()
    collate = transformers.DataCollatorWithFlattening()
    batch = collate([{"input_ids": doc.tolist()} for doc in docs])
    batch = {key: one for key, one in batch.items() if key != "attention_mask"}
    with torch.no_grad():
        outputs, theirs = model(batch), model.model(**batch, use_cache=False)
    torch.testing.assert_close(outputs["logits"], theirs.logits, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(outputs["loss"], theirs.loss)


def test_labels_that_are_the_tokens_are_refused_before_the_first_step() -> None:
    tokens = language_batch()["input_ids"]
    batch = {"input_ids": tokens, "labels": tokens}
    trainer = Trainer(
        model=lambda: HfCausalLm(config=config_of("llama")),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        loop=TrainingLoop(max_steps=1),
        progress="none",
    )
    with pytest.raises(ConfigError, match=r"labels equal input_ids .*shift_labels: true"):
        trainer.fit([batch])
    assert trainer.global_step == 0


def test_padding_and_repeated_tokens_are_no_reason_to_refuse() -> None:
    model, ones = make(), torch.ones(2, 4, dtype=torch.int32)
    model.check_batch({"input_ids": ones, "labels": ones})
    model.check_batch(language_batch())
    make(shift_labels=True).check_batch({"input_ids": ones, "labels": ones})


def test_weights_come_from_a_folder(folder: Path) -> None:
    model = HfCausalLm(pretrained_model_name_or_path=str(folder)).eval()
    torch.testing.assert_close(
        model.logits(language_batch()["input_ids"]),
        make().logits(language_batch()["input_ids"]),
        atol=0,
        rtol=0,
    )
    assert (model.vocab_size, model.max_position_embeddings) == (100, 64)
    other = HfCausalLm(pretrained_model_name_or_path=str(folder), pretrained=False)
    assert not torch.equal(other.model.lm_head.weight, model.model.lm_head.weight)


def test_overrides_change_only_what_they_name(folder: Path) -> None:
    model = HfCausalLm(
        pretrained_model_name_or_path=str(folder),
        config_overrides={"attention_dropout": 0.25, "rope_parameters": {"rope_theta": 500.0}},
        dtype="bfloat16",
        attn_implementation="eager",
    )
    assert model.config.attention_dropout == 0.25
    assert model.config.rope_parameters == {"rope_theta": 500.0, "rope_type": "default"}
    assert model.model.lm_head.weight.dtype is torch.bfloat16
    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "opt"])
def test_padding_on_the_left_gives_the_loss_of_the_rows_alone(model_type: str) -> None:
    opt = {"model_type": "opt", "hidden_size": 32, "num_hidden_layers": 1, "ffn_dim": 64}
    opt |= {"num_attention_heads": 4, "vocab_size": 100, "word_embed_proj_dim": 32}
    torch.manual_seed(0)
    config = opt if model_type == "opt" else config_of(model_type)
    model = HfCausalLm(config=config, shift_labels=True).eval()
    tokens = language_batch(num_rows=2)["input_ids"].long()
    mask = torch.ones_like(tokens)
    mask[0, :3] = 0
    batch = {"input_ids": tokens, "attention_mask": mask}
    batch["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
    found = model(batch | {"labels": tokens.masked_fill(mask == 0, -100)})
    alone = [tokens[:1, 3:], tokens[1:]]
    sums = [model.model(input_ids=one, labels=one).loss * (one.numel() - 1) for one in alone]
    assert found["num_items"] == 4 + 7
    torch.testing.assert_close(found["loss"], torch.stack(sums).sum() / 11)


EXPERTS = {"output_router_logits": True, "router_aux_loss_coef": 0.5}


@pytest.mark.parametrize("model_type", ["mixtral", "qwen2_moe"])
def test_the_loss_of_experts_does_not_count_padding(model_type: str) -> None:
    model = make(model_type, config_overrides=EXPERTS | {"pad_token_id": 0})
    shifting = make(model_type, config_overrides=EXPERTS | {"pad_token_id": 0}, shift_labels=True)
    tokens = language_batch(length=8)["input_ids"].long()
    mask = torch.ones_like(tokens)
    mask[1:, 5:] = 0  # row 0 has no padding
    labels = tokens.masked_fill(mask == 0, -100)
    theirs = model.model(input_ids=tokens, attention_mask=mask, labels=labels)
    given = {"input_ids": tokens, "attention_mask": mask, "labels": labels}
    torch.testing.assert_close(shifting(given)["loss"], theirs.loss)
    # As the data processors here have it: the last token is no input, padding has the weight 0.
    ours = {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:], "attention_mask": mask[:, 1:]}
    cut = model.model(input_ids=tokens[:, :-1], attention_mask=_inputs_of(mask))
    expected = functional.cross_entropy(cut.logits.transpose(1, 2), labels[:, 1:])
    torch.testing.assert_close(model(ours)["loss"], expected + 0.5 * cut.aux_loss)


def _inputs_of(mask: torch.Tensor) -> torch.Tensor:
    """Return which tokens are followed by one that counts."""
    return torch.cat([mask[:, :1], mask[:, 2:]], dim=1)


def test_packed_documents_are_refused_with_a_loss_of_experts() -> None:
    batch = packed(documents())
    for options in ({}, {"shift_labels": True}):
        model = make("mixtral", config_overrides=EXPERTS, **options)
        with pytest.raises(ConfigError, match=r"loss of experts .*output_router_logits: false"):
            model(batch | {"labels": batch["input_ids"]})


def test_generation_with_and_without_cache_is_the_same() -> None:
    model = make()
    prompt = language_batch()["input_ids"][:2, :5]
    found = model.generate(prompt, 6, temperature=0.0)
    again = model.generate(prompt, 6, temperature=0.0, use_cache=False)
    theirs = model.model.generate(
        prompt.long(), max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    assert torch.equal(found, again)
    assert torch.equal(found.long(), theirs)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "neither given"),
        ({"config": SIZES, "pretrained_model_name_or_path": "x"}, "both given"),
        ({"config": SIZES}, r"config\.model_type is missing"),
        ({"config": {"model_type": "lama"}}, r"config\.model_type: 'lama' .*Did you mean 'llama'"),
        ({"config": {"model_type": "llama", "hidden_sise": 3}}, "Did you mean 'hidden_size'"),
        ({"config": {"model_type": "llama", "hidden_size": "x"}}, "hidden_size"),
        ({"config": {**config_of("llama"), "hidden_size": 30}}, "multiple"),
        ({"config": config_of("llama"), "pretrained": True}, "pretrained .*no effect"),
        ({"config": {**config_of("llama"), "dtype": "float16"}}, "Set dtype of the model"),
        ({"config": config_of("vit")}, "no such setting"),
        ({"config": {"model_type": "vit"}}, "no model for the architecture 'vit'"),
        (
            {"config": config_of("llama"), "config_overrides": {"num_layer": 1}},
            "config_overrides.n",
        ),
        ({"config": config_of("gemma2"), "attn_implementation": "sdpa"}, "set eager"),
        ({"config": {**config_of("llama"), "return_dict": False}}, "return_dict is false"),
        (
            {"config": {**config_of("llama"), "pad_token_id": 10**6}},
            r"config: .*Padding_idx.*Set pad_token_id to a token below vocab_size",
        ),
        ({"config": config_of("llama"), "attn_implementation": "sdpaa"}, "attn_implementation"),
    ],
)
def test_invalid_settings(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        HfCausalLm(**options)


@pytest.mark.parametrize("shift_labels", [False, True])
@pytest.mark.parametrize("mask", ["none", "ones", "right"])
def test_labels_that_do_not_count_have_no_weight(mask: str, shift_labels: bool) -> None:
    model = make(shift_labels=shift_labels)
    ids = language_batch()["input_ids"]
    with torch.no_grad():
        logits = model.logits(ids)
        labels = logits.argmax(-1)  # the model is right everywhere
        counted = logits[:, 5:]
        expected = functional.cross_entropy(counted.flatten(0, 1), labels[:, 5:].flatten())
        labels[:, :5] = -100
        if shift_labels:
            labels = functional.pad(labels[:, :-1], (1, 0), value=-100)
            expected = functional.cross_entropy(
                counted[:, :-1].flatten(0, 1), labels[:, 6:].flatten()
            )
        masks = {"ones": torch.ones_like(ids), "right": (labels != -100).int()}
        batch = {"input_ids": ids, "labels": labels}
        if mask != "none" and not (shift_labels and mask == "right"):
            batch["attention_mask"] = masks[mask]
        outputs = model(batch)

    num = 8 if shift_labels else 12
    torch.testing.assert_close(outputs["loss"], expected)
    assert (outputs["accuracy"], outputs["num_items"], model.count_labels(batch)) == (1, num, num)
    weights = {weight.item() for _, weight, _ in model.validation_means(outputs, batch).values()}
    assert weights == {num}
