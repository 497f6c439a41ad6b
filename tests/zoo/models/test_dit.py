"""The diffusion transformer: formulas, options, initial values."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from backends.blocks import checkpoint_activations
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.models.vision.dit import Dit, published_name
from modelzoo_trainer.zoo.models.vision.dit_parts import NoiseSchedule, timestep_waves
from modelzoo_trainer.zoo.models.vision.dit_settings import DitSettings
from modelzoo_trainer.zoo.models.vision.embeddings import grid_positions
from tests.zoo.models.dit_cases import CASES, SIZES, batch_of, make

Tensor = torch.Tensor
DEFAULTS: dict[str, Any] = {
    "latent_size": [32, 32],
    "latent_channels": 4,
    "num_classes": 1000,
    "label_dropout_rate": 0.1,
    "num_diffusion_steps": 1000,
    "beta_start": 0.0001,
    "beta_end": 0.02,
    "frequency_embedding_size": 256,
    "layer_norm_epsilon": 1e-5,
    "embedding_dropout_rate": 0.1,
    "dropout_rate": 0.0,
    "attention_dropout_rate": 0.0,
    "vae_scaling_factor": 0.18215,
}


def affine(weights: dict[str, Tensor], name: str, values: Tensor) -> Tensor:
    found = values @ weights[f"{name}.weight"].T
    return found + weights[f"{name}.bias"] if f"{name}.bias" in weights else found


def silu(values: Tensor) -> Tensor:
    return values / (1 + (-values).exp())


def normed(weights: dict[str, Tensor], name: str, hidden: Tensor, condition: Tensor) -> Tensor:
    centred = hidden - hidden.mean(-1, keepdim=True)
    scaled = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    scale, shift = (affine(weights, f"{name}.{one}", condition) for one in ("scale", "shift"))
    return scaled * (1 + scale[:, None]) + shift[:, None]


def by_hand(model: Dit, batch: dict[str, Tensor]) -> Tensor:
    """Return the predicted noise from the formulas alone, for a convolution at both ends."""
    weights = {name: value.double() for name, value in model.state_dict().items()}
    times = batch["timestep"].long()
    betas = torch.tensor(
        [20 * (0.0001 + (0.02 - 0.0001) * step / 49) for step in range(50)], dtype=torch.float64
    )
    kept = torch.stack([(1 - betas[: time + 1]).prod() for time in times])[:, None, None, None]
    noisy = kept.sqrt() * batch["input"] + (1 - kept).sqrt() * batch["diffusion_noise"]
    kernel = weights["embedding.patches.projection.weight"]
    cuts = [noisy[:, :, r : r + 2, k : k + 3] for r in (0, 2) for k in (0, 3)]
    hidden = torch.stack([torch.einsum("bchw,nchw->bn", cut, kernel) for cut in cuts], dim=1)
    hidden = hidden + weights["embedding.patches.projection.bias"]
    hidden = hidden + grid_positions((2, 2), 32, torch.device("cpu"))
    angles = times[:, None] * torch.tensor([10000 ** (-i / 4) for i in range(4)])
    waves = torch.cat((angles.cos(), angles.sin()), dim=-1).double()
    inner = silu(affine(weights, "timestep_embedding.in_proj", waves))
    embedded = affine(weights, "timestep_embedding.out_proj", inner)
    condition = silu(embedded + weights["label_embedding.weight"][batch["label"].long()])
    for number in range(2):
        layer = f"layers.{number}"
        states = normed(weights, f"{layer}.attention_norm", hidden, condition)
        queries, keys, values = (
            affine(weights, f"{layer}.attention.{one}_proj", states).unflatten(-1, (4, 8))
            for one in "qkv"
        )
        scores = torch.einsum("bqnd,bknd->bnqk", queries, keys) / math.sqrt(8)
        mixed = torch.einsum("bnqk,bknd->bqnd", scores.softmax(-1), values).flatten(-2)
        gate = affine(weights, f"{layer}.attention_gate", condition)[:, None]
        hidden = hidden + gate * affine(weights, f"{layer}.attention.o_proj", mixed)
        states = normed(weights, f"{layer}.ffn_norm", hidden, condition)
        wide = affine(weights, f"{layer}.ffn.up_proj", states)
        wide = wide * 0.5 * (1 + torch.erf(wide / math.sqrt(2)))
        gate = affine(weights, f"{layer}.ffn_gate", condition)[:, None]
        hidden = hidden + gate * affine(weights, f"{layer}.ffn.down_proj", wide)
    hidden = normed(weights, "head.norm", hidden, condition)
    kernel, bias = weights["head.projection.weight"], weights["head.projection.bias"]
    patches = torch.einsum("bpn,nchw->bpchw", hidden, kernel) + bias[:, None, None]
    rows = [torch.cat((patches[:, r], patches[:, r + 1]), dim=-1) for r in (0, 2)]
    return torch.cat(rows, dim=-2)


def test_loss_and_noise_follow_the_formulas() -> None:
    model, batch = make("dit").eval(), batch_of()
    expected = by_hand(model, batch)

    found = model(batch)

    torch.testing.assert_close(found["prediction"].double(), expected, rtol=1e-4, atol=1e-5)
    loss = (expected - batch["diffusion_noise"]).square().mean()
    torch.testing.assert_close(found["loss"].double(), loss, rtol=1e-5, atol=1e-6)


def test_betas_are_larger_with_fewer_timesteps() -> None:
    schedule = NoiseSchedule(1000, 0.0001, 0.02)
    assert schedule.signal[0].item() ** 2 == pytest.approx(1 - 0.0001)
    torch.testing.assert_close(
        schedule.signal.square() + schedule.noise.square(), torch.ones(1000), rtol=0, atol=1e-6
    )
    assert schedule.signal[999].item() ** 2 == pytest.approx(4.0358e-5, rel=1e-3)
    short = NoiseSchedule(100, 0.0001, 0.02)
    assert short.signal[0].item() ** 2 == pytest.approx(1 - 0.001)
    kept = math.prod(1 - (0.001 + (0.2 - 0.001) * step / 99) for step in range(100))
    assert short.signal[99].item() ** 2 == pytest.approx(kept, rel=1e-4)


def test_waves_begin_with_cosines() -> None:
    found = timestep_waves(torch.tensor([0, 7]), 256)
    assert found[0].tolist() == [1.0] * 128 + [0.0] * 128
    assert found[1, 0].item() == pytest.approx(math.cos(7))
    assert found[1, 128].item() == pytest.approx(math.sin(7))
    slow = 7 * 10000 ** (-5 / 128)
    assert found[1, 128 + 5].item() == pytest.approx(math.sin(slow), abs=1e-5)


def test_convolutions_equal_linear_projections() -> None:
    conv = make("dit").eval()
    linear = make(
        "dit", use_conv_patchified_embedding=False, use_conv_transpose_unpatchify=False
    ).eval()
    state = conv.state_dict()
    first, last, bias = (
        "embedding.patches.projection.weight",
        "head.projection.weight",
        "head.projection.bias",
    )
    state[first] = state[first].permute(0, 2, 3, 1).flatten(1)
    state[last] = state[last].permute(2, 3, 1, 0).flatten(0, 2)
    state[bias] = state[bias].repeat(6)
    linear.load_state_dict(state)
    torch.testing.assert_close(linear(batch_of())["prediction"], conv(batch_of())["prediction"])


def test_a_new_model_predicts_nothing_and_its_layers_change_nothing() -> None:
    torch.manual_seed(0)
    model = Dit(**SIZES, use_conv_patchified_embedding=True)
    batch = batch_of()
    assert model(batch)["prediction"].abs().max() == 0
    assert model(batch)["loss"].item() == pytest.approx(batch["diffusion_noise"].square().mean())
    zero = {name for name, param in model.named_parameters() if not param.any()}
    started = ("attention_norm", "ffn_norm", "_gate", "head.", ".bias")
    assert all(any(part in name for part in started) for name in zero)
    assert sum(name.endswith("weight") for name in zero) == 2 * 6 + 3
    assert model.label_embedding.weight.shape == (6, 32)
    assert Dit(**SIZES, label_dropout_rate=0).label_embedding.weight.shape == (5, 32)


def test_initial_weights_have_their_spread() -> None:
    torch.manual_seed(0)
    sizes = {**SIZES, "hidden_size": 128, "filter_size": 256, "num_classes": 99}
    model = Dit(**sizes, use_conv_patchified_embedding=True)
    bound = math.sqrt(6 / (3 * 2 * 3 + 128))  # as a matrix
    patches = model.embedding.patches.projection.weight
    assert bound * 0.98 < patches.abs().max() <= bound
    assert model.layers[0].ffn.up_proj.weight.abs().max() <= math.sqrt(6 / (128 + 256))
    for part in (model.label_embedding, model.timestep_embedding.out_proj):
        assert part.weight.std().item() == pytest.approx(0.02, rel=0.05)
        assert part.weight.abs().max() > 0.05  # not truncated
    four = Dit(**sizes, use_conv_patchified_embedding=True, init_conv_like_linear=False)
    narrow = math.sqrt(6 / (3 * 2 * 3 + 128 * 2 * 3))
    assert narrow * 0.98 < four.embedding.patches.projection.weight.abs().max() <= narrow


def test_defaults_are_those_of_the_model_zoo() -> None:
    settings = DitSettings()
    assert {name: getattr(settings, name) for name in DEFAULTS} == DEFAULTS
    assert settings.vision().patch == (16, 16)
    vae: Any = {"latent_size": [8, 16], "latent_channels": 2, "scaling_factor": 0.5, "act_fn": "x"}
    settings = DitSettings(vae=vae, patch_size=[8, 8])
    assert (settings.latent_size, settings.latent_channels) == ([8, 16], 2)
    assert settings.vae_scaling_factor == 0.5


def test_settings_without_effect_are_noted() -> None:
    vae: Any = {"latent_channels": 3, "act_fn": "silu", "sample_size": None}
    settings = Dit.check_arguments(**SIZES, vae=vae, reverse_process={"sampler": {"name": "ddpm"}})
    (note,) = settings.notes
    assert note.startswith("vae.act_fn, vae.sample_size, reverse_process: no effect")
    assert DitSettings(**SIZES, vae={"latent_channels": 3}, reverse_process={}).notes == []


@pytest.mark.parametrize("case", CASES)
@pytest.mark.slow_cases("linear*", "gated*")
def test_a_model_from_the_meta_device_starts_like_one_that_was_built_in_place(case: str) -> None:
    options = {**SIZES, **CASES[case]}
    with torch.device("meta"):
        moved = Dit(**options)
        moved(batch_of())["loss"].backward()
    moved.to_empty(device="cpu")
    torch.manual_seed(7)
    moved.reset_parameters()
    built = Dit(**options)
    torch.manual_seed(7)
    built.reset_parameters()
    assert all(map(torch.equal, moved.state_dict().values(), built.state_dict().values()))
    assert all(map(torch.equal, moved.buffers(), built.buffers()))
    assert "noise_schedule" not in "".join(built.state_dict())


def results(model: Dit) -> list[torch.Tensor]:
    torch.manual_seed(5)
    loss = model(batch_of())["loss"]
    loss.backward()
    return [loss.detach(), *(param.grad for param in model.parameters())]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # of torch
@pytest.mark.parametrize("case", CASES)
def test_equal_layers_are_compiled_once(case: str) -> None:
    torch.compiler.reset()
    model, plain = (make(case, num_hidden_layers=12) for _ in range(2))
    counter = CompileCounter()
    for layer in model.layers:
        layer.compile(backend=counter, fullgraph=True)
    torch.testing.assert_close(results(model), results(plain), rtol=1e-5, atol=1e-6)
    assert counter.frame_count == 1
    torch.compiler.reset()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # of torch
def test_the_whole_model_is_one_graph() -> None:
    torch.compiler.reset()
    model, plain = make("dit"), make("dit")
    model.compile(backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(results(model), results(plain), rtol=1e-5, atol=1e-6)
    torch.compiler.reset()


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_layer_that_is_computed_again_gives_the_same_bits(case: str) -> None:
    options = {"dropout_rate": 0.5, "attention_dropout_rate": 0.1}
    model = make(case, **options)
    checkpoint_activations(model, "full")
    for found, expected in zip(results(model), results(make(case, **options)), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("changes", "facts"),
    [
        ({"latent_size": [5, 6]}, r"\[5, 6\].*multiple of the 2"),
        ({"num_heads": 3}, "num_heads"),
        ({"hidden_size": 36, "num_heads": 2, "frequency_embedding_size": 7}, "7.*even"),
        ({"hidden_size": 30, "num_heads": 2, "position_embedding_type": "fixed"}, "hidden_size"),
        ({"var_loss": True}, "var_loss: false"),
        ({"norm_first": False}, "norm_first is false.*norm_first: true"),
        ({"norm_first": None}, "norm_first is none.*norm_first: true"),
        ({"embedding_nonlinearity": "geglu"}, "embedding_nonlinearity is geglu"),
        ({"beta_start": 0.5}, "beta_start is 0.5.*0.02"),
        ({"num_diffusion_steps": 10}, "num_diffusion_steps is 10"),
        ({"vae": {"latent_size": [4, 4]}}, r"latent_size is \[4, 6\].*\[4, 4\]"),
        ({"vae": {"scaling_facto": 1.0}}, "vae.scaling_facto.*'scaling_factor'"),
        ({"vae": {"scaling_factor": 0.0}}, "vae.scaling_factor"),
        ({"vae": {"scaling_factor": {"a": 1}}}, "vae.scaling_factor.*got a mapping"),
        ({"reverse_process": {"sampler": {"beta_en": 0.1}}}, "reverse_process.sampler.beta_en"),
        ({"reverse_process": {"pipelin": {}}}, "'pipeline'"),
        ({"head_initializer": "zeroes"}, "head_initializer.*'zeros'"),
        ({"schedule_name": "cosine"}, "schedule_name.*linear"),
        ({"block_type": "cross"}, "block_type.*adaln_zero"),
        ({"position_embedding_type": "rotary"}, "position_embedding_type.*rotary"),
    ],
)
def test_invalid_settings_are_refused(changes: dict[str, Any], facts: str) -> None:
    with pytest.raises(ConfigError, match=facts):
        Dit.check_arguments(**SIZES | changes)


@pytest.mark.parametrize(
    ("change", "facts"),
    [
        ({"input": torch.zeros(4, 3, 4, 4)}, r"input.*\(4, 3, 4, 4\).*\(4, 3, 4, 6\)"),
        ({"diffusion_noise": torch.zeros(4, 2, 4, 6)}, "diffusion_noise"),
        ({"label": torch.zeros(3)}, r"label.*\(3,\)"),
        ({"timestep": torch.zeros(4, 1)}, "timestep"),
    ],
)
def test_other_batches_are_refused(change: dict[str, Tensor], facts: str) -> None:
    model = make("dit")
    with pytest.raises(ConfigError, match=facts):
        model(batch_of() | change)
    for other in ((torch.zeros(4, 3, 4, 6), torch.zeros(4)), {"input": torch.zeros(1)}):
        with pytest.raises(ConfigError, match="input, label, diffusion_noise, timestep"):
            model(other)


def test_every_parameter_has_a_published_name_and_a_step_that_initializes_it() -> None:
    model = make("linear, learned")
    found = [published_name(name) for name, _ in model.named_parameters()]
    assert None not in found
    assert len(set(found)) == len(found)
    assert "model.transformer_decoder.layers.1.gate_msa.1.weight" in found
    assert sum(p.numel() for p in model.parameters()) == sum(
        p.numel() for module, _ in model.reset_steps() for p in module.parameters()
    )
