"""The family vit of Hugging Face: vision transformers with classes of images."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from typing_extensions import override

from modelzoo_trainer.zoo.conversion.families.bert import ACTIVATIONS, THEIR_ACTIVATIONS
from modelzoo_trainer.zoo.conversion.family import Family
from modelzoo_trainer.zoo.conversion.readers import ConfigReader, ModelReader
from modelzoo_trainer.zoo.conversion.rules import Copy, Read, Rule, linear
from modelzoo_trainer.zoo.conversion.weights_folder import Shape

_LAYER: Final = {
    "attention.q_proj": "attention.attention.query",
    "attention.k_proj": "attention.attention.key",
    "attention.v_proj": "attention.attention.value",
    "attention.o_proj": "attention.output.dense",
    "ffn.up_proj": "intermediate.dense",
    "ffn.down_proj": "output.dense",
    "attention_norm": "layernorm_before",
    "ffn_norm": "layernorm_after",
}


@dataclass(frozen=True, slots=True)
class ClassToken(Copy):
    """The class token, which has two dimensions of size 1 more there."""

    @override
    def their_shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        return [(1, 1, *shapes[0])]

    @override
    def to_theirs(self, read: Read) -> Iterator[Tensor]:
        yield read(0).view(1, 1, -1)

    @override
    def to_ours(self, read: Read, shapes: Sequence[Shape]) -> Iterator[Tensor]:
        yield read(0).reshape(shapes[0])


@dataclass(frozen=True, slots=True)
class PositionTable(Copy):
    """The table of positions: the class token is last here, and first there."""

    @override
    def their_shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        return [(1, *shapes[0])]

    @override
    def to_theirs(self, read: Read) -> Iterator[Tensor]:
        table = read(0)
        yield torch.cat((table[-1:], table[:-1])).unsqueeze(0)

    @override
    def to_ours(self, read: Read, shapes: Sequence[Shape]) -> Iterator[Tensor]:
        table = read(0)[0]
        yield torch.cat((table[1:], table[:1]))


@dataclass(frozen=True, slots=True)
class Patches(Copy):
    """A linear layer on the pixels of a patch by row, column, channel: a convolution there."""

    height: int
    width: int

    @override
    def their_shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        size, inputs = shapes[0]
        return [(size, inputs // (self.height * self.width), self.height, self.width)]

    @override
    def to_theirs(self, read: Read) -> Iterator[Tensor]:
        weight = read(0)
        cut = weight.view(len(weight), self.height, self.width, -1)
        yield cut.permute(0, 3, 1, 2).contiguous()

    @override
    def to_ours(self, read: Read, shapes: Sequence[Shape]) -> Iterator[Tensor]:
        yield read(0).permute(0, 2, 3, 1).reshape(shapes[0])


def _settings_of(config: ConfigReader) -> dict[str, Any]:
    config.ignore("encoder_stride", "pooler_act", "pooler_output_size")  # of other heads
    act = config.text("hidden_act", "gelu")
    if act not in ACTIVATIONS:
        config.refuse("hidden_act", f"supported: {', '.join(ACTIVATIONS)}")
    labels = config.mapping("id2label", {"0": "", "1": ""})
    return {
        "hidden_size": config.integer("hidden_size", 768),
        "num_hidden_layers": config.integer("num_hidden_layers", 12),
        "num_heads": config.integer("num_attention_heads", 12),
        "filter_size": config.integer("intermediate_size", 3072),
        "image_size": _both(config, "image_size", 224),
        "patch_size": _both(config, "patch_size", 16),
        "num_channels": config.integer("num_channels", 3),
        "use_conv_patchified_embedding": True,
        "layer_norm_epsilon": config.number("layer_norm_eps", 1e-12),
        "nonlinearity": ACTIVATIONS[act],
        "use_projection_bias_in_attention": config.flag("qkv_bias", True),
        "dropout_rate": config.number("hidden_dropout_prob", 0.0),
        "attention_dropout_rate": config.number("attention_probs_dropout_prob", 0.0),
        "embedding_dropout_rate": config.number("hidden_dropout_prob", 0.0),
        "initializer_range": config.number("initializer_range", 0.02),
        "num_classes": len(labels),
        "use_bias_in_output": True,
    }


def _both(config: ConfigReader, key: str, default: int) -> list[int]:
    """Return a height and a width; a number means both."""
    found = config.value(key, default)
    sizes = [found, found] if type(found) is int else found
    if not isinstance(sizes, list) or [type(one) for one in sizes] != [int, int]:
        config.reject(key, found, "an integer, or a list of two")
    return sizes


def _config_of(settings: ModelReader) -> dict[str, Any]:
    settings.expect_all(
        {
            "use_embed_proj_bias": True,
            "prepend_cls_token": True,
            "use_masked_patches": False,
            "position_embedding_type": "learned",
            "use_post_embed_layer_norm": False,
            "norm_first": True,
            "use_final_layer_norm": True,
            "attention_type": "scaled_dot_product",
            "attention_module": "aiayn_attention",
            "use_ffn_bias_in_attention": True,
            "use_ffn_bias": True,
            "layerscale_value": None,
            "use_encoder_pooler_layer": False,
            "use_bias_in_output": True,
            "use_dinov2_classifier": False,
        }
    )
    for name in ("use_conv_patchified_embedding", "pooler_nonlinearity"):
        settings.take(name)
    names = {str(number): f"LABEL_{number}" for number in range(settings.take("num_classes"))}
    settings.take("image_size")
    settings.take("patch_size")
    return {
        "hidden_size": settings.take("hidden_size"),
        "num_hidden_layers": settings.take("num_hidden_layers"),
        "num_attention_heads": settings.take("num_heads"),
        "intermediate_size": settings.take("filter_size"),
        "image_size": _as_there(settings.settings.image),
        "patch_size": _as_there(settings.settings.patch),
        "num_channels": settings.take("num_channels"),
        "layer_norm_eps": settings.take("layer_norm_epsilon"),
        "hidden_act": settings.look_up("nonlinearity", THEIR_ACTIVATIONS),
        "qkv_bias": settings.take("use_projection_bias_in_attention"),
        "hidden_dropout_prob": float(settings.take("dropout_rate")),
        "attention_probs_dropout_prob": float(settings.take("attention_dropout_rate")),
        "initializer_range": settings.take("initializer_range"),
        "id2label": names,
        "label2id": {name: int(number) for number, name in names.items()},
    }


def _as_there(sizes: tuple[int, int]) -> int | list[int]:
    return sizes[0] if sizes[0] == sizes[1] else list(sizes)


def _rules(model: Any) -> list[Rule]:
    ours, theirs = "encoder.embedding", "vit.embeddings"
    patches = (f"{ours}.patches.projection", f"{theirs}.patch_embeddings.projection")
    rules: list[Rule] = [
        ClassToken(f"{ours}.cls_token.weight", f"{theirs}.cls_token"),
        PositionTable(f"{ours}.position_embeddings.weight", f"{theirs}.position_embeddings"),
        Copy(f"{patches[0]}.bias", f"{patches[1]}.bias"),
    ]
    names = (f"{patches[0]}.weight", f"{patches[1]}.weight")
    is_convolved = model.use_conv_patchified_embedding
    rules.append(Copy(*names) if is_convolved else Patches(*names, *model.patch))
    for number in range(model.num_hidden_layers):
        for our, their in _LAYER.items():
            has_bias = our[-6:] not in _OF_SCORES or model.use_projection_bias_in_attention
            rules += linear(
                f"encoder.layers.{number}.{our}",
                f"vit.encoder.layer.{number}.{their}",
                bias=has_bias,
            )
    rules += linear("encoder.final_norm", "vit.layernorm", bias=True)
    return [*rules, *linear("head", "classifier", bias=True)]


_OF_SCORES: Final = ("q_proj", "k_proj", "v_proj")

FAMILIES: Final = (
    Family(
        name="vit",
        architecture="ViTForImageClassification",
        model_name="vision_transformer",
        settings_of=_settings_of,
        config_of=_config_of,
        rules=_rules,
        base_prefix="vit.",
        embedding="vit.embeddings.cls_token",
        dropped=(r"vit\.pooler\.dense\.\w+",),
        kind="encoder",
    ),
)
