"""Language modeling on text files."""

from pathlib import Path
from typing import Any

from typing_extensions import override

from modelzoo_trainer.base.constraints import Share, Size, checked_dataclass
from modelzoo_trainer.core.parts.model_length import LENGTH, given_or_model_length
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.hooks.interceptors import event
from modelzoo_trainer.loading.batch_dataset import BatchDataset
from modelzoo_trainer.zoo.data.processor import DataProcessor, LoadingArguments
from modelzoo_trainer.zoo.data.sample_features import Features, length_without_data, rows_of
from modelzoo_trainer.zoo.data.token_cache import (
    CorpusFile,
    Split,
    TokenWindows,
    cached_tokens,
    default_cache_dir,
    find_documents,
    missing_places,
)
from modelzoo_trainer.zoo.data.tokenization import Tokenization, make_tokenization, missing_file


@checked_dataclass(kw_only=True)
class TextFileProcessor(LoadingArguments, DataProcessor):
    """Load batches of token windows from text files, tokenized once and cached on disk.

    Documents are split by their names. If there is only one, its end is the validation data.

    Args:
        batch_size: Sequences per batch and process, >= 1.
        global_batch_size: Sequences per batch over all processes, a multiple of their number; give
            either this or `batch_size`.
        shuffle: Whether to shuffle; `train` has a new order in every epoch.
        data_dir: One or a list of folders, files or glob patterns; `stdlib` is the standard library
            code of the running Python, available on every machine.
        max_sequence_length: Tokens per sequence, >= 1; default: `max_position_embeddings` of the
            model.
        split: `train`, `val`, or `all` documents.
        val_fraction: Fraction of the documents in `val`, between 0 and 1.
        pattern: Glob of the files in a folder; default: `**/*.txt`.
        tokenizer_file_path: A file of the `tokenizers` library; default: bytes are tokens
            (`vocab_size: 256`).
        eos_token: The token of that file that ends a document; default: none.
        cache_dir: Folder of the token cache; default: `.cache/modelzoo_trainer/tokens` in the home
            folder. A damaged file there is rebuilt.

    Shapes:
        A batch: input_ids and labels (B, max_sequence_length), int32. All labels count.

    Raises:
        ConfigError: If files are missing, a number is out of range, or there is too little text.
    """

    model_lengths = LENGTH
    shuffle: bool = True
    drop_last: bool = True
    data_dir: str | list[str]
    max_sequence_length: Size | None = None
    split: Split = "train"
    val_fraction: Share = 0.1
    pattern: str | None = None
    tokenizer_file_path: str | None = None
    eos_token: str | None = None
    cache_dir: str | None = None

    def __post_init__(self) -> None:
        self.options = self.loading_options(reshuffle=self.split == "train")
        self._length = given_or_model_length(
            self.max_sequence_length, "max_sequence_length", type(self).__name__
        )
        self.tokenization = self.create_tokenizer(self.tokenizer_file_path, self.eos_token)
        self.dataset = self.process(self.load(self.data_dir, self.pattern))

    @event("create-tokenizer")
    def create_tokenizer(
        self, tokenizer_file_path: str | None, eos_token: str | None
    ) -> Tokenization:
        """Return the tokenization of documents."""
        return make_tokenization(tokenizer_file_path, eos_token)

    @event("load")
    def load(self, data_dir: str | list[str], pattern: str | None) -> list[CorpusFile]:
        """Return the documents of the whole corpus, without reading them."""
        return find_documents(data_dir, pattern)

    @event("process")
    def process(self, documents: list[CorpusFile]) -> BatchDataset:
        """Return the token windows of the split; tokenize if they are not cached."""
        split, length = self.split, self._length
        tokens = cached_tokens(
            documents,
            self.tokenization,
            split=split,
            val_fraction=self.val_fraction,
            cache_dir=Path(self.cache_dir).expanduser() if self.cache_dir else default_cache_dir(),
        )
        windows = TokenWindows(tokens, length)
        if not len(windows):
            raise ConfigError(
                f"max_sequence_length is {length}, but split {split!r} has only "
                f"{windows.num_tokens} tokens. Decrease max_sequence_length, or add text to "
                f"data_dir."
            )
        return windows

    @override
    def sample_features(self, model: Any) -> Features:
        return rows_of(("input_ids", "labels"), length_without_data(self, model))

    @override
    def missing(self) -> list[str]:
        lacks, path = missing_places(self.data_dir), self.tokenizer_file_path
        if path is None:
            make_tokenization(None, self.eos_token)
        elif not Path(path).expanduser().is_file():
            lacks.append(missing_file(path))
        return lacks
