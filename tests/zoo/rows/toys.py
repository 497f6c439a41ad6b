"""Toy tokenizers, settings and documents for the modes."""

from __future__ import annotations

import json

import numpy as np
import pytest

from modelzoo_trainer.config.preprocessing import parse_settings
from modelzoo_trainer.zoo.rows.interface import Document, Stats

tokenizers = pytest.importorskip("tokenizers")

PAD, BOS, EOS, SEP, MASK, PREFIX, MIDDLE, SUFFIX = range(8)
SPECIAL = ["<pad>", "<bos>", "<eos>", "<|sep|>", "<mask>", "<pre>", "<mid>", "<suf>"]
CHAT = ["<|im_start|>", "<|im_end|>", "system", "user", "assistant"]  # 8 to 12
NAMES = {
    "pad_token": "<pad>",
    "bos_token": "<bos>",
    "eos_token": "<eos>",
    "mask_token": "<mask>",
}


def word_tokenizer(folder, config=NAMES, *, adds_bos=False, adds_eos=False):
    """Write a tokenizer whose words are w20 to w199, with those numbers as ids."""
    words = {word: number for number, word in enumerate([*SPECIAL, *CHAT])}
    words |= {f"w{number}": number for number in range(20, 200)} | {"<unk>": 19}
    engine = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    engine.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    engine.add_special_tokens([*SPECIAL, *CHAT[:2]])
    if adds_bos or adds_eos:
        around = ("<bos> " if adds_bos else "") + "$A" + (" <eos>" if adds_eos else "")
        used = [(name, words[name]) for name in around.split() if name != "$A"]
        engine.post_processor = tokenizers.processors.TemplateProcessing(
            single=around, special_tokens=used
        )
    folder.mkdir(exist_ok=True)
    engine.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return str(folder)


def byte_tokenizer(folder):
    """Write a tokenizer of bytes, after the special tokens."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    letters = {letter: number for number, letter in enumerate([*SPECIAL, *CHAT[:2], *alphabet])}
    engine = tokenizers.Tokenizer(tokenizers.models.BPE(letters, []))
    engine.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.decoder = tokenizers.decoders.ByteLevel()
    engine.add_special_tokens([*SPECIAL, *CHAT[:2]])
    folder.mkdir(exist_ok=True)
    engine.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(NAMES))
    return str(folder)


def settings_of(mode="finetuning", processing="", dataset=""):
    """Return settings with one line of YAML in each section; no document is too short."""
    shortest = "" if "min_sequence_len" in processing else "min_sequence_len: 0, "
    settings, notes = parse_settings(
        f"setup: {{mode: {mode}, data: {{type: local, source: x}}}}\n"
        f"processing: {{{shortest}{processing}}}\n"
        f"dataset: {{{dataset}}}\n"
    )
    assert notes == []
    return settings


def documents_of(*contents):
    """Return documents with the given turns: (role, text) pairs, or a text."""
    made = []
    for number, content in enumerate(contents):
        pairs = [("", content)] if isinstance(content, str) else content
        turns = [{"type": role, "content": [{"text": text}]} for role, text in pairs]
        made.append(Document("a.jsonl", number, turns))
    return made


def encoded(mode, documents, length):
    """Return the rows of documents and their counts."""
    stats = Stats()
    rows = mode.encode(documents, length, stats)
    assert {array.dtype for array in rows.arrays.values()} == {np.dtype(np.int32)}
    assert rows.arrays["data"].shape[1:] == (len(mode.features), length)
    assert len(rows.lengths) == len(rows.arrays["data"])
    return rows, stats


def named(mode, rows, index=0):
    """Return the features of a row as lists, by name."""
    return dict(zip(mode.features, rows.arrays["data"][index].tolist(), strict=True))


def text(*numbers):
    """Return the text with these tokens."""
    return " ".join(f"w{number}" for number in numbers)
