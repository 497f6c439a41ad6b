"""The files of a tokenizer: copied along, and compared with the vocabulary of the model."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from modelzoo_trainer.base.regular_files import require_inside
from modelzoo_trainer.errors import ConfigError, reason_of

GENERATION: Final = "generation_config.json"
_FILE: Final = "tokenizer.json"
_CONFIG: Final = "tokenizer_config.json"
_NAMES: Final = (
    *(_FILE, _CONFIG, "special_tokens_map.json", "added_tokens.json", "vocab.json"),
    *("vocab.txt", "merges.txt", "tokenizer.model", "spiece.model", "chat_template.jinja"),
    *("chat_template.json", GENERATION),
)
_VOCABULARIES: Final = (_FILE, "vocab.json", "vocab.txt", "tokenizer.model", "spiece.model")
_SPECIAL: Final = ("bos_token", "eos_token", "pad_token")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerFiles:
    """The files of a tokenizer, and generation_config.json.

    Attributes:
        content: What each file is to have, by name.
        token_ids: `bos_token_id`, `eos_token_id` and `pad_token_id`, as far as they are known; one
            id, or several.
        vocab_size: Number of ids, which is one more than the largest; None = not known, as of a
            SentencePiece model without tokenizer.json.
    """

    content: Mapping[str, bytes] = field(default_factory=dict)
    token_ids: Mapping[str, Any] = field(default_factory=dict)
    vocab_size: int | None = None

    def check(self, vocab_size: int, where: str) -> None:
        """Refuse a tokenizer with more ids than the model has embeddings.

        Raises:
            ConfigError: With both numbers.
        """
        if self.vocab_size is not None and self.vocab_size > vocab_size:
            raise ConfigError(
                f"The tokenizer in {where} has ids up to {self.vocab_size - 1}, but the model has "
                f"vocab_size {vocab_size}. Pass the tokenizer that the model was trained with: "
                f"--tokenizer DIR."
            )

    def without(self, name: str) -> TokenizerFiles:
        """Return the files without one of them."""
        content = {key: value for key, value in self.content.items() if key != name}
        return replace(self, content=content)

    def write(self, folder: Path) -> None:
        """Write the files to a folder."""
        for name, content in self.content.items():
            (folder / name).write_bytes(content)


def read_tokenizer(path: Path, *, is_required: bool = True) -> TokenizerFiles:
    """Read the files of a tokenizer.

    Args:
        path: A folder, or a `tokenizer.json`, which then gets a `tokenizer_config.json`.
        is_required: Whether a folder without a tokenizer is refused.

    Raises:
        ConfigError: If it does not exist, or a file in it is damaged, or a link out of it.
    """
    if path.is_file():
        config = {"tokenizer_class": "PreTrainedTokenizerFast"}
        content = {_FILE: path.read_bytes(), _CONFIG: json.dumps(config, indent=2).encode()}
        return _made(path.parent, content, path.name)
    if not path.is_dir():
        raise ConfigError(f"tokenizer: there is no folder or file {str(path)!r}.")
    found = [path / name for name in _NAMES if (path / name).is_file()]
    for file in found:
        require_inside(file, path)
    content = {file.name: file.read_bytes() for file in found}
    if is_required and not any(name in content for name in _VOCABULARIES):
        raise ConfigError(
            f"tokenizer: the folder {str(path)!r} has none of {', '.join(_VOCABULARIES)}. Pass "
            f"the folder that save_pretrained of a tokenizer wrote, or a tokenizer.json."
        )
    return _made(path, content, _FILE)


def _made(folder: Path, content: Mapping[str, bytes], name: str) -> TokenizerFiles:
    ids = _ids(folder, content, name)
    special: dict[str, Any] = {}
    for file in ("special_tokens_map.json", _CONFIG):
        if file in content:
            special |= _json(folder / file, content[file])
    ids |= dict(_decoded(special.get("added_tokens_decoder")))
    token_ids: dict[str, Any] = dict(_special_ids(special, ids))
    if GENERATION in content:
        generation = _json(folder / GENERATION, content[GENERATION])
        for token in _SPECIAL:
            token_ids[f"{token}_id"] = generation.get(f"{token}_id", token_ids.get(f"{token}_id"))
    return TokenizerFiles(
        content=content,
        token_ids=token_ids,
        vocab_size=max(ids.values()) + 1 if ids else None,
    )


def _ids(folder: Path, content: Mapping[str, bytes], name: str) -> dict[str, int]:
    """Return the id of each token; empty if they are not known."""
    if _FILE in content:
        return dict(_ids_in(_json(folder / name, content[_FILE])))
    if "vocab.json" in content:
        ids = dict(_plain_ids(_json(folder / "vocab.json", content["vocab.json"])))
        if "added_tokens.json" in content:
            added = _json(folder / "added_tokens.json", content["added_tokens.json"])
            ids |= dict(_plain_ids(added))
        return ids
    lines = content.get("vocab.txt", b"").decode("utf-8", "replace").splitlines()
    return {token: number for number, token in enumerate(lines)}


def _json(path: Path, text: bytes) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"tokenizer: {str(path)!r} cannot be read as JSON ({reason_of(error)}). Copy the file "
            f"again."
        ) from None
    if not isinstance(found, dict):
        raise ConfigError(f"tokenizer: {str(path)!r} must contain a JSON object.")
    return found


def _ids_in(tokenizer: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """Yield the tokens of a tokenizer.json with their ids."""
    model = tokenizer.get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocab, dict):
        yield from _plain_ids(vocab)
    elif isinstance(vocab, list):  # of Unigram: pairs of a token and its score
        yield from ((str(entry[0]), number) for number, entry in enumerate(vocab) if entry)
    for added in tokenizer.get("added_tokens") or []:
        if isinstance(added, dict) and type(added.get("id")) is int:
            yield str(added.get("content")), added["id"]


def _plain_ids(vocab: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    yield from ((token, number) for token, number in vocab.items() if type(number) is int)


def _decoded(tokens: object) -> Iterator[tuple[str, int]]:
    """Yield the tokens that tokenizer_config.json adds, with their ids."""
    for number, token in tokens.items() if isinstance(tokens, dict) else ():
        if isinstance(token, dict) and str(number).isdecimal():
            yield str(token.get("content")), int(number)


def _special_ids(special: Mapping[str, Any], ids: Mapping[str, int]) -> Iterator[tuple[str, int]]:
    for name in _SPECIAL:
        token = special.get(name)
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str) and token in ids:
            yield f"{name}_id", ids[token]
