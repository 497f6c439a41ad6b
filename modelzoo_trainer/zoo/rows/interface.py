"""What readers, hooks, tokenizers, modes and the pipeline pass to each other.

    unit of an input file -> entries -> hook -> documents -> mode -> tokens or rows -> HDF5

A worker process does everything up to the mode, for one unit and stream at a time. Tokens are then
cut into rows by the main process, which carries the rest of a unit over to the next one; rows are
written as they are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from modelzoo_trainer.zoo.rows.places import DocumentPlace
from modelzoo_trainer.zoo.rows.sections import PreprocessingSettings
from modelzoo_trainer.zoo.rows.tokenizers import Tokenizer

if TYPE_CHECKING:
    from modelzoo_trainer.zoo.rows.preprocessing.inputs import Input

Array: TypeAlias = npt.NDArray[Any]
Entry: TypeAlias = Mapping[str, Any]
"""One entry of an input file, by column; a text file has a single column."""
SemanticData: TypeAlias = list[dict[str, Any]]
"""What a read hook returns: sections, each with `content`, a list of `{region: text}`.

A section may have `type`, and per region the lists `semantic_loss_weight`, `semantic_drop_mask` and
`semantic_attention_mask`.
"""
Hook: TypeAlias = Callable[[Entry], SemanticData | None]
"""Converts an entry; None or an empty list = skip it. Its keyword arguments are bound already."""


class Document(NamedTuple):
    """One entry of the input, after the read hook."""

    file: str
    """Path below the source, with `/`: the same on every machine."""
    number: int
    """Row in the file; in a file of lines the byte, after decompression, at which it starts."""
    content: SemanticData
    line: int | None = None
    """Line of that byte, if it is known."""
    source: Input | None = None
    """The file, where lines are counted that are not known."""

    @property
    def place(self) -> DocumentPlace:
        """Where the document is."""
        return DocumentPlace(self.file, self.number, self.line)

    @property
    def where(self) -> str:
        """File and line, or row, for messages; it may read the file up to there."""
        return self.place.shown(self.source)

    def hash(self, seed: int | str) -> int:
        """Return 64 bits that depend on the seed, the file and the number alone."""
        text = f"{seed}\0{self.file}\0{self.number}"
        digest = hashlib.blake2b(text.encode("utf-8", "surrogateescape"), digest_size=8).digest()
        return int.from_bytes(digest, "little")


@dataclass(slots=True)
class Stats:
    """Counts of what was read and made; `+` adds the counts of two units."""

    documents: int = 0
    documents_truncated: int = 0
    answers_cut: int = 0
    """Truncated documents whose last answer lost its end."""
    raw_chars: int = 0
    raw_bytes: int = 0
    normalized_chars: int = 0
    normalized_bytes: int = 0
    sequences: int = 0
    """Sequences before packing them into rows; 0 in a mode that does not pack sequences."""
    rows: int = 0
    tokens: int = 0
    """Tokens in rows, without padding."""
    padding: int = 0
    tokens_dropped: int = 0
    """Tokens at the end of a document or of all, too few for a row."""
    loss_tokens: int = 0
    """Tokens whose prediction counts in the loss."""
    skipped: dict[str, tuple[int, DocumentPlace]] = field(default_factory=dict)
    """Skipped documents by reason: how many, and the first one."""

    def skip(self, document: Document, reason: str) -> None:
        """Count a document that a mode makes nothing of; `reason`: such as "too long"."""
        count, first = self.skipped.get(reason, (0, document.place))
        self.skipped[reason] = (count + 1, first)

    @property
    def documents_skipped(self) -> int:
        """Number of skipped documents."""
        return sum(count for count, _ in self.skipped.values())

    def __add__(self, other: Stats) -> Stats:
        names = [one.name for one in fields(self) if one.name != "skipped"]
        total = Stats(**{name: getattr(self, name) + getattr(other, name) for name in names})
        total.skipped = dict(self.skipped)
        for reason, (count, first) in other.skipped.items():
            before, earliest = total.skipped.get(reason, (0, first))
            total.skipped[reason] = (before + count, earliest)
        return total


class Tokens(NamedTuple):
    """Documents to be packed into rows of a fixed length by the main process."""

    ids: Array
    """(n,) int32: all documents, each with the token that ends it."""
    ends: Array
    """(documents,) int64: where each one ends in `ids`; a skipped one has no token."""
    weights: Array | None = None
    """(n,) int32: weight of each token in the loss as a label; None = 1."""


class Rows(NamedTuple):
    """Finished rows."""

    arrays: dict[str, Array]
    """By name of the dataset in the file: `data` (rows, features, length), int32, and others."""
    lengths: Array
    """(rows,) int64: tokens of each row without padding."""


class Mode(Protocol):
    """Makes tokens or rows of documents. The constructor takes the settings and the tokenizer.

    An object is created in each worker, and in the main process, which asks for its attributes. It
    holds no state from call to call: what it returns depends on the arguments alone, and random
    numbers on `Document.hash` (or of the first document, for several).

    Raises:
        ConfigError: By the constructor, if settings are missing or contradict each other.
    """

    uses: ClassVar[frozenset[str]]
    """Keys of `dataset` and `processing` that it reads; others that a file sets are reported."""
    features: tuple[str, ...]
    """Names of the second dimension of dataset `data`."""
    is_packed: bool
    """Whether `encode` returns `Tokens`, to be packed, or `Rows`."""

    def __init__(self, settings: PreprocessingSettings, tokenizer: Tokenizer) -> None: ...

    def encode(self, documents: Sequence[Document], length: int, stats: Stats) -> Tokens | Rows:
        """Return the tokens or rows of the documents of a unit that belong to one stream.

        Args:
            documents: In the order of the input; their texts are normalized.
            length: Tokens of a row; it differs between streams with `context_splits`.
            stats: Add skipped (`stats.skip`), truncated documents and `sequences`; the pipeline
                counts the rest.
        """


class Packed(NamedTuple):
    """What a worker returns for the documents of a unit in one stream."""

    encoded: Tokens | Rows
    places: Array
    """(documents,) int64: place of each document in the unit."""
    stats: Stats


def no_tokens() -> Tokens:
    """Return the tokens of no document."""
    return Tokens(np.empty(0, np.int32), np.empty(0, np.int64))
