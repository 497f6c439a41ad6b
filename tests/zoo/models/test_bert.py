"""BERT's encoder and pretraining: formulas, masks, initial values, engines."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.nn import functional

from backends.blocks import checkpoint_activations
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.models.bert.engines import published_name
from modelzoo_trainer.zoo.models.bert.pretraining import Bert
from modelzoo_trainer.zoo.models.position_bias import BidirectionalRelativeBias
from tests.zoo.models.bert_cases import CASES, NO_DROPOUT, SIZES, batch_of, make

IDS = torch.arange(24).view(2, 12) * 7 % 47 + 3


def by_hand(model: Bert, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the states of a post-norm encoder with one layer and learned positions."""
    encoder, length = model.encoder, batch["input_ids"].shape[1]
    hidden = encoder.token_embeddings.weight[batch["input_ids"]]
    hidden = hidden + encoder.position_embeddings.weight[:length]
    hidden = hidden + encoder.segment_embeddings.weight[batch["token_type_ids"]]

    def norm(values, layer):
        mean, var = values.mean(-1, keepdim=True), values.var(-1, keepdim=True, correction=0)
        return (values - mean) / (var + 1e-5).sqrt() * layer.weight + layer.bias

    hidden = norm(hidden * model.embeddings_scale, encoder.embedding_norm)
    (layer,) = encoder.layers
    queries, keys, values = (
        (hidden @ one.weight.T + one.bias).unflatten(-1, (4, 8)).transpose(1, 2)
        for one in (layer.attention.q_proj, layer.attention.k_proj, layer.attention.v_proj)
    )
    scores = queries @ keys.transpose(-1, -2) / 8**0.5
    scores = scores.masked_fill(batch["attention_mask"][:, None, None] == 0, -math.inf)
    mixed = (scores.softmax(-1) @ values).transpose(1, 2).flatten(-2)
    out = layer.attention.o_proj
    hidden = norm(hidden + mixed @ out.weight.T + out.bias, layer.attention_norm)
    up, down = layer.ffn.up_proj, layer.ffn.down_proj
    wide = hidden @ up.weight.T + up.bias
    wide = wide * 0.5 * (1 + torch.erf(wide / 2**0.5))
    return norm(hidden + wide @ down.weight.T + down.bias, layer.ffn_norm)


def randomized(model: Bert) -> Bert:
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn(param.shape, generator=generator) * 0.1)
    return model


def test_loss_and_logits_follow_the_formulas() -> None:
    model = randomized(make("bert", num_hidden_layers=1, mlm_loss_weight=0.3, embeddings_scale=2.0))
    model = model.double().eval()
    batch = batch_of({}, gathers=True)
    hidden = by_hand(model, batch)
    picked = hidden[torch.arange(4)[:, None], batch["masked_lm_positions"]]
    dense, norm = model.mlm_dense, model.mlm_norm
    logits = functional.gelu(picked @ dense.weight.T + dense.bias)
    logits = functional.layer_norm(logits, (32,), norm.weight, norm.bias)
    logits = logits @ model.encoder.token_embeddings.weight.T + model.lm_head.bias
    pooled = functional.gelu(
        hidden[:, 0] @ model.encoder.pooler.weight.T + model.encoder.pooler.bias
    )
    classes = pooled @ model.nsp_head.weight.T + model.nsp_head.bias
    chosen = logits.log_softmax(-1).gather(-1, batch["labels"][..., None])[..., 0]
    masked = -(chosen * batch["masked_lm_mask"]).sum()
    of_class = -classes.log_softmax(-1).gather(1, batch["next_sentence_label"]).mean()

    found = model(batch)

    torch.testing.assert_close(found["logits"], logits)
    torch.testing.assert_close(found["nsp_logits"], classes)
    expected = masked / 4 * 0.3 + of_class
    assert found["loss"].item() == pytest.approx(expected.item(), rel=1e-5)
    assert found["num_items"] == 4
    assert found["mlm_loss"].item() == pytest.approx(masked.item() / 8, rel=1e-5)
    hits = ((logits.argmax(-1) == batch["labels"]) * batch["masked_lm_mask"]).sum() / 8
    assert found["accuracy_masked_lm"] == hits
    means = model.validation_means(found, batch)
    assert {name: float(weight) for name, (_, weight, _) in means.items()} == {
        "accuracy_masked_lm": 8,
        "mlm_loss": 8,
        "mlm_perplexity": 8,
        "accuracy_cls": 4,
    }
    scaled = model(batch | {"mlm_loss_scale": torch.full((4, 1), 0.5)})["loss"]
    assert scaled.item() == pytest.approx((masked / 4 * 0.5 + of_class).item(), rel=1e-5)


def test_labels_of_all_positions_equal_those_of_some() -> None:
    model = make("bert").eval()
    some = batch_of({}, gathers=True)
    everywhere = dict(some)
    del everywhere["masked_lm_positions"], everywhere["masked_lm_mask"]
    everywhere["labels"] = torch.full((4, 12), -100).scatter(
        1, some["masked_lm_positions"][:, :2], some["labels"][:, :2]
    )

    found, expected = model(everywhere), model(some)

    for key in ("loss", "accuracy_masked_lm", "mlm_loss", "accuracy_cls"):
        torch.testing.assert_close(found[key], expected[key])
    weighted = everywhere | {"masked_lm_mask": (everywhere["labels"] != -100).int()}
    weighted["labels"] = everywhere["labels"].clamp(min=0)  # as the CSV processor pads
    torch.testing.assert_close(model(weighted)["loss"], expected["loss"])


def test_label_smoothing_is_of_training_only() -> None:
    smooth, plain = (make("roberta", label_smoothing=rate, **NO_DROPOUT) for rate in (0.1, 0.0))
    batch = batch_of(CASES["roberta"], gathers=True)
    logs = plain(batch)["logits"].log_softmax(-1)
    uniform = -(logs.mean(-1) * batch["masked_lm_mask"]).sum() / 4
    expected = 0.9 * plain(batch)["loss"] + 0.1 * uniform
    torch.testing.assert_close(smooth(batch)["loss"], expected)
    torch.testing.assert_close(smooth.eval()(batch)["loss"], plain(batch)["loss"])


@pytest.mark.parametrize("case", CASES)
def test_nothing_sees_padding(case: str) -> None:
    model = make(case).eval()
    batch = batch_of(CASES[case])
    padding = batch["attention_mask"] == 0
    other = batch | {"input_ids": torch.where(padding, 9, batch["input_ids"])}

    found, expected = model.encoder(other), model.encoder(batch)

    torch.testing.assert_close(found[~padding], expected[~padding])
    all_padding = batch | {"attention_mask": torch.zeros_like(batch["attention_mask"])}
    assert model(all_padding)["loss"].isfinite()


@pytest.mark.parametrize("case", ["bert", "pre-norm, rotary", "alibi", "relative"])
def test_packed_sequences_are_separate(case: str) -> None:
    model = make(case, disable_nsp=True, pooler_nonlinearity=None).eval()
    spans = torch.tensor([[4, 3, 2, 1, 0, 5, 4, 3, 2, 1, 0, 0]] * 2)
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 0]] * 2)

    packed = model.encoder({"input_ids": IDS, "attention_span": spans, "position_ids": positions})

    for part in (slice(0, 5), slice(5, 11)):
        alone = model.encoder({"input_ids": IDS[:, part]})
        torch.testing.assert_close(packed[:, part], alone)


def test_padding_rows_have_no_part_in_the_loss() -> None:
    model = make("bert").eval()
    batch = batch_of({}, gathers=True)
    expected = model(batch)
    zeros = {key: torch.zeros_like(one[:2]) for key, one in batch.items()}
    zeros["next_sentence_label"] -= 100
    found = model({key: torch.cat([one, zeros[key]]) for key, one in batch.items()})
    assert found["num_items"] == expected["num_items"] == 4
    for key in ("loss", "mlm_loss", "accuracy_cls", "accuracy_masked_lm"):
        torch.testing.assert_close(found[key], expected[key])
    assert model(zeros)["loss"] == 0


def test_positions_of_roberta_begin_after_the_padding_token() -> None:
    model = make("roberta", **NO_DROPOUT)
    table = model.encoder.position_embeddings.weight
    assert table.shape[0] == 12 + 1 + 1
    model(batch_of(CASES["roberta"], size=2))["loss"].backward()
    used = (table.grad != 0).any(-1)
    assert used.tolist() == [False, False] + [True] * 12  # 1: that of padding, which nothing sees


def test_relative_positions_have_buckets_for_both_directions() -> None:
    bias = BidirectionalRelativeBias(2, 8)
    table = bias.buckets.weight.detach()
    found = bias(4, torch.device("cpu")).detach()
    half = [0, 1, 2, 2]  # buckets of distances 0 to 3 out of 4
    for query in range(4):
        for key in range(4):
            distance = abs(query - key)
            row = half[distance] + (4 if key > query else 0)
            assert torch.equal(found[:, query - key + 3], table[row])


def test_the_padding_token_is_trained_as_an_output_only() -> None:
    model = make("bert", share_embedding_weights=False)
    model(batch_of({}))["loss"].backward()
    grads = model.encoder.token_embeddings.weight.grad
    assert not grads[0].any()
    assert grads[1:].any()


def test_initial_values() -> None:
    model = make("roberta", hidden_size=128, initializer_range=0.1)
    weights = {name: value for name, value in model.named_parameters() if name.endswith("weight")}
    for name, value in weights.items():
        if "norm" in name:
            assert (value == 1).all()
        else:  # a normal distribution that is cut at two standard deviations
            assert value.std().item() == pytest.approx(0.88 * 0.1, rel=0.06), name
            assert value.abs().max() <= 0.2
    assert not model.encoder.token_embeddings.weight[1].any()
    other = make("roberta", default_initializer="zeros", embeddings_initializer="ones")
    assert (other.encoder.token_embeddings.weight[2:] == 1).all()
    assert not other.encoder.position_embeddings.weight.any()


def test_mup_scales_rates_and_logits() -> None:
    mup = {"mup_base_hidden_size": 8, "mup_base_filter_size": 32, "output_logits_alpha": 3.0}
    model = make("bert", **mup).eval()
    plain = make("bert").eval()
    plain.load_state_dict(model.state_dict())
    for layer in plain.encoder.layers:
        layer.attention.scale = 1 / 8  # by d, not its root
    batch = batch_of({})
    for key in ("logits", "nsp_logits"):
        torch.testing.assert_close(model(batch)[key], plain(batch)[key] * 3 / 4)
    scales = {name: group.scale for name, group in model.lr_adjustment_groups.items()}
    assert scales == {
        "embedding": 1,
        "encoder_attention": 1 / 4,
        "encoder_input_ffn": 1 / 4,
        "encoder_output_ffn": 1 / 2,
        "pooler": 1 / 4,
    }


@pytest.mark.parametrize("case", CASES)
def test_every_parameter_has_a_published_name(case: str) -> None:
    names = [name for name, _ in make(case).named_parameters() if "position_bias" not in name]
    found = {published_name(name) for name in names}
    assert None not in found
    assert len(found) == len(names)


@pytest.mark.parametrize(
    ("changes", "facts"),
    [
        ({"max_position_embeddings": 4}, ["12 tokens", "4"]),
        ({"disable_nsp": True}, ["token_type_ids", "num_segments: 2"]),
        ({"num_segments": 0}, ["token_type_ids", "num_segments: 2"]),
    ],
)
def test_a_batch_that_does_not_fit_is_refused(changes: dict[str, Any], facts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        make("bert", **changes)(batch_of({}))
    assert all(fact in str(caught.value) for fact in facts)


def test_dropout_acts_after_both_matrices() -> None:
    model = make("bert", num_hidden_layers=1, dropout_rate=0.5, attention_dropout_rate=0.0)
    ffn = model.encoder.layers[0].ffn
    torch.manual_seed(0)
    inner = functional.dropout(functional.gelu(ffn.up_proj(torch.ones(3, 32))), 0.5)
    torch.manual_seed(0)
    torch.testing.assert_close(ffn(torch.ones(3, 32)), ffn.down_proj(inner))


@pytest.mark.parametrize("lost", ["labels", "next_sentence_label", "masked_lm_positions"])
def test_a_batch_that_lacks_something_is_refused(lost: str) -> None:
    batch = batch_of({}, gathers=True)
    del batch[lost]
    with pytest.raises(ConfigError, match=lost):
        make("bert")(batch)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"encoder_nonlinearity": "swiglu"}, "nonlinearity"),
        ({"pad_token_id": 51}, "pad_token_id"),
        (
            {"mask_padding_in_positional_embed": True, "position_embedding_type": "fixed"},
            "mask_padding_in_positional_embed",
        ),
        (
            {"position_embedding_type": "relative", "num_relative_attention_buckets": 7},
            "num_relative_attention_buckets",
        ),
        ({"default_initializer": "zeros!"}, "default_initializer"),
        ({"hidden_size": 30}, "hidden_size"),
        ({"mup_base_hidden_size": 8}, "mup_base_filter_size"),
    ],
)
def test_a_setting_that_does_not_fit_is_refused(changes: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        Bert.check_arguments(**{**SIZES, **changes})


@pytest.mark.parametrize(
    ("changes", "fact"),
    [
        ({"output_logits_alpha": 2.0}, "mup_base_hidden_size"),
        ({"scale_output_logits_by_d": False}, "mup_base_hidden_size"),
        ({"pooler_nonlinearity": "tanh", "disable_nsp": True}, "no pooler"),
    ],
)
def test_a_setting_without_effect_is_reported(changes: dict[str, Any], fact: str) -> None:
    with pytest.warns(UserWarning, match=f"{next(iter(changes))} .*no effect.*{fact}"):
        make("bert", **changes)


def results(model: Bert, case: str) -> list[Any]:
    torch.manual_seed(5)
    loss = model(batch_of(CASES[case], gathers=True))["loss"]
    loss.backward()
    return [loss.item(), *(param.grad for param in model.parameters() if param.requires_grad)]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.slow_cases(every=4)
def test_a_model_from_the_meta_device_starts_like_one_that_was_built_in_place(case: str) -> None:
    with torch.device("meta"):
        moved = make(case)
        batch = batch_of(CASES[case])
        moved(batch)["loss"].backward()
    moved.to_empty(device="cpu")
    torch.manual_seed(7)
    moved.reset_parameters()
    built = make(case)
    torch.manual_seed(7)
    built.reset_parameters()
    expected = built.state_dict()
    assert moved.state_dict().keys() == expected.keys()
    assert all(torch.equal(value, expected[key]) for key, value in moved.state_dict().items())


# CI: the plain model, and one with a bias.
@pytest.mark.soak_cases("roberta", "pre-norm, rotary", "alibi", "esm2")
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # of torch
@pytest.mark.parametrize("case", CASES)
def test_equal_layers_are_compiled_at_most_twice(case: str) -> None:
    torch.compiler.reset()
    model, plain = (make(case, num_hidden_layers=12, **NO_DROPOUT) for _ in range(2))
    counter = CompileCounter()
    for layer in model.encoder.layers:
        layer.compile(backend=counter, fullgraph=True)
    torch.testing.assert_close(results(model, case), results(plain, case), rtol=1e-5, atol=1e-6)
    assert 1 <= counter.frame_count <= 2
    torch.compiler.reset()


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_layer_that_is_computed_again_gives_the_same_bits(case: str) -> None:
    model = make(case)
    checkpoint_activations(model, "full")
    for found, expected in zip(results(model, case), results(make(case), case), strict=True):
        assert torch.equal(torch.as_tensor(found), torch.as_tensor(expected))
