"""What a worker does: from a unit of the input to tokens or rows of each stream."""

from __future__ import annotations

import itertools
import logging
import os
import re
import signal
import threading
import traceback
from collections.abc import Iterable
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any, Final, NamedTuple

import numpy as np

from backends.tokenizer_threads import hold_tokenizers_to_one_thread
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.rows.interface import (
    Document,
    Entry,
    Packed,
    Rows,
    SemanticData,
    Stats,
    Tokens,
)
from modelzoo_trainer.zoo.rows.preprocessing.choice import mode_of
from modelzoo_trainer.zoo.rows.preprocessing.hooks import ReadHook, ReadHookError, find_hook
from modelzoo_trainer.zoo.rows.preprocessing.normalization import make_normalization
from modelzoo_trainer.zoo.rows.preprocessing.readers import FilePart, Unit, entries
from modelzoo_trainer.zoo.rows.preprocessing.streams import Streams
from modelzoo_trainer.zoo.rows.sections import PreprocessingSettings
from modelzoo_trainer.zoo.rows.tokenizers import tokenizer_of

_PACKAGE: Final = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")
_SURROGATE: Final = re.compile("[\ud800-\udfff]")


class Result(NamedTuple):
    """The tokens or rows of a unit."""

    number: int
    streams: dict[int, Packed]
    """By index of the stream; those with documents in the unit."""


class UnitWork:
    """Processes units. The result of one depends on it and the settings alone.

    Raises:
        ConfigError: If the settings are invalid.
    """

    def __init__(self, settings: PreprocessingSettings) -> None:
        processing = settings.processing
        self.hook = hook_of(settings)
        self.tokenizer = tokenizer_of(settings)
        self.mode = mode_of(settings)(settings, self.tokenizer)
        self.streams = Streams(settings)
        self._skips_invalid = processing.UNSAFE_skip_jsonl_decoding_errors
        self._normalize = make_normalization(processing)
        self._key = self.hook.columns[0] if len(self.hook.columns) == 1 else None

    def __call__(self, unit: Unit) -> Result:
        """Return the tokens or rows of a unit.

        Raises:
            ConfigError: If an entry cannot be read.
        """
        documents: dict[int, list[Document]] = {}
        places: dict[int, list[int]] = {}
        counts: dict[int, Stats] = {}
        for place, (document, is_valid) in enumerate(self._documents(unit.parts)):
            stream = self.streams.index(document)
            stats = counts.setdefault(stream, Stats())
            stats.documents += 1
            if not is_valid:
                stats.skip(document, "not valid JSON")
            elif not document.content:
                stats.skip(document, "skipped by the read hook")
            else:
                content = self._normalized(document.content, stats)
                documents.setdefault(stream, []).append(document._replace(content=content))
                places.setdefault(stream, []).append(place)
        streams = {}
        for stream, stats in sorted(counts.items()):
            length = self.streams.all[stream].length
            encoded = self._encoded(documents.get(stream, []), length, stats)
            streams[stream] = Packed(encoded, np.array(places.get(stream, []), np.int64), stats)
        return Result(unit.number, streams)

    def _encoded(self, documents: list[Document], length: int, stats: Stats) -> Tokens | Rows:
        try:
            return self.mode.encode(documents, length, stats)
        except ConfigError:
            raise
        except Exception as error:  # of a user's mode or tokenizer
            if documents:
                first, last = documents[0].where, documents[-1].where
                error.add_note(f"in one of the documents from {first} to {last}")
            raise

    def _documents(self, parts: Iterable[FilePart]) -> Iterable[tuple[Document, bool]]:
        for part in parts:
            file = part.file
            for one in entries(part, self._key, skips_invalid=self._skips_invalid):
                document = Document(file.name, one.number, [], one.line, file)
                if one.entry is not None:
                    content = self._read(one.entry, document)
                    document = document._replace(content=content or [])
                yield document, one.entry is not None

    def _read(self, entry: Entry, document: Document) -> SemanticData | None:
        """Return what the hook makes of an entry; errors name the document."""
        try:
            return self.hook(entry)
        except ConfigError as error:
            raise ConfigError(f"{document.where}: {error}") from error
        except Exception as error:
            keys = ", ".join(map(repr, entry))
            raise ReadHookError(
                f"{document.where}: read_hook {self.hook.path} raised {_described(error)}. The "
                f"entry has the keys {keys}. Correct the hook, or let it return None to skip the "
                "document."
            ) from error

    def _normalized(self, content: SemanticData, stats: Stats) -> SemanticData:
        return [
            {**turn, "content": [self._normalized_region(one, stats) for one in turn["content"]]}
            for turn in content
        ]

    def _normalized_region(self, region: dict[str, Any], stats: Stats) -> dict[str, Any]:
        [(name, text)] = region.items()
        if not isinstance(text, str):
            return region
        text = _without_surrogates(text)
        stats.raw_chars += len(text)
        num_bytes = _num_bytes(text)
        stats.raw_bytes += num_bytes
        if self._normalize is not None:
            before, text = text, self._normalize(text)
            num_bytes = num_bytes if text is before else _num_bytes(text)
        stats.normalized_chars += len(text)
        stats.normalized_bytes += num_bytes
        return {name: text}


def hook_of(settings: PreprocessingSettings) -> ReadHook:
    """Return the read hook of the settings.

    Raises:
        ConfigError: If it is missing or invalid.
    """
    path = settings.processing.read_hook
    if path is None:
        raise ConfigError(
            "processing.read_hook: missing; set it to the function that reads an entry, such as "
            "modelzoo_trainer.zoo.rows.preprocessing.hooks:text_read_hook."
        )
    return find_hook(path, settings.processing.read_hook_kwargs)


def _without_surrogates(text: str) -> str:
    r"""Return text with U+FFFD for each half of a surrogate pair, such as `"\ud800"` in JSON."""
    return text if text.isascii() else _SURROGATE.sub("\ufffd", text)


def _num_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())


def serve(connection: Connection, settings: PreprocessingSettings) -> None:
    """Process units from a connection until it ends: the main function of a worker process.

    A thread receives them, so that the process exits as soon as the main process is gone, and the
    main process never waits for one that is sending.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process stops its workers
    hold_tokenizers_to_one_thread()
    logging.disable(logging.WARNING)  # the main process reports
    tasks: SimpleQueue[Unit | None] = SimpleQueue()
    threading.Thread(target=_receive, args=(connection, tasks), daemon=True).start()
    work: UnitWork | None = None
    while (unit := tasks.get()) is not None:
        try:
            work = work or UnitWork(settings)
            answer: Result | WorkerFailure = work(unit)
        except Exception as error:  # noqa: BLE001  # of a user's code; the main process raises it
            answer = WorkerFailure.of(error)
        connection.send(answer)


class WorkerFailure(NamedTuple):
    """An exception of a worker, which the main process raises."""

    kind: type[Exception] | None
    """None = of neither a setting nor a read hook."""
    message: str
    notes: tuple[str, ...]
    traceback: str
    """Of the user's code; "" if the message says all."""

    @classmethod
    def of(cls, error: Exception) -> WorkerFailure:
        """Return what the main process logs and raises."""
        notes = tuple(getattr(error, "__notes__", ()))
        if isinstance(error, ConfigError):
            return cls(ConfigError, str(error), notes, "")
        if isinstance(error, ReadHookError):
            assert error.__cause__ is not None
            return cls(ReadHookError, str(error), notes, _traceback(error.__cause__))
        return cls(None, _described(error), notes, _traceback(error))


def _described(error: BaseException) -> str:
    """Return type, first line and place of an exception."""
    first = str(error).partition("\n")[0]
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}{': ' if first else ''}{first}{where}"


def _traceback(error: BaseException) -> str:
    """Return the traceback of an exception, from the user's first frame on."""
    made = traceback.TracebackException.from_exception(error)
    frames = list(made.stack)
    theirs = [*itertools.dropwhile(lambda one: one.filename.startswith(_PACKAGE), frames)]
    made.stack = traceback.StackSummary.from_list(theirs or frames)
    return "".join(made.format()).rstrip()


def _receive(connection: Connection, tasks: SimpleQueue[Unit | None]) -> None:
    while True:
        try:
            task = connection.recv()
        except (EOFError, OSError):
            os._exit(1)  # the main process is gone; the main thread may be in the middle of a unit
        tasks.put(task)
        if task is None:
            return
