"""Make what the files in this folder train: a tokenizer, a small language model, and data.

    python configs/fine_tuning/make_inputs.py

Everything comes from the Python code of the running Python's standard library, in about a minute on
two cores. It writes, below runs/fine_tuning/inputs (or the folder that is given):

* `base`: a Llama of 0.8 million parameters, trained on the code, with its tokenizer and a chat
  template, as a folder of Hugging Face.
* `chats`, `preferences`, `lines`: JSON lines for training and validation. No definition, and no
  line, is in both.
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

CHAT_TEMPLATE: Final = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL: Final = ("<|end|>", "<|user|>", "<|assistant|>", "<|system|>")
VOCAB_SIZE, LENGTH, NUM_STEPS = 768, 128, 500
VAL_PERCENT: Final = 10


def library_files() -> list[Path]:
    """Return the files of the standard library, without its tests."""
    root = Path(sysconfig.get_path("stdlib"))
    return [
        path
        for path in sorted(root.rglob("*.py"))
        if not {"test", "tests", "site-packages", "idlelib", "lib2to3"} & set(path.parts)
    ]


def definitions(text: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the first line of each function that has two to five parameters, and their names."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            names = [one.arg for one in (*node.args.posonlyargs, *node.args.args)]
            names = [name for name in names if name not in ("self", "cls")]
            if 2 <= len(names) <= 5:
                yield f"def {node.name}({ast.unparse(node.args)}):", names


def kinds_of_lines(text: str) -> Iterator[tuple[str, int]]:
    """Yield lines with what they are: 0 code, 1 a comment, 2 part of a docstring."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return
    inside: set[int] = set()
    for node in ast.walk(tree):
        value = node.value if isinstance(node, ast.Expr) else None
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            inside.update(range(value.lineno, (value.end_lineno or value.lineno) + 1))
    for number, line in enumerate(text.splitlines(), start=1):
        stripped = line.strip().strip("\"'# ")
        if 20 <= len(stripped) <= 100:
            kind = 2 if number in inside else 1 if line.strip().startswith("#") else 0
            yield stripped, kind


def write_rows(folder: Path, rows: Sequence[dict[str, Any]], seed: int) -> None:
    """Write rows as JSON lines: nine of ten for training, the others for validation."""
    folder.mkdir(parents=True, exist_ok=True)
    order = list(rows)
    random.Random(seed).shuffle(order)
    num = len(order) * VAL_PERCENT // 100
    for name, part in (("val", order[:num]), ("train", order[num:])):
        text = "".join(f"{json.dumps(row)}\n" for row in part)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")
        print(f"{folder / name}.jsonl: {len(part)} rows")


def make_data(folder: Path, texts: Sequence[str]) -> None:
    """Write the data of the three tasks."""
    found = {code: names for text in texts for code, names in definitions(text) if len(code) < 90}
    chats, preferences = [], []
    for code, names in found.items():
        answer = ", ".join(names)
        question = {"role": "user", "content": f"Which parameters? {code}"}
        chats.append({"messages": [question, {"role": "assistant", "content": answer}]})
        preferences.append(
            {"prompt": f"Which parameters? {code}", "chosen": f"{answer}.", "rejected": answer}
        )
    write_rows(folder / "chats", chats, 1)
    write_rows(folder / "preferences", preferences, 1)
    by_kind: list[list[str]] = [[], [], []]
    kinds = dict(pair for text in texts for pair in kinds_of_lines(text))
    for line, kind in kinds.items():
        by_kind[kind].append(line)
    size = min(3000, *map(len, by_kind))
    chosen = [random.Random(2).sample(lines, size) for lines in by_kind]
    lines = [{"text": line, "label": kind} for kind in range(3) for line in chosen[kind]]
    write_rows(folder / "lines", lines, 2)


def make_tokenizer(folder: Path, texts: Sequence[str]) -> Any:
    """Train a byte-level BPE and write it as transformers does."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=SPECIAL[0],
        pad_token=SPECIAL[0],
        chat_template=CHAT_TEMPLATE,
        model_max_length=LENGTH,
    ).save_pretrained(folder)
    return tokenizer


def train_base(folder: Path, tokenizer: Any, texts: Sequence[str]) -> None:
    """Train a small Llama on the code, and write it as transformers does."""
    import torch
    from torch.utils.data import DataLoader
    from transformers import LlamaConfig, LlamaForCausalLM

    from modelzoo_trainer import Trainer, TrainingLoop
    from modelzoo_trainer.optim import AdamW

    end = tokenizer.token_to_id(SPECIAL[0])
    ids = [token for one in tokenizer.encode_batch(list(texts)) for token in (*one.ids, end)]
    rows = torch.tensor(ids[: len(ids) // LENGTH * LENGTH]).view(-1, LENGTH)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=end,
    )
    trainer = Trainer(
        model=lambda: LlamaForCausalLM(config),
        optimizer=lambda model: AdamW(model, lr=2e-3, weight_decay=0.1),
        schedulers=lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=2e-3, total_steps=NUM_STEPS, pct_start=0.1
        ),
        loop=TrainingLoop(num_steps=NUM_STEPS),
        seed=1,
        model_dir=folder.parent / "base_run",
        progress="lines",
    )
    samples = [{"input_ids": row, "labels": row} for row in rows]
    trainer.fit(DataLoader(samples, batch_size=16, shuffle=True), ckpt_path=None)
    trainer.model.save_pretrained(folder)


def main() -> None:
    """Make all inputs."""
    parser = argparse.ArgumentParser(description="Make the inputs of configs/fine_tuning.")
    parser.add_argument("folder", nargs="?", type=Path, default=Path("runs/fine_tuning/inputs"))
    folder: Path = parser.parse_args().folder
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in library_files()]
    make_data(folder, texts)
    tokenizer = make_tokenizer(folder / "base", texts[::4])
    train_base(folder / "base", tokenizer, random.Random(3).sample(texts, 150))


if __name__ == "__main__":
    main()
