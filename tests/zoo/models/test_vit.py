"""The vision transformer: formulas, options, initial values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.nn import functional

from backends.blocks import checkpoint_activations
from modelzoo_trainer import Trainer, TrainingLoop
from modelzoo_trainer.errors import CheckpointMismatch, ConfigError
from modelzoo_trainer.zoo.models.vision.classifier import Vit, VitSettings, published_name
from modelzoo_trainer.zoo.models.vision.embeddings import grid_positions
from modelzoo_trainer.zoo.models.vision.encoder import StochasticDepth, VisionEncoder
from modelzoo_trainer.zoo.models.vision.settings import VisionSettings
from tests.zoo.models.vit_cases import CASES, batch_of
from tests.zoo.models.vit_cases import make as make_case

SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_heads": 2,
    "filter_size": 32,
    "image_size": [8, 12],
    "patch_size": [4, 2],
    "num_classes": 5,
}
NO_DROPOUT: dict[str, Any] = {"dropout_rate": 0.0, "attention_dropout_rate": 0.0}
PATCHES = 2 * 6
DEFAULTS: dict[str, Any] = {
    "dropout_rate": 0.1,
    "attention_dropout_rate": 0.1,
    "embedding_dropout_rate": 0.0,
    "layer_norm_epsilon": 1e-5,
    "norm_first": True,
    "nonlinearity": "gelu",
    "initializer_range": 0.02,
    "use_projection_bias_in_attention": True,
    "use_ffn_bias_in_attention": True,
    "use_ffn_bias": True,
    "prepend_cls_token": True,
    "use_final_layer_norm": True,
    "use_bias_in_output": True,
}
IMAGES = torch.randn(3, 3, 8, 12, generator=torch.Generator().manual_seed(1))
BATCH = (IMAGES, torch.tensor([0, 4, 2]))


def make(**changes: Any) -> Vit:
    torch.manual_seed(3)
    return Vit(**{**SIZES, **NO_DROPOUT, "initializer_range": 0.3, **changes})


def by_hand(model: Vit) -> torch.Tensor:
    """Return the states of a pre-norm encoder, the class token first."""
    encoder, embedding = model.encoder, model.encoder.embedding
    cuts = [
        IMAGES[:, :, r : r + 4, k : k + 2].permute(0, 2, 3, 1).flatten(1)
        for r in (0, 4)
        for k in range(0, 12, 2)
    ]
    projection = embedding.patches.projection
    hidden = torch.stack(cuts, dim=1) @ projection.weight.T + projection.bias
    hidden = torch.cat((embedding.cls_token.weight.expand(3, 1, -1), hidden), dim=1)
    table = embedding.position_embeddings.weight
    hidden = hidden + torch.cat((table[-1:], table[:-1]))
    for layer in encoder.layers:
        normed = layer.attention_norm(hidden)
        queries, keys, values = (
            one(normed).unflatten(-1, (2, 8)).transpose(1, 2)
            for one in (layer.attention.q_proj, layer.attention.k_proj, layer.attention.v_proj)
        )
        weights = (queries @ keys.transpose(-1, -2) / 8**0.5).softmax(-1)
        hidden = hidden + layer.attention.o_proj((weights @ values).transpose(1, 2).flatten(-2))
        wide = functional.gelu(layer.ffn.up_proj(layer.ffn_norm(hidden)))
        hidden = hidden + layer.ffn.down_proj(wide)
    return encoder.final_norm(hidden)


def test_loss_logits_and_accuracy_follow_the_formulas() -> None:
    model = make().eval()
    logits = by_hand(model)[:, 0] @ model.head.weight.T

    found = model(BATCH)

    torch.testing.assert_close(found["logits"], logits, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found["loss"], functional.cross_entropy(logits, BATCH[1]))
    right = (logits.argmax(-1) == BATCH[1]).float().mean()
    assert found["accuracy_cls"] == right
    assert model.validation_means(found, BATCH) == {"accuracy_cls": (right, 3, None)}
    assert "accuracy_cls" not in model.train()(BATCH)


def trainer_of(folder: Path, **settings: Any) -> Trainer:
    return Trainer(
        device="cpu",
        model_dir=folder,
        model=lambda: make(**settings),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        loop=TrainingLoop(max_steps=2),
        progress="none",
    )


def test_a_checkpoint_without_the_bias_of_the_head_says_how_to_load_it(tmp_path: Path) -> None:
    first = trainer_of(tmp_path / "first", use_bias_in_output=False)
    first.fit([BATCH] * 2)
    path = first.save_checkpoint()

    with pytest.raises(CheckpointMismatch, match=r"head\.bias .*use_bias_in_output: false"):
        trainer_of(tmp_path / "second").load_checkpoint(path)
    trainer = trainer_of(tmp_path / "third", use_bias_in_output=False)
    trainer.load_checkpoint(path)

    assert torch.equal(trainer.model.head.weight, first.model.head.weight)


def test_convolution_equals_linear_projection() -> None:
    linear, conv = make().eval(), make(use_conv_patchified_embedding=True).eval()
    state = linear.state_dict()
    name = "encoder.embedding.patches.projection.weight"
    state[name] = state[name].view(16, 4, 2, 3).permute(0, 3, 1, 2)
    conv.load_state_dict(state)

    torch.testing.assert_close(conv(BATCH)["logits"], linear(BATCH)["logits"])


def test_dinov2_classifier_adds_the_mean_of_the_patches() -> None:
    model = make(use_dinov2_classifier=True, use_bias_in_output=True).eval()
    hidden = by_hand(model)
    pooled = torch.cat((hidden[:, 0], hidden[:, 1:].mean(1)), dim=-1)

    torch.testing.assert_close(model(BATCH)["logits"], model.head(pooled), rtol=1e-4, atol=1e-5)


def test_pooler_is_between_the_class_token_and_the_head() -> None:
    model = make(use_encoder_pooler_layer=True, pooler_nonlinearity="tanh").eval()
    pooled = torch.tanh(model.encoder.pooler(by_hand(model)[:, 0]))
    torch.testing.assert_close(model(BATCH)["logits"], model.head(pooled), rtol=1e-4, atol=1e-5)


def test_layerscale_of_zero_drops_the_layers() -> None:
    model = make(layerscale_value=0.0).eval()
    encoder = model.encoder
    expected = encoder.final_norm(encoder.embedding(IMAGES))
    torch.testing.assert_close(encoder(IMAGES).hidden, expected)
    assert make(layerscale_value=0.5).encoder.layers[1].ffn_scale.weight.unique().tolist() == [0.5]


def test_encoder_returns_earlier_states_and_replaces_masked_patches() -> None:
    sizes = {name: size for name, size in SIZES.items() if name != "num_classes"}
    settings = VisionSettings(**sizes, use_masked_patches=True, initializer_range=0.3)
    encoder = VisionEncoder(settings).eval()
    for _, draw in encoder.initial_steps():
        draw()
    states = encoder(IMAGES, after=(-1, 0))
    torch.testing.assert_close(encoder.final_norm(states.earlier[0]), states.hidden)
    assert not torch.equal(states.earlier[1], states.earlier[0])
    assert states.patches.shape == (3, PATCHES, 16)
    masked = torch.zeros(3, PATCHES, dtype=torch.bool)
    masked[:, 4] = True
    other = IMAGES.clone()
    other[:, :, :4, 8:10] = 7.0  # row 0, column 4
    torch.testing.assert_close(encoder(other, masked).hidden, encoder(IMAGES, masked).hidden)
    with pytest.raises(ConfigError, match="use_masked_patches: true"):
        make().encoder(IMAGES, masked)


def test_stochastic_depth_keeps_the_mean() -> None:
    torch.manual_seed(0)
    drop = StochasticDepth(0.25, by_row=True)
    found = drop(torch.ones(4000, 2, 3))
    assert sorted(found.unique().tolist()) == pytest.approx([0, 1 / 0.75])
    assert found.mean().item() == pytest.approx(1, abs=0.05)
    assert torch.equal(found, found[:, :1, :1].expand_as(found))
    whole = StochasticDepth(0.5, by_row=False)
    assert all(len(whole(torch.ones(9, 2, 3)).unique()) == 1 for _ in range(9))
    assert torch.equal(drop.eval()(torch.ones(9, 2, 3)), torch.ones(9, 2, 3))
    assert torch.equal(StochasticDepth(0.0, by_row=True)(found), found)
    linear = make(num_hidden_layers=3, stochastic_depth_drop_prob=0.2)
    assert linear.drop_rates == pytest.approx([0, 0.1, 0.2])
    rates = [1 - layer.drop_path.keep.item() for layer in linear.encoder.layers]
    assert rates == pytest.approx([0, 0.1, 0.2])
    assert "drop_path" not in "".join(linear.state_dict())
    constant = make(stochastic_depth_drop_prob=0.2, stochastic_depth_drop_prob_schedule="constant")
    assert constant.drop_rates == [0.2, 0.2]


def test_fixed_positions_are_those_of_column_and_row() -> None:
    waves = grid_positions((2, 3), 8, torch.device("cpu"))
    row, column = torch.tensor(1.0), torch.tensor(2.0)
    slow = 10000**-0.5
    expected = [column.sin(), (column * slow).sin(), column.cos(), (column * slow).cos()]
    expected += [row.sin(), (row * slow).sin(), row.cos(), (row * slow).cos()]
    torch.testing.assert_close(waves[1 * 3 + 2], torch.stack(expected))
    assert make(position_embedding_type="fixed")(BATCH)["loss"].isfinite()


def test_defaults_are_those_of_the_model_zoo() -> None:
    settings = VitSettings()
    found = {name: getattr(settings, name) for name in DEFAULTS}
    assert found == DEFAULTS
    assert (settings.image, settings.patch) == ((224, 224), (16, 16))


def test_heads_may_share_one_key_and_one_value() -> None:
    model = make(attention_module="multiquery_attention")
    assert model.encoder.layers[0].attention.k_proj.weight.shape == (8, 16)
    assert model(BATCH)["logits"].shape == (3, 5)


def test_freeze_takes_own_and_published_names() -> None:
    model = make(freeze=["^vit_model"], layerscale_value=0.5)
    assert [n for n, p in model.named_parameters() if p.requires_grad] == [
        *("head.weight", "head.bias"),
    ]
    model = make(freeze=[r"layers\.1$"])
    assert {n.split(".")[2] for n, p in model.named_parameters() if not p.requires_grad} == {"1"}
    with pytest.raises(ConfigError, match="nothing_here"):
        make(freeze=["nothing_here"])


@pytest.mark.parametrize("case", CASES)
@pytest.mark.slow_cases(every=4)
def test_a_model_from_the_meta_device_starts_like_one_that_was_built_in_place(case: str) -> None:
    with torch.device("meta"):
        moved = make_case(case)
        moved(batch_of())["loss"].backward()
    moved.to_empty(device="cpu")
    torch.manual_seed(7)
    moved.reset_parameters()
    built = make_case(case)
    torch.manual_seed(7)
    built.reset_parameters()
    assert all(map(torch.equal, moved.state_dict().values(), built.state_dict().values()))
    assert all(map(torch.equal, moved.buffers(), built.buffers()))


def results(model: Vit) -> list[torch.Tensor]:
    torch.manual_seed(5)
    loss = model(batch_of())["loss"]
    loss.backward()
    return [loss.detach(), *(param.grad for param in model.parameters())]


# CI: the plain model, and one whose layers differ in a number.
@pytest.mark.soak_cases("conv, pooler", "post-norm, gated, fixed", "dino")
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # of torch
@pytest.mark.parametrize("case", CASES)
def test_equal_layers_are_compiled_once(case: str) -> None:
    torch.compiler.reset()
    sizes = {"num_hidden_layers": 12, **NO_DROPOUT}
    model, plain = (make_case(case, **sizes) for _ in range(2))
    counter = CompileCounter()
    for layer in model.encoder.layers:
        layer.compile(backend=counter, fullgraph=True)
    torch.testing.assert_close(results(model), results(plain), rtol=1e-5, atol=1e-6)
    assert counter.frame_count == 1
    torch.compiler.reset()


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_layer_that_is_computed_again_gives_the_same_bits(case: str) -> None:
    options = {"stochastic_depth_drop_prob": 0.5, "stochastic_depth_mode": "row"}
    model = make_case(case, **options)
    checkpoint_activations(model, "full")
    for found, expected in zip(results(model), results(make_case(case, **options)), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("changes", "facts"),
    [
        ({"image_size": [9, 12]}, "9.*multiple of the 4"),
        ({"num_heads": 3}, "num_heads"),
        ({"prepend_cls_token": False}, "prepend_cls_token: true"),
        ({"use_masked_patches": True}, "use_masked_patches: false"),
        ({"freeze": ["("]}, "freeze.*regular expression"),
        ({"use_encoder_pooler_layer": True, "pooler_nonlinearity": "swiglu"}, "swiglu"),
    ],
)
def test_invalid_settings_are_refused(changes: dict[str, Any], facts: str) -> None:
    with pytest.raises(ConfigError, match=facts):
        Vit.check_arguments(**SIZES | changes)


@pytest.mark.parametrize(
    ("batch", "facts"),
    [
        ((IMAGES[:, :, :4], BATCH[1]), r"\(3, 3, 4, 12\)"),
        ((IMAGES, BATCH[1][:2]), r"\(2,\)"),
        ({"input_ids": IMAGES}, "input_ids"),
    ],
)
def test_other_batches_are_refused(batch: Any, facts: str) -> None:
    with pytest.raises(ConfigError, match=facts):
        make()(batch)


def test_every_parameter_has_an_initial_value_and_a_published_name() -> None:
    model = make(
        use_encoder_pooler_layer=True, use_post_embed_layer_norm=True, layerscale_value=0.5
    )
    for name, param in model.named_parameters():
        assert param.any() or name.endswith("bias"), name
        assert published_name(name) is not None, name
    assert published_name("encoder.embedding.cls_token.weight") == (
        "model.vit_model.embedding_layer.cls_embedding"
    )
    assert sum(p.numel() for _, p in model.named_parameters()) == sum(
        p.numel() for module, _ in model.reset_steps() for p in module.parameters()
    )
