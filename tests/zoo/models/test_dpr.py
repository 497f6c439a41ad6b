"""Dense passage retrieval: the loss, the encoders, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.models.bert.dpr import Dpr
from tests.zoo.models.bert_cases import SIZES, batch_of

SMALL: dict[str, Any] = {**SIZES, "num_hidden_layers": 1}
KEYS = ("input_ids", "attention_mask", "token_type_ids")
NUM, CONTEXTS = 3, 2


def batch():
    """Return questions of 12 tokens and contexts of 12 and fewer."""
    texts = batch_of({}, size=NUM * (1 + CONTEXTS))
    found = {}
    for key in KEYS:
        found[f"questions_{key}"] = texts[key][:NUM]
        found[f"ctx_{key}"] = texts[key][NUM:].view(NUM, CONTEXTS, -1)
    return found


def dpr(**changes):
    torch.manual_seed(4)
    given = {"q_encoder": SMALL, "ctx_encoder": SMALL} | changes
    return Dpr(**{key: one for key, one in given.items() if one is not None}).eval()


def texts_of(found, prefix):
    return {key: found[prefix + key].reshape(-1, 12) for key in KEYS}


@pytest.mark.parametrize("kind", ["cls", "mean", "ffn_pooler"])
@pytest.mark.parametrize("both", [False, True])
def test_the_loss_compares_each_question_with_all_contexts(kind, both):
    model = dpr(
        pooler_type=kind,
        mutual_information=both,
        softmax_temperature=0.5,
        compute_eval_metrics=True,
    )
    found = batch()
    output = model(found)
    states = [
        encoder(texts_of(found, prefix))
        for encoder, prefix in ((model.question_encoder, "questions_"), (model.ctx_encoder, "ctx_"))
    ]
    if kind == "cls":
        questions, contexts = (one[:, 0] for one in states)
    elif kind == "mean":
        masks = [
            found[f"{prefix}attention_mask"].view(-1, 12, 1) for prefix in ("questions_", "ctx_")
        ]
        questions, contexts = (
            (one * mask).sum(1) / mask.sum(1) for one, mask in zip(states, masks, strict=True)
        )
    else:
        poolers = (model.question_encoder.pooler, model.ctx_encoder.pooler)
        questions, contexts = (
            functional.gelu(pooler(one[:, 0])) for one, pooler in zip(states, poolers, strict=True)
        )
    logits = questions @ contexts.T / 0.5
    torch.testing.assert_close(output["logits"], logits)
    labels = torch.tensor([0, 2, 4])
    expected = functional.cross_entropy(logits, labels)
    if both:
        backwards = functional.cross_entropy(contexts[::2] @ questions.T / 0.5, torch.arange(3))
        expected = 2 / 3 * expected + 1 / 3 * backwards
    torch.testing.assert_close(output["loss"], expected)
    assert output["num_items"] == NUM
    torch.testing.assert_close(output["accuracy"], (logits.argmax(1) == labels).float().mean())
    assert "accuracy" not in model.train()(found)


def test_one_encoder_or_two():
    both = dpr(q_encoder=None, ctx_encoder=None, encoder=SMALL)
    assert set(both.encoders) == {"question_encoder", "ctx_encoder"}
    one = dpr(q_encoder=None, ctx_encoder=None, encoder=SMALL, use_biencoder=False)
    assert set(one.encoders) == {"question_encoder"}
    num = sum(param.numel() for param in one.parameters())
    assert sum(param.numel() for param in both.parameters()) == 2 * num
    found = texts_of(batch(), "questions_")
    assert torch.equal(one.question_vectors(found), one.context_vectors(found))
    reset = {id(part) for step, _ in both.reset_steps() for part in step.parameters()}
    assert reset == {id(param) for param in both.parameters()}


def test_names_limits_and_plans_of_both_encoders():
    model = dpr(ctx_encoder={**SMALL, "vocab_size": 40, "max_position_embeddings": 9})
    assert (model.vocab_size, model.max_position_embeddings) == (40, 9)
    assert model.published_name("question_encoder.token_embeddings.weight") == (
        "model.question_encoder.embedding_layer.word_embeddings.weight"
    )
    assert model.published_name("ctx_encoder.layers.0.ffn_norm.bias") == (
        "model.ctx_encoder.transformer_encoder.layers.0.norm2.bias"
    )
    assert model.published_name("other.weight") is None
    plan = model.tensor_plan
    assert plan["ctx_encoder.layers.*.ffn.down_proj"] == "rowwise"
    assert len(plan) == 2 * len([key for key in plan if key.startswith("question_encoder.")])
    scaled = {**SMALL, "mup_base_hidden_size": 16, "mup_base_filter_size": 32}
    groups = dpr(q_encoder=scaled, ctx_encoder=scaled).lr_adjustment_groups
    assert groups["encoder_attention"].scale == 0.5


def test_a_checkpoint_of_the_encoder_of_questions_starts_both():
    model = dpr()
    state = {key: one for key, one in model.state_dict().items() if key.startswith("question_")}
    other = dpr()
    other.load_state_dict(other.complete_state(state))
    for one, two in zip(
        other.question_encoder.parameters(), other.ctx_encoder.parameters(), strict=True
    ):
        assert torch.equal(one, two)
    whole = model.state_dict()
    assert other.complete_state(whole) == dict(whole)
    alone = dpr(q_encoder=None, ctx_encoder=None, encoder=SMALL, use_biencoder=False)
    assert alone.complete_state(state) == state


@pytest.mark.parametrize(
    ("changes", "facts"),
    [
        ({"ctx_encoder": None}, "q_encoder and ctx_encoder.*given: q_encoder"),
        ({"encoder": SMALL}, "given: q_encoder, ctx_encoder, encoder"),
        ({"use_biencoder": False}, "use_biencoder is false.*given: q_encoder, ctx_encoder"),
        ({"ctx_encoder": {**SMALL, "hidden_size": 16}}, "hidden_size .* 32 and 16"),
        ({"q_encoder": {**SMALL, "mup_base_hidden_size": 16, "mup_base_filter_size": 64}}, "muP"),
        ({"q_encoder": {**SMALL, "hiden_size": 8}}, r"q_encoder\.hiden_size.*'hidden_size'"),
        ({"q_encoder": {**SMALL, "hidden_size": "a"}}, r"model\.q_encoder\.hidden_size"),
        ({"ctx_encoder": {**SMALL, "num_heads": 5}}, r"model\.ctx_encoder: .*num_heads"),
        (
            {"q_encoder": {"hidden_size": 8}},
            r"model\.q_encoder: max_position_embeddings is missing",
        ),
        ({"q_encoder": {**SMALL, "disable_nsp": True}}, r"q_encoder\.disable_nsp.*num_segments: 0"),
        ({"softmax_temperature": 0.0}, "softmax_temperature"),
        ({"pooler_type": "max"}, "pooler_type.*'max'"),
    ],
)
def test_settings_that_do_not_fit_are_refused(changes, facts):
    with pytest.raises(ConfigError, match=facts):
        dpr(**changes)
    if (
        not {"softmax_temperature", "pooler_type"} & changes.keys()
    ):  # their types are checked before
        given = {"q_encoder": SMALL, "ctx_encoder": SMALL} | changes
        with pytest.raises(ConfigError, match=facts):
            Dpr.check_arguments(**given)


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ({"mlm_loss_weight": 0.1, "disable_nsp": False}, "no head"),
        ({"embedding_pad_token_id": 1}, "set pad_token_id"),
        ({"nonlinearity": "relu"}, "set encoder_nonlinearity"),
        ({"mixed_precision": True}, "the section precision"),
        ({"pooler_nonlinearity": "tanh"}, "no pooler"),
        ({"alibi_trainable_slopes": True}, "position_embedding_type: alibi"),
    ],
)
def test_settings_without_effect_are_said_with_the_reason(setting, reason):
    key, value = next(iter(setting.items()))
    facts = rf"model\.q_encoder\.{key} \({value}\) has no effect.*{reason}"
    with pytest.warns(UserWarning, match=facts) as found:
        dpr(q_encoder=SMALL | setting)
    assert len(found) == 1


def test_only_a_pooler_needs_an_activation_that_is_not_gated():
    encoder = {**SMALL, "encoder_nonlinearity": "swiglu"}
    given = {"q_encoder": encoder, "ctx_encoder": encoder}
    dpr(**given)
    with pytest.raises(ConfigError, match="pooler_nonlinearity"):
        dpr(**given, pooler_type="ffn_pooler")
    with pytest.raises(ConfigError, match="pooler_nonlinearity"):
        Dpr.check_arguments(**given, pooler_type="ffn_pooler")


def test_an_encoder_without_segments_does_not_use_those_of_the_batch():
    model = dpr(q_encoder={**SMALL, "num_segments": 0})
    found = batch()
    others = {key: one for key, one in found.items() if key != "questions_token_type_ids"}
    assert torch.equal(model(found)["logits"], model(others)["logits"])


def test_batches_that_do_not_fit_are_refused():
    model, found = dpr(), batch()
    lacking = {key: one for key, one in found.items() if key != "ctx_input_ids"}
    with pytest.raises(ConfigError, match=r"without \['ctx_input_ids'\]"):
        model(lacking)
    with pytest.raises(ConfigError, match=r"ctx_\* of the shapes .*\(3, 12\)"):
        model(found | {"ctx_attention_mask": found["ctx_attention_mask"][:, 0]})
    fewer = {key: one[:2] for key, one in found.items() if key.startswith("questions_")}
    with pytest.raises(ConfigError, match="2 questions, but contexts of 3"):
        model(found | fewer)
