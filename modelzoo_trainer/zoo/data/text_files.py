"""Language modeling on text files."""

from pathlib import Path
from typing import Any, Literal

from modelzoo_trainer.base.constraints import NonNegativeSize, PositiveInt, Share, Size, checked
from modelzoo_trainer.core.parts.model_length import LENGTH, given_or_model_length
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.hooks.interceptors import event
from modelzoo_trainer.loading.batch_dataset import BatchDataset
from modelzoo_trainer.zoo.data.processor import DataProcessor, LoadingOptions, ShuffleSeed
from modelzoo_trainer.zoo.data.token_cache import (
    Document,
    Split,
    TokenWindows,
    cached_tokens,
    default_cache_dir,
    find_documents,
    missing_places,
)
from modelzoo_trainer.zoo.data.tokenization import Tokenization, make_tokenization, missing_file


class TextFileProcessor(DataProcessor):
    """Load batches of token windows from text files, tokenized once and cached on disk.

    Documents are split by their names. If there is only one, its end is the validation data.

    Args:
        data_dir: One or a list of folders, files or glob patterns; `stdlib` is the standard library
            code of the running Python, available on every machine.
        max_sequence_length: Tokens per sequence, >= 1; default: `max_position_embeddings` of the
            model.
        batch_size: Sequences per batch and process, >= 1.
        global_batch_size: Sequences per batch over all processes, a multiple of their number; give
            either this or `batch_size`.
        split: `train`, `val`, or `all` documents.
        val_fraction: Fraction of the documents in `val`, between 0 and 1.
        pattern: Glob of the files in a folder; default: `**/*.txt`.
        tokenizer_file_path: A file of the `tokenizers` library; default: bytes are tokens
            (`vocab_size: 256`).
        eos_token: The token of that file that ends a document; default: none.
        cache_dir: Folder of the token cache; default: `.cache/modelzoo_trainer/tokens` in the home
            folder. A damaged file there is rebuilt.
        shuffle: Whether to shuffle; `train` has a new order in every epoch.
        shuffle_seed: Seed of the order.
        num_workers: Number of worker processes; 0 = load in the main process.
        drop_last: Whether to drop a smaller last batch.
        prefetch_factor: Batches that each worker prefetches.
        persistent_workers: Whether workers persist between epochs.

    Shapes:
        A batch: input_ids and labels (B, max_sequence_length), int32. All labels count.

    Raises:
        ConfigError: If files are missing, a number is out of range, or there is too little text.
    """

    model_lengths = LENGTH

    @checked()
    def __init__(
        self,
        *,
        data_dir: str | list[str],
        max_sequence_length: Size | None = None,
        batch_size: PositiveInt | None = None,
        global_batch_size: PositiveInt | None = None,
        split: Literal["train", "val", "all"] = "train",
        val_fraction: Share = 0.1,
        pattern: str | None = None,
        tokenizer_file_path: str | None = None,
        eos_token: str | None = None,
        cache_dir: str | None = None,
        shuffle: bool = True,
        shuffle_seed: ShuffleSeed = 0,
        num_workers: NonNegativeSize = 0,
        drop_last: bool = True,
        prefetch_factor: Size | None = None,
        persistent_workers: bool = False,
    ) -> None:
        self.options = LoadingOptions(
            batch_size=batch_size,
            global_batch_size=global_batch_size,
            shuffle=shuffle,
            shuffle_seed=shuffle_seed,
            reshuffle=split == "train",
            num_workers=num_workers,
            drop_last=drop_last,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
        )
        self._max_sequence_length = given_or_model_length(
            max_sequence_length, "max_sequence_length", type(self).__name__
        )
        self._split: Split = split
        self._val_fraction = val_fraction
        self._cache_dir = Path(cache_dir).expanduser() if cache_dir else default_cache_dir()
        self.tokenization = self.create_tokenizer(tokenizer_file_path, eos_token)
        self.dataset = self.process(self.load(data_dir, pattern))

    @event("create-tokenizer")
    def create_tokenizer(
        self, tokenizer_file_path: str | None, eos_token: str | None
    ) -> Tokenization:
        """Return the tokenization of documents."""
        return make_tokenization(tokenizer_file_path, eos_token)

    @event("load")
    def load(self, data_dir: str | list[str], pattern: str | None) -> list[Document]:
        """Return the documents of the whole corpus, without reading them."""
        return find_documents(data_dir, pattern)

    @event("process")
    def process(self, documents: list[Document]) -> BatchDataset:
        """Return the token windows of the split; tokenize if they are not cached."""
        split, length = self._split, self._max_sequence_length
        tokens = cached_tokens(
            documents,
            self.tokenization,
            split=split,
            val_fraction=self._val_fraction,
            cache_dir=self._cache_dir,
        )
        windows = TokenWindows(tokens, length)
        if not len(windows):
            raise ConfigError(
                f"max_sequence_length is {length}, but split {split!r} has only "
                f"{windows.num_tokens} tokens. Decrease max_sequence_length, or add text to "
                f"data_dir."
            )
        return windows

    @classmethod
    def check_arguments(
        cls,
        *,
        data_dir: str | list[str],
        tokenizer_file_path: str | None = None,
        eos_token: str | None = None,
        **others: Any,
    ) -> list[str]:
        """Check the arguments without reading data; return what is missing on this machine.

        Raises:
            ConfigError: If settings exclude each other.
        """
        LoadingOptions.check(others)
        lacks = missing_places(data_dir)
        if tokenizer_file_path is None:
            make_tokenization(None, eos_token)
        elif not Path(tokenizer_file_path).expanduser().is_file():
            lacks.append(missing_file(tokenizer_file_path))
        return lacks
