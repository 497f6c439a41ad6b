"""Rows that `data_preprocess` makes for published dataloaders of token sequences, scaled down."""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Final

from benchmarks.published_scaling import BATCH, LENGTH, STEPS

_NUM_ROWS: Final = (STEPS + 5) * BATCH
_NUM_MODULES: Final = 8
"""Between the first modules of folders."""
_END: Final = "<eos>"
_HOOKS: Final = "modelzoo_trainer.zoo.rows.preprocessing.hooks"
_ANSWERS: Final = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"
"""Turns without roles: a row has room for a line and its answer."""
_SETTINGS: Final = """\
setup: {{mode: {mode}, processes: 1, output_dir: {out}, data: {{type: local, source: {texts}}}}}
processing:
  huggingface_tokenizer: {tokenizer}
  tokenizer_params: {{eos_token: <eos>}}
  read_hook: "{hook}"
  read_hook_kwargs: {keys}
  use_ftfy: false
  max_seq_length: {length}
  write_chunk_size: 64
  shuffle: true
dataset: {dataset}
"""


def write_rows(folder: Path, loader: dict[str, Any], number: int) -> None:
    """Preprocess modules of the standard library, a token for each byte, to HDF5 rows.

    Args:
        folder: Where the rows will be; the text and the tokenizer are in a folder beside it.
        loader: Settings of the dataloader: `data_processor` and `use_vsl`.
        number: Of the folder, so that folders of a mixture have different text.
    """
    from modelzoo_trainer.config.preprocessing import parse_settings
    from modelzoo_trainer.zoo.rows.preprocessing import pipeline

    texts = folder.with_name(f"{folder.name}_text")
    texts.mkdir(parents=True)
    tokenizer = texts / "tokenizer.json"
    _save_tokenizer(tokenizer)
    is_dpo = "Dpo" in loader["data_processor"]
    with (texts / "documents.jsonl").open("w", encoding="utf-8") as file:
        documents = _pairs(number) if is_dpo else _modules(number)
        file.writelines(f"{json.dumps(one)}\n" for one in documents)
    dataset: dict[str, Any] = {"use_vsl": True} if loader.get("use_vsl") else {}
    keys = {"text_key": "text"}
    if is_dpo:
        dataset = {"chat_template": _ANSWERS}
        keys = {f"{one}_key": one for one in ("prompt", "chosen", "rejected")}
    settings, _ = parse_settings(
        _SETTINGS.format(
            mode="dpo" if is_dpo else "pretraining",
            out=folder,
            texts=texts / "documents.jsonl",
            tokenizer=tokenizer,
            hook=f"{_HOOKS}:{'dpo' if is_dpo else 'text'}_read_hook",
            keys=json.dumps(keys),
            dataset=json.dumps(dataset),
            length=LENGTH,
        )
    )
    pipeline.preprocess(settings)


def _modules(number: int) -> Iterator[dict[str, str]]:
    """Yield modules until their bytes fill all rows."""
    left = _NUM_ROWS * (LENGTH + 1)
    for text in _texts(number):
        yield {"text": text}
        left -= len(text.encode())
        if left < 0:
            return


def _pairs(number: int) -> Iterator[dict[str, str]]:
    """Yield lines of code with the line that follows, and with that line backwards."""
    lines = (line.strip() for text in _texts(number) for line in text.splitlines())
    kept = (line for line in lines if line.isascii() and LENGTH // 8 < len(line) < LENGTH // 3)
    for prompt, chosen in islice(zip(kept, kept, strict=False), _NUM_ROWS):
        yield {"prompt": prompt, "chosen": chosen, "rejected": chosen[::-1]}


def _texts(number: int) -> Iterator[str]:
    """Yield modules in alphabetical order, each `number` beginning with others."""
    folder = Path(sysconfig.get_path("stdlib"))
    for path in sorted(folder.glob("*.py"))[number * _NUM_MODULES :]:
        yield path.read_text(encoding="utf-8", errors="replace")


def _save_tokenizer(path: Path) -> None:
    """Save a tokenizer with a token for each byte and one for the end of a document."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({one: i for i, one in enumerate([*alphabet, _END])}, []))
    tokenizer.add_special_tokens([_END])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(path))
