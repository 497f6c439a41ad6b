"""What tests of the evaluation share: a tokenizer, tasks in local files, and models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import torch
import yaml

TEXT: Final = (
    "the cat sat on the mat and the dog ran to the red house. one two three four five. "
    "Question: what is it? Answer: yes it is. Answer: no it is not.\n"
)
CHOICE, WRITE, PERPLEXITY = "tiny_choice", "tiny_write", "tiny_perplexity"
GROUP: Final = "tiny_group"
VOCAB: Final = 320
LIMIT: Final = 48
SIZES: Final[dict[str, Any]] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": LIMIT,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 1,
}


def make_tokenizer(folder: Path) -> Path:
    """Write a tokenizer with fewer tokens than `VOCAB`, and return its folder."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|end|>", "<|pad|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT] * 4, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|pad|>", bos_token="<|end|>"
    )
    fast.chat_template = _CHAT
    fast.save_pretrained(folder)
    return folder


def make_tasks(folder: Path) -> Path:
    """Write tasks with their data, and return their folder."""
    folder.mkdir(parents=True)
    words = TEXT.replace("\n", "").split()
    choices = [
        {
            "question": " ".join(words[idx : idx + 3 + 5 * (idx % 4)]),
            "options": [words[idx + 1], words[-idx - 1], "the red house", "dog"][: 2 + idx % 3],
            "answer": idx % 2,
        }
        for idx in range(14)
    ]
    prompts = [
        {"prompt": " ".join(words[idx : idx + 1 + idx % 5]), "target": words[idx + 1]}
        for idx in range(9)
    ]
    texts = [{"text": " ".join(words[idx:] * 4)} for idx in range(3)]
    _write(folder, CHOICE, choices, _CHOICE)
    _write(folder, WRITE, prompts, _WRITE)
    _write(folder, PERPLEXITY, texts, _PERPLEXITY)
    group = {"group": GROUP, "task": [CHOICE], "aggregate_metric_list": [{"metric": "acc"}]}
    (folder / "group.yaml").write_text(yaml.safe_dump(group), encoding="utf-8")
    return folder


def _write(folder: Path, name: str, rows: list[dict[str, Any]], task: dict[str, Any]) -> None:
    data = folder / f"{name}.jsonl"
    data.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    own = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {
            "data_files": {"test": str(data)},
            "cache_dir": str(folder / "cache"),
        },
        "test_split": "test",
        "fewshot_split": "test",
        "metadata": {"version": 1.0},
    }
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(own | task), encoding="utf-8")


_CHAT: Final = (
    "{% for message in messages %}{{ message.role[0] }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}a: {% endif %}"
)
_MEAN: Final[dict[str, Any]] = {"aggregation": "mean", "higher_is_better": True}
_CHOICE: Final = {
    "output_type": "multiple_choice",
    "doc_to_text": "{{question}} ",
    "doc_to_choice": "{{options}}",
    "doc_to_target": "answer",
    "metric_list": [{"metric": "acc", **_MEAN}, {"metric": "acc_norm", **_MEAN}],
}
_WRITE: Final = {
    "output_type": "generate_until",
    "doc_to_text": "{{prompt}}",
    "doc_to_target": "{{target}}",
    "generation_kwargs": {"until": ["\n", " t"], "max_gen_toks": 12, "do_sample": False},
    "metric_list": [{"metric": "exact_match", **_MEAN}],
}
_PERPLEXITY: Final = {
    "output_type": "loglikelihood_rolling",
    "doc_to_text": "",
    "doc_to_target": "{{text}}",
    "metric_list": [{"metric": "word_perplexity"}, {"metric": "byte_perplexity"}],
}


def make_llama(folder: Path, tokenizer: Path, seed: int = 0) -> Any:
    """Write a small model of transformers with its tokenizer, and return it."""
    import transformers

    torch.manual_seed(seed)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    model.save_pretrained(folder)
    for path in tokenizer.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return model


def our_llama(folder: Path, **settings: Any) -> Any:
    """Return the decoder of this package with the weights of a folder."""
    from safetensors.torch import load_file

    from modelzoo_trainer.zoo.conversion.family import family_named
    from tests.zoo.hugging_face.conversions import InMemory, ours_from

    family = family_named("llama", where="the test")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    tensors = load_file(folder / "model.safetensors")
    model = ours_from(family, config, InMemory(tensors))
    if not settings:
        return model
    arguments = family.read_config(config, "config.json") | settings
    other = type(model)(**arguments)
    other.load_state_dict(model.state_dict())
    return other


def language_batches(num: int) -> list[dict[str, torch.Tensor]]:
    """Return batches for training."""
    generator = torch.Generator().manual_seed(3)
    rows = [torch.randint(0, 300, (2, 17), generator=generator) for _ in range(num)]
    return [{"input_ids": row[:, :-1], "labels": row[:, 1:]} for row in rows]
