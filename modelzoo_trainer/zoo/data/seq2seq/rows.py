"""Datasets of inputs and outputs: spans of documents, and pairs of lines."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.loading.batch_dataset import BatchDataset
from modelzoo_trainer.loading.seeded_sampler import mixed_seed
from modelzoo_trainer.zoo.data.seq2seq.spans import SHORTEST, Tokens, corrupt, longest_text
from modelzoo_trainer.zoo.data.seq2seq.text_lines import Ints, TextLines, fingerprint_of
from modelzoo_trainer.zoo.data.vocabulary import Vocabulary


@dataclass(frozen=True, slots=True, kw_only=True)
class Seq2SeqLayout:
    """What a batch looks like.

    Args:
        input_length: Tokens of an input, S.
        target_length: Tokens of an output, T.
        start_id: Token before the outputs.
        end_id: Token after them.
        input_pad_id: Token that fills inputs and `decoder_input_ids`.
        label_pad_id: Token that fills labels.
        has_weights: Whether batches have `loss_weight`.
    """

    input_length: int
    target_length: int
    start_id: int
    end_id: int
    input_pad_id: int
    label_pad_id: int
    has_weights: bool

    def batch(self, rows: Sequence[tuple[Tokens, Tokens]]) -> dict[str, Tensor]:
        """Return a batch of inputs and outputs.

        Shapes:
            Returns: input_ids, attention_mask (B, S); decoder_input_ids, decoder_attention_mask,
            labels (B, T), int32; decoder_input_length (B, 1), int64; loss_weight (B, 1), float32.
        """
        size = len(rows)
        inputs = np.full((size, self.input_length), self.input_pad_id, dtype=np.int32)
        shifted = np.full((size, self.target_length), self.input_pad_id, dtype=np.int32)
        labels = np.full((size, self.target_length), self.label_pad_id, dtype=np.int32)
        lengths = np.array([[len(one) for one in row] for row in rows], dtype=np.int64)
        lengths[:, 1] += 1  # with the token before, or after
        for number, (source, target) in enumerate(rows):
            inputs[number, : len(source)] = source
            shifted[number, 0], labels[number, len(target)] = self.start_id, self.end_id
            shifted[number, 1 : len(target) + 1] = labels[number, : len(target)] = target
        arrays = {
            "input_ids": inputs,
            "attention_mask": _mask(lengths[:, 0], self.input_length),
            "decoder_input_ids": shifted,
            "decoder_attention_mask": _mask(lengths[:, 1], self.target_length),
            "labels": labels,
            "decoder_input_length": lengths[:, 1:].copy(),
        }
        if self.has_weights:
            arrays["loss_weight"] = (1 / lengths[:, 1:]).astype(np.float32)
        return {key: torch.from_numpy(array) for key, array in arrays.items()}


def _mask(lengths: Ints, size: int) -> NDArray[np.int32]:
    return (np.arange(size) < lengths[:, None]).astype(np.int32)


class PairRows(BatchDataset):
    """A dataset of inputs and outputs from text files.

    Args:
        vocabulary: The ids of tokens.
        layout: Of the batches.
        lines: The texts.
        settings: What else decides the samples.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        layout: Seq2SeqLayout,
        lines: Sequence[TextLines],
        *settings: object,
    ) -> None:
        self.vocabulary = vocabulary
        self.layout = layout
        self.lines = tuple(lines)
        self.fingerprint = fingerprint_of(lines, vocabulary.settings, layout, settings)
        """A number that changes with the files, the vocabulary and the settings."""
        self._epoch = 0

    def __getitem__(self, index: int) -> Any:
        """Return one sample, without a batch dimension.

        Raises:
            IndexError: If there is no sample of this index.
        """
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        return {key: rows[0] for key, rows in self.__getitems__([index % len(self)]).items()}

    def __getitems__(self, indices: list[int]) -> Any:
        """Return the batch of these samples.

        Raises:
            ConfigError: If a file cannot be read.
        """
        return self.layout.batch([self._row(int(index)) for index in indices])

    @abstractmethod
    def _row(self, index: int) -> tuple[Tokens, Tokens]:
        """Return the input and the output of a sample, without start, end and padding."""

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, and check that the files are unchanged.

        Raises:
            ConfigError: With the file that has changed.
        """
        self._epoch = epoch
        for one in self.lines:
            one.check_unchanged()

    def follow_model(self, model: Any) -> None:
        """Check that sequences are not longer than a model's.

        Raises:
            ConfigError: If they are.
        """
        lengths = {"src": self.layout.input_length, "tgt": self.layout.target_length}
        for side, length in lengths.items():
            longest = getattr(model, f"{side}_max_position_embeddings", None)
            if type(longest) is int and length > longest:
                raise ConfigError(
                    f"{side}_max_sequence_length is {length}, but the model's "
                    f"{side}_max_position_embeddings is {longest}. Make them equal."
                )

    def check_model(self, vocab_size: int | None, max_position_embeddings: int | None) -> None:
        """Check that the model has all token ids.

        Raises:
            ConfigError: If the vocabulary is larger than the model's.
        """
        del max_position_embeddings
        if vocab_size is not None and self.vocabulary.size > vocab_size:
            raise ConfigError(
                f"src_vocab_file {self.vocabulary.path!r} and extra_ids give "
                f"{self.vocabulary.size} token ids, but the model has {vocab_size} "
                f"(src_vocab_size + extra_ids). Set both to the numbers of the data processor."
            )


class SpanRows(PairRows):
    """Documents, a line each, cut into pieces whose spans are to be predicted.

    The spans of a sample depend on the seed, the epoch and the sample alone.

    Args:
        vocabulary: With sentinels.
        layout: Of the batches.
        lines: The documents.
        num_packed: Documents that are joined before they are cut.
        seed: Of the spans.

    Raises:
        ConfigError: If no document has two tokens.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        layout: Seq2SeqLayout,
        lines: TextLines,
        *,
        num_packed: int,
        seed: int,
    ) -> None:
        super().__init__(vocabulary, layout, [lines], num_packed)
        self._seed = seed
        self._length = longest_text(layout.input_length)
        self._token_ends = np.cumsum(lines.num_pieces)
        last = np.arange(num_packed, len(lines) + num_packed, num_packed) - 1
        self._group_ends: Ints = self._token_ends[np.minimum(last, len(lines) - 1)]
        self._group_starts: Ints = np.concatenate(([0], self._group_ends[:-1])).astype(np.int64)
        whole, rest = np.divmod(self._group_ends - self._group_starts, self._length)
        self._sample_ends: Ints = np.cumsum(whole + (rest >= SHORTEST))
        if not len(self):
            raise ConfigError(
                f"{lines.files[0].path}: no document of the data has {SHORTEST} tokens or more. A "
                f"line is a document; blanks separate its tokens."
            )

    def __len__(self) -> int:
        return int(self._sample_ends[-1]) if len(self._sample_ends) else 0

    @override
    def _row(self, index: int) -> tuple[Tokens, Tokens]:
        seed = mixed_seed(self._seed, self._epoch, index)
        generator = torch.Generator().manual_seed(seed)
        return corrupt(self._text(index), self.vocabulary.size - 1, generator)

    def _text(self, index: int) -> Tokens:
        """Return the tokens of a sample before its spans are replaced."""
        group = int(np.searchsorted(self._sample_ends, index, side="right"))
        number = index - (int(self._sample_ends[group - 1]) if group else 0)
        start = int(self._group_starts[group]) + number * self._length
        stop = min(start + self._length, int(self._group_ends[group]))
        first, last = (
            int(np.searchsorted(self._token_ends, place, side="right"))
            for place in (start, stop - 1)
        )
        lines, pieces = self.lines[0], list[str]()
        for line in range(first, last + 1):
            end, num = int(self._token_ends[line]), int(lines.num_pieces[line])
            begin, until = max(0, start - end + num), min(num, stop - end + num)
            text, skipped = lines.read_pieces(line, begin, until)
            pieces += self.vocabulary.pieces_of(text)[skipped : skipped + until - begin]
        return _ids(self.vocabulary, pieces)


class TranslationRows(PairRows):
    """Lines of two texts, an input and its output.

    Pairs with a part that is empty, or as long as the model's longest sequence, are skipped.

    Args:
        vocabulary: Of both texts.
        layout: Of the batches.
        sources: The inputs.
        targets: The outputs, as many lines.

    Raises:
        ConfigError: If all pairs are left out.
    """

    def __init__(
        self, vocabulary: Vocabulary, layout: Seq2SeqLayout, sources: TextLines, targets: TextLines
    ) -> None:
        super().__init__(vocabulary, layout, [sources, targets])
        fits = np.ones(len(sources), dtype=bool)
        for lines, longest in (
            (sources, layout.input_length),
            (targets, layout.target_length),
        ):
            fits &= (lines.num_pieces > 0) & (lines.num_pieces < longest)
        self._lines = np.flatnonzero(fits)
        self.num_skipped = len(sources) - len(self._lines)
        """Pairs that are left out."""
        if not len(self):
            raise ConfigError(
                f"{sources.files[0].path}: all {len(sources)} pairs of the data are empty or too "
                f"long: inputs must have less than src_max_sequence_length "
                f"({layout.input_length}) tokens, outputs less than tgt_max_sequence_length "
                f"({layout.target_length})."
            )

    def __len__(self) -> int:
        return len(self._lines)

    @override
    def _row(self, index: int) -> tuple[Tokens, Tokens]:
        line, vocabulary = int(self._lines[index]), self.vocabulary
        source, target = (
            _ids(vocabulary, vocabulary.pieces_of(one.read([line])[0])) for one in self.lines
        )
        return source, target


def _ids(vocabulary: Vocabulary, pieces: Sequence[str]) -> Tokens:
    return np.asarray(vocabulary.ids_of(pieces), dtype=np.int32)
