"""Generation with what each architecture keeps of the tokens, compared with transformers' own."""

from typing import Any

import pytest
import torch

from modelzoo_trainer.zoo.models.hugging_face.causal_lm import HfCausalLm
from modelzoo_trainer.zoo.models.hugging_face.generating import cache_name
from tests.zoo.hugging_face.hf_cases import SIZES, config_of

pytest.importorskip("transformers", reason="needs transformers")
pytestmark = pytest.mark.slow

_MAMBA = {"vocab_size": 100, "hidden_size": 32, "state_size": 8, "num_hidden_layers": 2}
_HYBRID = {**SIZES, "mamba_d_state": 8, "num_experts": 2, "num_experts_per_tok": 1}
CONFIGS: dict[str, dict[str, Any]] = {
    "bloom": {"vocab_size": 100, "hidden_size": 32, "n_layer": 2, "n_head": 4},
    "falcon_mamba": _MAMBA,
    "jamba": {**_HYBRID, "attn_layer_offset": 1, "attn_layer_period": 2, "mamba_dt_rank": 4},
    "mamba": _MAMBA,
    "mamba2": {**_MAMBA, "num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 8},
    "minimax": {**SIZES, "head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1},
    "openai-gpt": {"vocab_size": 100, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4},
    "opt": {**SIZES, "ffn_dim": 64, "word_embed_proj_dim": 32},
    "recurrent_gemma": {**SIZES, "num_hidden_layers": 3, "lru_width": 32, "head_dim": 8},
    "rwkv": {"vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 2},
    **{name: config_of(name) for name in ("gemma3_text", "gpt2", "gpt_neox", "llama", "qwen3")},
}
for _name, _keys in {
    "opt": ("intermediate_size", "num_key_value_heads"),
    "recurrent_gemma": ("max_position_embeddings",),
}.items():
    CONFIGS[_name] = {key: one for key, one in CONFIGS[_name].items() if key not in _keys}
KEEP_NOTHING = {"openai-gpt", "rwkv"}
PROMPT = torch.randint(3, 100, (2, 9), generator=torch.Generator().manual_seed(1))


def make(name: str) -> HfCausalLm:
    torch.manual_seed(0)
    ids = {} if name == "rwkv" else {"pad_token_id": 0}
    model = HfCausalLm(config={**CONFIGS[name], **ids, "model_type": name}).eval()
    with torch.no_grad():
        for param in model.parameters():
            if param.dim() > 1:
                param.mul_(3)  # else all tokens are about as likely
    return model


@pytest.mark.parametrize("name", CONFIGS)
def test_tokens_are_those_of_transformers(name: str) -> None:
    model = make(name)
    assert (cache_name(model.model) is None) == (name in KEEP_NOTHING)
    model.model.generation_config.eos_token_id = None

    found = model.generate(PROMPT, 8, temperature=0.0)

    # The cache of rwkv gives other tokens than its forward pass.
    theirs = model.model.generate(
        PROMPT, max_new_tokens=8, do_sample=False, use_cache=name != "rwkv"
    )
    assert found.tolist() == theirs.tolist()
    assert torch.equal(found, model.generate(PROMPT, 8, temperature=0.0, use_cache=False))


def test_a_model_that_names_a_cache_but_keeps_nothing_is_given_all_tokens() -> None:
    model = make("llama")
    expected = model.generate(PROMPT, 6, temperature=0.0)
    forward = model.model.forward

    def forgetful(past_key_values: Any = None, **given: Any) -> Any:
        output = forward(**given | {"use_cache": False})
        output.past_key_values = None
        return output

    model.model.forward = forgetful

    assert torch.equal(model.generate(PROMPT, 6, temperature=0.0), expected)


@pytest.mark.parametrize("forced", [2, None])
def test_only_transformers_forces_the_last_token(forced: int | None) -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 100, "d_model": 16, "decoder_layers": 1, "decoder_attention_heads": 2}
    plain = {"is_decoder": True, "is_encoder_decoder": False, "forced_eos_token_id": forced}
    model = HfCausalLm(config={"model_type": "bart", **sizes, **plain}).eval()
    model.model.generation_config.eos_token_id = None

    found = model.generate(PROMPT, 8, temperature=0.0)

    theirs = model.model.generate(PROMPT, max_new_tokens=8, do_sample=False)
    assert torch.equal(found[:, :-1], theirs[:, :-1])
    assert (theirs[:, -1] == 2).all() == (forced == 2)
    assert torch.equal(found, theirs) == (forced is None)
