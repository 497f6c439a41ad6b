"""Mixtral against that of Transformers: logits, gradients, load balancing loss."""

from typing import Any

import pytest
import torch
from torch import Tensor

from modelzoo_trainer.zoo.models.gpt2 import Gpt2

pytestmark = pytest.mark.slow

VOCAB, WIDTH, FILTER, HEADS, GROUPS, LAYERS, LENGTH, EXPERTS = 61, 32, 48, 4, 2, 2, 12, 4
COEF = 0.3
HALVES = {"gate": slice(None, FILTER), "up": slice(FILTER, None)}  # of their fused projection


def make(over: str) -> tuple[Any, Gpt2]:
    """Return their model and ours with the same random weights."""
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    torch.manual_seed(0)
    theirs = transformers.MixtralForCausalLM(
        transformers.MixtralConfig(
            vocab_size=VOCAB,
            hidden_size=WIDTH,
            intermediate_size=FILTER,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            num_key_value_heads=GROUPS,
            head_dim=WIDTH // HEADS,
            max_position_embeddings=LENGTH,
            rms_norm_eps=1e-5,
            rope_parameters={"rope_type": "default", "rope_theta": 1e6},
            num_local_experts=EXPERTS,
            num_experts_per_tok=2,
            router_aux_loss_coef=COEF,
            output_router_logits=True,
            attention_dropout=0.0,
            tie_word_embeddings=False,
            initializer_range=0.2,
            bos_token_id=0,
            eos_token_id=1,
        )
    )
    ours = Gpt2(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        filter_size=FILTER,
        num_hidden_layers=LAYERS,
        num_heads=HEADS,
        attention_module="multiquery_attention",
        extra_attention_params={"num_kv_groups": GROUPS},
        max_position_embeddings=LENGTH,
        position_embedding_type="rotary",
        rotary_dim=WIDTH // HEADS,
        rope_theta=1e6,
        norm_type="rmsnorm",
        nonlinearity="swiglu",
        share_embedding_weights=False,
        use_projection_bias_in_attention=False,
        use_ffn_bias_in_attention=False,
        use_ffn_bias=False,
        dropout_rate=0.0,
        attention_dropout_rate=0.0,
        moe={
            "num_experts": EXPERTS,
            "top_k": 2,
            "load_balancing_loss_coef": COEF,
            "load_balancing_loss_over": over,
        },
    )
    found = translated(dict(theirs.named_parameters()))
    assert found.keys() == ours.state_dict().keys()
    ours.load_state_dict(found)
    return theirs, ours


def translated(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return their weights or gradients under our names."""
    found = {
        "token_embeddings.weight": tensors["model.embed_tokens.weight"],
        "final_norm.weight": tensors["model.norm.weight"],
        "lm_head.weight": tensors["lm_head.weight"],
    }
    for number in range(LAYERS):
        own, their = f"layers.{number}", f"model.layers.{number}"
        for letter in "qkvo":
            name = f"{letter}_proj.weight"
            found[f"{own}.attention.{name}"] = tensors[f"{their}.self_attn.{name}"]
        found[f"{own}.attention_norm.weight"] = tensors[f"{their}.input_layernorm.weight"]
        found[f"{own}.ffn_norm.weight"] = tensors[f"{their}.post_attention_layernorm.weight"]
        found[f"{own}.ffn.router.weight"] = tensors[f"{their}.mlp.gate.weight"]
        for name, half in HALVES.items():
            fused = tensors[f"{their}.mlp.experts.gate_up_proj"]
            found[f"{own}.ffn.experts.{name}"] = fused[:, half]
        found[f"{own}.ffn.experts.down"] = tensors[f"{their}.mlp.experts.down_proj"]
    return found


def tokens(size: int) -> Tensor:
    return torch.randint(VOCAB, (size, LENGTH), generator=torch.Generator().manual_seed(size))


@pytest.mark.parametrize(("over", "size"), [("batch", 3), ("sequence", 1)])
def test_logits_loss_and_gradients_are_theirs(over: str, size: int) -> None:
    theirs, ours = make(over)
    ids = tokens(size)
    labels = ids.roll(-1, 1)

    expected = theirs(input_ids=ids)
    cross_entropy = torch.nn.functional.cross_entropy(
        expected.logits.flatten(0, 1), labels.flatten()
    )
    their_loss = cross_entropy + COEF * expected.aux_loss
    their_loss.backward()
    ours.requested_outputs = ("logits",)
    outputs = ours({"input_ids": ids, "labels": labels})
    outputs["loss"].backward()

    torch.testing.assert_close(outputs["logits"], expected.logits, rtol=0, atol=1e-5)
    torch.testing.assert_close(outputs["loss"], their_loss, rtol=1e-5, atol=1e-5)
    assert expected.aux_loss > 2
    grads = {name: param.grad for name, param in theirs.named_parameters()}
    assert all(grad is not None for grad in grads.values())
    found = {name: param.grad for name, param in ours.named_parameters()}
    torch.testing.assert_close(found, translated(grads), rtol=1e-4, atol=1e-4)


def test_over_sequences_the_loss_of_a_batch_is_another_one() -> None:
    ids = tokens(3)
    losses = {}
    for over in ("sequence", "batch"):
        _, ours = make(over)
        losses[over] = ours({"input_ids": ids, "labels": ids})["loss"].item()

    assert losses["sequence"] > losses["batch"] + 0.001
