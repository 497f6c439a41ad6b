"""Mode `finetuning`: prompts with completions, and chats; only the answers are learned."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Final, NamedTuple

import numpy as np

from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.rows.chat import Located, TemplateRefusal
from modelzoo_trainer.zoo.rows.hdf5_format import FEATURES, VSL_FEATURES
from modelzoo_trainer.zoo.rows.interface import Array, Document, Rows, Stats
from modelzoo_trainer.zoo.rows.modes.packing import (
    Weighted,
    packed_rows,
    single_rows,
)
from modelzoo_trainer.zoo.rows.modes.sequences import (
    NO_TURN,
    Piece,
    RegionRules,
    Tokenized,
    TurnSpan,
    document_turns,
    text_of,
    tokenize,
)
from modelzoo_trainer.zoo.rows.modes.special_ids import require_eos, require_pad
from modelzoo_trainer.zoo.rows.modes.truncation import Truncation, WholeAnswers
from modelzoo_trainer.zoo.rows.sections import PreprocessingSettings
from modelzoo_trainer.zoo.rows.tokenizers import Tokenizer
from modelzoo_trainer.zoo.rows.turns import Turn, TurnRegion

_SEPARATOR: Final = "<|sep|>"
_CHAT: Final = frozenset({"system", "user", "assistant", "tool"})
_TEXT: Final = frozenset({"prompt", "context", "completion"})
_ANSWERS: Final = frozenset({"completion", "assistant"})


class _Parts(NamedTuple):
    """A document before its tokens."""

    document: Document
    turns: list[Turn]
    pieces: list[Piece]
    is_chat: bool


class FinetuningMode:
    """Rows of one document each, or of several with `use_vsl`.

    Prompt and completion: BOS, prompt, separator, completion, EOS. A chat: as the template writes
    it. The tokens of completions and of the assistant count in the loss, with the token that ends
    them; if the template has `{% generation %}` blocks, those in the blocks.

    Args:
        settings: The settings of the run.
        tokenizer: Has an EOS token.
        truncation: Of documents that are too long; None = `dataset.truncate_to_msl`.

    Raises:
        ConfigError: If the tokenizer has no EOS token, or a setting is invalid.
    """

    uses: ClassVar[frozenset[str]] = RegionRules.uses | {
        "use_vsl",
        "sep_token",
        "chat_template",
        "truncate_to_msl",
        "end_of_turn_token",
        "min_sequence_len",
    }
    is_packed = False

    def __init__(
        self,
        settings: PreprocessingSettings,
        tokenizer: Tokenizer,
        truncation: Truncation | WholeAnswers | None = None,
    ) -> None:
        dataset, processing = settings.dataset, settings.processing
        self._tokenizer = tokenizer
        self._eos, self._pad = require_eos(tokenizer), require_pad(tokenizer)
        self._rules = RegionRules(settings, _ANSWERS)
        separator = dataset.sep_token
        self._separator = (
            tokenizer.tokens.get("sep_token", _SEPARATOR) if separator is None else separator
        )
        self._template = tokenizer.chat_template(dataset.chat_template)
        ends = (processing.end_of_turn_token, tokenizer.decode([self._eos]), self._end_of_answer())
        self._end_of_turn = [end for end in ends if end]
        self._uses_blocks = self._template.marks_answers and not processing.semantic_loss_weight
        self._truncation = truncation or Truncation.of(dataset.truncate_to_msl)
        self._shortest = processing.min_sequence_len
        self._is_vsl = dataset.use_vsl
        self.features = VSL_FEATURES if self._is_vsl else FEATURES
        self._before = np.array(tokenizer.around()[0], np.int32)

    def encode(self, documents: Sequence[Document], length: int, stats: Stats) -> Rows:
        """Return the rows of documents; see `Mode`."""
        parts = [one for document in documents if (one := self._parts(document, stats))]
        tokens = iter(tokenize([piece for one in parts for piece in one.pieces], self._tokenizer))
        sequences = []
        for one in parts:
            joined = self._joined(one, [next(tokens) for _ in one.pieces])
            if (fitting := self._fitting(one, joined, length, stats)) is not None:
                sequences.append(fitting)
        if self._is_vsl:
            stats.sequences += len(sequences)
            return packed_rows(sequences, length, self._pad)
        return single_rows(sequences, length, self._pad)

    def _parts(self, document: Document, stats: Stats) -> _Parts | None:
        turns = list(document_turns(document))
        roles = {turn.role for turn in turns}
        if not (roles <= _CHAT or roles <= _TEXT):
            raise ConfigError(
                f"{document.where}: finetuning needs turns of the roles prompt "
                f"and completion, or system, user and assistant; got {sorted(roles)}. Choose "
                "another read hook, or setup.mode: pretraining."
            )
        texts = [[text_of(region, document) for region in self._rules.kept(turn)] for turn in turns]
        if _is_empty(turns, texts):
            stats.skip(document, "empty")
            return None
        is_chat = roles <= _CHAT
        try:
            pieces = self._chat(turns, texts) if is_chat else self._pairs(turns, texts)
        except TemplateRefusal as error:
            stats.skip(document, error.reason)
            return None
        if pieces is None:
            stats.skip(document, "the chat template omits or changes a message")
            return None
        return _Parts(document, turns, pieces, is_chat)

    def _pairs(self, turns: list[Turn], texts: list[list[str]]) -> list[Piece]:
        """Return a piece for each prompt with its completion."""
        pieces: list[Piece] = []
        for index, (turn, regions) in enumerate(zip(turns, texts, strict=True)):
            is_completion = turn.role == "completion"
            begins = not pieces or (not is_completion and turns[index - 1].role == "completion")
            text, places = ("", []) if begins else pieces.pop()
            text += self._separator if is_completion and text else ""
            for region, content in zip(self._rules.kept(turn), regions, strict=True):
                places.append(self._place(len(text), content, index, turn, region))
                text += content
            pieces.append(Piece(text, places))
        return pieces

    def _chat(self, turns: list[Turn], texts: list[list[str]]) -> list[Piece] | None:
        found = self._located(turns, texts)
        if found is None:
            return None
        if self._uses_blocks:
            return [Piece(found.text, _places_of_blocks(found))]
        places = []
        for span in found.spans:
            turn = turns[span.turn]
            region = self._rules.kept(turn)[span.region]
            is_last = span.region == len(texts[span.turn]) - 1
            stop = self._end_of(found.text, span.stop) if is_last else span.stop
            weight = self._rules.weight(turn.role, region)
            begin = self._begin_of_end(found.text, span.stop)
            end = begin if begin < stop else None
            places.append(TurnSpan(span.start, stop, span.turn, weight, end))
        return [Piece(found.text, places)]

    def _located(self, turns: list[Turn], texts: list[list[str]]) -> Located | None:
        pairs = list(zip(turns, texts, strict=True))
        if all(turn.message is None for turn in turns):
            return self._template.locate([(turn.role, regions) for turn, regions in pairs])
        return self._template.locate_answers(
            [
                {"role": turn.role, "content": "".join(regions), **(turn.message or {})}
                for turn, regions in pairs
            ]
        )

    def _begin_of_end(self, text: str, stop: int) -> int:
        """Return where the token begins that ends a turn, if the turn's text has it."""
        sizes = [len(end) for end in self._end_of_turn if text.endswith(end, 0, stop)]
        return stop - max(sizes, default=0)

    def _end_of(self, text: str, stop: int) -> int:
        """Return where the token that ends a turn stops, if it follows, maybe after white space."""
        after = len(text) - len(text[stop:].lstrip())
        stops = [
            start + len(end)
            for end in self._end_of_turn
            for start in (stop, after)
            if text.startswith(end, start)
        ]
        return max(stops, default=stop)

    def _end_of_answer(self) -> str:
        """Return what ends an answer in the template: a special token, or else text."""
        text = (self._template.end_of_answer() or "").strip()
        tokens = [one for one in self._tokenizer.added_tokens() if text.startswith(one)]
        return max(tokens, key=len, default=text)

    def _place(
        self, start: int, content: str, index: int, turn: Turn, region: TurnRegion
    ) -> TurnSpan:
        return TurnSpan(start, start + len(content), index, self._rules.weight(turn.role, region))

    def _joined(self, parts: _Parts, pieces: list[Tokenized]) -> Tokenized:
        if parts.is_chat:
            return self._with_ends_of_turns(parts, pieces[0])
        before = len(self._before)
        weights, owners = _constant(before, 0, NO_TURN)
        found = [Tokenized(self._before, weights, owners, np.zeros(before, bool))]
        end = np.array([self._eos], np.int32)
        for piece in pieces:
            weights, owners = piece.weights[-1:], piece.owners[-1:]  # as the text that it ends
            found += [piece, Tokenized(end, weights, owners, np.array([True]))]
        return Tokenized(*(np.concatenate(arrays) for arrays in zip(*found, strict=True)))

    def _with_ends_of_turns(self, parts: _Parts, tokens: Tokenized) -> Tokenized:
        """Return the tokens of a chat, where each turn has at least one token that ends it."""
        if self._uses_blocks:
            return tokens
        [piece] = parts.pieces
        last_places = {place.turn: place for place in piece.places}
        _, weights, owners, is_end = (array.copy() for array in tokens)
        for turn, place in last_places.items():
            if any(piece.text.endswith(end, 0, place.stop) for end in self._end_of_turn):
                continue
            after = np.flatnonzero(tokens.owners == turn)[-1:] + 1
            if after.size and after[0] < len(owners) and owners[after[0]] == NO_TURN:
                owners[after], weights[after], is_end[after] = turn, place.weight, True
        return Tokenized(tokens.ids, weights, owners, is_end)

    def _fitting(
        self, parts: _Parts, tokens: Tokenized, length: int, stats: Stats
    ) -> Weighted | None:
        """Return the sequence of a document, truncated if it must be; None if it is skipped."""
        is_answer = [turn.role in _ANSWERS for turn in parts.turns]
        kept, weights = np.arange(len(tokens.ids)), tokens.weights
        if len(kept) > length:
            kept = self._truncation.kept(tokens.owners, tokens.is_end, is_answer, length)
            is_cut = _without_some(tokens.owners, kept, is_answer)
            # What ends an answer must not be learned where the answer does not end.
            weights = np.where(tokens.is_end & np.isin(tokens.owners, is_cut), 0, weights)
        why = _unusable(weights[kept], len(tokens.ids), self._shortest)
        if why is not None:
            stats.skip(parts.document, why)
            return None
        if len(kept) < len(tokens.ids):
            stats.documents_truncated += 1
            counted = tokens.owners[kept][weights[kept] == 1]
            stats.answers_cut += bool(np.isin(is_cut, counted).any())
        return Weighted(tokens.ids[kept], weights[kept])


def _without_some(owners: Array, kept: Array, is_answer: Sequence[bool]) -> Array:
    """Return the answers that lose tokens."""
    is_out = np.ones(len(owners), bool)
    is_out[kept] = False
    return np.intersect1d(owners[is_out], np.flatnonzero(is_answer))


def _is_empty(turns: Sequence[Turn], texts: Sequence[Sequence[str]]) -> bool:
    """Return whether there are no messages, or one has neither text nor anything else."""
    is_empty = [
        bool(regions) and not turn.message and not "".join(regions).strip()
        for turn, regions in zip(turns, texts, strict=True)
    ]
    return not any(texts) or any(is_empty)


def _unusable(weights: Array, size: int, shortest: int) -> str | None:
    """Return why no row is made of a sequence of `size` tokens if these weights are kept."""
    if size < max(2, shortest):
        return "too short"
    if len(weights) == 0:
        return "too long"
    return None if weights[1:].any() else "no token counts in the loss"


def _places_of_blocks(found: Located) -> list[TurnSpan]:
    """Return the places of all regions, of no weight, and of the blocks, which count."""
    places = [TurnSpan(span.start, span.stop, span.turn, 0) for span in found.spans]
    for start, stop in found.generated:
        inside = [span.turn for span in found.spans if span.start < stop and start < span.stop]
        end = max((span.stop for span in found.spans if start < span.stop <= stop), default=stop)
        places.append(TurnSpan(start, stop, min(inside, default=NO_TURN), 1, end))
    return places


def _constant(size: int, *values: int) -> list[Array]:
    return [np.full(size, value, np.int32) for value in values]
