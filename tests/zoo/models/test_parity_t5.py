"""Logits and gradients of T5 are those of transformers, with the same weights."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from modelzoo_trainer.zoo.models.t5.model import T5
from tests.zoo.models.t5_cases import SIZES, batch_of

pytestmark = pytest.mark.slow

NAMES = {
    "layer.0.layer_norm": "attention_norm",
    "layer.1.EncDecAttention": "cross_attention",
    "layer.0.SelfAttention": "attention",
    "DenseReluDense.wi": "ffn.up_proj",
    "DenseReluDense.wi_0": "ffn.gate_proj",
    "DenseReluDense.wi_1": "ffn.up_proj",
    "DenseReluDense.wo": "ffn.down_proj",
}


def translated(tensors: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield their tensors under our names."""
    plain = {"shared.weight": "token_embeddings.weight", "lm_head.weight": "lm_head.weight"}
    for name, value in tensors.items():
        if name in plain:
            yield plain[name], value
            continue
        stack, _, inner = name.partition(".")
        if inner == "final_layer_norm.weight":
            yield f"{stack}.final_norm.weight", value
        elif inner.endswith("relative_attention_bias.weight"):
            yield f"{stack}.position_bias.buckets.weight", value
        elif inner.startswith("block."):
            number, _, part = inner.removeprefix("block.").partition(".")
            yield f"{stack}.layers.{number}.{layer_name(part, stack)}.weight", value
        else:
            raise AssertionError(name)


def layer_name(part: str, stack: str) -> str:
    """Return our name of a part of their layer."""
    part = part.removesuffix(".weight")
    if part.endswith(".layer_norm"):
        names = ["attention_norm", "cross_attention_norm", "ffn_norm"]
        if stack == "encoder":
            names.remove("cross_attention_norm")
        return names[int(part.split(".")[1])]
    module, _, last = part.rpartition(".")
    if module in NAMES:
        return f"{NAMES[module]}.{last}_proj"
    return NAMES[".".join(part.split(".")[2:])]


V1, V1_1 = (True, "relu", "relu"), (False, "gated-gelu", "geglu")
"""Tied output layer, their feed-forward network, ours."""


def pair(is_tied: bool, theirs_is: str, ours_is: str, **changes: Any) -> tuple[nn.Module, T5]:
    """Return their model and ours, in eval mode and float64, with the same weights."""
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    config = transformers.T5Config(
        vocab_size=51,
        d_model=32,
        d_kv=16,
        d_ff=64,
        num_layers=2,
        num_decoder_layers=3,
        num_heads=4,
        layer_norm_epsilon=1e-5,
        feed_forward_proj=theirs_is,
        attn_implementation="eager",
    )
    # Their constructor ties the weights of T5 v1.1 as well, unlike the checkpoints of its authors.
    config.scale_decoder_outputs = config.tie_word_embeddings = is_tied
    if ours_is == "geglu":
        config.dense_act_fn = "gelu"  # exact, as in the Model Zoo; theirs is gelu_new
    theirs = transformers.T5ForConditionalGeneration(config).double().eval()
    theirs.encoder.embed_tokens = theirs.decoder.embed_tokens = theirs.shared
    settings: dict[str, Any] = {**SIZES, "decoder_num_hidden_layers": 3, **changes}
    ours = T5(**settings, encoder_nonlinearity=ours_is, share_embedding_weights=is_tied)
    ours = ours.double().eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, param in theirs.named_parameters():
            mean = 1.0 if "norm" in name else 0.0
            drawn = torch.randn(param.shape, generator=generator, dtype=torch.float64)
            param.copy_(drawn * 0.2 + mean)
        params = dict(ours.named_parameters())
        for name, value in translated(dict(theirs.named_parameters())):
            params.pop(name).copy_(value)
    assert not params
    return theirs, ours


def assert_same_gradients(theirs: nn.Module, ours: T5) -> None:
    grads = {name: param.grad for name, param in theirs.named_parameters()}
    found = dict(translated(grads))
    assert found.keys() == dict(ours.named_parameters()).keys()
    for name, expected in found.items():
        size = max(expected.abs().max().item(), 1.0)
        torch.testing.assert_close(
            ours.get_parameter(name).grad, expected, rtol=0, atol=1e-4 * size
        )


@pytest.mark.parametrize("case", [V1, V1_1, (True, "gated-silu", "swiglu")])
def test_logits_and_gradients_are_those_of_transformers(case: tuple[bool, str, str]) -> None:
    theirs, ours = pair(*case)
    assert ("lm_head.weight" in dict(ours.named_parameters())) != case[0]
    batch = batch_of()
    mask = batch["decoder_attention_mask"]
    keys = ("input_ids", "attention_mask", "decoder_input_ids")
    labels = torch.where(mask != 0, batch["labels"], -100)
    output = theirs(**{key: batch[key] for key in keys}, labels=labels)
    found = ours(batch)
    torch.testing.assert_close(found["logits"], output.logits, rtol=0, atol=1e-5)
    assert found["lm_loss"].item() == pytest.approx(output.loss.item(), rel=1e-5)
    torch.autograd.backward([output.logits.square().sum(), found["logits"].square().sum()])
    assert_same_gradients(theirs, ours)


def test_a_mask_of_the_outputs_changes_no_logits_that_count() -> None:
    theirs, ours = pair(*V1)
    batch = batch_of()
    counts = batch["decoder_attention_mask"] != 0
    keys = ("input_ids", "attention_mask", "decoder_input_ids", "decoder_attention_mask")
    expected = theirs(**{key: batch[key] for key in keys}).logits[counts]
    torch.testing.assert_close(ours(batch)["logits"][counts], expected, rtol=0, atol=1e-5)


def test_relative_positions_beyond_the_last_bucket_are_those_of_transformers() -> None:
    longest = {"src_max_position_embeddings": 150, "tgt_max_position_embeddings": 140}
    theirs, ours = pair(*V1, **longest)
    batch = batch_of(2, 150, 140)
    keys = ("input_ids", "attention_mask", "decoder_input_ids")
    output = theirs(**{key: batch[key] for key in keys})
    found = ours(batch)
    torch.testing.assert_close(found["logits"], output.logits, rtol=0, atol=1e-5)
    torch.autograd.backward([output.logits.square().mean(), found["logits"].square().mean()])
    assert_same_gradients(theirs, ours)


def test_a_smoothed_loss_and_its_gradients_are_those_of_transformers() -> None:
    from transformers.trainer_pt_utils import LabelSmoother

    theirs, ours = pair(*V1, label_smoothing=0.1, mlm_loss_scaling="num_masked", dropout_rate=0.0)
    batch = batch_of()
    labels = torch.where(batch["decoder_attention_mask"] != 0, batch["labels"], -100)
    keys = ("input_ids", "attention_mask", "decoder_input_ids")
    output = theirs(**{key: batch[key] for key in keys})
    expected = LabelSmoother(epsilon=0.1)(output, labels)
    found = ours.train()(batch)["loss"]
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)
    torch.autograd.backward([expected, found])
    assert_same_gradients(theirs, ours)
