"""BERT's pretraining on CSV files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from typing_extensions import override

from modelzoo_trainer.base.constraints import (
    Flag,
    Name,
    NonNegativeSize,
    PositiveInt,
    Share,
    Size,
    checked,
)
from modelzoo_trainer.core.parts.model_length import LENGTH, given_or_model_length
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.data.csv.files import CsvFile
from modelzoo_trainer.zoo.data.csv.masking import Masking
from modelzoo_trainer.zoo.data.csv.pretraining_rows import (
    DynamicMaskRows,
    DynamicOptions,
    StaticMaskRows,
)
from modelzoo_trainer.zoo.data.csv.processor import CsvProcessor, lacks_of, say_ignored
from modelzoo_trainer.zoo.data.processor import LoadingOptions, ShuffleSeed
from modelzoo_trainer.zoo.data.vocabulary import Vocabulary, missing_vocabulary

_EXCLUDED: Final = ("[CLS]", "[SEP]", "[PAD]", "[MASK]")


class BertCSVDynamicMaskDataProcessor(CsvProcessor):
    """Load batches of sequences from CSV files of tokens, of which some are hidden in each epoch.

    Folders have a file `meta.dat` with a line for each CSV file: its name and its number of rows.
    Columns are `tokens`, a list such as `['[CLS]', 'the', '##m', '[SEP]']`, and to predict the next
    sentence `segment_ids`, a list of 0 and 1, and `is_random_next`, 0 or 1. Which tokens are hidden
    depends on the seed, the epoch and the row alone.

    Args:
        data_dir: One or a list of folders.
        batch_size: Sequences per batch over all processes, a multiple of their number.
        vocab_file: Text file of the tokens, one a line, in the order of their ids.
        max_sequence_length: Tokens per sequence: shorter ones are padded, longer ones cut, or
            refused if they have a next sentence; default: `max_position_embeddings` of the model.
        max_predictions_per_seq: Predicted tokens per sequence, at most.
        disable_nsp: Whether only hidden tokens are predicted, not the next sentence; null = as the
            model has it.
        masked_lm_prob: Share of the tokens that are predicted.
        mask_whole_word: Whether all pieces of a word are predicted, or none.
        gather_mlm_labels: Whether there are labels of the predicted tokens alone, with their
            positions, instead of labels of all positions.
        dynamic_mlm_scale: Whether the loss is divided by the number of predicted tokens in a batch
            of a process, instead of being multiplied by the model's `mlm_loss_weight`.
        do_lower: Whether tokens that the vocabulary lacks are looked up in lower case.
        oov_token: In place of tokens that the vocabulary lacks.
        mask_token: In place of hidden tokens.
        document_separator_token: Ends a sentence; never predicted.
        exclude_from_masking: Tokens that are never predicted, nor drawn at random; default:
            `[CLS]`, `[SEP]`, `[PAD]` and `[MASK]`.
        labels_pad_id: Value of labels where nothing is predicted.
        input_pad_id: Value of `input_ids` after the end of a sequence.
        attn_mask_pad_id: Value of `attention_mask` there.
        segment_pad_id: Value of `token_type_ids` there.
        shuffle: Whether to shuffle; each epoch has its own order.
        shuffle_seed: Seed of the order and of the masks; default: 0.
        shuffle_buffer: No effect.
        num_workers: Number of worker processes; 0 = load in the main process.
        drop_last: Whether an incomplete batch at the end of an epoch begins the next epoch instead;
            no sample is lost.
        prefetch_factor: Batches that each worker prefetches.
        persistent_workers: Whether workers persist between epochs.
        buckets: No effect.
        vocab_size: No effect.
        whole_word_masking: No effect; see `mask_whole_word`.
        num_examples: No effect.
        steps: No effect.

    Shapes:
        A batch: input_ids, attention_mask (B, S), int32; labels, masked_lm_mask and
        masked_lm_positions (B, P), or labels and masked_lm_mask (B, S); token_type_ids (B, S) and
        next_sentence_label (B, 1) unless `disable_nsp`; mlm_loss_scale (B, 1), float32.

    Raises:
        ConfigError: If a file cannot be read, or does not fit the arguments or the model.
    """

    model_lengths = LENGTH
    dataset: DynamicMaskRows

    @checked()
    def __init__(
        self,
        *,
        data_dir: str | list[str],
        batch_size: PositiveInt,
        vocab_file: Name,
        max_sequence_length: Size | None = None,
        max_predictions_per_seq: Size,
        disable_nsp: bool | None = None,
        masked_lm_prob: Share = 0.15,
        mask_whole_word: Flag = False,
        gather_mlm_labels: Flag = True,
        dynamic_mlm_scale: Flag = False,
        do_lower: Flag = False,
        oov_token: Name = "[UNK]",
        mask_token: Name = "[MASK]",
        document_separator_token: Name = "[SEP]",
        exclude_from_masking: list[str] | None = None,
        labels_pad_id: int = 0,
        input_pad_id: NonNegativeSize = 0,
        attn_mask_pad_id: NonNegativeSize = 0,
        segment_pad_id: NonNegativeSize = 0,
        shuffle: Flag = True,
        shuffle_seed: ShuffleSeed | None = None,
        shuffle_buffer: Size | None = None,
        num_workers: NonNegativeSize = 0,
        drop_last: Flag = True,
        prefetch_factor: Size | None = 10,
        persistent_workers: Flag = True,
        buckets: Any = None,
        vocab_size: Any = None,
        whole_word_masking: Any = None,
        num_examples: Any = None,
        steps: Any = None,
    ) -> None:
        owner = type(self).__name__
        say_ignored(
            owner,
            {
                "shuffle_buffer": shuffle_buffer,
                "buckets": buckets,
                "vocab_size": vocab_size,
                "whole_word_masking": whole_word_masking,
                "num_examples": num_examples,
                "steps": steps,
            },
        )
        max_sequence_length = given_or_model_length(
            max_sequence_length, "max_sequence_length", owner
        )
        if max_predictions_per_seq > max_sequence_length:
            raise ConfigError(
                f"{owner}: max_predictions_per_seq is {max_predictions_per_seq}, but a sequence "
                f"has {max_sequence_length} tokens (max_sequence_length). Decrease it."
            )
        vocabulary = Vocabulary(
            vocab_file, oov_token=oov_token, case="lower_if_missing" if do_lower else "counts"
        )
        excluded = frozenset(_EXCLUDED if exclude_from_masking is None else exclude_from_masking)
        excluded |= {document_separator_token}
        not_drawn = vocabulary.find(excluded)
        replacements = [one for one in range(vocabulary.size) if one not in not_drawn]
        if not replacements:
            raise ConfigError(f"{owner}: exclude_from_masking excludes all tokens of vocab_file.")
        masking = Masking(
            probability=masked_lm_prob,
            max_predictions=max_predictions_per_seq,
            mask_id=vocabulary.id_of(mask_token, "mask_token"),
            excluded=excluded,
            replacements=replacements,
            whole_words=mask_whole_word,
        )
        self._rows = DynamicOptions(
            vocabulary=vocabulary,
            masking=masking,
            length=max_sequence_length,
            gathers=gather_mlm_labels,
            scales=dynamic_mlm_scale,
            input_pad=input_pad_id,
            mask_pad=attn_mask_pad_id,
            segment_pad=segment_pad_id,
            label_pad=labels_pad_id,
        )
        self._disable_nsp = disable_nsp
        options = LoadingOptions(
            global_batch_size=batch_size,
            shuffle=shuffle,
            shuffle_seed=shuffle_seed or 0,
            num_workers=num_workers,
            drop_last=drop_last,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
        )
        self.begin(data_dir, options)

    @override
    def make_dataset(self, files: Sequence[CsvFile]) -> DynamicMaskRows:
        """Return the dataset of files."""
        return DynamicMaskRows(
            files,
            self._rows,
            owner=type(self).__name__,
            disable_nsp=self._disable_nsp,
            seed=self.options.shuffle_seed,
        )

    @classmethod
    def check_arguments(
        cls, *, data_dir: str | list[str], vocab_file: str, **others: Any
    ) -> list[str]:
        """Check the arguments without opening files; return what is missing on this machine.

        Raises:
            ConfigError: If `data_dir` names no folder.
        """
        return lacks_of(data_dir) + missing_vocabulary(vocab_file)


class BertCSVDataProcessor(CsvProcessor):
    """Load batches of sequences from CSV files of token ids, hidden when the files were written.

    Folders have a file `meta.dat` with a line for each CSV file: its name and its number of rows.
    The columns are lists of integers: `input_ids`, `attention_mask`, `labels`, and if all files
    have them `masked_lm_weights`, and with these `masked_lm_positions`; to predict the next
    sentence also `token_type_ids` and `next_sentence_label`. Each has the same length in all rows.

    Args:
        data_dir: One or a list of folders.
        batch_size: Sequences per batch over all processes, a multiple of their number.
        disable_nsp: Whether only hidden tokens are predicted, not the next sentence; null = as the
            model has it.
        dynamic_mlm_scale: Whether the loss is divided by the number of predicted tokens in a batch
            of a process, instead of being multiplied by the model's `mlm_loss_weight`.
        shuffle: Whether to shuffle; each epoch has its own order.
        shuffle_seed: Seed of the order; default: 0.
        shuffle_buffer: No effect.
        num_workers: Number of worker processes; 0 = load in the main process.
        drop_last: Whether an incomplete batch at the end of an epoch begins the next epoch instead;
            no sample is lost.
        prefetch_factor: Batches that each worker prefetches.
        persistent_workers: Whether workers persist between epochs.
        buckets: No effect.
        vocab_size: No effect.
        vocab_file: No effect.
        whole_word_masking: No effect.
        max_predictions_per_seq: No effect.
        do_lower: No effect.
        masked_lm_prob: No effect.
        max_sequence_length: No effect.
        max_position_embeddings: No effect.

    Shapes:
        A batch: each column (B, its length), int32, `masked_lm_weights` as `masked_lm_mask`;
        next_sentence_label (B, 1); mlm_loss_scale (B, 1), float32.

    Raises:
        ConfigError: If a file cannot be read, or does not fit the arguments or the model.
    """

    dataset: StaticMaskRows

    @checked()
    def __init__(
        self,
        *,
        data_dir: str | list[str],
        batch_size: PositiveInt,
        disable_nsp: bool | None = None,
        dynamic_mlm_scale: Flag = False,
        shuffle: Flag = False,
        shuffle_seed: ShuffleSeed | None = None,
        shuffle_buffer: Size | None = None,
        num_workers: NonNegativeSize = 0,
        drop_last: Flag = True,
        prefetch_factor: Size | None = 2,
        persistent_workers: Flag = False,
        buckets: Any = None,
        vocab_size: Any = None,
        vocab_file: Any = None,
        whole_word_masking: Any = None,
        max_predictions_per_seq: Any = None,
        do_lower: Any = None,
        masked_lm_prob: Any = None,
        max_sequence_length: Any = None,
        max_position_embeddings: Any = None,
    ) -> None:
        owner = type(self).__name__
        say_ignored(
            owner,
            {"shuffle_buffer": shuffle_buffer, "buckets": buckets, "vocab_size": vocab_size},
        )
        say_ignored(
            owner,
            {
                "vocab_file": vocab_file,
                "whole_word_masking": whole_word_masking,
                "max_predictions_per_seq": max_predictions_per_seq,
                "do_lower": do_lower,
                "masked_lm_prob": masked_lm_prob,
                "max_sequence_length": max_sequence_length,
                "max_position_embeddings": max_position_embeddings,
            },
            "the files have token ids that are masked already",
        )
        self._disable_nsp, self._scales = disable_nsp, dynamic_mlm_scale
        options = LoadingOptions(
            global_batch_size=batch_size,
            shuffle=shuffle,
            shuffle_seed=shuffle_seed or 0,
            num_workers=num_workers,
            drop_last=drop_last,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
        )
        self.begin(data_dir, options)

    @override
    def make_dataset(self, files: Sequence[CsvFile]) -> StaticMaskRows:
        """Return the dataset of files."""
        return StaticMaskRows(
            files,
            scales=self._scales,
            owner=type(self).__name__,
            disable_nsp=self._disable_nsp,
            seed=self.options.shuffle_seed,
        )

    @classmethod
    def check_arguments(cls, *, data_dir: str | list[str], **others: Any) -> list[str]:
        """Check the arguments without opening files; return what is missing on this machine.

        Raises:
            ConfigError: If `data_dir` names no folder.
        """
        return lacks_of(data_dir)
