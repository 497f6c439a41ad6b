"""Language modelling on text files."""

from pathlib import Path
from typing import Any, Literal

from modelzoo_trainer.constraints import NonNegativeSize, PositiveInt, Share, Size, checked
from modelzoo_trainer.data.processor import BatchDataset, DataProcessor, LoadingOptions, ShuffleSeed
from modelzoo_trainer.data.token_cache import (
    Document,
    Split,
    TokenWindows,
    cached_tokens,
    default_cache_dir,
    find_documents,
    missing_places,
)
from modelzoo_trainer.data.tokenization import Tokenization, make_tokenization
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.interceptors import event


class TextFileProcessor(DataProcessor):
    """Batches of token windows from text files; tokens are made once and kept on disk.

    Documents are split by their names. If there is only one, its end is for validation.

    Args:
        data_dir: Folders, files or glob patterns, one or a list; `stdlib` is the Python code of
            the running Python's own library, which every machine has.
        max_sequence_length: Tokens in a sequence, >= 1.
        batch_size: Sequences a batch of each process, >= 1.
        global_batch_size: Sequences a batch of all processes together, which their number divides;
            either this or `batch_size`.
        split: `train`, `val`, or `all` documents.
        val_fraction: Share of the documents in `val`, between 0 and 1.
        pattern: Which files of a folder, as a glob; not set, `**/*.txt`.
        tokenizer_file_path: A file of the `tokenizers` library; not set, bytes are the tokens
            (`vocab_size: 256`).
        eos_token: The token of that file that ends a document; not set, none.
        cache_dir: Where tokens are kept; not set, `.cache/modelzoo_trainer/tokens` in the home
            folder. A file there that is damaged is made anew.
        shuffle: Whether the order is random, for `train` another one every epoch.
        shuffle_seed: Determines that order.
        num_workers: Processes that load; 0 loads in this one.
        drop_last: Whether a smaller last batch is dropped.
        prefetch_factor: Batches that each worker holds ready.
        persistent_workers: Whether workers live on between epochs.

    Shapes:
        A batch: input_ids and labels (B, max_sequence_length), int32. All labels count.

    Raises:
        ConfigError: If files are missing, a number is out of range, or there is too little text.
    """

    @checked()
    def __init__(
        self,
        *,
        data_dir: str | list[str],
        max_sequence_length: Size,
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
        self._max_sequence_length = max_sequence_length
        self._split: Split = split
        self._val_fraction = val_fraction
        self._cache_dir = Path(cache_dir).expanduser() if cache_dir else default_cache_dir()
        self.tokenization = self.create_tokenizer(tokenizer_file_path, eos_token)
        self.dataset = self.process(self.load(data_dir, pattern))

    @event("create-tokenizer")
    def create_tokenizer(
        self, tokenizer_file_path: str | None, eos_token: str | None
    ) -> Tokenization:
        """Return what turns documents into tokens."""
        return make_tokenization(tokenizer_file_path, eos_token)

    @event("load")
    def load(self, data_dir: str | list[str], pattern: str | None) -> list[Document]:
        """Return the documents of the whole corpus; none is read yet."""
        return find_documents(data_dir, pattern)

    @event("process")
    def process(self, documents: list[Document]) -> BatchDataset:
        """Return the windows of tokens of the split; the tokens are made if they are not there."""
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
                f"{windows.num_tokens} tokens. Lower it, or give data_dir more text."
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
        """Check the constructor's arguments, nothing read; return what this machine lacks.

        Raises:
            ConfigError: If settings exclude each other.
        """
        LoadingOptions.check(others)
        lacks = missing_places(data_dir)
        if tokenizer_file_path is None:
            make_tokenization(None, eos_token)
        elif not Path(tokenizer_file_path).expanduser().is_file():
            lacks.append(f"tokenizer_file_path {tokenizer_file_path!r} does not exist.")
        return lacks
