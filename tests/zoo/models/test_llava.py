"""LLaVA: where features of images go, what is trained, which settings are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.nn import functional

from backends.blocks import checkpoint_activations
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.models.freezing import ModelFreezer
from modelzoo_trainer.zoo.models.masks import visible_keys
from modelzoo_trainer.zoo.models.multimodal.llava import Llava
from modelzoo_trainer.zoo.models.visible import EVERYTHING
from tests.zoo.models.llava_cases import (
    HOLDER,
    IMAGE,
    LAYERS,
    LENGTH,
    LLAVA,
    PATCHES,
    WIDTH,
    batch_of,
    make,
)


def by_hand(model: Llava, batch: Any, start: int = 1) -> torch.Tensor:
    """Return the logits of the decoder on states with features in the place of placeholders."""
    image = model.image_model.embedding(batch["image_data"])
    context = model.text_model._begin(batch["text_input_ids"], None, None)[1]
    for layer in model.image_model.layers[:2]:
        image = layer(image, context._replace(angles=None, visible=(EVERYTHING, EVERYTHING)))
    first, second = model.projector.layers.values()
    features = second(functional.gelu(first(image[:, 1:])))
    hidden = model.text_model.token_embeddings(batch["text_input_ids"])
    hidden = torch.cat((hidden[:, :start], features, hidden[:, start + PATCHES :]), dim=1)
    hidden, _ = model.text_model._run_layers(hidden, context)
    return model.text_model._score(hidden)


def test_features_replace_placeholders_and_the_loss_counts_what_its_mask_says() -> None:
    model, batch = make().eval(), batch_of()
    logits = by_hand(model, batch)

    found = model(batch)

    real = batch["key_padding_mask"] == 0
    torch.testing.assert_close(found["logits"][real], logits[real], rtol=1e-5, atol=1e-6)
    counted = batch["loss_mask"] == 1
    labels = batch["labels"].long()
    torch.testing.assert_close(
        found["loss"], functional.cross_entropy(logits[counted], labels[counted])
    )
    assert found["num_items"] == counted.sum()
    hits = (logits.argmax(-1) == labels)[counted]
    assert found["accuracy"] == hits.float().mean()
    means = model.validation_means(found, batch)
    assert means["accuracy"][1] == counted.sum()
    assert sorted(means) == ["accuracy", "lm_perplexity"]


def test_the_placeholder_has_no_effect_and_the_image_has() -> None:
    model, batch = make().eval(), batch_of()
    before = model(batch)["loss"]
    other = dict(batch, text_input_ids=batch["text_input_ids"].clone())
    other["text_input_ids"][:, 1 : 1 + PATCHES] = HOLDER + 1
    assert torch.equal(model(other)["loss"], before)
    assert not torch.equal(model(dict(batch, image_data=batch["image_data"] + 1))["loss"], before)


def test_each_row_may_have_its_own_start() -> None:
    model = make().eval()
    batch = batch_of()
    same = dict(batch, img_start_idx=torch.tensor([[1], [1], [1]], dtype=torch.int32))
    torch.testing.assert_close(model(same)["logits"], model(batch)["logits"])
    starts = [1, 6, 3]
    mixed = dict(batch, img_start_idx=torch.tensor(starts, dtype=torch.int32))
    found = model(mixed)["logits"]
    for row, start in enumerate(starts):
        one = {key: value[row : row + 1] for key, value in batch.items()}
        moved = make(image_start_idx=start).eval()
        torch.testing.assert_close(found[row : row + 1], moved(one)["logits"])
    model.train()(mixed)["loss"].backward()
    assert model.projector.layers["0"].weight.grad.any()


def test_no_query_sees_padding_and_a_row_of_padding_gives_numbers() -> None:
    model, batch = make().eval(), batch_of()
    batch["key_padding_mask"][:, 8] = 1
    before = model(batch)["logits"]
    other = dict(batch, text_input_ids=batch["text_input_ids"].clone())
    other["text_input_ids"][:, 8] = 60
    found = model(other)["logits"]
    kept = torch.arange(LENGTH) != 8
    assert torch.equal(found[:, kept], before[:, kept])
    batch["key_padding_mask"][:] = 1
    assert model(batch)["logits"].isfinite().all()


def test_keys_that_are_padding_are_hidden_from_all_queries_that_see_another_one() -> None:
    padding = torch.tensor([[1, 0, 0, 1]])
    found = visible_keys(4, torch.device("cpu"), padding=padding)
    expected = [[1, 0, 0, 0], [0, 1, 0, 0], [0, 1, 1, 0], [0, 1, 1, 0]]
    assert found[0, 0].int().tolist() == expected
    window = visible_keys(4, torch.device("cpu"), padding=padding, window=1)
    assert window[0, 0].int().tolist() == [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]


def test_packed_rows_and_positions_of_the_batch_reach_the_decoder() -> None:
    model, batch = make().eval(), batch_of()
    before = model(batch)["logits"]
    span = torch.full((3, LENGTH), LENGTH, dtype=torch.int32)
    positions = torch.arange(LENGTH, dtype=torch.int32).repeat(3, 1)
    same = model(dict(batch, attention_span=span, position_ids=positions))["logits"]
    torch.testing.assert_close(same, before)
    packed = model(dict(batch, attention_span=span * 0, position_ids=positions))["logits"]
    assert not torch.allclose(packed, before)


def test_class_token_and_last_layer_can_be_features() -> None:
    model = make(image_feature_select_mode="cls_patch", image_feature_select_layer_idx=None)
    assert model.image_positions == (1, 1 + PATCHES + 1)
    seen = []
    model.projector.register_forward_pre_hook(lambda module, given: seen.append(given[0]))
    batch = batch_of()
    model(batch)
    assert torch.equal(seen[0], model.image_model(batch["image_data"]).hidden)
    assert all(param.requires_grad for param in model.parameters())
    whole = make(image_feature_select_layer_idx=-1)
    whole.projector.register_forward_pre_hook(lambda module, given: seen.append(given[0]))
    whole(batch)
    earlier = whole.image_model(batch["image_data"], after=(-1,)).earlier[0]
    assert torch.equal(seen[1], earlier[:, 1:])


def frozen(model: nn.Module) -> set[str]:
    return {name for name, one in model.named_parameters() if not one.requires_grad}


def test_layers_after_the_selected_one_are_neither_run_nor_trained() -> None:
    model = make()
    model.image_model.layers[2].forward = None
    model(batch_of())["loss"].backward()
    assert {name for name, one in model.named_parameters() if one.grad is None} == frozen(model)
    assert {name.split(".")[2] for name in frozen(model)} == {"2", "weight", "bias"}
    assert "image_model.final_norm.weight" in frozen(model)


def test_layers_that_do_not_run_stay_frozen_when_all_others_are_unfrozen() -> None:
    model = make(freeze=["^image_model"])
    thawed = ModelFreezer(model).unfreeze()
    assert {*thawed} == {"image_model"}
    assert {name.split(".")[2] for name in frozen(model)} == {"2", "weight", "bias"}
    assert len(thawed["image_model"]) > 1
    assert all(one.requires_grad for one in thawed["image_model"])


def test_a_tied_weight_is_frozen_by_either_of_its_names() -> None:
    text = LLAVA["text_model"] | {"share_embedding_weights": True}
    model = make(text_model=text, freeze=["text_model.lm_head"])
    assert "text_model.token_embeddings.weight" in frozen(model)


def test_freeze_takes_own_and_published_names() -> None:
    model = make(freeze=["^image_model", "^text_model"])
    trained = {name for name, one in model.named_parameters() if one.requires_grad}
    assert {name.split(".")[0] for name in trained} == {"projector"}
    assert len(trained) == 4
    model(batch_of())["loss"].backward()
    assert all(model.get_parameter(name).grad is not None for name in trained)
    names = frozen(make(freeze=[r"^projector_image_model\.ffn\.1"])) - frozen(make())
    assert names == {"projector.layers.1.weight", "projector.layers.1.bias"}
    with pytest.raises(ConfigError, match="nothing_here"):
        make(freeze=["nothing_here"])


def test_every_parameter_has_a_published_name_and_an_initial_value() -> None:
    model = make()
    for name, param in model.named_parameters():
        assert param.any() or name.endswith("bias"), name
        assert Llava.published_name(name) is not None, name
    assert Llava.published_name("projector.layers.0.bias") == (
        "model.projector_image_model.ffn.0.linear_layer.bias"
    )
    assert Llava.published_name("text_model.lm_head.weight") == "model.text_model.lm_head.weight"
    assert Llava.published_name("image_model.layers.1.ffn_norm.bias") == (
        "model.image_model.encoder.transformer_encoder.layers.1.norm2.bias"
    )
    own = sum(one.numel() for module, _ in model.reset_steps() for one in module.parameters())
    text = sum(one.numel() for one in model.text_model.parameters())
    assert own + text == sum(one.numel() for one in model.parameters())


def test_a_model_from_the_meta_device_starts_like_one_that_was_built_in_place() -> None:
    with torch.device("meta"):
        moved = make()
        moved({key: value.to("meta") for key, value in batch_of().items()})["loss"].backward()
    moved.to_empty(device="cpu")
    built = make()
    for model in (moved, built):
        torch.manual_seed(7)
        model.reset_parameters()
    assert all(map(torch.equal, moved.state_dict().values(), built.state_dict().values()))
    assert frozen(moved) == frozen(built)


def test_learning_rate_groups_are_those_of_the_text_model_alone() -> None:
    text = {"mup_base_hidden_size": 16, "mup_base_filter_size": 24}
    groups = make(text_model=text).lr_adjustment_groups
    assert groups["decoder_attention"].scale == 0.5
    for group in groups.values():
        assert all("text_model." in pattern for pattern in group.param_filter_patterns)


def test_features_of_the_right_width_need_no_projector() -> None:
    model = make(projector=None, image_model={"hidden_size": WIDTH})
    assert isinstance(model.projector, nn.Identity)
    assert model(batch_of())["loss"].isfinite()


@pytest.mark.slow
def test_dropout_and_initializers_of_the_projector_are_used() -> None:
    layers = LAYERS | {"layers_dropout_rates": [0.5, None], "kernel_initializer": "ones"}
    model = make(projector={"image_model": layers})
    assert model.projector.layers["1"].weight.eq(1).all()
    batch = batch_of()
    assert not torch.equal(model(batch)["loss"], model(batch)["loss"])
    linear = make().projector.layers["0"]
    assert linear.weight.abs().max() <= 1 / 16**0.5
    assert not linear.bias.any()


@pytest.mark.slow
def test_experts_in_the_text_model_have_their_loss() -> None:
    moe = {"num_experts": 3, "top_k": 2, "load_balancing_loss_coef": 0.1}
    model = make(text_model={"moe": moe})
    outputs = model(batch_of())
    plain = make(text_model={"moe": moe | {"load_balancing_loss_coef": 0.0}})(batch_of())
    assert outputs["loss"] > plain["loss"]


@pytest.mark.parametrize(
    ("changes", "facts"),
    [
        ({"image_model": {"hiden_size": 8}}, r"image_model\.hiden_size.*'hidden_size'"),
        ({"image_model": {"name": "ResNet"}}, "image_model.name is 'ResNet'.*ViTModel"),
        ({"image_model": {"num_heads": 3}}, r"image_model.*num_heads"),
        ({"image_model": {"image_size": [9, 8]}}, r"image_model\.image_size.*9"),
        ({"image_model": {"image_layer_idx": 1}}, "image_layer_idx.*feature_select_layer_idx"),
        ({"image_model": {"num_classes": 5}}, "num_classes is 5.*no head"),
        ({"image_model": {"use_masked_patches": True}}, "use_masked_patches"),
        ({"image_model": {"use_encoder_pooler_layer": True}}, "use_encoder_pooler_layer"),
        ({"text_model": {"name": "bert"}}, "text_model.name: 'bert' is not a decoder"),
        ({"text_model": {"filter_size": 48, "num_heads": 5}}, r"text_model\.hidden_size"),
        ({"text_model": {"loss_weight": 0.1}}, r"text_model\.loss_weight is 0\.1.*whole model"),
        ({"projector": None}, r"projector\.image_model is missing.*16.*32"),
        ({"projector": {"text_model": LAYERS}}, r"projector\.text_model"),
        ({"projector": {"image": LAYERS}}, r"projector\.image: .*'image_model'"),
        ({"image_feature_select_layer_idx": 3}, "layer_idx is 3, but .* 3 layers"),
        ({"image_start_idx": 21}, "image_start_idx is 21.* 4 features.*is 24"),
        ({"freeze": ["("]}, "freeze.*regular expression"),
    ],
)
def test_invalid_settings_are_refused(changes: dict[str, Any], facts: str) -> None:
    given = {**LLAVA}
    for name, value in changes.items():
        is_part = name in ("image_model", "text_model")
        given[name] = {**LLAVA[name], **value} if is_part else value
    with pytest.raises(ConfigError, match=facts):
        Llava.check_arguments(**given)


@pytest.mark.parametrize(
    ("changes", "facts"),
    [
        ({"input_unit": 8}, "input_unit is 8, but .* 16"),
        ({"layers_units": [32, 16]}, "layers_units is 16 at its end.* 32"),
        ({"layers_activation": ["gelu"]}, "layers_activation has 1 elements.* 2"),
        ({"layers_activation": ["swiglu", None]}, "swiglu.*gated"),
        ({"layers_activation": ["gellu", None]}, "layers_activation.*'gellu'"),
        ({"kernel_initializer": "nrmal"}, "kernel_initializer"),
        ({"name": "Linear"}, "name is 'Linear'.*FeedForwardNetwork"),
        ({"use_biases": True}, "use_biases.*'use_bias'"),
    ],
)
def test_an_invalid_projector_is_refused(changes: dict[str, Any], facts: str) -> None:
    with pytest.raises(ConfigError, match=rf"projector\.image_model\..*{facts}"):
        Llava.check_arguments(**LLAVA | {"projector": {"image_model": LAYERS | changes}})
    lacking = {key: value for key, value in LAYERS.items() if key != "input_unit"}
    with pytest.raises(ConfigError, match="input_unit is missing"):
        Llava.check_arguments(**LLAVA | {"projector": {"image_model": lacking}})
    no_token = IMAGE | {"prepend_cls_token": False}
    with pytest.raises(ConfigError, match=r"prepend_cls_token.*cls_patch"):
        Llava.check_arguments(
            **LLAVA | {"image_model": no_token, "image_feature_select_mode": "cls_patch"}
        )


@pytest.mark.parametrize(
    ("change", "facts"),
    [
        ({"loss_mask": None}, "without .*loss_mask"),
        ({"image_data": torch.zeros(2, 3, 8, 8)}, r"\(2, 3, 8, 8\).* 3 rows"),
        ({"image_data": torch.zeros(3, 3, 8, 4)}, "image_size"),
        ({"key_padding_mask": torch.zeros(3, 2)}, r"key_padding_mask.*\(3, 2\)"),
        ({"img_start_idx": torch.zeros(2, dtype=torch.int32)}, r"img_start_idx.*\(2,\)"),
    ],
)
def test_other_batches_are_refused(change: dict[str, Any], facts: str) -> None:
    batch = {key: one for key, one in {**batch_of(), **change}.items() if one is not None}
    with pytest.raises(ConfigError, match=facts):
        make()(batch)


def test_rows_without_room_for_an_image_are_refused() -> None:
    batch = batch_of(length=4)
    with pytest.raises(ConfigError, match=r"image_start_idx is 1.* 4 features.* 4 positions"):
        make()(batch)


def test_extra_attention_params_are_said_to_have_no_effect() -> None:
    with pytest.warns(UserWarning, match="extra_attention_params.*no effect"):
        make(image_model={"extra_attention_params": {"a": 1}})


def results(model: Llava) -> list[torch.Tensor]:
    torch.manual_seed(5)
    loss = model(batch_of())["loss"]
    loss.backward()
    return [loss.detach(), *(one.grad for one in model.parameters() if one.grad is not None)]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # of torch
def test_layers_are_compiled_once_for_each_part() -> None:
    torch.compiler.reset()
    deep = {"image_model": {"num_hidden_layers": 6}, "text_model": {"num_hidden_layers": 6}}
    model, plain = (make(**{key: dict(one) for key, one in deep.items()}) for _ in range(2))
    counter = CompileCounter()
    for layer in (*model.image_model.layers, *model.text_model.layers):
        layer.compile(backend=counter, fullgraph=True)
    torch.testing.assert_close(results(model), results(plain), rtol=1e-5, atol=1e-6)
    assert counter.frame_count == 2
    torch.compiler.reset()


@pytest.mark.slow
@pytest.mark.parametrize("freeze", [None, ["^image_model", "^text_model"]])
def test_layers_that_are_computed_again_give_the_same_bits(freeze: list[str] | None) -> None:
    rates = {"dropout_rate": 0.1}
    parts = {"image_model": rates, "text_model": rates, "freeze": freeze}
    model = make(**parts)
    checkpoint_activations(model, "full")
    assert all(map(torch.equal, results(model), results(make(**parts))))
