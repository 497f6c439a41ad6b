"""Preprocess: read units, let workers tokenize them, cut rows and write them, in order."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Final, NoReturn

import numpy as np

from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.rows.hdf5_format import DATASET, INCOMPLETE, INPUTS, LABELS, PARAMS
from modelzoo_trainer.zoo.rows.interface import Array, Packed, Rows, Stats, Tokens
from modelzoo_trainer.zoo.rows.packing import Carry, Packer
from modelzoo_trainer.zoo.rows.preprocessing import output, summary
from modelzoo_trainer.zoo.rows.preprocessing.identity import identity_of
from modelzoo_trainer.zoo.rows.preprocessing.inputs import Inputs, find_inputs, subsets
from modelzoo_trainer.zoo.rows.preprocessing.journal import (
    Journal,
    State,
    StreamState,
    check_empty,
    digest_of,
)
from modelzoo_trainer.zoo.rows.preprocessing.output import ChunkWriter, StreamLayout
from modelzoo_trainer.zoo.rows.preprocessing.pool import Pool
from modelzoo_trainer.zoo.rows.preprocessing.readers import units
from modelzoo_trainer.zoo.rows.preprocessing.shuffling import BucketWriter, num_buckets
from modelzoo_trainer.zoo.rows.preprocessing.streams import OutputStream, Streams
from modelzoo_trainer.zoo.rows.preprocessing.summary import FolderFacts
from modelzoo_trainer.zoo.rows.preprocessing.token_limit import cut
from modelzoo_trainer.zoo.rows.preprocessing.worker import Result, UnitWork
from modelzoo_trainer.zoo.rows.sections import PreprocessingSettings, Setup

log = logging.getLogger("modelzoo_trainer.preprocessing")

_SAVE_S: Final = 1.0
_SAVE_SHARE: Final = 0.05  # of the time is spent on saving the state, at most
_PROGRESS_S: Final = 10.0


def preprocess(settings: PreprocessingSettings, *, save_s: float = _SAVE_S) -> list[FolderFacts]:
    """Write the rows that the settings describe; continue an interrupted run.

    The bytes of all files depend on the settings and the input alone: not on the number of
    processes, nor on interruptions.

    Args:
        settings: As `read_settings` returns them.
        save_s: Seconds between saved states, at least; a restart repeats what is newer.

    Returns:
        What was written to each folder.

    Raises:
        ConfigError: If a setting or an input is invalid, or the output folder has other rows.
        ReadHookError: If a read hook raised an exception.
        WorkerError: If a worker process died, or other code raised one.
    """
    names = subsets(settings.setup)
    if not names:
        return _preprocess(settings, save_s)
    runs = [_subset(settings, name) for name in names]
    inputs = digest_of([names, [find_inputs(one.setup).fingerprint for one in runs]])
    identity = identity_of(settings, UnitWork(settings), inputs)
    journal = Journal(_root(settings.setup), [], identity)
    facts = []
    if not (_root(settings.setup) / INCOMPLETE).exists():
        for one in runs:
            for folder in (_root(one.setup), *_folders(one)):
                check_empty(folder)
    with closing(journal):
        state = journal.open() or State()
        for number, one in enumerate(runs):
            folders = _folders(one)
            if number < state.unit or _is_complete(one, folders):
                log.info("%s is complete", _root(one.setup))
                facts += [summary.facts_of(folder) for folder in folders]
            else:
                facts += _preprocess(one, save_s, may_be_empty=True)
            state.unit = max(state.unit, number + 1)
            journal.save(state)
        journal.finish()
    return facts


def _folders(settings: PreprocessingSettings) -> list[Path]:
    """Return the folders of the streams of a run."""
    return [_root(settings.setup) / one.folder for one in Streams(settings).all]


def _is_complete(settings: PreprocessingSettings, folders: Iterable[Path]) -> bool:
    has_all = all((folder / PARAMS).exists() for folder in folders)
    return has_all and not (_root(settings.setup) / INCOMPLETE).exists()


def _subset(settings: PreprocessingSettings, name: str) -> PreprocessingSettings:
    """Return the settings of the run of a sub-folder."""
    setup = settings.setup
    splits = setup.data_splits_dir
    inner = replace(
        setup,
        data={"type": "local", "source": str(Path(setup.data["source"], name))},
        output_dir=str(Path(setup.output_dir, name)),
        data_splits_dir=str(Path(splits, name)) if splits else None,
    )
    return replace(settings, setup=inner)


def _root(setup: Setup) -> Path:
    """Return the output folder of a run."""
    has_own = setup.data_splits and setup.data_splits_dir
    return Path((has_own and setup.data_splits_dir) or setup.output_dir).expanduser()


def _preprocess(
    settings: PreprocessingSettings, save_s: float, *, may_be_empty: bool = False
) -> list[FolderFacts]:
    output.h5py()
    work = UnitWork(settings)
    _check_size(settings, work.tokenizer.vocab_size)
    for key in settings.not_used(work.mode.uses):
        log.warning("%s: has no effect in this mode.", key)
    inputs = find_inputs(settings.setup)
    with closing(_Run(settings, work, inputs, save_s)) as run:
        return run.run(may_be_empty=may_be_empty)


def _check_size(settings: PreprocessingSettings, vocab_size: int) -> None:
    processing = settings.processing
    dtype = processing.input_ids_dtype
    if processing.input_mask_dtype != dtype:
        raise ConfigError(
            f"processing.input_mask_dtype: {processing.input_mask_dtype!r} differs from "
            f"input_ids_dtype ({dtype!r}); both are in one dataset. Make them equal."
        )
    if vocab_size - 1 > np.iinfo(dtype).max:
        raise ConfigError(
            f"processing.input_ids_dtype: {dtype!r} cannot hold the tokenizer's {vocab_size} "
            "tokens. Use int32."
        )


class _StreamWriter:
    """One stream: cuts rows where the mode asks for it, counts, and writes."""

    def __init__(
        self, stream: OutputStream, folder: Path, settings: PreprocessingSettings, work: UnitWork
    ) -> None:
        processing, mode = settings.processing, work.mode
        self.stream = stream
        self.folder = folder
        self.stats = Stats()
        pad_id = work.tokenizer.pad_id
        self._packer = (
            Packer(stream.length, 0 if pad_id is None else pad_id, processing.min_sequence_len)
            if mode.is_packed
            else None
        )
        features = tuple(mode.features)
        self._layout = StreamLayout(
            features=features,
            dtype=processing.input_ids_dtype,
            inverts_mask=processing.inverted_mask,
            bytes_per_file=processing.write_chunk_size * 1024,
        )
        self._num_sequences = max(1, sum(name.endswith(INPUTS) for name in features))
        self._ignored = settings.dataset.ignore_index
        self._writer: ChunkWriter | BucketWriter = ChunkWriter(folder, self._layout)

    def shuffle(self, buckets: int, seed: int) -> None:
        """Write the rows in random order."""
        self._writer = BucketWriter(self.folder, self._layout, buckets, seed)

    def add(self, packed: Packed) -> None:
        """Add what became of a unit."""
        self.stats = self.stats + packed.stats
        encoded = packed.encoded
        if isinstance(encoded, Tokens):
            assert self._packer is not None
            encoded = self._packer.add(encoded)
        self._write(encoded)

    def end(self) -> None:
        """Add the last row."""
        if self._packer is not None:
            rows, dropped = self._packer.finish()
            self.stats.tokens_dropped += dropped
            self._write(rows)

    def finish(self) -> int:
        """Write the last files, and return the number of all."""
        if isinstance(self._writer, BucketWriter):
            return self._writer.finish()
        self._writer.finish()
        output.sync_folder(self.folder)
        return self._writer.num_files

    def clean(self) -> None:
        """Remove what only an unfinished run needs."""
        if isinstance(self._writer, BucketWriter):
            self._writer.remove()

    def _write(self, rows: Rows) -> None:
        stats = self.stats
        count, tokens = len(rows.lengths), int(rows.lengths.sum())
        stats.rows += count
        stats.tokens += tokens
        stats.padding += count * self._num_sequences * self.stream.length - tokens
        stats.loss_tokens += self._num_counted(rows.arrays) if count else 0
        self._writer.add(rows)

    def _num_counted(self, arrays: Mapping[str, Array]) -> int:
        """Return how many labels of rows count in the loss; 0 if the labels are made later."""
        if LABELS in arrays:  # of masked tokens
            return int((arrays[LABELS][:, 0] != self._ignored).sum())
        if not any(name.endswith(LABELS) for name in self._layout.features):
            return 0
        masks = self._layout.masks
        return int(arrays[DATASET][:, masks].sum(dtype=np.int64)) if masks else 0

    def state(self) -> StreamState:
        """Return the state, after making durable what it counts."""
        state = StreamState(stats=self.stats)
        if self._packer is not None:
            state.arrays |= {f"carry.{k}": v for k, v in self._packer.carry._asdict().items()}
        if isinstance(self._writer, BucketWriter):
            self._writer.sync()
            state.facts = {"lengths": self._writer.lengths, "kind": self._writer.kind}
        else:
            output.sync_folder(self.folder)
            state.num_files = self._writer.num_files
            state.arrays |= {f"rows.{k}": v for k, v in self._writer.pending.items()}
        return state

    def restore(self, state: StreamState, *, is_read: bool) -> None:
        """Continue from a state; `is_read`: whether it has the rows of all input."""
        self.stats = state.stats
        if self._packer is not None:
            carry = [state.arrays[f"carry.{name}"] for name in Carry._fields]
            self._packer.carry = Carry(*carry)
        if isinstance(self._writer, BucketWriter):
            self._writer.restore(state.facts["lengths"], state.facts["kind"], is_full=is_read)
        else:
            self._writer.restore(state.num_files, _without_prefix(state.arrays, "rows."))


def _without_prefix(arrays: dict[str, Array], prefix: str) -> dict[str, Array]:
    return {name[len(prefix) :]: one for name, one in arrays.items() if name.startswith(prefix)}


class _Run:
    """One run into one output folder."""

    def __init__(
        self, settings: PreprocessingSettings, work: UnitWork, inputs: Inputs, save_s: float
    ) -> None:
        setup, processing = settings.setup, settings.processing
        self._settings, self._work, self._inputs = settings, work, inputs
        self._save_s = save_s
        self._limit = processing.token_limit
        self._root = root = _root(setup)
        streams = work.streams.all
        self._writers = [
            _StreamWriter(one, root / one.folder if one.folder else root, settings, work)
            for one in streams
        ]
        if processing.shuffle:
            for index, writer in enumerate(self._writers):
                buckets = num_buckets(inputs.num_bytes)
                writer.shuffle(buckets, processing.shuffle_seed + index)
        identity = identity_of(settings, work, inputs.fingerprint)
        self._journal = Journal(root, [writer.folder for writer in self._writers], identity)
        self._state = State()

    def close(self) -> None:
        """Release the output folder."""
        self._journal.close()

    def run(self, *, may_be_empty: bool) -> list[FolderFacts]:
        """Read everything that is not yet read, and write the rest.

        Raises:
            ConfigError: If there is no document, unless `may_be_empty`.
        """
        state = self._journal.open()
        if state is None:
            for writer in self._writers:
                writer.clean()
        else:
            self._state = state
            for writer, known in zip(self._writers, state.streams, strict=True):
                writer.restore(known, is_read=state.is_read)
            log.info("Continuing with unit %d of %s", state.unit, self._root)
        if not self._state.is_read:
            self._read()
        if not may_be_empty and not any(writer.stats.documents for writer in self._writers):
            self._abandon()
        return self._finish()

    def _abandon(self) -> NoReturn:
        for writer in self._writers:
            writer.clean()
        self._journal.abandon()
        files = self._inputs.files
        more = f" and {len(files) - 1} others" if len(files) > 1 else ""
        raise ConfigError(
            f"setup.data: the input has no documents: {files[0].path!r}{more} are empty. Name "
            "files with documents."
        )

    def _read(self) -> None:
        state = self._state
        first = state.unit
        columns = self._work.hook.columns or None
        waiting = (unit for unit in units(self._inputs, columns) if unit.number >= first)
        saved = shown = begin = time.monotonic()
        pause = self._save_s
        with Pool(self._settings) as pool:
            for result in pool.results(waiting, self._work):
                self._add(result)
                state.unit = result.number + 1
                if self._limit is not None and state.tokens >= self._limit:
                    break
                now = time.monotonic()
                if now - saved >= pause:
                    self._save()
                    saved = time.monotonic()
                    pause = max(self._save_s, (saved - now) / _SAVE_SHARE)
                if now - shown >= _PROGRESS_S:
                    rate = self._num_tokens() / (now - begin)
                    log.info("%s tokens, %s tokens/s", f"{self._num_tokens():,}", f"{rate:,.0f}")
                    shown = now
        for writer in self._writers:
            writer.end()
        state.is_read = True
        self._save()

    def _add(self, result: Result) -> None:
        if self._limit is not None:
            result, num_tokens = cut(result, self._limit - self._state.tokens)
            self._state.tokens += num_tokens
        for stream, packed in result.streams.items():
            self._writers[stream].add(packed)

    def _num_tokens(self) -> int:
        return sum(writer.stats.tokens for writer in self._writers)

    def _save(self) -> None:
        self._state.streams = [writer.state() for writer in self._writers]
        self._journal.save(self._state)

    def _finish(self) -> list[FolderFacts]:
        facts = [self._finished(writer) for writer in self._writers]
        for problem in filter(None, map(summary.lack_of, facts)):
            log.warning("%s", problem)
        for writer in self._writers:
            writer.clean()
        self._journal.finish()
        return facts

    def _finished(self, writer: _StreamWriter) -> FolderFacts:
        stream, tokenizer = writer.stream, self._work.tokenizer
        facts = FolderFacts(
            folder=str(writer.folder),
            length=stream.length,
            num_files=writer.finish(),
            stats=writer.stats,
            first_skipped={
                reason: first.shown(self._inputs.named(first.file))
                for reason, (_, first) in writer.stats.skipped.items()
            },
        )
        text = summary.params_text(
            self._settings,
            facts,
            features=self._work.mode.features,
            ids={
                "eos_id": tokenizer.eos_id,
                "pad_id": tokenizer.pad_id,
                "vocab_size": tokenizer.vocab_size,
            },
            num_inputs=len(self._inputs.files),
        )
        output.write_text(writer.folder / PARAMS, text)
        return facts
