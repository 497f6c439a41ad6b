"""T5 and the Transformer: formulas, masks, losses, initial values, muP, engines."""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.nn import functional

from backends.blocks import checkpoint_activations
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.models.t5.engines import published_name
from modelzoo_trainer.zoo.models.t5.model import T5
from tests.zoo.models.t5_cases import CASES, NO_DROPOUT, SIZES, batch_of, make


def randomized(model: T5) -> T5:
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn(param.shape, generator=generator) * 0.1)
    return model


# ---- the Transformer, written out


def norm(values: Tensor, layer: Any) -> Tensor:
    mean, var = values.mean(-1, keepdim=True), values.var(-1, keepdim=True, correction=0)
    return (values - mean) / (var + 1e-5).sqrt() * layer.weight + layer.bias


def attended(layer: Any, hidden: Tensor, sources: Tensor, visible: Tensor) -> Tensor:
    queries, keys, values = (
        (states @ one.weight.T).unflatten(-1, (4, 16)).transpose(1, 2)
        for one, states in (
            (layer.q_proj, hidden),
            (layer.k_proj, sources),
            (layer.v_proj, sources),
        )
    )
    scores = (queries @ keys.transpose(-1, -2) / 4).masked_fill(~visible, -math.inf)
    return (scores.softmax(-1) @ values).transpose(1, 2).flatten(-2) @ layer.o_proj.weight.T


def stacked(stack: Any, table: Tensor, ids: Tensor, visible: Tensor, *others: Any) -> Tensor:
    size, length = table.shape[1], ids.shape[1]
    waves = torch.arange(size // 2, dtype=torch.float64)
    angles = torch.arange(length)[:, None] * torch.exp(-waves * math.log(10000) / (size // 2 - 1))
    places = torch.stack((angles.sin(), angles.cos()), -1).flatten(-2)
    hidden = table[ids] + places
    for layer in stack.layers:
        hidden = norm(
            hidden + attended(layer.attention, hidden, hidden, visible), layer.attention_norm
        )
        if others:
            cross = attended(layer.cross_attention, hidden, *others)
            hidden = norm(hidden + cross, layer.cross_attention_norm)
        up, down = layer.ffn.up_proj, layer.ffn.down_proj
        wide = (hidden @ up.weight.T + up.bias).clamp(min=0)
        hidden = norm(hidden + wide @ down.weight.T + down.bias, layer.ffn_norm)
    return norm(hidden, stack.final_norm)


def test_loss_and_logits_of_the_transformer_follow_the_formulas() -> None:
    model = randomized(make("transformer", lm_loss_weight=0.3)).double().eval()
    batch, table = batch_of(), model.token_embeddings.weight
    seen = (batch["attention_mask"] != 0)[:, None, None]
    sources = stacked(model.encoder, table, batch["input_ids"], seen)
    causal = torch.ones(7, 7, dtype=torch.bool).tril()
    hidden = stacked(model.decoder, table, batch["decoder_input_ids"], causal, sources, seen)
    logits = hidden * 32**-0.5 @ table.T
    chosen = logits.log_softmax(-1).gather(-1, batch["labels"][..., None])[..., 0]
    mask = batch["decoder_attention_mask"]
    total, num = -(chosen * mask).sum().item(), mask.sum().item()

    found = model(batch)

    torch.testing.assert_close(found["logits"], logits, rtol=1e-5, atol=1e-5)
    assert found["loss"].item() == pytest.approx(total / 4 * 0.3, rel=1e-5)
    assert found["num_items"] == 4
    assert found["lm_loss"].item() == pytest.approx(total / num, rel=1e-5)
    hits = ((logits.argmax(-1) == batch["labels"]) * mask).sum() / num
    assert found["accuracy_lm"].item() == pytest.approx(hits.item())
    means = model.validation_means(found, batch)
    assert {key: (float(one[1]), one[2]) for key, one in means.items()} == {
        "accuracy_lm": (num, None),
        "lm_loss": (num, None),
        "perplexity_lm": (num, torch.exp),
    }


def losses_of(model: T5, batch: dict[str, Tensor]) -> Tensor:
    model.requested_outputs = ("logits",)
    logits = model(batch)["logits"]
    model.requested_outputs = None
    return functional.cross_entropy(logits.transpose(1, 2), batch["labels"], reduction="none")


def test_t5_has_no_factor_of_scores_and_one_of_tied_states() -> None:
    tied, untied = make("t5").eval(), make("t5", share_embedding_weights=False).eval()
    assert {one.attention.scale for one in tied.encoder.layers} == {1}
    assert {one.cross_attention.scale for one in tied.decoder.layers} == {1}
    untied.load_state_dict(tied.state_dict())
    batch = batch_of()
    torch.testing.assert_close(
        tied(batch)["logits"], untied(batch)["logits"] * 32**-0.5, rtol=1e-4, atol=1e-5
    )


def test_every_scaling_of_the_loss_follows_its_formula(caplog) -> None:
    caplog.set_level(logging.INFO, "modelzoo_trainer.models")
    batch = batch_of()
    mask = batch["decoder_attention_mask"]
    weight = 1 / mask.sum(1, keepdim=True)

    def loss(scaling: str, **more: Tensor) -> tuple[Tensor, Any]:
        model = make("t5", mlm_loss_scaling=scaling, **NO_DROPOUT)
        found = model(batch | more)
        return found["loss"], found["num_items"]

    losses = losses_of(make("t5", **NO_DROPOUT), batch) * mask
    num = mask.sum()
    torch.testing.assert_close(loss("batch_size"), (losses.sum() / 4, 4))
    torch.testing.assert_close(loss("num_masked"), (losses.sum() / num, num.float()))
    assert not caplog.messages
    precomputed = loss("precomputed_num_masked", loss_weight=weight)
    torch.testing.assert_close(precomputed, ((losses * weight).sum() / 4, 4))
    assert not caplog.messages
    torch.testing.assert_close(loss("precomputed_num_masked"), (losses.sum() / 4, 4))
    torch.testing.assert_close(loss("batch_size", loss_weight=weight)[0], losses.sum() / 4)
    model = make("t5", mlm_loss_scaling="precomputed_num_masked", lm_loss_weight=0.3)
    model(batch | {"loss_weight": weight})
    without, unused, alone = caplog.messages
    assert "lm_loss_weight (0.3) has no effect" in alone
    assert "precomputed_num_masked" in without
    assert "dynamic_loss_weight: true" in without
    assert "no effect" in unused


def test_label_smoothing_is_of_training_only() -> None:
    smooth, plain = (make("t5", label_smoothing=rate, **NO_DROPOUT) for rate in (0.1, 0.0))
    batch = batch_of()
    plain.requested_outputs = ("logits",)
    logs = plain(batch)["logits"].log_softmax(-1)
    uniform = -(logs.mean(-1) * batch["decoder_attention_mask"]).sum() / 4
    expected = 0.9 * plain(batch)["loss"] + 0.1 * uniform
    torch.testing.assert_close(smooth(batch)["loss"], expected)
    torch.testing.assert_close(smooth.eval()(batch)["loss"], plain(batch)["loss"])


def test_ignored_labels_do_not_count() -> None:
    model, batch = make("t5").eval(), batch_of()
    ignored = torch.where(batch["decoder_attention_mask"] != 0, batch["labels"], -100)
    found, expected = model(batch | {"labels": ignored}), model(batch)
    for key in ("loss", "accuracy_lm", "lm_loss"):
        torch.testing.assert_close(found[key], expected[key])


@pytest.mark.parametrize("case", CASES)
def test_nothing_sees_padding_or_later_labels(case: str) -> None:
    model, batch = make(case).eval(), batch_of()
    expected = model(batch)["logits"]
    others = torch.where(batch["attention_mask"] == 0, 9, batch["input_ids"])
    torch.testing.assert_close(model(batch | {"input_ids": others})["logits"], expected)
    later = batch["decoder_input_ids"].clone()
    later[:, 4:] = 2
    found = model(batch | {"decoder_input_ids": later})["logits"]
    torch.testing.assert_close(found[:, :4], expected[:, :4])
    assert not torch.allclose(found[:, 4:], expected[:, 4:])
    empty = batch | {"attention_mask": torch.zeros_like(batch["attention_mask"])}
    assert model(empty)["loss"].isfinite()


def test_dropout_after_the_activation_has_its_own_rate_in_both_stacks() -> None:
    model = make("t5", relu_dropout_rate=0.25)
    rates = {one.ffn.inner_dropout_rate for one in (*model.encoder.layers, *model.decoder.layers)}
    assert rates == {0.25}
    assert make("t5").decoder.layers[0].ffn.inner_dropout_rate == 0.1
    assert len(make("transformer").encoder.input_dropouts) == 2
    assert make("transformer").decoder.output_dropout.p == 0
    assert make("t5").decoder.output_dropout.p == 0.1


# ---- initial values and muP

STDS = {
    "t5": {"q": (32 * 16) ** -0.5, "k": 32**-0.5, "o": 32**-0.5, "up": 32**-0.5, "down": 64**-0.5},
    "transformer": {
        "q": (2 / (9 * 16 * (32 + 64))) ** 0.5,
        "k": (2 / (9 * (32 + 64))) ** 0.5,
        "o": (2 / (9 * (32 + 64))) ** 0.5,
        "up": (2 / (32 + 64)) ** 0.5,
        "down": (2 / (32 + 64)) ** 0.5,
    },
    "muP": {
        "q": (32 * 16) ** -0.5,
        "k": 32**-0.5,
        "o": 32**-0.5 / 2,
        "up": 32**-0.5,
        "down": 64**-0.5 / 2,
    },
}


@pytest.mark.parametrize("case", STDS)
def test_initial_values(case: str) -> None:
    model = make(case)
    for layer in (*model.encoder.layers, *model.decoder.layers):
        found = {
            "q": layer.attention.q_proj,
            "k": layer.attention.k_proj,
            "o": layer.attention.o_proj,
            "up": layer.ffn.up_proj,
            "down": layer.ffn.down_proj,
        }
        for name, module in found.items():
            expected = pytest.approx(STDS[case][name], rel=0.1)
            assert module.weight.std().item() == expected, name
    embeddings = model.token_embeddings.weight
    std = {"t5": 1.0, "transformer": 0.88, "muP": 32**-0.5}[case]
    assert embeddings.std().item() == pytest.approx(std, rel=0.06)
    is_cut = case == "transformer"
    assert (embeddings.abs().max().item() <= 2) == (is_cut or case == "muP")
    twice = make(case, initializer_factor=2.0, share_embedding_weights=not is_cut)
    ratio = twice.decoder.layers[0].ffn.up_proj.weight / model.decoder.layers[0].ffn.up_proj.weight
    torch.testing.assert_close(ratio, torch.full_like(ratio, 1.0 if is_cut else 2.0))


def test_mup_scales_rates_scores_and_logits() -> None:
    model = make("muP").eval()
    scales = {name: group.scale for name, group in model.lr_adjustment_groups.items()}
    assert scales == {
        "embedding": 1 / 2,
        "encoder_qkv_projection": 1 / 2,
        "encoder_output_projection": 1 / 2,
        "encoder_input_ffn": 1 / 4,
        "encoder_output_ffn": 1 / 2,
        "decoder_qkv_projection": 1 / 2,
        "decoder_output_projection": 1 / 2,
        "decoder_input_ffn": 1 / 4,
        "decoder_output_ffn": 1 / 2,
        "lm_head": 1 / 2,
    }
    assert model.encoder.layers[0].attention.scale == 1 / 16 / 4  # d_kv, m
    assert model.encoder.scale == 32**0.5
    same = make("t5", output_logits_alpha=None).eval()
    same.load_state_dict(model.state_dict())
    for stack in (same.encoder, same.decoder):
        stack.scale = 32**0.5
        for layer in stack.layers:
            for one in (layer.attention, layer.cross_attention):
                if one is not None:
                    one.scale = 1 / 64
    batch = batch_of()
    torch.testing.assert_close(model(batch)["logits"], same(batch)["logits"] * 32**0.5 * 3 / 2)


def test_mup_with_a_base_of_heads_scales_projections_as_hidden_weights() -> None:
    model = make("muP", mup_base_d_kv=4, scale_output_logits_by_d=True)
    groups = model.lr_adjustment_groups
    assert groups["decoder_qkv_projection"].scale == 1 / 4
    assert groups["decoder_output_projection"].scale == 1 / 4
    assert model.decoder.layers[0].cross_attention.scale == 1 / 16
    std = model.decoder.layers[0].attention.o_proj.weight.std().item()
    assert std == pytest.approx(64**-0.5 / 2, rel=0.1)


def test_mup_at_the_base_width_changes_no_rate_and_no_logits() -> None:
    at_base = make("t5", mup_base_d_model=32, mup_base_d_ff=64)
    assert {one.scale for one in at_base.lr_adjustment_groups.values()} == {1}
    torch.manual_seed(0)
    plain, batch = make("t5").eval(), batch_of()
    at_base.load_state_dict(plain.state_dict())
    at_base.eval()
    with torch.no_grad():  # the same function, with another factor on embeddings and scores
        at_base.token_embeddings.weight.mul_(32**-0.5)
        for stack in (at_base.encoder, at_base.decoder):
            for name, weight in stack.named_parameters():
                if "q_proj" in name:
                    weight.mul_(16.0)
    torch.testing.assert_close(at_base(batch)["logits"], plain(batch)["logits"])


def test_every_group_of_mup_has_parameters_and_every_weight_of_a_layer_is_in_one() -> None:
    from modelzoo_trainer.optim.param_groups import lr_factors

    model = make("muP", encoder_nonlinearity="geglu", share_embedding_weights=False)
    names = {param: [name] for name, param in model.named_parameters()}
    factors = lr_factors(model, names, dict.fromkeys(model.lr_adjustment_groups, 0.5))
    left = [name for name, param in model.named_parameters() if param not in factors]
    assert all("norm" in name or "position_bias" in name for name in left), left


@pytest.mark.parametrize("case", CASES)
def test_every_parameter_has_a_published_name(case: str) -> None:
    names = [name for name, _ in make(case).named_parameters()]
    found = {published_name(name) for name in names}
    assert None not in found
    assert len(found) == len(names)
    assert published_name("else.weight") is None


# ---- refusals


@pytest.mark.parametrize(
    ("changes", "facts"),
    [
        ({"src_max_position_embeddings": 4}, ["src_max_position_embeddings is 4", "12 tokens"]),
        ({"tgt_max_position_embeddings": 5}, ["tgt_max_position_embeddings is 5", "7 tokens"]),
    ],
)
def test_a_batch_that_is_too_long_is_refused(changes: dict[str, Any], facts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        make("t5", **changes)(batch_of())
    assert all(fact in str(caught.value) for fact in facts)


@pytest.mark.parametrize("lost", ["input_ids", "decoder_input_ids", "labels"])
def test_a_batch_that_lacks_something_is_refused(lost: str) -> None:
    batch = batch_of()
    del batch[lost]
    with pytest.raises(ConfigError, match=lost):
        make("t5")(batch)


def test_a_batch_with_other_shapes_is_refused() -> None:
    batch = batch_of()
    batch["decoder_attention_mask"] = batch["decoder_attention_mask"][:, 1:]
    with pytest.raises(ConfigError, match=r"decoder_attention_mask .*\(4, 6\).*\(4, 7\)"):
        make("t5")(batch)


def test_a_batch_with_fewer_inputs_than_labels_is_refused() -> None:
    batch = batch_of()
    for key in ("input_ids", "attention_mask"):
        batch[key] = batch[key][:1]
    with pytest.raises(ConfigError, match=r"1 sequences in input_ids, but 4 in labels"):
        make("t5")(batch)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"position_embedding_type": "rotary"}, "rotary"),
        ({"tgt_vocab_size": 40}, "share_encoder_decoder_embedding"),
        ({"mup_base_d_model": 8}, "mup_base_d_ff"),
        ({"mup_base_d_kv": 8}, "mup_base_d_kv"),
        (
            {"mup_base_d_model": 8, "mup_base_d_ff": 8, "use_transformer_initialization": True},
            "use_transformer_initialization",
        ),
        ({"relative_attention_num_buckets": 7}, "relative_attention_num_buckets"),
        ({"extra_attention_params": {"num_kv_groups": 2}}, "extra_attention_params"),
        (
            {"position_embedding_type": "learned_absolute", "src_max_position_embeddings": None},
            "src_max_position_embeddings",
        ),
        ({"use_cache": True}, "use_cache"),
        ({"dropout_rate": 1.5}, "dropout_rate"),
    ],
)
def test_a_setting_that_does_not_fit_is_refused(changes: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        T5.check_arguments(**{**SIZES, **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {"output_logits_alpha": 2.0},
        {"scale_output_logits_by_d": True},
        {"scale_decoder_qk_dot_by_d": True},
        {"initializer_factor": 0.1, "use_transformer_initialization": True},
        {"lm_loss_weight": 0.1, "mlm_loss_scaling": "num_masked"},
    ],
)
def test_a_setting_without_effect_is_reported(changes: dict[str, Any]) -> None:
    with pytest.warns(UserWarning, match=f"{next(iter(changes))}.*no effect"):
        make("t5", **changes)


def test_the_factor_of_initial_weights_acts_on_an_output_layer_of_its_own() -> None:
    model = make("transformer", initializer_factor=0.1, share_embedding_weights=False)
    assert 0.08 < model.lm_head.weight.std() < 0.12


# ---- engines


def results(model: T5) -> list[Any]:
    torch.manual_seed(5)
    loss = model(batch_of())["loss"]
    loss.backward()
    return [loss.item(), *(param.grad for param in model.parameters() if param.requires_grad)]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.slow_cases(every=4)
def test_a_model_from_the_meta_device_starts_like_one_that_was_built_in_place(case: str) -> None:
    with torch.device("meta"):
        moved = make(case)
        moved(batch_of())["loss"].backward()
    moved.to_empty(device="cpu")
    torch.manual_seed(7)
    moved.reset_parameters()
    built = make(case)
    torch.manual_seed(7)
    built.reset_parameters()
    expected = built.state_dict()
    assert moved.state_dict().keys() == expected.keys()
    assert all(torch.equal(value, expected[key]) for key, value in moved.state_dict().items())


# CI: the plain model, and one with another bias.
@pytest.mark.soak_cases("transformer", "untied, learned", "muP")
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # of torch
@pytest.mark.parametrize("case", CASES)
def test_equal_layers_are_compiled_once_per_stack(case: str) -> None:
    torch.compiler.reset()
    many = {"encoder_num_hidden_layers": 6, "decoder_num_hidden_layers": 6}
    model, plain = (make(case, **many, **NO_DROPOUT) for _ in range(2))
    counter = CompileCounter()
    for layer in (*model.encoder.layers, *model.decoder.layers):
        layer.compile(backend=counter, fullgraph=True)
    torch.testing.assert_close(results(model), results(plain), rtol=1e-4, atol=1e-5)
    assert 2 <= counter.frame_count <= 4
    torch.compiler.reset()


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_layer_that_is_computed_again_gives_the_same_bits(case: str) -> None:
    model = make(case)
    checkpoint_activations(model, "full")
    for found, expected in zip(results(model), results(make(case)), strict=True):
        assert torch.equal(torch.as_tensor(found), torch.as_tensor(expected))
