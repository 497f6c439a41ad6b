"""Data processors of encoder-decoder models, over text files."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from typing_extensions import override

from modelzoo_trainer.base.constraints import (
    Flag,
    NonNegativeSize,
    PositiveInt,
    Size,
    checked,
)
from modelzoo_trainer.core.parts.model_length import PAIR_LENGTHS, given_or_model_length
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.hooks.interceptors import event
from modelzoo_trainer.loading.stream import Member
from modelzoo_trainer.zoo.data.folders import META, Listed, distinct_folders, read_meta
from modelzoo_trainer.zoo.data.processor import LoadingOptions, ShuffleSeed
from modelzoo_trainer.zoo.data.seq2seq.rows import Layout, PairRows, SpanRows, TranslationRows
from modelzoo_trainer.zoo.data.seq2seq.spans import counts_of, longest_text
from modelzoo_trainer.zoo.data.seq2seq.text_lines import TextLines, index_file, warn_of_count
from modelzoo_trainer.zoo.data.stream_processor import StreamProcessor, say_once, say_without_effect
from modelzoo_trainer.zoo.data.vocabulary import Vocabulary, missing_vocabulary

_NO_EFFECT: Final = {
    "shuffle_buffer": "shuffle puts all samples of all files into a random order",
    "buckets": "all batches are padded to src_max_sequence_length and tgt_max_sequence_length",
    "vocab_size": "the vocabulary file and extra_ids decide",
    "tgt_vocab_file": "inputs and outputs have the vocabulary of src_vocab_file",
    "tgt_data_dir": "the files of src_data_dir have inputs and outputs",
    "mixed_precision": "token ids are integers",
    "fp16_type": "token ids are integers",
    "pack_sequences": "pairs of lines are not joined",
    "num_documents_to_concatenate": "pack_sequences is false",
}
_SHORTEST_INPUT: Final = 3
_NUM_PACKED: Final = 128
_NUM_LOOKED_AT: Final = 100  # lines, and tokens of a line
_MOST_UNKNOWN: Final = 0.5  # share of the tokens


class SpanOptions(NamedTuple):
    """How documents are joined, and the seed of the spans."""

    num_packed: int
    seed: int


class SequencePairProcessor(StreamProcessor):
    """Base class of the data processors of this module."""

    model_lengths = PAIR_LENGTHS
    dataset: PairRows

    @checked()
    def __init__(
        self,
        *,
        src_vocab_file: str,
        src_data_dir: str | list[str],
        batch_size: PositiveInt,
        src_max_sequence_length: Size | None = None,
        tgt_max_sequence_length: Size | None = None,
        extra_ids: NonNegativeSize = 0,
        shuffle: Flag = True,
        shuffle_seed: ShuffleSeed | None = None,
        shuffle_buffer: Size | None = None,
        num_workers: NonNegativeSize = 0,
        drop_last: Flag = True,
        prefetch_factor: Size | None = 10,
        persistent_workers: Flag = True,
        do_lower: Flag = False,
        buckets: list[int] | None = None,
        dynamic_loss_weight: Flag = False,
        pack_sequences: Flag = False,
        num_documents_to_concatenate: Size = _NUM_PACKED,
        oov_token: str = "<unk>",
        sos_token: str = "<s>",
        eos_token: str = "</s>",
        pad_token: str = "<pad>",
        labels_pad_id: int | str | None = None,
        input_pad_id: int | str | None = None,
        vocab_size: Any = None,
        tgt_vocab_file: Any = None,
        tgt_data_dir: Any = None,
        mixed_precision: Any = None,
        fp16_type: Any = None,
    ) -> None:
        owner = type(self).__name__
        src_max_sequence_length = given_or_model_length(
            src_max_sequence_length, "src_max_sequence_length", owner
        )
        tgt_max_sequence_length = given_or_model_length(
            tgt_max_sequence_length, "tgt_max_sequence_length", owner
        )
        self.check_lengths(src_max_sequence_length, tgt_max_sequence_length, extra_ids)
        ignored: dict[str, Any] = {
            "shuffle_buffer": shuffle_buffer,
            "buckets": buckets,
            "vocab_size": vocab_size,
            "tgt_vocab_file": tgt_vocab_file,
            "tgt_data_dir": tgt_data_dir,
            "mixed_precision": mixed_precision,
            "fp16_type": fp16_type,
        }
        if not pack_sequences and num_documents_to_concatenate != _NUM_PACKED:
            ignored["num_documents_to_concatenate"] = num_documents_to_concatenate
        say_without_effect(owner, ignored | self.without_effect(pack_sequences), _NO_EFFECT)
        seed = shuffle_seed or 0
        self.options = LoadingOptions(
            global_batch_size=batch_size,
            shuffle=shuffle,
            shuffle_seed=seed,
            num_workers=num_workers,
            drop_last=drop_last,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
        )
        vocabulary = Vocabulary(
            src_vocab_file,
            argument="src_vocab_file",
            oov_token=oov_token,
            extra_ids=extra_ids,
            case="lower" if do_lower else "counts",
        )
        pad_id = vocabulary.id_of(pad_token, "pad_token")
        layout = Layout(
            input_length=src_max_sequence_length,
            target_length=tgt_max_sequence_length,
            start_id=vocabulary.id_of(sos_token, "sos_token"),
            end_id=vocabulary.id_of(eos_token, "eos_token"),
            input_pad_id=_pad_id(vocabulary, input_pad_id, "input_pad_id", pad_id),
            label_pad_id=_pad_id(vocabulary, labels_pad_id, "labels_pad_id", pad_id),
            has_weights=dynamic_loss_weight,
        )
        folders = distinct_folders(src_data_dir, "src_data_dir")
        spans = SpanOptions(num_documents_to_concatenate if pack_sequences else 1, seed)
        self.dataset = self.load(folders, vocabulary, layout, spans)
        _warn_of_unknown(self.dataset)
        self.members = [Member(0, len(self.dataset), len(self.dataset))]

    @event("load")
    def load(
        self, folders: Sequence[str], vocabulary: Vocabulary, layout: Layout, spans: SpanOptions
    ) -> PairRows:
        """Return the dataset."""
        return self.open(folders, vocabulary, layout, spans)

    @abstractmethod
    def open(
        self, folders: Sequence[str], vocabulary: Vocabulary, layout: Layout, spans: SpanOptions
    ) -> PairRows:
        """Return the dataset of some folders."""

    @classmethod
    def check_lengths(cls, inputs: int, outputs: int, extra_ids: int) -> None:
        """Check the lengths of sequences and the number of sentinels.

        Raises:
            ConfigError: If there are too few of them.
        """

    @classmethod
    def without_effect(cls, pack_sequences: bool) -> dict[str, Any]:
        """Return further arguments that have no effect, by name."""
        del pack_sequences
        return {}

    @classmethod
    def check_arguments(
        cls,
        *,
        src_vocab_file: str,
        src_data_dir: str | list[str],
        src_max_sequence_length: int | None = None,
        tgt_max_sequence_length: int | None = None,
        extra_ids: int = 0,
        **others: Any,
    ) -> list[str]:
        """Check the arguments without opening files; return what is missing on this machine.

        Raises:
            ConfigError: If lengths and sentinels do not fit, or `src_data_dir` is invalid.
        """
        del others
        if src_max_sequence_length is not None and tgt_max_sequence_length is not None:
            cls.check_lengths(src_max_sequence_length, tgt_max_sequence_length, extra_ids)
        lacks = missing_vocabulary(src_vocab_file, "src_vocab_file")
        folders = distinct_folders(src_data_dir, "src_data_dir")
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
        src_vocab_file: File of the vocabulary: one token a line, whose number is its id.
        src_data_dir: One or a list of folders.
        batch_size: Samples per batch over all processes, a multiple of their number.
        src_max_sequence_length: Tokens of an input; default: `src_max_position_embeddings` of the
            model.
        tgt_max_sequence_length: Tokens of an output; 114 for inputs of 512. Default:
            `tgt_max_position_embeddings` of the model.
        extra_ids: Sentinels, which mark the spans: the ids after the vocabulary, the last one
            first; 28 for inputs of 512.
        shuffle: Whether to shuffle; each epoch has its own order.
        shuffle_seed: Seed of the order and of the spans; default: 0.
        shuffle_buffer: No effect.
        num_workers: Number of worker processes; 0 = load in the main process.
        drop_last: Whether an incomplete batch at the end of an epoch begins the next epoch instead;
            no sample is lost.
        prefetch_factor: Batches that each worker prefetches.
        persistent_workers: Whether workers persist between epochs.
        do_lower: Whether text and vocabulary are converted to lower case.
        buckets: No effect.
        dynamic_loss_weight: Whether batches have `loss_weight`: 1 / tokens of the output.
        pack_sequences: Whether documents are joined before they are cut.
        num_documents_to_concatenate: How many.
        oov_token: Token for those that the vocabulary lacks.
        sos_token: Token before an output.
        eos_token: Token after an output.
        pad_token: Token that fills sequences.
        labels_pad_id: Id, or token, that fills labels; default: `pad_token`.
        input_pad_id: Id, or token, that fills inputs; default: `pad_token`.
        vocab_size: No effect.
        tgt_vocab_file: No effect.
        tgt_data_dir: No effect.
        mixed_precision: No effect.
        fp16_type: No effect.

    Shapes:
        A batch: input_ids and attention_mask (B, `src_max_sequence_length`); decoder_input_ids,
        decoder_attention_mask and labels (B, `tgt_max_sequence_length`), int32;
        decoder_input_length (B, 1), int64; loss_weight (B, 1), float32.

    Raises:
        ConfigError: If a file cannot be read, or the arguments do not fit each other.
    """

    @override
    def open(
        self, folders: Sequence[str], vocabulary: Vocabulary, layout: Layout, spans: SpanOptions
    ) -> PairRows:
        files, listed = [], Listed()
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


class TransformerDynamicDataProcessor(SequencePairProcessor):
    """Load pairs of lines from text files: an input, and the output to predict.

    Blanks separate the tokens of a line. The folder has a file `meta.dat`, with a line for each
    pair of files: the name of the inputs, that of the outputs, and their number of lines. Names are
    relative to the working directory, else to the folder. Pairs of which one is empty, or not
    shorter than the longest sequence, are left out, which is logged.

    Args:
        src_vocab_file: File of the vocabulary of both: one token a line, whose number is its id.
        src_data_dir: One or a list of folders.
        batch_size: Samples per batch over all processes, a multiple of their number.
        src_max_sequence_length: Tokens of an input; longer ones are left out. Default:
            `src_max_position_embeddings` of the model.
        tgt_max_sequence_length: Tokens of an output; likewise, `tgt_max_position_embeddings`.
        extra_ids: Ids that the model has besides the vocabulary.
        shuffle: Whether to shuffle; each epoch has its own order.
        shuffle_seed: Seed of the order; default: 0.
        shuffle_buffer: No effect.
        num_workers: Number of worker processes; 0 = load in the main process.
        drop_last: Whether an incomplete batch at the end of an epoch begins the next epoch instead;
            no sample is lost.
        prefetch_factor: Batches that each worker prefetches.
        persistent_workers: Whether workers persist between epochs.
        do_lower: Whether text and vocabulary are converted to lower case.
        buckets: No effect.
        dynamic_loss_weight: Whether batches have `loss_weight`: 1 / tokens of the output.
        pack_sequences: No effect.
        num_documents_to_concatenate: No effect.
        oov_token: Token for those that the vocabulary lacks.
        sos_token: Token before an output.
        eos_token: Token after an output.
        pad_token: Token that fills sequences.
        labels_pad_id: Id, or token, that fills labels; default: `pad_token`.
        input_pad_id: Id, or token, that fills inputs; default: `pad_token`.
        vocab_size: No effect.
        tgt_vocab_file: No effect.
        tgt_data_dir: No effect.
        mixed_precision: No effect.
        fp16_type: No effect.

    Shapes:
        A batch: as of `T5DynamicDataProcessor`.

    Raises:
        ConfigError: If a file cannot be read, or two files have not as many lines.
    """

    @override
    def open(
        self, folders: Sequence[str], vocabulary: Vocabulary, layout: Layout, spans: SpanOptions
    ) -> PairRows:
        pairs, listed = [], Listed()
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

    @classmethod
    @override
    def without_effect(cls, pack_sequences: bool) -> dict[str, Any]:
        return {"pack_sequences": pack_sequences}


def _place_of(name: str, folder: str) -> str:
    """Return the path of a file that `meta.dat` names."""
    path = Path(name).expanduser()
    inside = Path(folder).expanduser() / path
    if not path.exists():
        return str(inside)
    if inside.exists() and not inside.samefile(path):
        say_once(
            f"{name} is in the working directory and in {folder}; that of the working directory is "
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
