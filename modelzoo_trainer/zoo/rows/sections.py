"""The settings of a preprocessing file: sections `setup`, `processing` and `dataset`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Final, Literal, TypeAlias

from annotated_types import Ge, Gt, Le

from modelzoo_trainer.base.cores import num_cores

Positive: TypeAlias = Annotated[int, Gt(0)]
NonNegative: TypeAlias = Annotated[int, Ge(0)]
Rate: TypeAlias = Annotated[float, Ge(0), Le(1)]
Dtype: TypeAlias = Literal["int16", "int32", "int64"]


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Section `setup`: what is read, and where the rows are written."""

    data: dict[str, Any] = field(default_factory=dict)
    metadata_files: str | list[str] | None = None
    output_dir: str = "./output/"
    mode: Literal["pretraining", "finetuning", "dpo", "nlg", "custom"]
    token_generator: str | None = None
    processes: Positive = field(default_factory=num_cores)
    data_splits: dict[str, Any] | None = None
    context_splits: dict[str, Any] | None = None
    data_splits_dir: str | None = None


@dataclass(frozen=True, kw_only=True)
class Processing:
    """Section `processing`: how entries are read, tokenized and written."""

    huggingface_tokenizer: str | None = None
    custom_tokenizer: str | None = None
    tokenizer_params: dict[str, Any] | None = None
    eos_id: NonNegative | None = None
    pad_id: NonNegative | None = None
    max_seq_length: Positive = 2048
    min_sequence_len: NonNegative = 10
    short_seq_prob: Rate = 0.0
    seed: NonNegative = 0
    input_ids_dtype: Dtype = "int32"
    input_mask_dtype: Dtype = "int32"
    inverted_mask: bool = False
    use_ftfy: bool = True
    ftfy_normalizer: Literal["NFC", "NFD", "NFKC", "NFKD"] | None = "NFC"
    wikitext_detokenize: bool = False
    read_hook: str | None = None
    read_hook_kwargs: dict[str, Any] = field(default_factory=dict)
    read_chunk_size: Positive = 1024
    write_chunk_size: Positive = 1024
    write_in_batch: bool = False
    shuffle: bool = False
    shuffle_seed: NonNegative = 0
    resume_from_checkpoint: bool = False
    token_limit: Positive | None = None
    semantic_loss_weight: dict[str, Any] | None = None
    semantic_drop_mask: dict[str, Any] | None = None
    semantic_attention_mask: dict[str, Any] | None = None
    end_of_turn_token: str | None = None
    fraction_of_RAM_alloted: Annotated[float, Gt(0), Le(1)] = 0.7
    split_seed: NonNegative = 0
    UNSAFE_skip_jsonl_decoding_errors: bool = False


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """Section `dataset`: how rows are made of documents."""

    use_vsl: bool = False
    training_objective: str | None = None
    pack_sequences: bool = True
    is_multimodal: bool = False
    sep_token: str | None = None
    chat_template: str | None = None
    truncate_to_msl: dict[str, Any] | None = None
    fold_long_doc: bool = True
    split_text_to_tokenize: bool = False
    chunk_len_to_split: Positive = 2000
    remove_bos_in_chunks: bool = False
    mlm_fraction: Rate = 0.15
    mlm_with_gather: bool = False
    ignore_index: int = -100
    excluded_tokens: list[Any] | None = None
    fim_rate: Rate | None = None
    spm_rate: Rate | None = None
    fim_prefix_tok: str | None = None
    fim_middle_tok: str | None = None
    fim_suffix_tok: str | None = None
    max_prompt_length: Positive = 512
    response_delimiter: str = "<response>"
    num_patches: Positive = 1
    max_num_img: Positive = 1
    image_token: str = "<special_image_token>"
    register_special_image_token: bool = True
    use_single_image_token: bool = False
    position_ids_dtype: Dtype = "int32"


SECTIONS: Final[dict[str, type]] = {"setup": Setup, "processing": Processing, "dataset": Dataset}


_OF_MODES: Final = {
    "processing": frozenset(
        {
            "end_of_turn_token",
            "seed",
            "semantic_drop_mask",
            "semantic_loss_weight",
            "short_seq_prob",
        }
    )
}
"""Keys outside `dataset` that only modes read."""


@dataclass(frozen=True, slots=True)
class PreprocessingSettings:
    """All settings of a run."""

    setup: Setup
    processing: Processing
    dataset: Dataset
    given: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The sections as they are in the file."""
    source: str = ""
    """The file, for messages."""

    def not_used(self, uses: frozenset[str]) -> Iterator[str]:
        """Yield the keys that are for modes alone and that a mode does not read.

        `false` where it is the default asks for nothing.
        """
        for section, known in {"dataset": Dataset.__dataclass_fields__, **_OF_MODES}.items():
            defaults = {one.name: one.default for one in fields(SECTIONS[section])}
            for key, value in self.given.get(section, {}).items():
                is_off = value is None or value is defaults.get(key) is False
                if key in known and key not in uses and not is_off:
                    yield f"{section}.{key}"
