"""BERT's pretraining on CSV files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from typing_extensions import override

from modelzoo_trainer.base.constraints import (
    Flag,
    Name,
    NonNegativeSize,
    Share,
    Size,
    checked_dataclass,
    without_effect,
)
from modelzoo_trainer.core.parts.model_length import LENGTH, given_or_model_length
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.data.csv.files import CsvFile
from modelzoo_trainer.zoo.data.csv.follow import followed
from modelzoo_trainer.zoo.data.csv.masking import Masking
from modelzoo_trainer.zoo.data.csv.pretraining_rows import (
    DynamicMaskRows,
    DynamicOptions,
    StaticMaskRows,
)
from modelzoo_trainer.zoo.data.csv.processor import CsvProcessor
from modelzoo_trainer.zoo.data.sample_features import (
    Feature,
    Features,
    length_without_data,
    rows_of,
)
from modelzoo_trainer.zoo.data.stream_processor import ALL_ARE_SHUFFLED, VOCAB_SIZE_IS_COMPARED
from modelzoo_trainer.zoo.data.vocabulary import Vocabulary, missing_vocabulary

_ONE_LENGTH: Final = "all samples are padded to one length"
_MASKED: Final = "the files have token ids that are masked already"
_EXCLUDED: Final = ("[CLS]", "[SEP]", "[PAD]", "[MASK]")


@checked_dataclass(kw_only=True)
class BertCSVDynamicMaskDataProcessor(CsvProcessor):
    """Load batches of sequences from CSV files of tokens; each epoch hides some of them.

    Folders have a file `meta.dat` with a line for each CSV file: its name and its number of rows.
    Columns are `tokens`, a list such as `['[CLS]', 'the', '##m', '[SEP]']`, and to predict the next
    sentence `segment_ids`, a list of 0 and 1, and `is_random_next`, 0 or 1. Which tokens are hidden
    depends on the seed, the epoch and the row alone.

    Args:
        batch_size: Sequences per batch over all processes, a multiple of their number.
        shuffle_seed: Seed of the order and of the masks; default: 0.
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
        whole_word_masking: No effect; see `mask_whole_word`.

    Shapes:
        A batch: input_ids, attention_mask (B, S), int32; labels, masked_lm_mask and
        masked_lm_positions (B, P), or labels and masked_lm_mask (B, S); token_type_ids (B, S) and
        next_sentence_label (B, 1) unless `disable_nsp`; mlm_loss_scale (B, 1), float32.

    Raises:
        ConfigError: If a file cannot be read, or does not fit the arguments or the model.
    """

    model_lengths = LENGTH
    vocab_file: Name
    max_sequence_length: Size | None = None
    max_predictions_per_seq: Size
    disable_nsp: bool | None = None
    masked_lm_prob: Share = 0.15
    mask_whole_word: Flag = False
    gather_mlm_labels: Flag = True
    dynamic_mlm_scale: Flag = False
    do_lower: Flag = False
    oov_token: Name = "[UNK]"
    mask_token: Name = "[MASK]"
    document_separator_token: Name = "[SEP]"
    exclude_from_masking: list[str] | None = None
    labels_pad_id: int = 0
    input_pad_id: NonNegativeSize = 0
    attn_mask_pad_id: NonNegativeSize = 0
    segment_pad_id: NonNegativeSize = 0
    shuffle_buffer: Size | None = without_effect(ALL_ARE_SHUFFLED)
    buckets: Any = without_effect(_ONE_LENGTH)
    vocab_size: Any = without_effect(VOCAB_SIZE_IS_COMPARED)
    whole_word_masking: Any = without_effect(
        "this processor has no such setting, see mask_whole_word"
    )
    num_examples: Any = without_effect("it follows from the files")
    steps: Any = without_effect("the loop decides")

    def __post_init__(self) -> None:
        owner = type(self).__name__
        length = given_or_model_length(self.max_sequence_length, "max_sequence_length", owner)
        if self.max_predictions_per_seq > length:
            raise ConfigError(
                f"{owner}: max_predictions_per_seq is {self.max_predictions_per_seq}, but a "
                f"sequence has {length} tokens (max_sequence_length). Decrease it."
            )
        vocabulary = Vocabulary(
            self.vocab_file,
            oov_token=self.oov_token,
            case="lower_if_missing" if self.do_lower else "counts",
        )
        given = self.exclude_from_masking
        excluded = frozenset(_EXCLUDED if given is None else given)
        excluded |= {self.document_separator_token}
        not_drawn = vocabulary.find(excluded)
        replacements = [one for one in range(vocabulary.size) if one not in not_drawn]
        if not replacements:
            raise ConfigError(f"{owner}: exclude_from_masking excludes all tokens of vocab_file.")
        masking = Masking(
            probability=self.masked_lm_prob,
            max_predictions=self.max_predictions_per_seq,
            mask_id=vocabulary.id_of(self.mask_token, "mask_token"),
            excluded=excluded,
            replacements=replacements,
            whole_words=self.mask_whole_word,
        )
        self._rows = DynamicOptions(
            vocabulary=vocabulary,
            masking=masking,
            length=length,
            gathers=self.gather_mlm_labels,
            scales=self.dynamic_mlm_scale,
            input_pad=self.input_pad_id,
            mask_pad=self.attn_mask_pad_id,
            segment_pad=self.segment_pad_id,
            label_pad=self.labels_pad_id,
        )
        self.begin()

    @override
    def sample_features(self, model: Any) -> Features:
        length = length_without_data(self, model)
        num = self.max_predictions_per_seq if self.gather_mlm_labels else length
        return _masked(self, model, length, num, is_gathered=self.gather_mlm_labels)

    @override
    def make_dataset(self, files: Sequence[CsvFile]) -> DynamicMaskRows:
        """Return the dataset of files."""
        return DynamicMaskRows(
            files,
            self._rows,
            owner=type(self).__name__,
            disable_nsp=self.disable_nsp,
            seed=self.options.shuffle_seed,
        )

    @override
    def missing(self) -> list[str]:
        return super().missing() + missing_vocabulary(self.vocab_file)


@checked_dataclass(kw_only=True)
class BertCSVDataProcessor(CsvProcessor):
    """Load batches of sequences from CSV files of token ids, hidden when the files were written.

    Folders have a file `meta.dat` with a line for each CSV file: its name and its number of rows.
    The columns are lists of integers: `input_ids`, `attention_mask`, `labels`, and if all files
    have them `masked_lm_weights`, and with these `masked_lm_positions`; to predict the next
    sentence also `token_type_ids` and `next_sentence_label`. Each has the same length in all rows.

    Args:
        batch_size: Sequences per batch over all processes, a multiple of their number.
        disable_nsp: Whether only hidden tokens are predicted, not the next sentence; null = as the
            model has it.
        dynamic_mlm_scale: Whether the loss is divided by the number of predicted tokens in a batch
            of a process, instead of being multiplied by the model's `mlm_loss_weight`.

    Shapes:
        A batch: each column (B, its length), int32, `masked_lm_weights` as `masked_lm_mask`;
        next_sentence_label (B, 1); mlm_loss_scale (B, 1), float32.

    Raises:
        ConfigError: If a file cannot be read, or does not fit the arguments or the model.
    """

    shuffle: Flag = False
    prefetch_factor: Size | None = 2
    persistent_workers: Flag = False
    disable_nsp: bool | None = None
    dynamic_mlm_scale: Flag = False
    shuffle_buffer: Size | None = without_effect(ALL_ARE_SHUFFLED)
    buckets: Any = without_effect(_ONE_LENGTH)
    vocab_size: Any = without_effect(VOCAB_SIZE_IS_COMPARED)
    vocab_file: Any = without_effect(_MASKED)
    whole_word_masking: Any = without_effect(_MASKED)
    max_predictions_per_seq: Any = without_effect(_MASKED)
    do_lower: Any = without_effect(_MASKED)
    masked_lm_prob: Any = without_effect(_MASKED)
    max_sequence_length: Any = without_effect(_MASKED)
    max_position_embeddings: Any = without_effect(_MASKED)

    def __post_init__(self) -> None:
        self.begin()

    @override
    def sample_features(self, model: Any) -> Features:
        length = length_without_data(self, model)
        num = self.max_predictions_per_seq
        return _masked(self, model, length, num or length, is_gathered=num is not None)

    @override
    def make_dataset(self, files: Sequence[CsvFile]) -> StaticMaskRows:
        """Return the dataset of files."""
        return StaticMaskRows(
            files,
            scales=self.dynamic_mlm_scale,
            owner=type(self).__name__,
            disable_nsp=self.disable_nsp,
            seed=self.options.shuffle_seed,
        )


def _masked(
    processor: Any, model: Any, length: int, num_labels: int, *, is_gathered: bool
) -> dict[str, Feature]:
    """Return the features of samples whose masked tokens are predicted."""
    found = rows_of(("input_ids", "attention_mask"), length)
    found |= rows_of(("labels", "masked_lm_mask"), num_labels)
    if is_gathered:
        found |= rows_of(("masked_lm_positions",), num_labels)
    owner, given = type(processor).__name__, processor.disable_nsp
    if not followed(owner, "disable_nsp", given, model, default=False):
        found |= {"token_type_ids": Feature((length,)), "next_sentence_label": Feature((1,))}
    if processor.dynamic_mlm_scale:
        found["mlm_loss_scale"] = Feature((1,), torch.float32)
    return found
