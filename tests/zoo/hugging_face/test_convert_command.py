"""`checkpoint convert` against transformers: folders that it saves, and that it loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from modelzoo_trainer.cli.command import main
from modelzoo_trainer.zoo.conversion.engine import InMemory
from modelzoo_trainer.zoo.conversion.hugging_face import plan_export, write_export
from tests.zoo.conversion.test_scales import CASES, made

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
transformers = pytest.importorskip("transformers", reason="needs transformers")
tokenizers = pytest.importorskip("tokenizers", reason="needs tokenizers")


def convert(*words: object) -> int:
    return main(["checkpoint", "convert", *map(str, words)])


def save_tokenizer(folder: Path) -> None:
    words = ["<s>", "</s>", *(f"w{number}" for number in range(30))]
    vocab = {word: number for number, word in enumerate(words)}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="<s>"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="</s>"
    )
    tokenizer.save_pretrained(folder)


def make(folder: Path) -> Any:
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.5,
        bos_token_id=0,
        eos_token_id=1,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    model.save_pretrained(folder, max_shard_size="20KB")
    save_tokenizer(folder)
    return model


def generated(folder: Path) -> str:
    pipeline = transformers.pipeline("text-generation", model=str(folder))
    answer: str = pipeline("w3 w4", max_new_tokens=8, do_sample=False)[0]["generated_text"]
    return answer


def test_a_folder_goes_to_ours_and_back_and_gives_the_same_text(tmp_path: Path) -> None:
    model = make(tmp_path / "theirs")
    assert convert(tmp_path / "theirs", tmp_path / "ours", "--from", "hf") == 0
    assert convert(tmp_path / "ours", tmp_path / "again", "--to", "hf") == 0
    found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again").state_dict()
    assert all(torch.equal(found[name], one) for name, one in model.state_dict().items())
    assert generated(tmp_path / "again") == generated(tmp_path / "theirs")


def test_a_file_of_torch_save_is_read(tmp_path: Path) -> None:
    model = make(tmp_path / "theirs")
    for file in (tmp_path / "theirs").glob("model*"):
        file.unlink()
    torch.save(model.state_dict(), tmp_path / "theirs/pytorch_model.bin")
    words = ("--from", "hf", "--dtype", "bfloat16")
    assert convert(tmp_path / "theirs", tmp_path / "ours", *words) == 0
    assert convert(tmp_path / "ours", tmp_path / "again", "--to", "hf") == 0
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert again.dtype is torch.bfloat16


@pytest.mark.parametrize("case", ["mup", "norms of queries", "learned positions", "still tied"])
def test_transformers_computes_the_logits_of_a_model_with_factors(
    case: str, tmp_path: Path
) -> None:
    name, arguments = CASES[case]
    model = made(name, arguments)
    export = plan_export(InMemory(dict(model.state_dict())), model, where="the model", name=name)
    write_export(export, tmp_path / "hf")
    auto: Any = transformers.AutoModelForCausalLM
    theirs, report = auto.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not report["missing_keys"]
    tokens = torch.randint(0, 20, (2, 9))
    with torch.no_grad():
        torch.testing.assert_close(
            theirs.eval()(input_ids=tokens).logits, model.logits(tokens), atol=1e-5, rtol=1e-5
        )
