"""Datasets of Hugging Face's `datasets`, tokenized or as features that a model takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader
from typing_extensions import override

from modelzoo_trainer.base.constraints import (
    Flag,
    Name,
    Names,
    NonNegativeSize,
    Size,
    checked_dataclass,
)
from modelzoo_trainer.core.parts.model_length import LENGTH, given_or_model_length
from modelzoo_trainer.hooks.interceptors import event
from modelzoo_trainer.loading.batch_dataset import already_a_batch
from modelzoo_trainer.zoo.data.hugging_face.arguments import (
    check_use,
    encoding_settings,
    source_of,
)
from modelzoo_trainer.zoo.data.hugging_face.classes import ClassEncoding
from modelzoo_trainer.zoo.data.hugging_face.encoding import (
    Encoding,
    EncodingSettings,
    Truncation,
    TurnsEncoding,
    template_of,
)
from modelzoo_trainer.zoo.data.hugging_face.examples import Task
from modelzoo_trainer.zoo.data.hugging_face.features import (
    FeatureColumns,
    FeatureRows,
    FeatureStream,
    Padding,
    feature_settings,
    open_features,
)
from modelzoo_trainer.zoo.data.hugging_face.pixels import Channels, Deviations, ImageSize, Means
from modelzoo_trainer.zoo.data.hugging_face.row_cache import CachedRows, cached_rows
from modelzoo_trainer.zoo.data.hugging_face.source import (
    DatasetSource,
    column_names,
    require_column,
)
from modelzoo_trainer.zoo.data.hugging_face.stream import RowStream
from modelzoo_trainer.zoo.data.hugging_face.tokenizer import (
    FitCheck,
    load_tokenizer,
    missing_tokenizer,
    require_tokens,
)
from modelzoo_trainer.zoo.data.processor import (
    DataProcessor,
    LoadingArguments,
    make_dataloader,
)
from modelzoo_trainer.zoo.data.sample_features import (
    Feature,
    Features,
    length_without_data,
    rows_of,
)
from modelzoo_trainer.zoo.data.token_cache import default_cache_dir
from modelzoo_trainer.zoo.rows.hdf5_format import (
    DPO_FEATURES,
    FEATURES,
    INPUTS,
    LABELS,
    MASK,
    SEGMENTS,
    VSL_FEATURES,
)
from modelzoo_trainer.zoo.rows.tokenizers import Tokenizer


@checked_dataclass(kw_only=True)
class HuggingFaceDataProcessor(LoadingArguments, DataProcessor):
    """Load batches of a dataset of Hugging Face's `datasets`, tokenized once or as a stream.

    With the task `features`, columns are used as they are. Other rows are those that
    `data_preprocess` writes for the same texts, tokenizer and settings, without its normalization
    of text (`use_ftfy: false`, and white space around messages), except those that are cut.

    Args:
        batch_size: Rows per batch and process, >= 1.
        global_batch_size: Rows per batch over all processes, a multiple of their number; give
            either this or `batch_size`.
        shuffle: Whether to shuffle the rows.
        path: A file (`.jsonl`, `.json`, `.csv`, `.parquet`, `.txt`, `.arrow`), a folder of files or
            one that `save_to_disk` wrote, a format of `data_files` (`json`, `csv`, `parquet`,
            `text`, `arrow`), or a name of the Hub.
        tokenizer: A folder, a tokenizer.json file, or a name of the Hub. Required but for
            `features`.
        max_sequence_length: Tokens per row, >= 1; default: `max_position_embeddings` of the model.
        task: What a row of the dataset is: `text`, `chat`, `instruction`,
            `preference`, `classification` or `features`.
        name: The configuration of a dataset that has several.
        data_files: Files or glob patterns, one or a list, or a mapping of these by split.
        data_dir: A folder of files of a format, or of the dataset.
        split: The split, such as `train` or `train[:90%]`.
        revision: Branch, tag or commit of a dataset of the Hub.
        streaming: Whether rows are made as they are needed, instead of once before the run.
        text_column: For `text` and `classification`.
        messages_column: For `chat`: a list of messages, each with a role and a content.
        message_role_key: Key of the role in a message: system, user (or human), assistant (gpt).
        message_content_key: Key of the content in a message.
        prompt_column: For `instruction` and `preference`; not used where the answers are lists of
            messages that begin with those before the answer.
        response_column: For `instruction`.
        text_pair_column: For `classification`: a second text; default: none.
        label_column: For `classification`: the class, a number or a text.
        label_names: The classes, in the order of their numbers, where they are texts.
        chosen_column: For `preference`: a text, or a list of messages that ends with the answer.
        rejected_column: For `preference`, as `chosen_column`.
        feature_columns: For `features`: the column of each argument of the model, by the argument,
            or a list of columns that are called like arguments.
        padding: For `features`: what fills rows that are shorter than the longest of their batch,
            by argument; default: 0 for `input_ids` and masks, -100 for `labels`.
        image_size: For `features` of images: height and width to resize to, or one number for both;
            default: the images' size, which must be equal.
        image_channels: 3 = red, green and blue, 1 = grey.
        image_mean: What is subtracted from pixels in [0, 1], per channel.
        image_std: What they are divided by then.
        image_processor: Folder or name of an image processor of `transformers`, instead of the
            other arguments of images.
        packing: Whether a row has several documents. They do not attend to each other: batches have
            `attention_span` and `position_ids`, which the included decoders use.
        chat_template: `tokenizer` for its own, `chatml`, a Jinja file, or the text of a template;
            default: the tokenizer's for `chat` and `preference`, none for `instruction`.
        separator: Text between a prompt and its response, for `instruction` without a template.
        truncation: What to do with chats and instructions of more than `max_sequence_length`
            tokens: `skip`, or cut them. A row then ends with the last answer that fits, whole. If
            none fits, the prompts before the first one are cut, the longest first, at their start
            (`keep_end`) or end (`keep_start`), as far as needed to keep the answer whole; what the
            template writes around them stays. If that is not enough, prompts keep half of the row,
            and the answer loses its end.
        max_prompt_length: For `preference`: tokens that the prompt keeps, at its end, in rows that
            would be too long; then the answers lose their ends. Default: half of
            `max_sequence_length`.
        min_sequence_length: Documents with fewer tokens are skipped.
        eos_token: The token that ends a document; default: from the tokenizer's folder.
        pad_token: The token that fills rows; default: from the folder, else `eos_token`.
        vocab_size: Number of token ids of the model, which the tokenizer must not exceed; a run
            also compares the model's.
        cache_dir: Folder of the cached rows and of what `datasets` makes of files; default:
            `.cache/modelzoo_trainer/tokens` in the home folder, and the default of `datasets`.

    Shapes:
        A batch: `input_ids`, `attention_mask` (which labels count: for `chat` and `instruction`
        only answers) and `labels` (the next tokens), (B, max_sequence_length), int32; with
        `packing` also `attention_span` and `position_ids`. For `preference`: the first three with
        `chosen_` and `rejected_` in front, for the model `dpo`. For `classification`: `input_ids`,
        `attention_mask` (which positions are tokens), with a second text `token_type_ids`, and
        `labels` (B,), int64. For `features`: the arguments in `feature_columns`, int64 or float32.

    Raises:
        ConfigError: If a file, split, column or chat template is missing, no row can be used, or a
            row of `features` is invalid.
    """

    shuffle: Flag = True
    drop_last: Flag = True
    persistent_workers: Flag = False
    path: Name
    tokenizer: Name | None = None
    max_sequence_length: Size | None = None
    task: Task = "text"
    name: str | None = None
    data_files: str | list[str] | dict[str, Any] | None = None
    data_dir: str | None = None
    split: Name = "train"
    revision: str | None = None
    streaming: Flag = False
    text_column: Name = "text"
    messages_column: Name = "messages"
    message_role_key: Name = "role"
    message_content_key: Name = "content"
    prompt_column: Name = "prompt"
    response_column: Name = "response"
    text_pair_column: Name | None = None
    label_column: Name = "label"
    label_names: Names | None = None
    chosen_column: Name = "chosen"
    rejected_column: Name = "rejected"
    feature_columns: FeatureColumns | None = None
    padding: Padding | None = None
    image_size: ImageSize | None = None
    image_channels: Channels = 3
    image_mean: Means | None = None
    image_std: Deviations | None = None
    image_processor: Name | None = None
    packing: Flag = False
    chat_template: str | None = None
    separator: str = "\n"
    truncation: Truncation = "skip"
    max_prompt_length: Size | None = None
    min_sequence_length: NonNegativeSize = 0
    eos_token: str | None = None
    pad_token: str | None = None
    vocab_size: Size | None = None
    cache_dir: str | None = None

    def __post_init__(self) -> None:
        given, defaults = self._arguments()
        check_use(given, defaults)
        self.options = self.loading_options()
        source = source_of(given)
        self.dataset: FeatureRows | FeatureStream | CachedRows | RowStream
        if self.task == "features":
            features = feature_settings(given)
            self.dataset = open_features(self.load(source), features, self.options, source)
            return
        name = self.tokenizer
        assert name is not None  # checked
        length = given_or_model_length(
            self.max_sequence_length, "max_sequence_length", type(self).__name__
        )
        given["max_sequence_length"] = length
        made = self.create_tokenizer(name, self.eos_token, self.pad_token)
        self.tokenizer = made  # type: ignore[assignment]  # in place of its name
        require_tokens(made, name, self.task)
        self._fit_check = FitCheck(name, made.vocab_size, length)
        self._fit_check(self.vocab_size, None)
        template = template_of(self.chat_template, made, name, self.task)
        settings = encoding_settings(given, template)
        self._source = source
        data = self.load(source)
        found = column_names(data, source.where)
        for key, column in settings.columns.of(self.task).items():
            require_column(column, key, found, source.where)
        self.dataset = self.process(data, settings, source.where)

    def _arguments(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the arguments by name, and their defaults."""
        known = fields(self)
        given = {one.name: getattr(self, one.name) for one in known}
        return given, {one.name: one.default for one in known}

    @event("create-tokenizer")
    def create_tokenizer(
        self, tokenizer: str, eos_token: str | None, pad_token: str | None
    ) -> Tokenizer:
        """Return the tokenizer."""
        return load_tokenizer(tokenizer, eos_token, pad_token)

    @event("load")
    def load(self, source: DatasetSource) -> Any:
        """Return the split of the dataset."""
        return source.open(self.cache_dir)

    @event("process")
    def process(self, data: Any, settings: EncodingSettings, where: str) -> CachedRows | RowStream:
        """Return the rows of tokens; make them if they are not cached, or as a stream."""
        kind = ClassEncoding if settings.task == "classification" else TurnsEncoding
        tokenizer: Any = self.tokenizer
        encoding: Encoding = kind(settings, tokenizer, where)
        if self.streaming:
            identity = self._source.identity()
            return RowStream(data, encoding, self.options, self._fit_check, where, identity)
        given = self.cache_dir
        folder = default_cache_dir() if given is None else Path(given).expanduser()
        path = cached_rows(data, encoding, folder, where)
        return CachedRows(path, encoding, settings.max_sequence_length, self._fit_check)

    @event("create-dataloader")
    @override
    def create_dataloader(self) -> DataLoader[Any]:
        """Return a loader of the rows; a stream makes whole batches itself."""
        options = self.options
        if not self.streaming:
            return make_dataloader(self.dataset, options)
        has_workers = options.num_workers > 0
        return DataLoader(
            self.dataset,
            batch_size=None,
            num_workers=options.num_workers,
            collate_fn=already_a_batch,
            prefetch_factor=options.prefetch_factor if has_workers else None,
            persistent_workers=options.persistent_workers and has_workers,
        )

    @classmethod
    @override
    def lengths_from_model(cls, arguments: Mapping[str, Any]) -> Mapping[str, str]:
        return {} if arguments.get("task") == "features" else LENGTH

    @override
    def sample_features(self, model: Any) -> Features | None:
        if self.task == "features":
            return None
        length = length_without_data(self, model)
        if self.task == "preference":
            return rows_of(DPO_FEATURES, length)
        if self.task != "classification":
            return rows_of(VSL_FEATURES if self.packing else FEATURES, length)
        segments = () if self.text_pair_column is None else (SEGMENTS,)
        return rows_of((INPUTS, MASK, *segments), length) | {LABELS: Feature((), torch.int64)}

    @override
    def missing(self) -> list[str]:
        """Check the arguments without reading data; return what is missing on this machine.

        A tokenizer on this machine is read; a name of the Hub is not looked up.

        Raises:
            ConfigError: If arguments exclude each other, or the tokenizer cannot be used.
        """
        given, defaults = self._arguments()
        check_use(given, defaults)
        lacks = source_of(given).check()
        name = self.tokenizer
        if self.task == "features" or name is None:
            return lacks + feature_settings(given).pixels.missing()
        lacks += missing_tokenizer(name)
        if Path(name).expanduser().exists():
            made = load_tokenizer(name, self.eos_token, self.pad_token)
            require_tokens(made, name, self.task)
            length = self.max_sequence_length or 1  # not compared here
            FitCheck(name, made.vocab_size, length)(self.vocab_size, None)
            template_of(self.chat_template, made, name, self.task)
        return lacks
