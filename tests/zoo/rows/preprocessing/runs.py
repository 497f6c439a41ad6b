"""Small runs of preprocessing: their input, settings and output."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from modelzoo_trainer.config.preprocessing import parse_settings
from modelzoo_trainer.zoo.rows.preprocessing.pipeline import preprocess
from tests.zoo.rows.toys import byte_tokenizer

FIRST = 10  # id of the first byte of the toy tokenizer
EOS = 2
PAD = 0
HOOK = "modelzoo_trainer.zoo.rows.preprocessing.hooks:text_read_hook"


def write_lines(path: Path, texts: list[str]) -> None:
    lines = [json.dumps({"text": text}) + "\n" for text in texts]
    path.write_text("".join(lines), encoding="utf-8")


def settings_for(folder: Path, *, setup="", processing="", dataset="", processes=1, out="out"):
    """Return the settings of a run on the folder `in`, with a tokenizer of bytes."""
    tokenizer = folder / "bytes"
    if not tokenizer.exists():
        byte_tokenizer(tokenizer)
    settings, notes = parse_settings(
        f"setup: {{mode: pretraining, data: {{type: local, source: {folder / 'in'}}}, "
        f"output_dir: {folder / out}, processes: {processes}, {setup}}}\n"
        f"processing: {{huggingface_tokenizer: {tokenizer}, max_seq_length: 8, "
        f"min_sequence_len: 1, read_hook: '{HOOK}', read_hook_kwargs: {{text_key: text}}, "
        f"{processing}}}\n"
        f"dataset: {{{dataset}}}\n"
    )
    assert notes == []
    return settings


def run(folder: Path, **options):
    """Preprocess, and return the facts of each folder."""
    return preprocess(settings_for(folder, **options), save_s=0)


def rows_of(folder: Path, name: str = "data"):
    """Return the rows of all files of a folder, in order."""
    import h5py
    import numpy as np

    found = []
    paths = sorted(folder.glob("*.h5"), key=lambda path: int(path.stem.rpartition("_")[2]))
    for path in paths:
        with h5py.File(path) as file:
            assert file.attrs["n_examples"] == len(file[name])
            found.append(file[name][:])
    return np.concatenate(found)


def text_of(ids) -> str:
    """Return the text of ids of the toy tokenizer, EOS as `|`."""
    import tokenizers

    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    decoder = tokenizers.decoders.ByteLevel()
    marked = [alphabet[one - FIRST] if one != EOS else "|" for one in ids]
    return str(decoder.decode(["".join(marked)]))


def tree_digest(folder: Path) -> str:
    """Return a digest of the names and bytes of all files in a folder."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            digest.update(path.relative_to(folder).as_posix().encode())
            digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()
