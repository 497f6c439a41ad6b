"""Logits and gradients are those of transformers, with the same weights."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from modelzoo_trainer.zoo.models.registry import model_class
from tests.zoo.models.llama_settings import LLAMA
from tests.zoo.models.parity import (
    DIM,
    FILTER,
    GPTJ_ROTARY,
    LENGTH,
    SIZES,
    THEIR_SIZES,
    VOCAB,
    WIDTH,
    Case,
    bigcode_tensors,
    fused_tensors,
    gpt2_tensors,
    gptj_tensors,
    llama_tensors,
    per_group,
    per_head,
    queries_first,
)

pytestmark = pytest.mark.slow

ONE_GROUP = {
    "attention_module": "multiquery_attention",
    "extra_attention_params": {"num_kv_groups": 1},
}
TWO_GROUPS = {
    "attention_module": "multiquery_attention",
    "extra_attention_params": {"num_kv_groups": 2},
}
WITHOUT_BIASES = {
    "use_projection_bias_in_attention": False,
    "use_ffn_bias_in_attention": False,
    "use_ffn_bias": False,
}
ROTARY = 1e-6  # of float64, since angles are float32


def llama(theirs: dict[str, Any], **ours: Any) -> Case:
    """Return a Llama with `rope_parameters` of theirs and settings of ours."""
    config = {
        "intermediate_size": FILTER,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_theta": 500.0, **theirs},
    }
    settings = LLAMA | TWO_GROUPS | {"rotary_dim": DIM, "rope_theta": 500.0} | ours
    return Case("llama", "LlamaForCausalLM", settings, config, llama_tensors, ROTARY)


def scaled(kind: str, factor: float, *, ours: Any = None, theirs: Any = None) -> Case:
    """Return a Llama with scaled positions."""
    extra = {"pos_scaling_extra_args": ours} if ours else {}
    rope = {"rope_type": kind, "factor": factor, **(theirs or {})}
    factors = {} if kind == "longrope" else {"pos_scaling_factor": factor}
    return llama(rope, pos_scaling_type=kind, **factors, **extra)


LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 12}
LONGROPE = {
    "original_max_position_embeddings": 12,
    "long_factor": [1.0, 1.5, 2.0, 4.0],
    "short_factor": [1.0, 1.0, 1.0, 1.0],
}
YARN = {"original_max_position_embeddings": 12, "beta_fast": 2.0, "beta_slow": 0.5}
NEOX = {
    "layer": "gpt_neox.layers",
    "token_embeddings": "gpt_neox.embed_in",
    "layer.attention_norm": "input_layernorm",
    "layer.ffn_norm": "post_attention_layernorm",
    "layer.attention": "attention.query_key_value",
    "layer.attention.o_proj": "attention.dense",
    "layer.ffn.up_proj": "mlp.dense_h_to_4h",
    "layer.ffn.down_proj": "mlp.dense_4h_to_h",
    "final_norm": "gpt_neox.final_layer_norm",
    "lm_head": "lm_head",
}
FALCON = {
    "layer": "transformer.h",
    "token_embeddings": "transformer.word_embeddings",
    "layer.attention_norm": "input_layernorm",
    "layer.attention": "self_attention.query_key_value",
    "layer.attention.o_proj": "self_attention.dense",
    "layer.ffn.up_proj": "mlp.dense_h_to_4h",
    "layer.ffn.down_proj": "mlp.dense_4h_to_h",
    "final_norm": "transformer.ln_f",
}
FALCON_40B = FALCON | {"layer.attention_norm": "ln_attn", "layer.ffn_norm": "ln_mlp"}
FALCON_CONFIG = {
    "ffn_hidden_size": FILTER,
    "bias": False,
    "parallel_attn": True,
    "alibi": False,
    "activation": "gelu",
    "tie_word_embeddings": True,
}
BLOOM = {
    "layer": "transformer.h",
    "token_embeddings": "transformer.word_embeddings",
    "embedding_norm": "transformer.word_embeddings_layernorm",
    "layer.attention_norm": "input_layernorm",
    "layer.ffn_norm": "post_attention_layernorm",
    "layer.attention": "self_attention.query_key_value",
    "layer.attention.o_proj": "self_attention.dense",
    "layer.ffn.up_proj": "mlp.dense_h_to_4h",
    "layer.ffn.down_proj": "mlp.dense_4h_to_h",
    "final_norm": "transformer.ln_f",
}


def bloom(num_heads: int) -> Case:
    """Return a BLOOM with heads of 8."""
    size = DIM * num_heads
    settings = {
        "position_embedding_type": "alibi",
        "embedding_layer_norm": True,
        "nonlinearity": "gelu_new",
        "hidden_size": size,
        "num_heads": num_heads,
        "filter_size": 4 * size,
    }
    config = {"hidden_size": size, "num_attention_heads": num_heads}
    return Case("bloom", "BloomForCausalLM", settings, config, fused_tensors(BLOOM, per_head), 1e-6)


WIDE_HEADS = {"attention_inner_dim": 2 * WIDTH, "rotary_dim": 2 * DIM}
MISTRAL = {
    "intermediate_size": FILTER,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
GEMMA2 = {
    **WIDE_HEADS,
    **WITHOUT_BIASES,
    **TWO_GROUPS,
    "position_embedding_type": "rotary",
    "norm_type": "rmsnorm",
    "layer_norm_epsilon": 1e-6,
    "nonlinearity": "geglu",
    "embeddings_scale": WIDTH**0.5,
    "attention_logit_softcapping": 2.0,
    "final_logit_softcapping": 3.0,
    "attention_sliding_window_length": 8,
    "sliding_window_every_other_decoder_layer": True,
    "norm_first_sandwich": True,
}
GEMMA2_CONFIG = {
    "intermediate_size": FILTER,
    "num_key_value_heads": 2,
    "head_dim": 2 * DIM,
    "rms_norm_eps": 1e-6,
    "hidden_activation": "gelu",
    "query_pre_attn_scalar": 2 * DIM,
    "attn_logit_softcapping": 2.0,
    "final_logit_softcapping": 3.0,
    "sliding_window": 8,
    "layer_types": ["full_attention", "sliding_attention"],
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}

CASES = {
    "gpt2": Case(
        "gpt2",
        "GPT2LMHeadModel",
        {},
        {"n_inner": FILTER, "activation_function": "gelu"},
        gpt2_tensors,
    ),
    "gpt2, tanh gelu": Case(
        "gpt3",
        "GPT2LMHeadModel",
        {"nonlinearity": "gelu_new", "layer_norm_epsilon": 1e-3},
        {"n_inner": FILTER, "activation_function": "gelu_new", "layer_norm_epsilon": 1e-3},
        gpt2_tensors,
    ),
    "gpt2, by layer": Case(
        "gpt2",
        "GPT2LMHeadModel",
        {"scale_qk_dot_by_layer_idx": True},
        {
            "n_inner": FILTER,
            "activation_function": "gelu",
            "scale_attn_by_inverse_layer_idx": True,
        },
        gpt2_tensors,
    ),
    "bloom": bloom(4),
    "bloom, 6 heads": bloom(6),
    "starcoder": Case(
        "starcoder",
        "GPTBigCodeForCausalLM",
        ONE_GROUP,
        {
            "n_inner": FILTER,
            "activation_function": "gelu",
            "multi_query": True,
            "attn_implementation": "sdpa",  # the other has its softmax in float32
        },
        bigcode_tensors,
    ),
    "llama": llama({"rope_type": "default"}),
    "llama, linear": scaled("linear", 3.0),
    "llama, llama3": scaled("llama3", 4.0, ours=LLAMA3, theirs=LLAMA3),
    "llama, yarn": scaled("yarn", 2.0, ours=YARN, theirs=YARN),
    "llama, longrope": scaled("longrope", 2.0, ours=LONGROPE, theirs=LONGROPE),
    "mistral": Case(
        "mistral",
        "MistralForCausalLM",
        LLAMA | TWO_GROUPS | {"rotary_dim": DIM, "attention_sliding_window_length": 8},
        MISTRAL | {"sliding_window": 8},
        llama_tensors,
        ROTARY,
    ),
    "mistral, wide heads": Case(
        "mistral",
        "MistralForCausalLM",
        LLAMA | TWO_GROUPS | WIDE_HEADS,
        MISTRAL | {"sliding_window": None, "head_dim": 2 * DIM},
        llama_tensors,
        ROTARY,
    ),
    "qwen3": Case(
        "llama",
        "Qwen3ForCausalLM",
        LLAMA | TWO_GROUPS | WIDE_HEADS | {"attention_qk_norm": "rmsnorm"},
        MISTRAL | {"head_dim": 2 * DIM},
        llama_tensors,
        ROTARY,
    ),
    "gemma2": Case(
        "gemma2",
        "Gemma2ForCausalLM",
        GEMMA2,
        GEMMA2_CONFIG,
        llama_tensors,
        ROTARY,
        is_offset=True,
    ),
    "gemma2, tanh gelu": Case(
        "gemma2",
        "Gemma2ForCausalLM",
        GEMMA2 | {"nonlinearity": "geglu_new"},
        GEMMA2_CONFIG | {"hidden_activation": "gelu_pytorch_tanh"},
        llama_tensors,
        ROTARY,
        is_offset=True,
    ),
    "gemma2, window first": Case(
        "gemma2",
        "Gemma2ForCausalLM",
        GEMMA2 | {"sliding_window_every_other_decoder_layer_pattern": "sliding_window_first"},
        GEMMA2_CONFIG | {"layer_types": ["sliding_attention", "full_attention"]},
        llama_tensors,
        ROTARY,
        is_offset=True,
    ),
    "gptj": Case(
        "gptj",
        "GPTJForCausalLM",
        {
            "rotary_dim": GPTJ_ROTARY,
            "share_embedding_weights": False,
            "use_bias_in_output": True,
            **WITHOUT_BIASES,
            "use_ffn_bias": True,
        },
        {
            "n_inner": FILTER,
            "rotary_dim": GPTJ_ROTARY,
            "activation_function": "gelu",
            "tie_word_embeddings": False,
        },
        gptj_tensors,
        ROTARY,
    ),
    "gpt-neox": Case(
        "gpt-neox",
        "GPTNeoXForCausalLM",
        {
            "rotary_dim": DIM // 2,
            "share_embedding_weights": False,
            "use_untied_layer_norm": True,
            "use_ffn_bias": True,
        },
        {
            "intermediate_size": FILTER,
            "hidden_act": "gelu",
            "use_parallel_residual": True,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.5,
            },
            "tie_word_embeddings": False,
        },
        fused_tensors(NEOX, per_head),
        ROTARY,
    ),
    "falcon 7B": Case(
        "falcon",
        "FalconForCausalLM",
        {"rotary_dim": DIM, **WITHOUT_BIASES, **ONE_GROUP},
        FALCON_CONFIG | {"multi_query": True, "new_decoder_architecture": False},
        fused_tensors(FALCON, queries_first),
        ROTARY,
    ),
    "falcon 40B": Case(
        "falcon",
        "FalconForCausalLM",
        {"rotary_dim": DIM, "use_untied_layer_norm": True, **WITHOUT_BIASES, **TWO_GROUPS},
        FALCON_CONFIG | {"new_decoder_architecture": True, "num_kv_heads": 2},
        fused_tensors(FALCON_40B, per_group(2)),
        ROTARY,
    ),
}


def make_theirs(case: Case, dtype: torch.dtype) -> Any:
    """Return their model in eval mode, with random weights, norms near 1 and biases not 0."""
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    config_class = getattr(transformers, case.kind.split("LMHead")[0].split("For")[0] + "Config")
    model: Any = getattr(transformers, case.kind)(config_class(**{**THEIR_SIZES, **case.config}))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, param in model.named_parameters():
            is_norm = param.dim() == 1 and name.endswith("weight")
            mean = 1.0 if is_norm and not case.is_offset else 0.0
            param.copy_(torch.randn(param.shape, generator=generator) * 0.2 + mean)
    return model.to(dtype).eval()


def translated(case: Case, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return their tensors under our names."""
    pairs = list(case.tensors(tensors))
    found = dict(pairs)
    assert len(found) == len(pairs)
    return found


def with_their_weights(case: Case, theirs: nn.Module, dtype: torch.dtype) -> Any:
    """Return our model in eval mode; every parameter is one of theirs."""
    ours: Any = model_class(case.name)(**{**SIZES, **case.settings}).to(dtype).eval()
    weights = translated(case, dict(theirs.named_parameters()))
    params = {name: param for name, param in ours.named_parameters() if param.requires_grad}
    assert weights.keys() == params.keys()
    with torch.no_grad():
        for name, param in params.items():
            weight = weights[name]
            param.copy_(weight + 1 if case.is_offset and "norm" in name else weight)
    return ours


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_logits_and_gradients_are_those_of_transformers(name: str, dtype: torch.dtype) -> None:
    case = CASES[name]
    theirs = make_theirs(case, dtype)
    ours = with_their_weights(case, theirs, dtype)
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(VOCAB, (3, LENGTH), generator=generator)
    weights = torch.randn(3, LENGTH, VOCAB, generator=generator).to(dtype)

    expected = theirs(input_ids=ids, use_cache=False).logits
    found = ours.logits(ids)
    torch.autograd.backward([expected, found], [weights, weights])

    tolerance = case.exact if dtype == torch.float64 else 1e-5
    scale = expected.abs().max().item()
    assert 0.3 < scale < 30
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance * max(scale, 1.0))
    grads = translated(case, {name: param.grad for name, param in theirs.named_parameters()})
    sizes = {key: grad.abs().max().item() for key, grad in grads.items()}
    least = 1e-2 * max(sizes.values())  # biases of keys do not matter, but for rounding
    for key, param in ours.named_parameters():
        if not param.requires_grad:  # the slopes of ALiBi
            continue
        assert param.grad is not None
        bound = max(sizes[key], least)
        torch.testing.assert_close(
            param.grad,
            grads[key],
            rtol=0,
            atol=10 * tolerance * bound,
            msg=lambda text, key=key: f"{key}: {text}",
        )
