"""Mode `dpo`: a prompt with a chosen and a rejected answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Final

import numpy as np

from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.rows.chat import TemplateRefusal
from modelzoo_trainer.zoo.rows.hdf5_format import DATASET, DPO_FEATURES
from modelzoo_trainer.zoo.rows.interface import Array, Document, Rows, Stats
from modelzoo_trainer.zoo.rows.modes.sequences import (
    Piece,
    Tokenized,
    TurnSpan,
    document_turns,
    text_of,
    tokenize,
)
from modelzoo_trainer.zoo.rows.modes.special_ids import require_pad
from modelzoo_trainer.zoo.rows.sections import PreprocessingSettings
from modelzoo_trainer.zoo.rows.tokenizers import Tokenizer

_ANSWERS: Final = ("chosen", "rejected")
_CHAT: Final = frozenset({"system", "user", "assistant", "tool"})
_ANSWER: Final = 1  # owner of the tokens of an answer


class DpoMode:
    """Two sequences in each row: the prompt with either answer, in the chat template.

    The prompt is a text, of the user, or the turns of a chat. All that follows it counts in the
    loss, up to the end that the template writes.

    Args:
        settings: The settings of the run.
        tokenizer: Of the run.

    Raises:
        ConfigError: If the tokenizer has no token for padding, or the template is invalid.
    """

    uses: ClassVar[frozenset[str]] = frozenset({"chat_template", "max_prompt_length"})
    features = DPO_FEATURES
    is_packed = False

    def __init__(self, settings: PreprocessingSettings, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._pad = require_pad(tokenizer)
        self._template = tokenizer.chat_template(settings.dataset.chat_template)
        self._max_prompt_length = settings.dataset.max_prompt_length

    def encode(self, documents: Sequence[Document], length: int, stats: Stats) -> Rows:
        """Return the rows of documents; see `Mode`."""
        pieces = [(document, self._pieces(document, stats)) for document in documents]
        usable = [(document, pair) for document, pair in pieces if pair is not None]
        tokens = iter(tokenize([piece for _, pair in usable for piece in pair], self._tokenizer))
        rows, lengths = [], []
        for document, _ in usable:
            row = self._row(document, (next(tokens), next(tokens)), length, stats)
            if row is not None:
                rows.append(row[0])
                lengths.append(row[1])
        data = np.stack(rows) if rows else np.empty((0, len(self.features), length), np.int32)
        return Rows({DATASET: data}, np.array(lengths, np.int64))

    def _pieces(self, document: Document, stats: Stats) -> tuple[Piece, Piece] | None:
        texts = [
            (turn.role, "".join(text_of(region, document) for region in turn.regions))
            for turn in document_turns(document)
        ]
        roles = {role for role, _ in texts}
        before = roles - {*_ANSWERS}
        if not roles.issuperset(_ANSWERS) or not (before == {"prompt"} or set() < before <= _CHAT):
            raise ConfigError(
                f"{document.where}: dpo needs the turns prompt, chosen, rejected; got "
                f"{', '.join(sorted(roles)) or 'none'}. Use dpo_read_hook."
            )
        prompt = [(role, text) for role, text in texts if role in _CHAT]
        if not prompt:
            prompt = [("user", _joined(texts, "prompt"))]
        answers = [_joined(texts, name) for name in _ANSWERS]
        if not all(text.strip() for text in (*(text for _, text in prompt), *answers)):
            stats.skip(document, "empty")
            return None
        try:
            chosen, rejected = (self._piece(prompt, answer) for answer in answers)
        except TemplateRefusal as error:
            stats.skip(document, error.reason)
            return None
        if chosen is None or rejected is None:
            stats.skip(document, "the chat template omits or changes a message")
            return None
        return chosen, rejected

    def _piece(self, prompt: list[tuple[str, str]], answer: str) -> Piece | None:
        turns = [*prompt, ("assistant", answer)]
        found = self._template.locate([(role, [text]) for role, text in turns])
        if found is None:
            return None
        return Piece(found.text, [TurnSpan(found.spans[-1].start, len(found.text), _ANSWER, 1)])

    def _row(
        self, document: Document, pair: tuple[Tokenized, Tokenized], length: int, stats: Stats
    ) -> tuple[Array, int] | None:
        """Return the six rows of a document, and the tokens in them."""
        prompts = [int(np.argmax(tokens.owners == _ANSWER)) for tokens in pair]
        dropped = 0
        if max(len(tokens.ids) for tokens in pair) > length:
            dropped = max(0, max(prompts) - self._max_prompt_length)
            stats.documents_truncated += 1
        if max(prompts) - dropped >= length:
            stats.skip(document, "too long")
            stats.documents_truncated -= 1
            return None
        cut = [one.ids[min(dropped, size) :] for one, size in zip(pair, prompts, strict=True)]
        stats.answers_cut += max(map(len, cut)) > length
        row = np.zeros((len(self.features), length), np.int32)
        row[[0, 2, 3, 5]] = self._pad
        total = 0
        for start, whole, prompt in zip((0, 3), cut, prompts, strict=True):
            ids = whole[:length]
            first = max(prompt - dropped, 1) - 1  # predicts the first token of the answer
            last = len(ids) - 1
            row[start, : len(ids)] = ids
            row[start + 1, first:last] = 1
            row[start + 2, first:last] = ids[first + 1 :]
            total += len(ids)
        return row, total


def _joined(texts: Sequence[tuple[str, str]], role: str) -> str:
    return "".join(text for one, text in texts if one == role)
