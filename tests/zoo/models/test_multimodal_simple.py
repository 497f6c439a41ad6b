"""A decoder with several images in a row: where features go, and which settings are refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.models.multimodal.simple import MultimodalSimple
from tests.zoo.models.llava_cases import (
    HOLDER,
    LAYERS,
    LENGTH,
    PATCHES,
    SIMPLE,
    WIDTH,
    batch_of,
    make,
    make_simple,
    simple_batch,
)

LIST = SIMPLE["image_model_list"]


def test_one_image_in_the_place_of_llava_gives_the_same_outputs() -> None:
    llava, model = make().eval(), make_simple().eval()
    names = {
        "image_model.": "image_model.image_model_list.0.encoder.",
        "projector.": "image_model.global_image_projection.",
        "text_model.": "text_model.",
    }
    state = {}
    for name, value in llava.state_dict().items():
        prefix = next(one for one in names if name.startswith(one))
        state[name.replace(prefix, names[prefix], 1)] = value
    model.load_state_dict(state)
    batch = batch_of()
    expected = llava(batch)
    batch["image_data"] = batch["image_data"][:, None]
    batch["image_data_loc"] = torch.arange(1, 1 + PATCHES).repeat(3, 1, 1)

    found = model(batch)

    torch.testing.assert_close(found["logits"], expected["logits"])
    torch.testing.assert_close(found["loss"], expected["loss"])
    for name, param in model.named_parameters():
        back = next(key for key, value in names.items() if name.startswith(value))
        theirs = name.replace(names[back], back, 1)
        assert param.requires_grad == llava.get_parameter(theirs).requires_grad, name


def test_features_of_each_image_are_where_the_data_says() -> None:
    model, batch = make_simple().eval(), simple_batch()
    seen: list[Any] = []
    model.text_model.layers[0].register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    model(batch)
    features = model.image_model(batch["image_data"].flatten(0, 1)).view(3, 2, PATCHES, WIDTH)
    plain = model.text_model.input_states(batch["text_input_ids"])
    for row, image in ((0, 0), (0, 1), (2, 0)):
        start = 1 + 8 * image
        torch.testing.assert_close(seen[0][row, start : start + PATCHES], features[row, image])
    assert torch.equal(seen[0][2, 9:], plain[2, 9:])  # the row has no second image
    assert seen[0].shape == (3, LENGTH, WIDTH)


def test_an_image_that_is_not_there_changes_and_trains_nothing() -> None:
    model, batch = make_simple(), simple_batch()
    before = model(batch)["loss"]
    batch["image_data"][-1, 1] += 5
    assert torch.equal(model(batch)["loss"], before)
    images = batch["image_data"].requires_grad_()
    model(batch)["loss"].backward()
    assert not images.grad[-1, 1].any()
    assert images.grad[0, 1].any()


def test_placeholders_have_no_effect() -> None:
    model, batch = make_simple().eval(), simple_batch()
    before = model(batch)["loss"]
    batch["text_input_ids"] = batch["text_input_ids"].clone()
    batch["text_input_ids"][:, 1 : 1 + PATCHES] = HOLDER + 2
    assert torch.equal(model(batch)["loss"], before)


def test_each_encoder_may_have_a_projection_of_its_own() -> None:
    first = LAYERS | {"layers_units": [20], "layers_activation": None}
    given = copy.deepcopy(LIST)
    given["image_models"][0]["projection_layer"] = first
    given["global_image_projection"] = LAYERS | {"input_unit": 20}
    assert make_simple(image_model_list=given)(simple_batch())["loss"].isfinite()
    del given["global_image_projection"]
    given["image_models"][0]["projection_layer"] = LAYERS
    model = make_simple(image_model_list=given)
    assert model(simple_batch())["loss"].isfinite()
    assert MultimodalSimple.published_name(
        "image_model.image_model_list.0.projection.layers.1.bias"
    ) == ("model.image_model.image_model_list.0.1.ffn.1.linear_layer.bias")


def test_freeze_takes_the_names_of_the_model_zoo() -> None:
    model = make_simple(freeze=["^image_model.image_model_list", "^text_model"])
    trained = {name for name, one in model.named_parameters() if one.requires_grad}
    assert {name.rpartition("layers")[0] for name in trained} == {
        "image_model.global_image_projection."
    }
    assert all(MultimodalSimple.published_name(name) for name, _ in model.named_parameters())
    assert MultimodalSimple.published_name(
        "image_model.image_model_list.0.encoder.final_norm.weight"
    ) == ("model.image_model.image_model_list.0.0.encoder.transformer_encoder.norm.weight")


@pytest.mark.slow
def test_a_model_from_the_meta_device_starts_like_one_that_was_built_in_place() -> None:
    with torch.device("meta"):
        moved = make_simple()
        moved({key: one.to("meta") for key, one in simple_batch().items()})["loss"].backward()
    moved.to_empty(device="cpu")
    built = make_simple()
    for model in (moved, built):
        torch.manual_seed(7)
        model.reset_parameters()
    assert all(map(torch.equal, moved.state_dict().values(), built.state_dict().values()))


def test_networks_for_each_kind_of_token_are_refused_unless_they_are_off() -> None:
    text = SIMPLE["text_model"]
    off = text | {"extra_ffn_params": {"static_dual_expert": False}}
    MultimodalSimple.check_arguments(**SIMPLE | {"text_model": off})
    on = text | {"extra_ffn_params": {"static_dual_expert": True}}
    with pytest.raises(ConfigError, match=r"text_model\.extra_ffn_params is .*Remove it"):
        MultimodalSimple.check_arguments(**SIMPLE | {"text_model": on})


@pytest.mark.parametrize(
    ("change", "facts"),
    [
        ({"image_models": []}, r"image_models: .*one element.*got 0"),
        ({"image_models": LIST["image_models"] * 2}, "several.*got 2"),
        ({"image_model": []}, r"image_model_list\.image_model: .*'image_models'"),
        ({"image_feature_select_mode": "cls"}, "image_feature_select_mode.*'cls'"),
        ({"global_image_projection": None}, "global_image_projection is missing.*16.*32"),
        ({"global_image_projection": LAYERS | {"input_unit": 3}}, "input_unit is 3"),
    ],
)
def test_an_invalid_list_is_refused(change: dict[str, Any], facts: str) -> None:
    with pytest.raises(ConfigError, match=facts):
        MultimodalSimple.check_arguments(**SIMPLE | {"image_model_list": LIST | change})


@pytest.mark.parametrize(
    ("change", "facts"),
    [
        ({"hiden_size": 8}, r"image_models\[0\]\.image_encoder\.hiden_size.*'hidden_size'"),
        ({"image_layer_idx": 3}, r"image_encoder\.image_layer_idx is 3.* 3 layers"),
        ({"image_layer_idx": "a"}, r"image_encoder\.image_layer_idx: .*'a'"),
        ({"name": None}, r"image_encoder\.name is missing"),
    ],
)
def test_an_invalid_encoder_is_refused(change: dict[str, Any], facts: str) -> None:
    member = LIST["image_models"][0]["image_encoder"]
    given = LIST | {"image_models": [{"image_encoder": member | change}]}
    with pytest.raises(ConfigError, match=facts):
        MultimodalSimple.check_arguments(**SIMPLE | {"image_model_list": given})
    with pytest.raises(ConfigError, match=r"text_model\.name: 'dpo'"):
        MultimodalSimple.check_arguments(**SIMPLE | {"text_model": {"name": "dpo"}})


@pytest.mark.parametrize(
    ("change", "facts"),
    [
        ({"image_data_loc": None}, "no image_data_loc"),
        ({"image_data": torch.zeros(3, 3, 8, 8)}, r"\(3, 3, 8, 8\)"),
        ({"image_data_loc": torch.zeros(3, 2, 5, dtype=torch.int32)}, r"\(3, 2, 5\).*\(3, 2, 4\)"),
    ],
)
def test_other_batches_are_refused(change: dict[str, Any], facts: str) -> None:
    batch = {key: one for key, one in {**simple_batch(), **change}.items() if one is not None}
    with pytest.raises(ConfigError, match=facts):
        make_simple()(batch)
