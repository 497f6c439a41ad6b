"""The tokenizer of a run: from its settings to token ids, places in the text and special ids."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module as import_library
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, NamedTuple

from modelzoo_trainer.base.user_modules import import_module
from modelzoo_trainer.errors import ConfigError, reason_of, suggest
from modelzoo_trainer.zoo.rows.chat import CHATML, ChatTemplate
from modelzoo_trainer.zoo.rows.sections import PreprocessingSettings

SPECIAL: Final = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
_END_OF_TEXT: Final = "<|endoftext|>"
HUB_FILES: Final = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)
"""Files of a repository of the Hub that are downloaded for its tokenizer."""
_INSTALL: Final = 'pip install "modelzoo-trainer[preprocess]"'


class Encoded(NamedTuple):
    """Token ids of a text, and the characters [start, stop) that each stands for."""

    ids: list[int]
    spans: list[tuple[int, int]]


@dataclass(frozen=True, kw_only=True)
class Tokenizer:
    """A tokenizer of the `tokenizers` library, or a user's, with its special tokens.

    It can be pickled.

    Args:
        engine: `tokenizers.Tokenizer`, or an object with `encode(text)` and `decode(ids)`.
        tokens: Text of the special tokens, by the names in `SPECIAL`; those that there are.
        eos_id: Ends a document; None = the tokenizer has no such token.
        pad_id: Fills rows; None = neither pad nor eos is known.
        vocab_size: One more than the largest id.
        template: Source of its chat template; None = it has none.
    """

    engine: Any
    tokens: Mapping[str, str] = field(default_factory=dict)
    eos_id: int | None
    pad_id: int | None
    vocab_size: int
    template: str | None = None

    def encode_batch(
        self, texts: Sequence[str], *, add_special_tokens: bool = True
    ) -> list[list[int]]:
        """Return the ids of texts.

        Args:
            texts: Any number.
            add_special_tokens: Add what the tokenizer puts around a text, such as BOS.
        """
        if _is_library(self.engine):
            found = self._fast(list(texts), add_special_tokens=add_special_tokens)
            return [one.ids for one in found]
        return [[int(token) for token in self.engine.encode(text)] for text in texts]

    def encode_with_spans(
        self,
        texts: Sequence[str],
        *,
        add_special_tokens: bool,
        cuts: Sequence[Sequence[int]] = (),
    ) -> list[Encoded]:
        """Return the ids of texts and their places.

        Args:
            texts: Any number.
            add_special_tokens: As for `encode_batch`; they stand for no characters: (0, 0).
            cuts: For each text, increasing places where a user's tokenizer, which tells no
                places, encodes the parts separately.
        """
        if _is_library(self.engine):
            found = self.engine.encode_batch(list(texts), add_special_tokens=add_special_tokens)
            return [Encoded(one.ids, one.offsets) for one in found]
        return [
            self._in_parts(text, cuts[index] if cuts else ()) for index, text in enumerate(texts)
        ]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, with special tokens as their names."""
        if _is_library(self.engine):
            return str(self.engine.decode(list(ids), skip_special_tokens=False))
        return str(self.engine.decode(list(ids)))

    def id_of(self, token: str) -> int | None:
        """Return the id of a token, or None if the vocabulary lacks it."""
        if _is_library(self.engine):
            found = self.engine.token_to_id(token)
            return None if found is None else int(found)
        ids = self.encode_batch([token], add_special_tokens=False)[0]
        return ids[0] if len(ids) == 1 else None

    def added_tokens(self) -> list[str]:
        """Return the texts of tokens that are not part of words, such as `<|im_end|>`."""
        if not _is_library(self.engine):
            return list(self.tokens.values())
        added = self.engine.get_added_tokens_decoder().values()
        return [one.content for one in added]

    def special_id(self, name: str) -> int | None:
        """Return the id of a special token, by its name in `SPECIAL`, or None."""
        text = self.tokens.get(name)
        return None if text is None else self.id_of(text)

    def chat_template(self, source: str | None = None) -> ChatTemplate:
        """Return a chat template: the given one, else the tokenizer's own, else ChatML."""
        return ChatTemplate(source or self.template or CHATML, self.tokens)

    def around(self) -> tuple[list[int], list[int]]:
        """Return the ids that the tokenizer puts before and after a text."""
        plain, full = (self.encode_batch(["a"], add_special_tokens=b)[0] for b in (False, True))
        starts = range(len(full) - len(plain) + 1)
        start = next((i for i in starts if full[i : i + len(plain)] == plain), 0)
        return full[:start], full[start + len(plain) :]

    @property
    def _fast(self) -> Any:
        return getattr(self.engine, "encode_batch_fast", self.engine.encode_batch)

    def _in_parts(self, text: str, cuts: Iterable[int]) -> Encoded:
        encoded = Encoded([], [])
        places = [0, *cuts, len(text)]
        for start, stop in pairwise(places):
            if start < stop:
                ids = self.encode_batch([text[start:stop]], add_special_tokens=False)[0]
                encoded.ids.extend(ids)
                encoded.spans.extend([(start, stop)] * len(ids))
        return encoded


def tokenizer_of(settings: PreprocessingSettings) -> Tokenizer:
    """Return the tokenizer of a preprocessing file; see `make_tokenizer`."""
    given = settings.processing
    return make_tokenizer(
        huggingface_tokenizer=given.huggingface_tokenizer,
        custom_tokenizer=given.custom_tokenizer,
        tokenizer_params=given.tokenizer_params,
        eos_id=given.eos_id,
        pad_id=given.pad_id,
    )


def make_tokenizer(
    *,
    huggingface_tokenizer: str | None = None,
    custom_tokenizer: str | None = None,
    tokenizer_params: Mapping[str, Any] | None = None,
    eos_id: int | None = None,
    pad_id: int | None = None,
) -> Tokenizer:
    """Return the tokenizer for the keys of `processing`.

    Args:
        huggingface_tokenizer: A folder, a tokenizer.json file, or a name on the hub.
        custom_tokenizer: `gpt2tokenizer`, `neoxtokenizer`, or `module:Class`.
        tokenizer_params: gpt2: `encoder_file` (the vocabulary) and `vocab_file` (the merges);
            neox: `encoder_file`; huggingface: special tokens, `revision`, `token`; else the
            arguments of the class.
        eos_id: Replaces the tokenizer's; also its pad id unless `pad_id` is given.
        pad_id: Replaces the tokenizer's.

    Raises:
        ConfigError: If it cannot be loaded, or an id is not one of its vocabulary.
    """
    if (huggingface_tokenizer is None) == (custom_tokenizer is None):
        raise ConfigError(
            "processing: give one of huggingface_tokenizer and custom_tokenizer; got "
            f"{'neither' if custom_tokenizer is None else 'both'}."
        )
    params = dict(tokenizer_params or {})
    if huggingface_tokenizer is not None:
        made = _huggingface(huggingface_tokenizer, params)
    elif custom_tokenizer in _CUSTOM:
        made = _CUSTOM[custom_tokenizer](params)
    else:
        made = _users_own(str(custom_tokenizer), params)
    for name, number in {"eos_id": eos_id, "pad_id": pad_id}.items():
        if number is not None and not 0 <= number < made.vocab_size:
            raise ConfigError(
                f"processing.{name}: {number} is not an id of the tokenizer, which has "
                f"{made.vocab_size} tokens: 0 to {made.vocab_size - 1}."
            )
    if custom_tokenizer == "gpt2tokenizer" and pad_id not in (None, eos_id, made.pad_id):
        raise ConfigError(
            f"processing.pad_id: {pad_id} is given, but gpt2tokenizer pads with its end of text "
            f"({made.pad_id}). Omit pad_id."
        )
    if eos_id is not None:
        made = replace(made, eos_id=eos_id, pad_id=eos_id)
    return made if pad_id is None else replace(made, pad_id=pad_id)


def _huggingface(name: str, params: dict[str, Any]) -> Tokenizer:
    given: dict[str, Any] = {key: params.pop(key) for key in SPECIAL if key in params}
    access: dict[str, Any] = {
        key: params.pop(key) for key in ("revision", "token") if key in params
    }
    for key in params:
        known = (*SPECIAL, "revision", "token")
        raise ConfigError(f"processing.tokenizer_params.{key}: unknown. {suggest(key, known)}")
    path = Path(name).expanduser()
    return tokenizer_at(
        path if path.exists() else _downloaded(name, access),
        given,
        key="processing.huggingface_tokenizer",
    )


def tokenizer_at(path: Path, tokens: Mapping[str, str], *, key: str) -> Tokenizer:
    """Return the tokenizer of a tokenizer.json file, or of a folder that contains one.

    Args:
        path: The file or folder; a folder also has the special tokens and the chat template.
        tokens: Special tokens by the names in `SPECIAL`, which replace the folder's.
        key: The setting that gives it, for messages.

    Raises:
        ConfigError: If it cannot be loaded, or a special token is not one of its tokens.
    """
    if path.is_file():
        return _from_engine(_read(path), tokens)
    config = _json(path / "tokenizer_config.json")
    texts = _token_texts(_json(path / "special_tokens_map.json"), config, tokens)
    made = _from_engine(_engine_of(path, key), texts)
    return replace(made, template=_template_of(path, config))


def _engine_of(folder: Path, key: str) -> Any:
    if (folder / "tokenizer.json").is_file():
        return _read(folder / "tokenizer.json")
    try:  # converts older files; it imports torch, so only where there is nothing else
        auto = import_library("transformers").AutoTokenizer
        engine = auto.from_pretrained(str(folder)).backend_tokenizer
    except Exception as error:
        raise ConfigError(
            f"{key}: {str(folder)!r} has no tokenizer.json, and transformers cannot convert its "
            f"files: {reason_of(error)}. Save a fast tokenizer there: "
            "AutoTokenizer.from_pretrained(...).save_pretrained(folder)."
        ) from error
    return _plain(engine)


def _downloaded(name: str, access: Mapping[str, Any]) -> Path:
    try:
        hub = import_library("huggingface_hub")
        return Path(hub.snapshot_download(name, allow_patterns=list(HUB_FILES), **access))
    except Exception as error:  # no network, no such name, no access
        raise ConfigError(
            f"processing.huggingface_tokenizer: {name!r} is not a folder or file, and cannot be "
            f"fetched from the hub: {reason_of(error)}"
        ) from error


def _gpt2(params: dict[str, Any]) -> Tokenizer:
    vocabulary, merges = _files(params, "gpt2tokenizer", ("encoder_file", "vocab_file"))
    library = _library()
    try:
        model = library.models.BPE.from_file(str(vocabulary), str(merges))
    except Exception as error:  # the library raises nothing narrower
        raise ConfigError(
            f"processing.tokenizer_params: encoder_file {str(vocabulary)!r} and vocab_file "
            f"{str(merges)!r} cannot be loaded: {error}. encoder_file is the vocabulary (JSON), "
            "vocab_file the merges (text)."
        ) from error
    engine = library.Tokenizer(model)
    engine.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.decoder = library.decoders.ByteLevel()
    engine.add_special_tokens([_END_OF_TEXT])
    return _from_engine(engine, {"eos_token": _END_OF_TEXT, "pad_token": _END_OF_TEXT})


def _neox(params: dict[str, Any]) -> Tokenizer:
    (path,) = _files(params, "neoxtokenizer", ("encoder_file",))
    engine = _read(path)
    tokens = {"eos_token": _END_OF_TEXT, "pad_token": "<|padding|>"}
    return _from_engine(
        engine, {k: v for k, v in tokens.items() if engine.token_to_id(v) is not None}
    )


_CUSTOM: Final = {"gpt2tokenizer": _gpt2, "neoxtokenizer": _neox}


def _users_own(path: str, params: Mapping[str, Any]) -> Tokenizer:
    module_name, separator, name = path.partition(":")
    if not separator:
        raise ConfigError(
            f"processing.custom_tokenizer: {path!r} is not known. Use {', '.join(_CUSTOM)} or "
            "module:Class."
        )
    try:
        made = getattr(import_module(module_name, "Write module:Class."), name, None)
    except ConfigError as error:
        raise ConfigError(f"processing.custom_tokenizer: {error}") from None
    if made is None:
        raise ConfigError(f"processing.custom_tokenizer: {module_name} has no {name!r}.")
    engine = made(**params)
    for needed in ("encode", "decode", "eos_token_id", "pad_token_id"):
        if not hasattr(engine, needed):
            raise ConfigError(
                f"processing.custom_tokenizer: {path} has no {needed!r}. It needs encode(text), "
                "decode(ids), eos_token_id and pad_token_id."
            )
    size = getattr(engine, "vocab_size", None)
    size = len(engine) if size is None else size
    tokens = {key: getattr(engine, key, None) for key in SPECIAL}
    return Tokenizer(
        engine=engine,
        tokens={key: text for key, text in tokens.items() if isinstance(text, str)},
        eos_id=engine.eos_token_id,
        pad_id=engine.eos_token_id if engine.pad_token_id is None else engine.pad_token_id,
        vocab_size=int(size),
        template=getattr(engine, "chat_template", None),
    )


def _from_engine(engine: Any, tokens: Mapping[str, str]) -> Tokenizer:
    for key, text in tokens.items():
        if engine.token_to_id(text) is None:
            raise ConfigError(f"{key} {text!r} is not a token of the tokenizer.")
    eos, pad = (
        engine.token_to_id(tokens[key]) if key in tokens else None
        for key in ("eos_token", "pad_token")
    )
    return Tokenizer(
        engine=engine,
        tokens=tokens,
        eos_id=eos,
        pad_id=eos if pad is None else pad,
        vocab_size=max(engine.get_vocab().values(), default=-1) + 1,
    )


def _files(params: dict[str, Any], owner: str, keys: Sequence[str]) -> list[Path]:
    for key in params:
        if key not in keys:
            raise ConfigError(
                f"processing.tokenizer_params.{key}: no argument of {owner}. {suggest(key, keys)}"
            )
    paths = []
    for key in keys:
        if key not in params:
            raise ConfigError(f"processing.tokenizer_params: {owner} needs {key}.")
        path = Path(params[key]).expanduser()
        if not path.is_file():
            raise ConfigError(f"processing.tokenizer_params.{key}: {str(path)!r} does not exist.")
        paths.append(path)
    return paths


def _read(path: Path) -> Any:
    try:
        engine = _library().Tokenizer.from_file(str(path))
    except ConfigError:
        raise
    except Exception as error:  # the library raises nothing narrower
        raise ConfigError(
            f"The tokenizer {str(path)!r} cannot be loaded: {error}. Name a tokenizer.json file."
        ) from error
    return _plain(engine)


def _plain(engine: Any) -> Any:
    """Return a tokenizer that neither cuts nor fills what it encodes."""
    engine.no_truncation()
    engine.no_padding()
    return engine


def _library() -> Any:
    try:
        return import_library("tokenizers")
    except ImportError as error:
        raise ConfigError(
            f"Tokenization requires the tokenizers library, which is not installed: {_INSTALL}"
        ) from error


def _is_library(engine: Any) -> bool:
    return type(engine).__module__.split(".")[0] == "tokenizers"


def _token_texts(*sources: Mapping[str, Any]) -> dict[str, str]:
    """Return the special tokens of several sources; the later replace the earlier ones."""
    found = {}
    for key in SPECIAL:
        for source in sources:
            value = source.get(key)
            value = value.get("content") if isinstance(value, Mapping) else value
            if isinstance(value, str) and value:
                found[key] = value
    return found


def _template_of(folder: Path, config: Mapping[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):  # several, by name
        named = {one["name"]: one["template"] for one in template}
        return named.get("default")
    return template


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{str(path)!r} is not valid JSON: {error}.") from error
    return content if isinstance(content, dict) else {}
