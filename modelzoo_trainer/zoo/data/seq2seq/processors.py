"""Data processors of encoder-decoder models, over text files."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import field
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from typing_extensions import override

from modelzoo_trainer.base.constraints import (
    Flag,
    NonNegativeSize,
    Size,
    checked_dataclass,
    without_effect,
)
from modelzoo_trainer.core.parts.model_length import PAIR_LENGTHS, given_or_model_length
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.hooks.interceptors import event
from modelzoo_trainer.loading.stream import Member
from modelzoo_trainer.zoo.data.folders import META, NamedFiles, distinct_folders, read_meta
from modelzoo_trainer.zoo.data.sample_features import (
    Feature,
    Features,
    length_without_data,
    rows_of,
)
from modelzoo_trainer.zoo.data.seq2seq.rows import (
    PairRows,
    Seq2SeqLayout,
    SpanRows,
    TranslationRows,
)
from modelzoo_trainer.zoo.data.seq2seq.spans import counts_of, longest_text
from modelzoo_trainer.zoo.data.seq2seq.text_lines import TextLines, index_file, warn_of_count
from modelzoo_trainer.zoo.data.stream_processor import (
    ALL_ARE_SHUFFLED,
    StreamProcessor,
    say_once,
    say_without_effect,
)
from modelzoo_trainer.zoo.data.vocabulary import Vocabulary, missing_vocabulary

_OF_NUMBERS: Final = "token ids are integers"
_SHORTEST_INPUT: Final = 3
_NUM_PACKED: Final = 128
_NUM_LOOKED_AT: Final = 100  # lines, and tokens of a line
_MOST_UNKNOWN: Final = 0.5  # share of the tokens


class SpanOptions(NamedTuple):
    """How documents are joined, and the seed of the spans."""

    num_packed: int
    seed: int


@checked_dataclass(kw_only=True)
class SequencePairProcessor(StreamProcessor):
    """Base class of the data processors of this module.

    Args:
        batch_size: Samples per batch over all processes, a multiple of their number.
        src_data_dir: One or a list of folders.
        do_lower: Whether text and vocabulary are converted to lower case.
        dynamic_loss_weight: Whether batches have `loss_weight`: 1 / tokens of the output.
        oov_token: Token for those that the vocabulary lacks.
        sos_token: Token before an output.
        eos_token: Token after an output.
        pad_token: Token that fills sequences.
        labels_pad_id: Id, or token, that fills labels; default: `pad_token`.
        input_pad_id: Id, or token, that fills inputs; default: `pad_token`.
    """

    model_lengths = PAIR_LENGTHS
    persistent_workers: Flag = True
    src_vocab_file: str
    src_data_dir: str | list[str]
    src_max_sequence_length: Size | None = None
    tgt_max_sequence_length: Size | None = None
    extra_ids: NonNegativeSize = 0
    do_lower: Flag = False
    dynamic_loss_weight: Flag = False
    pack_sequences: Flag = False
    num_documents_to_concatenate: Size = _NUM_PACKED
    oov_token: str = "<unk>"
    sos_token: str = "<s>"
    eos_token: str = "</s>"
    pad_token: str = "<pad>"
    labels_pad_id: int | str | None = None
    input_pad_id: int | str | None = None
    shuffle_buffer: Size | None = without_effect(ALL_ARE_SHUFFLED)
    buckets: list[int] | None = without_effect(
        "all batches are padded to src_max_sequence_length and tgt_max_sequence_length"
    )
    vocab_size: Any = without_effect("the vocabulary file and extra_ids decide")
    tgt_vocab_file: Any = without_effect("inputs and outputs have the vocabulary of src_vocab_file")
    tgt_data_dir: Any = without_effect("the files of src_data_dir have inputs and outputs")
    mixed_precision: Any = without_effect(_OF_NUMBERS)
    fp16_type: Any = without_effect(_OF_NUMBERS)
    dataset: PairRows = field(init=False)

    def __post_init__(self) -> None:
        owner = type(self).__name__
        input_length = given_or_model_length(
            self.src_max_sequence_length, "src_max_sequence_length", owner
        )
        target_length = given_or_model_length(
            self.tgt_max_sequence_length, "tgt_max_sequence_length", owner
        )
        self.check_lengths(input_length, target_length, self.extra_ids)
        say_without_effect(self)
        num_packed = self.num_documents_to_concatenate
        if not self.pack_sequences and num_packed != _NUM_PACKED:
            say_once(
                f"{owner}.num_documents_to_concatenate has no effect: pack_sequences is false."
            )
        self.options = self.loading_options()
        vocabulary = Vocabulary(
            self.src_vocab_file,
            argument="src_vocab_file",
            oov_token=self.oov_token,
            extra_ids=self.extra_ids,
            case="lower" if self.do_lower else "counts",
        )
        pad_id = vocabulary.id_of(self.pad_token, "pad_token")
        layout = Seq2SeqLayout(
            input_length=input_length,
            target_length=target_length,
            start_id=vocabulary.id_of(self.sos_token, "sos_token"),
            end_id=vocabulary.id_of(self.eos_token, "eos_token"),
            input_pad_id=_pad_id(vocabulary, self.input_pad_id, "input_pad_id", pad_id),
            label_pad_id=_pad_id(vocabulary, self.labels_pad_id, "labels_pad_id", pad_id),
            has_weights=self.dynamic_loss_weight,
        )
        folders = distinct_folders(self.src_data_dir, "src_data_dir")
        spans = SpanOptions(num_packed if self.pack_sequences else 1, self.options.shuffle_seed)
        self.dataset = self.load(folders, vocabulary, layout, spans)
        _warn_of_unknown(self.dataset)
        self.members = [Member(0, len(self.dataset), len(self.dataset))]

    @event("load")
    def load(
        self,
        folders: Sequence[str],
        vocabulary: Vocabulary,
        layout: Seq2SeqLayout,
        spans: SpanOptions,
    ) -> PairRows:
        """Return the dataset."""
        return self.open(folders, vocabulary, layout, spans)

    @abstractmethod
    def open(
        self,
        folders: Sequence[str],
        vocabulary: Vocabulary,
        layout: Seq2SeqLayout,
        spans: SpanOptions,
    ) -> PairRows:
        """Return the dataset of some folders."""

    @classmethod
    def check_lengths(cls, inputs: int, outputs: int, extra_ids: int) -> None:
        """Check the lengths of sequences and the number of sentinels.

        Raises:
            ConfigError: If there are too few of them.
        """

    @override
    def sample_features(self, model: Any) -> Features:
        inputs = length_without_data(self, model, "src_max_sequence_length")
        outputs = length_without_data(self, model, "tgt_max_sequence_length")
        found = rows_of(("input_ids", "attention_mask"), inputs)
        found |= rows_of(("decoder_input_ids", "decoder_attention_mask", "labels"), outputs)
        found["decoder_input_length"] = Feature((1,), torch.int64)
        if self.dynamic_loss_weight:
            found["loss_weight"] = Feature((1,), torch.float32)
        return found

    @override
    def missing(self) -> list[str]:
        inputs, outputs = self.src_max_sequence_length, self.tgt_max_sequence_length
        if inputs is not None and outputs is not None:
            self.check_lengths(inputs, outputs, self.extra_ids)
        lacks = missing_vocabulary(self.src_vocab_file, "src_vocab_file")
        folders = distinct_folders(self.src_data_dir, "src_data_dir")
        return lacks + [
            f"src_data_dir {folder!r} is not a folder with a file {META}."
            for folder in folders
            if not (Path(folder).expanduser() / META).is_file()
        ]


class T5DynamicDataProcessor(SequencePairProcessor):
    """Load documents from text files; some spans of their tokens are replaced, and predicted.

    Each line is a document, whose tokens blanks separate. The folder has a file `meta.dat`, with a
    line for each file: its name and its number of lines. Documents are cut into samples that fill
    an input; what is left is a shorter one. 15 % of the tokens are replaced, in spans of 3 on
    average: another choice in each epoch, which depends on the seed, the epoch and the sample only.

    Args:
        shuffle_seed: Seed of the order and of the spans; default: 0.
        src_vocab_file: File of the vocabulary: one token a line, whose number is its id.
        src_max_sequence_length: Tokens of an input; default: `src_max_position_embeddings` of the
            model.
        tgt_max_sequence_length: Tokens of an output; 114 for inputs of 512. Default:
            `tgt_max_position_embeddings` of the model.
        extra_ids: Sentinels, which mark the spans: the ids after the vocabulary, the last one
            first; 28 for inputs of 512.
        pack_sequences: Whether documents are joined before they are cut.
        num_documents_to_concatenate: How many.

    Shapes:
        A batch: input_ids and attention_mask (B, `src_max_sequence_length`); decoder_input_ids,
        decoder_attention_mask and labels (B, `tgt_max_sequence_length`), int32;
        decoder_input_length (B, 1), int64; loss_weight (B, 1), float32.

    Raises:
        ConfigError: If a file cannot be read, or the arguments do not fit each other.
    """

    @override
    def open(
        self,
        folders: Sequence[str],
        vocabulary: Vocabulary,
        layout: Seq2SeqLayout,
        spans: SpanOptions,
    ) -> PairRows:
        files, listed = [], NamedFiles()
        for folder in folders:
            for meta in read_meta(folder, 1, "src_data_dir"):
                path = str(Path(folder).expanduser() / meta.names[0])
                listed.add([path], meta.place)
                found = index_file(path)
                warn_of_count(meta, found)
                files.append(found)
        lines, (num_packed, seed) = TextLines(files), spans
        return SpanRows(vocabulary, layout, lines, num_packed=num_packed, seed=seed)

    @classmethod
    @override
    def check_lengths(cls, inputs: int, outputs: int, extra_ids: int) -> None:
        if inputs < _SHORTEST_INPUT:
            raise ConfigError(
                f"src_max_sequence_length is {inputs}, but must be at least {_SHORTEST_INPUT}."
            )
        replaced, spans = counts_of(longest_text(inputs))
        needed = replaced + spans + 1
        if needed > outputs:
            raise ConfigError(
                f"tgt_max_sequence_length is {outputs}, but inputs of {inputs} tokens "
                f"(src_max_sequence_length) have outputs of {needed}. Set it to {needed}."
            )
        if spans > extra_ids:
            raise ConfigError(
                f"extra_ids is {extra_ids}, but inputs of {inputs} tokens "
                f"(src_max_sequence_length) have {spans} spans, each with an id of its own. Set it "
                f"to {spans} or more, in the model as well."
            )


@checked_dataclass(kw_only=True)
class TransformerDynamicDataProcessor(SequencePairProcessor):
    """Load pairs of lines from text files: an input, and the output to predict.

    Blanks separate the tokens of a line. The folder has a file `meta.dat`, with a line for each
    pair of files: the name of the inputs, the name of the outputs, and their number of lines. Names
    are relative to the working directory, else to the folder. Pairs with a part that is empty, or
    not shorter than the longest sequence, are skipped; the log says so.

    Args:
        src_vocab_file: File of the vocabulary of both: one token a line, whose number is its id.
        src_max_sequence_length: Tokens of an input; longer ones are left out. Default:
            `src_max_position_embeddings` of the model.
        tgt_max_sequence_length: Tokens of an output; likewise, `tgt_max_position_embeddings`.
        extra_ids: Ids that the model has besides the vocabulary.
        num_documents_to_concatenate: No effect.

    Shapes:
        A batch: as of `T5DynamicDataProcessor`.

    Raises:
        ConfigError: If a file cannot be read, or two files have not as many lines.
    """

    pack_sequences: Flag = without_effect("pairs of lines are not joined", default=False)

    @override
    def open(
        self,
        folders: Sequence[str],
        vocabulary: Vocabulary,
        layout: Seq2SeqLayout,
        spans: SpanOptions,
    ) -> PairRows:
        pairs, listed = [], NamedFiles()
        for folder in folders:
            for meta in read_meta(folder, 2, "src_data_dir"):
                paths = [_place_of(name, folder) for name in meta.names]
                listed.add(paths, meta.place)
                source, target = (index_file(one) for one in paths)
                if len(source.num_pieces) != len(target.num_pieces):
                    raise ConfigError(
                        f"{meta.place}: {source.path} has {len(source.num_pieces)} lines, but "
                        f"{target.path} has {len(target.num_pieces)}: each line of one must have "
                        f"its counterpart in the other."
                    )
                warn_of_count(meta, source)
                pairs.append((source, target))
        sources, targets = (TextLines(files) for files in zip(*pairs, strict=True))
        dataset = TranslationRows(vocabulary, layout, sources, targets)
        if dataset.num_skipped:
            say_once(
                f"{type(self).__name__}: {dataset.num_skipped} of {len(sources)} pairs are left "
                f"out: one of them is empty, or has as many tokens as "
                f"src_max_sequence_length ({layout.input_length}) or tgt_max_sequence_length "
                f"({layout.target_length}), or more."
            )
        return dataset


def _place_of(name: str, folder: str) -> str:
    """Return the path of a file that `meta.dat` names."""
    path = Path(name).expanduser()
    inside = Path(folder).expanduser() / path
    if not path.exists():
        return str(inside)
    if inside.exists() and not inside.samefile(path):
        say_once(
            f"{name} is in the working directory and in {folder}; the former is "
            f"used. Write an absolute path in {META} for the other one.",
            logging.WARNING,
        )
    return str(path)


def _warn_of_unknown(dataset: PairRows) -> None:
    """Warn once if the vocabulary lacks most pieces at the start of a text."""
    vocabulary = dataset.vocabulary
    for lines in dataset.lines:
        pieces: list[str] = []
        for number in range(min(len(lines), _NUM_LOOKED_AT)):
            pieces += vocabulary.pieces_of(lines.read([number])[0])[:_NUM_LOOKED_AT]
        unknown = vocabulary.num_unknown(pieces)
        if unknown > len(pieces) * _MOST_UNKNOWN:
            example = next(one for one in pieces if vocabulary.num_unknown([one]))
            say_once(
                f"{lines.files[0].path}: {unknown} of its first {len(pieces)} tokens are not in "
                f"the vocabulary {vocabulary.path}, as {example!r}, and get the id of oov_token. "
                f"The text must consist of tokens of that file, with blanks between.",
                logging.WARNING,
            )


def _pad_id(vocabulary: Vocabulary, given: int | str | None, argument: str, default: int) -> int:
    """Return the id that an argument gives: as a number, as its digits, or as a token."""
    if given is None:
        return default
    if isinstance(given, str) and not given.removeprefix("-").isdecimal():
        return vocabulary.id_of(given, argument)
    number = int(given)
    lowest = -100 if argument.startswith("labels") else 0  # -100: a label that does not count
    if number != lowest and not 0 <= number < vocabulary.size:
        raise ConfigError(
            f"{argument} is {number}, but the vocabulary has the ids 0 to {vocabulary.size - 1}."
        )
    return number
