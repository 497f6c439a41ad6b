"""Every family on the command line: folders of transformers to our weights, and back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from modelzoo_trainer.checkpointing.weights import read_weights
from modelzoo_trainer.cli.command import main
from modelzoo_trainer.zoo.models.decoder import Decoder
from modelzoo_trainer.zoo.models.registry import model_class
from tests.zoo.hugging_face.conversions import randomized

pytestmark = pytest.mark.slow
transformers = pytest.importorskip("transformers", reason="needs transformers")

SIZES: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}
LONG = {"max_position_embeddings": 64}
LLAMA = LONG | {"intermediate_size": 48, "num_key_value_heads": 2}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", LLAMA),
    "mistral": ("MistralForCausalLM", LLAMA),
    "mixtral": ("MixtralForCausalLM", LLAMA | {"num_local_experts": 3}),
    "gemma2": ("Gemma2ForCausalLM", LLAMA | {"head_dim": 8}),
    "qwen2": ("Qwen2ForCausalLM", LLAMA),
    "qwen3": ("Qwen3ForCausalLM", LLAMA | {"head_dim": 8}),
    "gpt2": ("GPT2LMHeadModel", LONG),
    "gptj": ("GPTJForCausalLM", LONG | {"rotary_dim": 4}),
    "gpt_neox": ("GPTNeoXForCausalLM", LONG | {"intermediate_size": 48}),
    "gpt_neox, sequential": (
        "GPTNeoXForCausalLM",
        LONG | {"intermediate_size": 48, "use_parallel_residual": False},
    ),
    "falcon": ("FalconForCausalLM", LONG),
    "bloom": ("BloomForCausalLM", {}),
    "gpt_bigcode": ("GPTBigCodeForCausalLM", LONG),
}
TOKENS = torch.randint(99, (2, 20), generator=torch.Generator().manual_seed(0))


def make(name: str) -> Any:
    """Return a model of transformers, in eval mode."""
    cls = getattr(transformers, CASES[name][0])
    return randomized(cls(cls.config_class(**(SIZES | CASES[name][1]))))


def convert(*words: object) -> None:
    assert main(["checkpoint", "convert", *map(str, words)]) == 0


def ours_in(folder: Path) -> Decoder:
    """Return our decoder with the weights and the `model.yaml` of a folder, in eval mode."""
    arguments = yaml.safe_load((folder / "model.yaml").read_text(encoding="utf-8"))["model"]
    cls: Any = model_class(arguments.pop("name"))
    model: Decoder = cls(**arguments)
    model.load_state_dict(read_weights(folder))
    return model.eval()


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_folders_are_converted_both_ways(name: str, tmp_path: Path) -> None:
    theirs = make(name)
    expected = theirs(input_ids=TOKENS, use_cache=False).logits
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 1

    convert(tmp_path / "theirs", tmp_path / "ours", "--from", "hf")
    convert(tmp_path / "ours", tmp_path / "again", "--to", "hf", "--shard-size", "20KB")

    found = ours_in(tmp_path / "ours").logits(TOKENS)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    auto: Any = transformers.AutoModelForCausalLM
    again, report = auto.from_pretrained(tmp_path / "again", output_loading_info=True)
    assert type(again) is type(theirs)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert torch.equal(again(input_ids=TOKENS, use_cache=False).logits, expected)
    for key, tensor in again.state_dict().items():
        if name == "gemma2" and "norm" in key:  # 1 + w is rounded, but the same for both
            assert torch.equal(1 + tensor, 1 + theirs.state_dict()[key])
        else:
            assert torch.equal(tensor, theirs.state_dict()[key]), key


@torch.no_grad()
def test_norms_of_gemma2_keep_their_digits_in_half_precision(tmp_path: Path) -> None:
    theirs = make("gemma2").to(torch.bfloat16)
    theirs.save_pretrained(tmp_path / "theirs")

    convert(tmp_path / "theirs", tmp_path / "ours", "--from", "hf", "--dtype", "bfloat16")
    convert(tmp_path / "ours", tmp_path / "again", "--to", "hf", "--dtype", "bfloat16")

    norm = read_weights(tmp_path / "ours")["final_norm.weight"]
    assert norm.dtype == torch.float32
    assert torch.equal(norm, 1 + theirs.model.norm.weight.float())
    again: Any = transformers.AutoModelForCausalLM
    model = again.from_pretrained(tmp_path / "again", dtype=torch.bfloat16)
    torch.testing.assert_close(model.model.norm.weight, theirs.model.norm.weight)


@pytest.mark.parametrize("name", ["gpt2", "bloom", "falcon"])
@torch.no_grad()
def test_folders_of_the_model_without_its_output_layer_are_read(name: str, tmp_path: Path) -> None:
    """Names in the first releases of GPT-2 and BLOOM lack the prefix."""
    theirs = make(name)
    theirs.base_model.save_pretrained(tmp_path / "theirs")
    architectures = json.loads((tmp_path / "theirs" / "config.json").read_text())["architectures"]
    assert architectures == [type(theirs.base_model).__name__]

    convert(tmp_path / "theirs", tmp_path / "ours", "--from", "hf")

    expected = theirs(input_ids=TOKENS, use_cache=False).logits
    found = ours_in(tmp_path / "ours").logits(TOKENS)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
