"""Token ids of text, as BERT has them: words, then the pieces of a vocabulary file."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final

from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.data.vocabulary import Vocabulary

_LIBRARY: Final = "tokenizers"
_UNKNOWN: Final = "[UNK]"


class WordPieces:
    """BERT's tokenizer: cut text at blanks and punctuation, words into pieces of a vocabulary.

    Args:
        vocabulary: The pieces; those that continue a word begin with `##`.
        lowercase: Whether text is put into lower case, without accents.

    Raises:
        ConfigError: If the library `tokenizers` is not installed, or the vocabulary lacks `[CLS]`
            or `[SEP]`.
    """

    def __init__(self, vocabulary: Vocabulary, *, lowercase: bool) -> None:
        library = _library()
        self.lowercase = lowercase
        self._first = vocabulary.id_of("[CLS]", "vocab_file")
        self._end = vocabulary.id_of("[SEP]", "vocab_file")
        model = library.models.WordPiece(vocabulary.ids, unk_token=_UNKNOWN)
        self._tokenizer = library.Tokenizer(model)
        self._tokenizer.normalizer = library.normalizers.BertNormalizer(lowercase=lowercase)
        self._tokenizer.pre_tokenizer = library.pre_tokenizers.BertPreTokenizer()

    def encode(self, texts: Sequence[str], length: int) -> tuple[list[int], int]:
        """Return the ids of one text or a pair, and how many of them belong to the first one.

        They are `[CLS] first [SEP]`, then `second [SEP]`. If there are too many, the last piece of
        the longer text is removed, of the second one if both are as long, until they fit.

        Args:
            texts: One or two.
            length: Ids, at most; at least 3.
        """
        # One by one: `encode_batch` would start threads, which a fork must not find.
        pieces = [self._tokenizer.encode(text).ids for text in texts]
        kept = _kept([len(one) for one in pieces], length - 1 - len(texts))
        ids = [self._first]
        ends = []
        for one, num in zip(pieces, kept, strict=True):
            ids += [*one[:num], self._end]
            ends.append(len(ids))
        return ids, ends[0]


def missing_library(argument: str) -> list[str]:
    """Return a message if the library is not installed, in a list."""
    return [] if find_spec(_LIBRARY) else [_lacking(argument)]


def _kept(sizes: Sequence[int], num: int) -> list[int]:
    """Return how many pieces each text keeps, so that there are `num` at most."""
    if len(sizes) == 1:
        return [min(sizes[0], num)]
    first, second = sizes
    excess = max(0, first + second - num)
    uneven = min(excess, abs(first - second))  # removed until both are as long
    if first > second:
        first -= uneven
    else:
        second -= uneven
    rest = excess - uneven
    return [first - rest // 2, second - (rest - rest // 2)]


def _library() -> Any:
    try:
        return import_module(_LIBRARY)
    except ImportError as error:
        raise ConfigError(_lacking("vocab_file")) from error


def _lacking(argument: str) -> str:
    return (
        f"{argument}: cutting text into tokens requires the library tokenizers, which is not "
        f"installed: pip install 'modelzoo-trainer[text]'"
    )
