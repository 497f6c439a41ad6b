"""Initial weights and default settings: the values of Model Zoo 2.10, in tables.

Expected values are literals of the original, not computed by the tested code.
"""

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

from modelzoo_trainer.zoo.models.decoder import Decoder
from modelzoo_trainer.zoo.models.registry import model_class

NAMES = ["gpt2", "gptj"]
OF_GPT2 = [
    *(
        "bloom",
        "btlm",
        "gemma2",
        "gpt3",
        "jais",
        "llama",
        "mistral",
        "mixtral",
        "santacoder",
        "starcoder",
    )
]
SIZES: dict[str, Any] = {  # (2 * layers) ** -0.5 is 1 / 2
    "vocab_size": 256,
    "hidden_size": 128,
    "max_position_embeddings": 256,
    "position_embedding_type": "learned",
    "num_hidden_layers": 2,
    "num_heads": 4,
    "filter_size": 256,
    "nonlinearity": "swiglu",
    "share_embedding_weights": False,
}
MUP = {"mup_base_hidden_size": 32, "mup_base_filter_size": 64}  # m ** -0.5 is 1 / 2, f ** -0.5 too
KEPT = 0.8796  # of the deviation of a normal distribution that is cut at two of them
KINDS = ("token_emb", "position_emb", "qkv", "attention_out", "ffn_in", "ffn_gate", "ffn_out")


def cut(std: float) -> dict[str, Any]:
    return {"name": "truncated_normal", "std": std}


# What is set -> the standard deviations of token and position embedding, q k v, output of
# attention, input and gate of the feed-forward network, its output. All are cut at two deviations.
STARTS: dict[str, tuple[dict[str, Any], list[float]]] = {
    "nothing": ({}, [0.02, 0.02, 0.02, 0.01, 0.02, 0.02, 0.01]),
    "initializer_range": ({"initializer_range": 0.08}, [0.08, 0.08, 0.08, 0.04, 0.08, 0.08, 0.04]),
    "embedding_initializer": (
        {"embedding_initializer": cut(0.3)},
        [0.3, 0.3, 0.02, 0.01, 0.02, 0.02, 0.01],
    ),
    "initializer": ({"initializer": cut(0.3)}, [0.02, 0.02, 0.3, 0.3, 0.3, 0.3, 0.3]),
    "output_layer_initializer": (
        {"output_layer_initializer": cut(0.3)},
        [0.02, 0.02, 0.02, 0.3, 0.02, 0.02, 0.3],
    ),
    "ffn_initializer": ({"ffn_initializer": cut(0.3)}, [0.02, 0.02, 0.02, 0.01, 0.3, 0.3, 0.3]),
    "ffn_output_layer_initializer": (
        {"ffn_output_layer_initializer": cut(0.3)},
        [0.02, 0.02, 0.02, 0.01, 0.02, 0.02, 0.3],
    ),
    "initializer and ffn_initializer": (
        {"initializer": cut(0.3), "ffn_initializer": cut(0.5)},
        [0.02, 0.02, 0.3, 0.3, 0.5, 0.5, 0.5],
    ),
    "all": (
        {
            "initializer": cut(0.3),
            "output_layer_initializer": cut(0.4),
            "ffn_initializer": cut(0.5),
            "ffn_output_layer_initializer": cut(0.6),
        },
        [0.02, 0.02, 0.3, 0.4, 0.5, 0.5, 0.6],
    ),
    "muP": (MUP, [0.02, 0.02, 0.01, 0.005, 0.01, 0.01, 0.005]),
    "muP, initializer": (  # as params_gpt3_40M.yaml
        {**MUP, "initializer": cut(0.08)},
        [0.02, 0.02, 0.04, 0.005, 0.04, 0.04, 0.005],
    ),
    "muP, initializer and output_layer_initializer": (  # as the other published ones
        {**MUP, "initializer": cut(0.08), "output_layer_initializer": cut(0.12)},
        [0.02, 0.02, 0.04, 0.03, 0.04, 0.04, 0.005],
    ),
    "muP, ffn_initializer": (
        {**MUP, "ffn_initializer": cut(0.08)},
        [0.02, 0.02, 0.01, 0.005, 0.04, 0.04, 0.005],
    ),
    "muP, ffn_output_layer_initializer": (
        {**MUP, "initializer": cut(0.08), "ffn_output_layer_initializer": cut(0.12)},
        [0.02, 0.02, 0.04, 0.005, 0.04, 0.04, 0.03],
    ),
}

# The same of the GPT-J class: no factor of depth without muP, and none on what is given.
GPTJ_STARTS: dict[str, tuple[dict[str, Any], list[float]]] = {
    "nothing": ({}, [0.02, 0.02, 0.02, 0.02, 0.02, 0.02, 0.02]),
    "initializer_range": ({"initializer_range": 0.08}, [0.08] * 7),
    "embedding_initializer": (
        {"embedding_initializer": cut(0.3)},
        [0.3, 0.3, 0.02, 0.02, 0.02, 0.02, 0.02],
    ),
    "initializer": ({"initializer": cut(0.3)}, [0.02, 0.02, 0.3, 0.02, 0.02, 0.02, 0.02]),
    "attention_initializer": (
        {"attention_initializer": cut(0.3)},
        [0.02, 0.02, 0.3, 0.02, 0.02, 0.02, 0.02],
    ),
    "output_layer_initializer": (
        {"output_layer_initializer": cut(0.3)},
        [0.02, 0.02, 0.02, 0.3, 0.3, 0.3, 0.3],
    ),
    "ffn_initializer": ({"ffn_initializer": cut(0.3)}, [0.02] * 4 + [0.3, 0.3, 0.02]),
    "ffn_output_layer_initializer": (
        {"ffn_output_layer_initializer": cut(0.3)},
        [0.02] * 6 + [0.3],
    ),
    "all": (
        {
            "initializer": cut(0.3),
            "output_layer_initializer": cut(0.4),
            "ffn_initializer": cut(0.5),
            "ffn_output_layer_initializer": cut(0.6),
        },
        [0.02, 0.02, 0.3, 0.4, 0.5, 0.5, 0.6],
    ),
    "muP": (MUP, [0.02, 0.02, 0.01, 0.005, 0.01, 0.01, 0.005]),
    "muP, initializer and output_layer_initializer": (  # as params_gptj_6B_muP.yaml
        {**MUP, "initializer": cut(1.0), "output_layer_initializer": cut(0.0714)},
        [0.02, 0.02, 1.0, 0.0714, 0.0714, 0.0714, 0.0714],
    ),
    "muP, ffn_initializer": (
        {**MUP, "ffn_initializer": cut(0.08)},
        [0.02, 0.02, 0.01, 0.005, 0.08, 0.08, 0.005],
    ),
}
CASES = [("gpt2", case) for case in STARTS] + [("gptj", case) for case in GPTJ_STARTS]


def make(name: str, **settings: Any) -> Decoder:
    torch.manual_seed(0)
    model = model_class(name)(**{**SIZES, **settings})
    assert isinstance(model, Decoder)
    return model


def joined(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def weights_of(model: Decoder) -> dict[str, Tensor]:
    layers: list[Any] = list(model.layers)
    assert model.position_embeddings is not None
    found = [
        [model.token_embeddings.weight],
        [model.position_embeddings.weight],
        [getattr(layer.attention, f"{part}_proj").weight for layer in layers for part in "qkv"],
        [layer.attention.o_proj.weight for layer in layers],
        [layer.ffn.up_proj.weight for layer in layers],
        [layer.ffn.gate_proj.weight for layer in layers],
        [layer.ffn.down_proj.weight for layer in layers],
    ]
    return {kind: joined(weights) for kind, weights in zip(KINDS, found, strict=True)}


@pytest.mark.parametrize(("name", "case"), CASES)
@pytest.mark.slow_cases(every=4)
def test_every_weight_starts_with_the_deviation_that_it_has_in_the_original(
    name: str, case: str
) -> None:
    settings, expected = (STARTS if name == "gpt2" else GPTJ_STARTS)[case]
    weights = weights_of(make(name, **settings))

    stds = [weight.std().item() / KEPT for weight in weights.values()]
    greatest = [weight.abs().max().item() for weight in weights.values()]

    assert stds == pytest.approx(expected, rel=0.02)
    assert greatest == pytest.approx([2 * std for std in expected], rel=0.01)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("settings", [{}, MUP, {"initializer": cut(0.3)}])
def test_an_untied_output_layer_starts_normal_and_is_not_cut(
    name: str, settings: dict[str, Any]
) -> None:
    weight = make(name, initializer_range=0.05, **settings).lm_head.weight.detach()

    assert weight.std().item() == pytest.approx(0.05, rel=0.02)
    assert weight.abs().max() > 3.5 * 0.05


@pytest.mark.parametrize("name", NAMES)
def test_biases_start_at_zero_and_norms_at_one(name: str) -> None:
    biases = ("use_projection_bias_in_attention", "use_ffn_bias_in_attention", "use_ffn_bias")
    model = make(name, use_bias_in_output=True, **dict.fromkeys(biases, True))
    starts = {
        parameter: {value.item() for value in tensor.unique()}
        for parameter, tensor in model.named_parameters()
        if tensor.dim() == 1
    }

    assert {n: v for n, v in starts.items() if v != ({1.0} if "norm.w" in n else {0.0})} == {}
    assert len(starts) >= 2 * (9 if name == "gpt2" else 7) + 2


# ---- defaults

DEFAULTS: dict[str, Any] = {
    "vocab_size": 50257,
    "hidden_size": 768,
    "max_position_embeddings": 1024,
    "position_embedding_type": "learned",
    "num_relative_attention_buckets": 32,
    "alibi_trainable_slopes": False,
    "rotary_dim": None,
    "rope_theta": 10000.0,
    "pos_scaling_type": "linear",
    "pos_scaling_factor": 1.0,
    "pos_scaling_extra_args": None,
    "share_embedding_weights": True,
    "embedding_layer_norm": False,
    "attention_inner_dim": None,
    "attention_logit_softcapping": None,
    "attention_qk_norm": None,  # not of the original
    "final_logit_softcapping": None,
    "norm_first_sandwich": False,
    "output_logits_scale": None,
    "position_embedding_offset": 0,
    "num_hidden_layers": 12,
    "norm_type": "layernorm",
    "layer_norm_epsilon": 1e-5,
    "dropout_rate": 0.1,
    "embedding_dropout_rate": None,
    "embd_pdrop": None,  # another name of the former
    "attention_dropout_rate": 0.1,
    "num_heads": 12,
    "attention_type": "scaled_dot_product",
    "attention_module": "aiayn_attention",
    "extra_attention_params": None,
    "attention_sliding_window_length": None,
    "sliding_window_every_other_decoder_layer": False,
    "sliding_window_every_other_decoder_layer_pattern": None,
    "scale_qk_dot_by_layer_idx": False,
    "use_projection_bias_in_attention": True,
    "use_ffn_bias_in_attention": True,
    "filter_size": 3072,
    "nonlinearity": "gelu",
    "use_ffn_bias": True,
    "moe": None,
    "moe_params": None,  # another name of the former
    "use_bias_in_output": False,
    "initializer_range": 0.02,
    "embedding_initializer": None,
    "initializer": None,
    "output_layer_initializer": None,
    "ffn_initializer": None,
    "ffn_output_layer_initializer": None,
    "mup_base_hidden_size": None,
    "mup_base_filter_size": None,
    "embeddings_scale": 1.0,
    "scale_qk_dot_by_d": None,
    "attention_logits_alpha": 1.0,
    "scale_output_logits_by_d": True,
    "output_logits_alpha": None,
    "loss_scaling": "num_tokens",
    "loss_weight": 1.0,
    "compute_eval_metrics": True,
}
WITHOUT_MEANING = {
    "attention_softmax_fp32",
    "attention_kernel",
    "fold_rope_consts",
    "mixed_precision",
    "fp16_type",
}


def defaults_of(name: str) -> dict[str, Any]:
    parameters = inspect.signature(model_class(name)).parameters
    return {key: p.default for key, p in parameters.items() if key not in WITHOUT_MEANING}


GPTJ_DEFAULTS: dict[str, Any] = {
    "num_relative_attention_buckets": None,
    "attention_sink_tokens": None,
    "position_embedding_type": "rotary",
    "embedding_dropout_rate": 0.1,
    "residual_dropout_rate": None,  # another name of dropout_rate
    "use_ffn_bias": False,
    "use_untied_layer_norm": False,
    "attention_initializer": None,  # another name of initializer
    "scale_qk_dot_by_d": False,
}
ONLY_GPT2 = {
    "output_logits_scale",
    "embedding_layer_norm",
    "attention_inner_dim",
    "attention_logit_softcapping",
    "attention_qk_norm",
    "final_logit_softcapping",
    "norm_first_sandwich",
    "position_embedding_offset",
    "alibi_trainable_slopes",
    "scale_qk_dot_by_layer_idx",
    "sliding_window_every_other_decoder_layer",
    "sliding_window_every_other_decoder_layer_pattern",
}


OF_THIS_PROJECT = {"attention": "auto"}  # no published keys


def test_every_default_is_that_of_the_original() -> None:
    assert defaults_of("gpt2") == DEFAULTS | OF_THIS_PROJECT
    common = {key: value for key, value in DEFAULTS.items() if key not in ONLY_GPT2}
    assert defaults_of("gptj") == common | GPTJ_DEFAULTS | OF_THIS_PROJECT


@pytest.mark.parametrize("name", OF_GPT2)
def test_no_name_changes_a_default(name: str) -> None:
    assert model_class(name) is model_class("gpt2")


@pytest.mark.parametrize("name", NAMES)
def test_an_unset_rotary_dim_is_a_quarter_of_the_head(name: str) -> None:
    model = make(name, position_embedding_type="rotary")
    rotary = model.rotary()

    assert rotary is not None
    assert rotary.rotary_dim == 8  # of 32
    assert rotary.theta == 10000.0


# What is set -> dropout of embeddings, of attention weights, of what is added to the residual.
DROPOUTS = {
    "dropout_rate": ({"dropout_rate": 0.3}, [0.3, 0.1, 0.3]),
    "explicit null": (
        {"dropout_rate": 0.3, "attention_dropout_rate": None, "embedding_dropout_rate": None},
        [0.3, 0.3, 0.3],
    ),
    "no dropout_rate": ({"dropout_rate": 0.0}, [0.0, 0.1, 0.0]),
    "all": (
        {"dropout_rate": 0.3, "attention_dropout_rate": 0.0, "embedding_dropout_rate": 0.4},
        [0.4, 0.0, 0.3],
    ),
    "embd_pdrop": ({"embd_pdrop": 0.4}, [0.4, 0.1, 0.1]),
}


GPTJ_DROPOUTS = {
    **DROPOUTS,
    "dropout_rate": ({"dropout_rate": 0.3}, [0.1, 0.1, 0.3]),
    "no dropout_rate": ({"dropout_rate": 0.0}, [0.1, 0.1, 0.0]),
    "residual_dropout_rate": ({"residual_dropout_rate": 0.3}, [0.1, 0.1, 0.3]),
}
DROPOUT_CASES = [("gpt2", case) for case in DROPOUTS] + [("gptj", case) for case in GPTJ_DROPOUTS]


@pytest.mark.parametrize(("name", "case"), DROPOUT_CASES)
@pytest.mark.slow_cases(every=4)
def test_dropout_rates_that_are_not_set_are_those_of_the_original(name: str, case: str) -> None:
    settings, expected = (DROPOUTS if name == "gpt2" else GPTJ_DROPOUTS)[case]
    model = make(name, **settings)
    layer: Any = model.layers[0]

    rates = [model.embedding_dropout.p, layer.attention.dropout_rate, layer.dropout.p]

    assert rates == expected


# What is set -> the factor on products of queries and keys (heads of 32), that on the logits.
SCALES: dict[str, tuple[dict[str, Any], list[float]]] = {
    "nothing": ({}, [32**-0.5, 1.0]),
    "by d": ({"scale_qk_dot_by_d": True}, [1 / 32, 1.0]),
    "attention_logits_alpha": ({"attention_logits_alpha": 4.0}, [4 * 32**-0.5, 1.0]),
    "dot_product": ({"attention_type": "dot_product"}, [1.0, 1.0]),
    "muP": (MUP, [1 / 32, 1 / 4]),
    "muP, not by d": ({**MUP, "scale_qk_dot_by_d": False}, [32**-0.5, 1 / 4]),
    "muP, root": ({**MUP, "scale_output_logits_by_d": False}, [1 / 32, 1 / 2]),
    "muP, alpha": ({**MUP, "output_logits_alpha": 2.22}, [1 / 32, 2.22 / 4]),
    "muP, alpha 0": ({**MUP, "output_logits_alpha": 0.0}, [1 / 32, 1 / 4]),
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("case", SCALES)
@pytest.mark.slow_cases(every=4)
def test_scores_and_logits_are_scaled_as_in_the_original(name: str, case: str) -> None:
    settings, expected = SCALES[case]
    if name == "gptj" and "scale_qk_dot_by_d" not in settings and expected[0] == 1 / 32:
        expected = [32**-0.5, expected[1]]  # muP does not change it
    model = make(name, **settings).eval()
    plain = make(name).eval()
    plain.load_state_dict(model.state_dict())
    layer: Any = model.layers[0]
    ids = torch.arange(4).view(1, 4)
    model.layers, plain.layers = torch.nn.ModuleList(), torch.nn.ModuleList()

    factor = (model.logits(ids) / plain.logits(ids)).mean().item()
    assert [layer.attention.scale, factor] == pytest.approx(expected, rel=1e-4)


def test_output_logits_alpha_has_no_effect_without_mup_and_the_model_warns_of_it() -> None:
    with pytest.warns(UserWarning, match=r"output_logits_alpha \(3\.0\) has no effect without muP"):
        model = make("gpt2", output_logits_alpha=3.0)

    ids = torch.arange(4).view(1, 4)
    assert torch.equal(model.eval().logits(ids), make("gpt2").eval().logits(ids))
