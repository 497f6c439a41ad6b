"""Published encoder-decoder models and their text files, scaled down.

The rule, besides that of `published_scaling.py`:

| setting | becomes |
|---|---|
| `d_model`, `d_kv`, heads | 64, 16, 4 |
| `d_ff`, bases of muP | in proportion |
| `extra_ids` | at most 16 |
| inputs | 64 tokens |
| outputs | those of inputs of 64 tokens: 14 for spans, 64 for pairs of lines |
| `lm_loss_weight` | in inverse proportion to the outputs |
| data | bytes of the text of Python's standard library, as two hexadecimal digits each |
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

Plain = dict[str, Any]

_MODELS: Final = ("t5", "transformer")
_SIZES: Final = {"d_model": 64, "d_kv": 16, "num_heads": 4}
_LAYERS, _VOCABULARY, _EXTRA = 2, 320, 16
_INPUT, _SPANS = 64, 14
_DOCUMENT, _LINE = 150, 40  # tokens
_SPECIAL: Final = ("<pad>", "<s>", "</s>", "<unk>")


def is_seq2seq(section: Plain) -> bool:
    """Return whether a `model` or a dataloader is that of an encoder-decoder model."""
    return section.get("name") in _MODELS or "src_data_dir" in section


def scale_model(model: Plain) -> None:
    """Scale a `model` section in place."""
    width = _SIZES["d_model"] / model["d_model"]
    model["d_ff"] = max(8, round(model["d_ff"] * width))
    for name, ratio in (
        ("mup_base_d_model", width),
        ("mup_base_d_ff", width),
        ("mup_base_d_kv", _SIZES["d_kv"] / model["d_kv"]),
    ):
        if model.get(name):
            model[name] = max(1, round(model[name] * ratio))
    model |= _SIZES
    _limit(model, ("encoder_num_hidden_layers", "decoder_num_hidden_layers"), _LAYERS)
    _limit(model, ("src_vocab_size", "tgt_vocab_size"), _VOCABULARY)
    _limit(model, ("extra_ids",), _EXTRA)
    has_spans = bool(model.get("extra_ids"))
    outputs = _SPANS if has_spans else _INPUT
    if model.get("lm_loss_weight") and model.get("tgt_max_position_embeddings"):
        model["lm_loss_weight"] *= model["tgt_max_position_embeddings"] / outputs
    _set(model, {"src_max_position_embeddings": _INPUT, "tgt_max_position_embeddings": outputs})


def scale_loader(loader: Plain, folder: Path) -> None:
    """Scale a dataloader in place; its folder becomes `folder`, its vocabulary lies there."""
    has_spans = _has_spans(loader)
    loader["src_data_dir"] = str(folder)
    loader["src_vocab_file"] = str(folder / "vocab.txt")
    loader["src_max_sequence_length"] = _INPUT
    loader["tgt_max_sequence_length"] = _SPANS if has_spans else _INPUT
    _limit(loader, ("extra_ids",), _EXTRA)


def write_text(loader: Plain, tokens: list[int]) -> None:
    """Write the files of a scaled dataloader; `tokens` are bytes."""
    folder = Path(loader["src_data_dir"])
    folder.mkdir(parents=True, exist_ok=True)
    pieces = [f"{number:02x}" for number in range(256)]
    (folder / "vocab.txt").write_text("\n".join([*_SPECIAL, *pieces]) + "\n")
    length = _DOCUMENT if _has_spans(loader) else _LINE
    lines = [
        " ".join(f"{one:02x}" for one in tokens[start : start + length])
        for start in range(0, len(tokens), length)
    ]
    text = "\n".join(lines) + "\n"
    (folder / "a.txt").write_text(text)
    names = "a.txt"
    if not _has_spans(loader):  # the output is the input
        (folder / "b.txt").write_text(text)
        names = f"{folder / 'a.txt'} {folder / 'b.txt'}"
    (folder / "meta.dat").write_text(f"{names} {len(lines)}\n")


def _has_spans(loader: Plain) -> bool:
    name: str = loader["data_processor"]
    return name.lower().startswith("t5")


def _set(given: Plain, new: Plain) -> None:
    given |= {name: value for name, value in new.items() if given.get(name)}


def _limit(given: Plain, names: tuple[str, ...], most: int) -> None:
    given |= {name: min(given[name], most) for name in names if given.get(name)}
