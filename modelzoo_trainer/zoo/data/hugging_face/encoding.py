"""From rows of a dataset to rows of tokens, as preprocessing makes them.

Dimension letters: N rows, F features, S positions, B batch.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Literal, Protocol

import numpy as np
import numpy.typing as npt

from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.data.hdf5.sending import Batch, by_feature
from modelzoo_trainer.zoo.data.hugging_face.examples import Columns, ReadTurns, Task
from modelzoo_trainer.zoo.data.hugging_face.source import OWNER
from modelzoo_trainer.zoo.rows.chat import CHATML
from modelzoo_trainer.zoo.rows.hdf5_format import DATASET, INPUTS, LABELS
from modelzoo_trainer.zoo.rows.interface import Document, Stats
from modelzoo_trainer.zoo.rows.modes.dpo import DpoMode
from modelzoo_trainer.zoo.rows.modes.finetuning import FinetuningMode
from modelzoo_trainer.zoo.rows.modes.pretraining import PretrainingMode
from modelzoo_trainer.zoo.rows.modes.truncation import WholeAnswers
from modelzoo_trainer.zoo.rows.modes.vsl_pretraining import VslPretrainingMode
from modelzoo_trainer.zoo.rows.sections import Dataset, PreprocessingSettings, Processing, Setup
from modelzoo_trainer.zoo.rows.tokenizers import Tokenizer

log = logging.getLogger("modelzoo_trainer.data.hugging_face")

Rows = npt.NDArray[np.int32]
Truncation = Literal["skip", "keep_start", "keep_end"]

_Mode = PretrainingMode | VslPretrainingMode | FinetuningMode | DpoMode

_MOST_REASONS: Final = 20
_OTHERS: Final = "for other reasons"

CHUNK: Final = 1024
"""Documents that are tokenized, and packed, together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodingSettings:
    """How rows are made, as the arguments of the data processor say.

    Args:
        task: What a row of the dataset is.
        columns: Where it is.
        max_sequence_length: S.
        packing: Whether a row has several documents, which do not attend to each other.
        min_sequence_length: Documents with fewer tokens are skipped.
        truncation: What to do with documents that are too long.
        max_prompt_length: Of preferences that are too long, the tokens that the prompt keeps; None
            = half of a row.
        separator: Between a prompt and its response, without a chat template.
        chat_template: Text of the template; None = the task has none.
        label_names: The classes, in the order of their numbers; None = the data has numbers.
    """

    task: Task
    columns: Columns
    max_sequence_length: int
    packing: bool = False
    min_sequence_length: int = 0
    truncation: Truncation = "skip"
    max_prompt_length: int | None = None
    separator: str = "\n"
    chat_template: str | None = None
    label_names: list[str] | None = None


class Encoding(Protocol):
    """Makes rows of examples. It can be pickled."""

    features: tuple[str, ...]
    """Names of F."""
    fill: tuple[int, ...]
    """What fills each of them after the tokens of a row."""
    largest: int
    """The largest number in a row."""

    @property
    def identity(self) -> str:
        """Identifier that differs between any two encodings with different rows."""

    def rows(self, examples: Sequence[Mapping[str, Any]], first: int, stats: Stats) -> Rows:
        """Return the rows (N, F, S) of examples.

        Args:
            examples: Rows of the dataset.
            first: The number of the first of them.
            stats: Gets the counts.
        """

    def batch(self, rows: Any, names: Sequence[str]) -> Batch:
        """Return the batch of rows (F, B, S) with these features."""


class TurnsEncoding:
    """Rows of text, chats, instructions or preferences, made by the modes of preprocessing.

    Args:
        settings: The settings of the data processor.
        tokenizer: Has the special tokens that the task needs.
        where: The dataset, for messages.

    Raises:
        ConfigError: If the chat template is invalid.
    """

    def __init__(self, settings: EncodingSettings, tokenizer: Tokenizer, where: str) -> None:
        self._settings = settings
        self._tokenizer = tokenizer
        self._where = where
        self._read = ReadTurns(
            settings.task, settings.columns, is_chat=settings.chat_template is not None
        )
        self._mode = _mode_of(settings, tokenizer)
        _warn_of_no_end(settings, tokenizer)
        self.features = self._mode.features
        assert tokenizer.pad_id is not None  # the data processor has checked it
        self.fill = tuple(
            tokenizer.pad_id if one.endswith((INPUTS, LABELS)) else 0 for one in self.features
        )
        self.largest = max(tokenizer.vocab_size - 1, settings.max_sequence_length)

    @property
    def identity(self) -> str:
        """See `Encoding`."""
        return identity_of(self._settings, self._tokenizer)

    def rows(self, examples: Sequence[Mapping[str, Any]], first: int, stats: Stats) -> Rows:
        """Return the rows of examples; see `Encoding`.

        An example that is not what the task reads is skipped and counted.
        """
        documents = []
        for number, example in enumerate(examples, first):
            document = Document(self._where, number, [])
            try:
                turns = self._read(example)
            except ConfigError as error:  # one row never ends a run
                stats.skip(document, _reason(error, stats))
                continue
            if turns:
                documents.append(document._replace(content=turns))
            else:
                stats.skip(document, "there are no messages")
        stats.documents += len(examples)
        made = self._mode.encode(documents, self._settings.max_sequence_length, stats)
        found: Rows = made.arrays[DATASET]  # type: ignore[union-attr]  # no mode here packs
        stats.rows += len(found)
        return found

    def batch(self, rows: Any, names: Sequence[str]) -> Batch:
        """Return the batch of rows; see `Encoding`."""
        return by_feature(rows, names)


def _reason(error: ConfigError, stats: Stats) -> str:
    """Return why a row is skipped, of a limited number of reasons."""
    found = str(error).rstrip(".")
    return found if found in stats.skipped or len(stats.skipped) < _MOST_REASONS else _OTHERS


def identity_of(settings: EncodingSettings, tokenizer: Tokenizer) -> str:
    """Return a digest of all that decides which rows a dataset has."""
    given = asdict(settings)
    if settings.truncation == "keep_start":  # earlier rows lack the ends of prompts
        given["truncation"] = "keep_start with ends"
    if settings.task == "chat":  # earlier rows lack some chats
        given["task"] = "chat in any order"
    known = [tokenizer.eos_id, tokenizer.pad_id, dict(tokenizer.tokens)]
    content = json.dumps([given, tokenizer.engine.to_str(), known], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()


def template_of(given: str | None, tokenizer: Tokenizer, name: str, task: Task) -> str | None:
    """Return the text of the chat template; None if the task has none.

    Args:
        given: A file, the text of a template, `tokenizer`, `chatml`, or None.
        tokenizer: May have one of its own.
        name: What the tokenizer is called in messages.
        task: What the rows are.

    Raises:
        ConfigError: If there is none, or the file is missing.
    """
    if given is None and task not in ("chat", "preference"):
        return None
    if given in (None, "tokenizer"):
        if tokenizer.template is None:
            raise ConfigError(
                f"{OWNER}.chat_template: tokenizer {name!r} has no chat template. Give the folder "
                f"of a tokenizer that has one, or set chat_template to a Jinja file, to the text "
                f"of a template, or to chatml."
            )
        return tokenizer.template
    assert given is not None
    return CHATML if given == "chatml" else _template_text(given)


def _template_text(given: str) -> str:
    if "{" in given:
        return given
    path = Path(given).expanduser()
    if not path.is_file():
        raise ConfigError(
            f"{OWNER}.chat_template: {given!r} does not exist. Give a Jinja file, the text of a "
            f"template, tokenizer or chatml."
        )
    return path.read_text(encoding="utf-8")


def _warn_of_no_end(settings: EncodingSettings, tokenizer: Tokenizer) -> None:
    source = settings.chat_template
    if source is not None and tokenizer.chat_template(source).end_of_answer() == "":
        log.warning(
            "The chat template writes nothing after an answer, or not in its generation block: a "
            "model does not learn where an answer ends. Let the template write eos_token there."
        )


def _mode_of(given: EncodingSettings, tokenizer: Tokenizer) -> _Mode:
    """Return the mode of preprocessing that makes the rows of a task."""
    settings = PreprocessingSettings(
        Setup(mode="custom"),  # of no effect here
        Processing(
            max_seq_length=given.max_sequence_length, min_sequence_len=given.min_sequence_length
        ),
        Dataset(
            use_vsl=given.packing,
            pack_sequences=False,
            sep_token=given.separator,
            chat_template=given.chat_template,
            max_prompt_length=given.max_prompt_length or max(1, given.max_sequence_length // 2),
        ),
    )
    if given.task == "preference":
        return DpoMode(settings, tokenizer)
    if given.task != "text":
        keeps_end = given.truncation == "keep_end"
        cuts = None if given.truncation == "skip" else WholeAnswers(keeps_end)
        return FinetuningMode(settings, tokenizer, cuts)
    return (VslPretrainingMode if given.packing else PretrainingMode)(settings, tokenizer)
