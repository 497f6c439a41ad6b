"""What `hf_causal_lm` refuses: attention that sees later tokens, and batches of another form."""

from typing import Any

import pytest
import torch

from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.models.hugging_face.causal_lm import HfCausalLm
from tests.zoo.hugging_face.hf_cases import SIZES, config_of, documents, language_batch, packed

transformers = pytest.importorskip("transformers", reason="needs transformers")
pytestmark = pytest.mark.slow

_SIZES = {key: one for key, one in SIZES.items() if key != "num_key_value_heads"}
_OPT = {"model_type": "opt", "hidden_size": 32, "num_hidden_layers": 1, "ffn_dim": 64}
_OPT |= {"num_attention_heads": 4, "vocab_size": 100, "word_embed_proj_dim": 32}
_ENCODERS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"model_type": "bert", **_SIZES}, {"is_decoder": True}),
    ({"model_type": "electra", **_SIZES, "embedding_size": 32}, {"is_decoder": True}),
    ({"model_type": "roberta", **_SIZES}, {"is_decoder": True}),
    ({"model_type": "roformer", **_SIZES}, {"is_decoder": True}),
    (
        {"model_type": "xlm", "emb_dim": 32, "n_layers": 1, "n_heads": 4, "vocab_size": 100},
        {"causal": True},
    ),
    (
        {"model_type": "xlnet", "d_model": 32, "n_layer": 1, "n_head": 4, "d_inner": 64}
        | {"vocab_size": 100},
        {"attn_type": "uni"},
    ),
]


@pytest.mark.parametrize(("config", "causal"), _ENCODERS, ids=lambda one: one.get("model_type"))
def test_attention_to_later_tokens_is_refused(
    config: dict[str, Any], causal: dict[str, Any]
) -> None:
    (key,) = causal
    with pytest.raises(ConfigError, match=rf"learn to copy the next token. Set config: {{{key}: "):
        HfCausalLm(config=config)
    with pytest.raises(ConfigError, match=key):
        HfCausalLm.check_arguments(config=config)
    model, tokens = HfCausalLm(config=config | causal).eval(), torch.tensor([[9, 8, 7]])
    with torch.no_grad():
        first, second = model.logits(tokens), model.logits(torch.tensor([[9, 8, 6]]))
    torch.testing.assert_close(first[:, :2], second[:, :2], atol=0, rtol=0)


def test_an_encoder_of_a_folder_is_refused(tmp_path: Any) -> None:
    config = transformers.BertConfig(**_SIZES)
    transformers.BertForMaskedLM(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"Set config_overrides: \{is_decoder: true\}"):
        HfCausalLm(pretrained_model_name_or_path=str(tmp_path))
    HfCausalLm.check_arguments(config={**config_of("gpt_neox")})  # causal without is_decoder


def test_labels_that_are_shifted_already_are_refused() -> None:
    model, batch = HfCausalLm(config=config_of("llama"), shift_labels=True), language_batch()
    weights = torch.ones_like(batch["labels"])
    weights[:, :4] = 0
    padded = {key: one.clone() for key, one in batch.items()}
    padded["input_ids"][:, -2:] = 0
    padded["labels"][:, -2:] = -100
    for one in (batch, batch | {"attention_mask": weights}, padded):
        with pytest.raises(ConfigError, match=r"labels are the next tokens .*Remove shift_labels"):
            model.check_batch(one)
    tokens = batch["input_ids"]
    model.check_batch({"input_ids": tokens, "labels": tokens})
    model.check_batch({"input_ids": tokens, "labels": torch.full_like(tokens, -100)})


def test_positions_of_packed_documents_are_refused_where_they_would_be_mixed() -> None:
    model, row = HfCausalLm(config=_OPT, shift_labels=True), packed(documents())
    batch = {key: row[key] for key in ("input_ids", "position_ids")} | {"labels": row["input_ids"]}
    with pytest.raises(ConfigError, match=r"position_ids \(packed documents\).*'opt'"):
        model(batch)
    batch["attention_mask"] = torch.ones_like(row["input_ids"])
    with pytest.raises(ConfigError, match=r"position_ids \(packed documents\).*'opt'"):
        model.check_batch(batch)
    positions = torch.tensor([[1, 1, 0, 1, 2]])  # left padding
    mask, tokens = torch.tensor([[0, 0, 1, 1, 1]]), torch.tensor([[1, 1, 7, 8, 9]])
    labels = tokens.masked_fill(mask == 0, -100)
    one = {"input_ids": tokens, "position_ids": positions, "attention_mask": mask, "labels": labels}
    model.check_batch(one)
    assert model(one)["loss"].isfinite()


def test_packed_documents_with_a_mask_of_ones_are_kept_apart() -> None:
    model, docs = HfCausalLm(config=config_of("llama"), shift_labels=True).eval(), documents()
    row = packed(docs)
    batch = {key: row[key] for key in ("input_ids", "position_ids")} | {"labels": row["input_ids"]}
    mask = torch.ones_like(row["input_ids"])
    with torch.no_grad():
        found, alone = model(batch | {"attention_mask": mask}), model(batch)
    torch.testing.assert_close(found["logits"], alone["logits"], atol=1e-6, rtol=0)


def test_tokens_beyond_the_vocabulary_are_named() -> None:
    batch = language_batch()
    batch["input_ids"][1, 2] = 100
    for options in ({}, {"shift_labels": True}):
        model = HfCausalLm(config=config_of("llama"), **options)
        with pytest.raises(ConfigError, match=r"token 100, .* has 100 \(0 to 99\)"):
            model.check_batch(batch)
