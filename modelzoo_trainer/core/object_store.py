"""Object stores as `model_dir` or `checkpoint_root`: each has a local copy, which is uploaded."""

from __future__ import annotations

import logging
import os
import re
import secrets
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

from typing_extensions import override

from modelzoo_trainer import checkpointing
from modelzoo_trainer.base.constraints import NonNegativeFloat, Seconds, checked
from modelzoo_trainer.base.regular_files import read_bytes
from modelzoo_trainer.callback import CoreCallback, Loader, StateDict
from modelzoo_trainer.checkpointing.load_save import verify_files
from modelzoo_trainer.checkpointing.stores.apart import bring, remove_leftovers
from modelzoo_trainer.checkpointing.stores.cache import make_room
from modelzoo_trainer.checkpointing.stores.mirror import (
    MANIFEST,
    Mirror,
    attempt_of,
    files_of,
    located,
    mirror_of,
    open_mirror,
    resolve,
)
from modelzoo_trainer.checkpointing.stores.pulling import fetch, pull
from modelzoo_trainer.checkpointing.stores.session import StoreSession, Times
from modelzoo_trainer.checkpointing.stores.urls import StoreUrl, is_url, parse_url
from modelzoo_trainer.core.artifact_dir import folder_of
from modelzoo_trainer.errors import CheckpointError, ConfigError, NoCheckpoint, StoreError

if TYPE_CHECKING:
    from modelzoo_trainer.core.checkpoint import Checkpoint
    from modelzoo_trainer.trainer import Trainer

log = logging.getLogger("modelzoo_trainer.stores")

_GIB: Final = 2**30
_KINDS: Final = (StoreError, CheckpointError, ConfigError)
_SLICE_S: Final = 5.0
_PATIENCE_S: Final = 3.0


class ObjectStore(CoreCallback):
    """Settings of object stores, for `model_dir`, `checkpoint_root` and `ckpt_path` that are URLs.

    Such a folder has a local copy, where everything is written first. A thread uploads checkpoints,
    metrics and logs; training does not wait for it. The end of a fit waits, and raises an error
    that says what is only in the local copy if uploads fail for `wait_seconds`.

    Credentials come from environment variables or the role of the machine.

    Args:
        cache_dir: The folder of local copies; None = `~/.cache/modelzoo_trainer/stores`.
        cache_size: GiB that local copies of uploaded checkpoints may take; the newest one always
            stays. None = the two newest ones stay.
        sync_seconds: Time between two uploads of metrics and logs.
        lease_seconds: A run that does not renew its lock for so long counts as dead, so that
            another machine may continue it.
        wait_seconds: How long the end of a fit waits for uploads without any progress.
        options: Of the store, such as `endpoint` and `region`.

    Raises:
        ConfigError: If a setting is invalid; at set-up, if the store cannot be used, or another run
            uses the prefix; when a checkpoint is saved, if another run has taken it over.
    """

    @checked("object_store")
    def __init__(
        self,
        cache_dir: str | Path | None = None,
        cache_size: NonNegativeFloat | None = None,
        sync_seconds: Seconds = 30.0,
        lease_seconds: Seconds = 60.0,
        wait_seconds: Seconds = 600.0,
        options: dict[str, Any] | None = None,
    ) -> None:
        self.cache_dir = cache_dir
        self.cache_bytes = None if cache_size is None else int(cache_size * _GIB)
        self.times = Times(sync_s=sync_seconds, lease_s=lease_seconds, wait_s=wait_seconds)
        self.options = dict(options or {})
        self._mirrors: list[Mirror] = []
        self._home: Mirror | None = None  # of model_dir
        self._last_bytes = 0  # of a checkpoint
        self._sessions: list[StoreSession] = []

    # ---- URLs

    def local(self, given: Any, setting: str) -> Any:
        """Return the local folder of a URL; anything else unchanged. Does not use the network."""
        return resolve(given, setting, cache_dir=self.cache_dir, options=self.options)

    def bind(self, checkpoint: Checkpoint, model_dir: Any) -> Path:
        """Return the folder of a trainer, and tell its checkpoints theirs. Uses no network.

        Raises:
            ConfigError: If one cannot be a folder.
        """
        given = folder_of("model_dir", self.local(model_dir, "model_dir"))
        home = Path(os.path.abspath(given))
        if checkpoint.checkpoint_url is not None:
            root = self.local(checkpoint.checkpoint_url, "checkpoint.checkpoint_root")
            checkpoint.checkpoint_root = Path(root)
        if checkpoint.checkpoint_root is not None:  # the same folder after a chdir
            checkpoint.checkpoint_root = Path(os.path.abspath(checkpoint.checkpoint_root))
        self._home, root = _mirror_at(home), _mirror_at(checkpoint.checkpoint_root)
        both = {str(one.path): one for one in (self._home, root) if one is not None}
        self._mirrors = list(both.values())
        for mirror in self._mirrors:
            _ = mirror.store  # finds invalid options, and a missing package
        if self._home is not None and root not in (None, self._home):
            _check_apart(self._home.url, root.url)
        return home

    def checkpoint_at(self, given: Any) -> Path:
        """Return the local path of a checkpoint or of weights, given as a path or URL.

        Raises:
            NoCheckpoint: If there is none at the URL.
            ConfigError: If the URL is invalid.
            StoreError: If the store cannot be read.
        """
        if not isinstance(given, (str, Path)) or not is_url(given):
            return Path(given)
        url = parse_url(given, "ckpt_path")
        if isinstance(url, Path):
            return url
        parent, _, name = url.prefix.rpartition("/")
        if not name:
            raise NoCheckpoint(f"ckpt_path: '{url}' is a bucket. Add the name of a checkpoint.")
        mirror = open_mirror(
            StoreUrl(url.scheme, url.bucket, parent),
            cache_dir=self.cache_dir,
            options=self.options,
        )
        return fetch(mirror, name)

    # ---- several hosts

    def note_hosts(self, trainer: Trainer) -> None:
        """Find out which processes do not see the local copies of the main process. Collective.

        Raises:
            ConfigError: On all of them, if there are some for a store in memory.
        """
        comm = trainer.backend.comm
        for mirror in self._mirrors:
            nonce = comm.broadcast_object(secrets.token_hex(8))
            mark = mirror.folder / f"seen-{nonce}"
            if comm.is_main:
                mark.touch()
            comm.gather_object(None)  # it is there from now on
            seen = comm.gather_object(_is_seen(mark))
            if comm.is_main:
                mark.unlink(missing_ok=True)
            mirror.is_split, mirror.is_apart = not all(seen), not seen[comm.rank]
            if mirror.is_split and mirror.url.scheme == "memory":
                raise ConfigError(
                    f"Process {seen.index(False)} cannot see the local copy of {mirror.url} that "
                    f"process 0 has in {str(mirror.path)!r}. Several hosts cannot share memory; "
                    f"use another store."
                )
            if mirror.is_apart:
                remove_leftovers(mirror)

    @property
    def is_split(self) -> bool:
        """Whether processes of this run have different local copies."""
        return any(mirror.is_split for mirror in self._mirrors)

    def refuse_if_split(self, trainer: Trainer, what: str) -> None:
        """Raise a `ConfigError` if a host would need the files of another one.

        `what`: the callback and what it writes, for the message.
        """
        if self.is_split and trainer.backend.caps.sharded_state:
            raise ConfigError(
                f"{what} from the shards of all processes, and some of these are on hosts that "
                f"do not share trainer.init.object_store.cache_dir. Set it to a folder that all of "
                f"them share, or convert checkpoints after the run."
            )

    def shared(self, trainer: Trainer, paths: Any) -> Any:
        """Return paths of the main process, as this process names them. Collective.

        Until that process is here, the others do their part of its calls of `verify`.

        `paths`: a path, a list of them, or anything else, which is returned unchanged.
        """
        comm = trainer.backend.comm
        if comm.is_main:
            comm.broadcast_object((None, _portable(paths)))
            return paths
        while True:
            attempt, sent = comm.broadcast_object(None)
            if attempt is None:
                return self._own(sent)
            comm.gather_object(self._part_of_problems(trainer, self._own(sent), attempt))

    def verify(self, trainer: Trainer, path: Path) -> list[str]:
        """Return the problems of a checkpoint; called by the main process, before `shared`.

        If hosts have local copies of their own, each process reads the files that a process of its
        number has written, so that no host downloads the whole checkpoint.

        Raises:
            CheckpointError: If the checkpoint cannot be uploaded, or the store has another one.
            StoreError: If the store does not answer, or a disk fails.
        """
        mirror, name = located(path)
        if mirror is None or not mirror.is_split or not name or not (path / MANIFEST).is_file():
            return checkpointing.verify(path)
        self.publish(path)
        comm = trainer.backend.comm
        attempt = attempt_of(read_bytes(path / MANIFEST))
        comm.broadcast_object((attempt, _portable(path)))
        found = comm.gather_object(self._part_of_problems(trainer, path, attempt))
        for failure, _ in found:
            if failure is not None:
                raise _KINDS[failure[0]](failure[1])
        return list(dict.fromkeys(problem for _, problems in found for problem in problems))

    def _part_of_problems(
        self, trainer: Trainer, path: Path, attempt: str
    ) -> tuple[tuple[int, str] | None, list[str]]:
        """Return why files of this process cannot be read, and their problems."""
        comm = trainer.backend.comm
        problems: list[str] = []

        def look() -> None:
            mirror, name = located(path)
            if not comm.is_main and mirror is not None:
                bring(mirror, name, attempt)
            manifest = checkpointing.read_manifest(path)
            own = [
                file for file in manifest.files if _writer_of(file) % comm.world_size == comm.rank
            ]
            problems.extend(verify_files(path, manifest, own))

        return _failure_of(look), problems

    def _own(self, sent: Any) -> Any:
        if isinstance(sent, list):
            return [self._own(one) for one in sent]
        if not isinstance(sent, dict):
            return sent
        url = parse_url(sent["url"], "ckpt_path")
        assert isinstance(url, StoreUrl)  # it was one on the main process
        mirror = open_mirror(url, cache_dir=self.cache_dir, options=sent["options"])
        return mirror.path / sent["name"]

    def bring(self, trainer: Trainer, path: Path) -> None:
        """Make the main process's checkpoint the one of that path on each host. Collective.

        Before that it is uploaded, if it is not in the store.

        Raises:
            CheckpointError: On all processes, if it cannot be uploaded, or the store has another.
            StoreError: On all processes, if the store does not answer, or a disk fails.
        """
        comm = trainer.backend.comm
        mirror, name = located(path)
        is_needed = (
            mirror is not None and bool(name) and (mirror.is_split or mirror not in self._mirrors)
        )
        if comm.world_size == 1 or not comm.broadcast_object(is_needed):
            return
        failure = attempt = None
        if comm.is_main:
            failure = _failure_of(partial(self.publish, path))
            manifest = path / MANIFEST
            attempt = attempt_of(read_bytes(manifest)) if manifest.is_file() else None
        failure, attempt = comm.broadcast_object((failure, attempt))
        if failure is None and not comm.is_main and mirror is not None and name:
            failure = _failure_of(partial(bring, mirror, name, attempt))
        for kind, text in filter(None, comm.gather_object(failure)):
            raise _KINDS[kind](text)

    def publish(self, path: Path) -> None:
        """Upload a checkpoint that processes of other hosts will read, unless it is in the store.

        Raises:
            CheckpointError: If it cannot be.
            StoreError: If the store does not answer.
        """
        mirror, name = located(path)
        if mirror is None or not mirror.is_split or not name or not (path / MANIFEST).is_file():
            return
        for session in self._sessions:
            if session.mirror is mirror:
                problem = session.uploader.upload(name)
                if problem is not None:
                    raise CheckpointError(f"{str(path)!r} cannot be uploaded: {problem}.")

    # ---- a run

    @override
    def pre_setup(self, trainer: Trainer) -> None:
        if not trainer.backend.caps.holds_values or not trainer.backend.comm.is_main:
            return
        for mirror in self._mirrors:
            if mirror is self._home:
                self._sessions.append(StoreSession.begin(mirror, self.times, self.cache_bytes))
            else:
                _pull_only(mirror)

    @override
    def on_enter_fit(
        self,
        trainer: Trainer,
        stack: ExitStack,
        train_dataloader: Loader,
        val_dataloader: Loader,
        loop: Any,
    ) -> None:
        if not self._mirrors or not trainer.backend.caps.holds_values:
            return
        stack.push(partial(self._finish, trainer))
        if not trainer.backend.comm.is_main:
            return
        begun = {id(session.mirror) for session in self._sessions}
        for mirror in self._mirrors:
            if id(mirror) not in begun:  # of checkpoints only
                self._sessions.append(StoreSession.begin(mirror, self.times, self.cache_bytes))
        for session in self._sessions:
            session.start()

    def _finish(
        self,
        trainer: Trainer,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Wait for the uploads of a fit, in all processes: one that ends may end the others.

        Raises:
            CheckpointError: If something could not be uploaded, unless the fit has failed or was
                interrupted; then it is logged.
        """
        comm = trainer.backend.comm
        for session in self._sessions:
            session.begin_to_finish()
        is_over = False
        while not is_over:
            trainer.autorestart.note_progress()
            is_over = all(session.is_over(_SLICE_S) for session in self._sessions)
            if error is None:  # shorter than any time-out of the other processes
                is_over = comm.broadcast_object(is_over)
        text = " ".join(filter(None, map(StoreSession.end_of_finish, self._sessions)))
        if error is None:
            text = comm.broadcast_object(text)
        if text and error is None and trainer.interrupted is None:
            raise CheckpointError(text)
        if text and trainer.backend.comm.is_main:
            log.error("%s", text)

    @override
    def on_save_checkpoint(self, trainer: Trainer, state_dict: StateDict) -> None:
        for session in self._sessions:
            session.lease.require()
            make_room(session.mirror, self._last_bytes)

    @override
    def on_after_save_checkpoint(self, trainer: Trainer, ckpt_path: Path) -> None:
        if self._sessions:
            self._last_bytes = _bytes_of(ckpt_path)
        self._ask()

    def saving_end(self) -> None:
        """Upload also what callbacks have written."""
        self._ask()

    def _ask(self) -> None:
        for session in self._sessions:
            session.ask()

    def leave(self, trainer: Trainer) -> None:
        """Upload what is left and release the locks, after all callbacks are closed. Idempotent."""
        sessions, self._sessions = self._sessions, []
        for session in sessions:
            session.end(has_run=trainer.result is not None)


def _portable(paths: Any) -> Any:
    """Return paths in mirrors by what they mirror."""
    if isinstance(paths, list):
        return [_portable(one) for one in paths]
    mirror = mirror_of(paths) if isinstance(paths, Path) else None
    if mirror is None:
        return paths
    inside = Path(os.path.realpath(paths.parent), paths.name)
    name = str(inside.relative_to(mirror.path))
    return {"url": str(mirror.url), "options": mirror.options, "name": name}


def _writer_of(file: str) -> int:
    """Return the number of the process that wrote a file of a checkpoint; 0 if there is none."""
    number = re.search(r"-(\d+)\.", file)
    return int(number[1]) if number else 0


def _failure_of(act: Callable[[], None]) -> tuple[int, str] | None:
    """Do something and return the kind and message of its error, for other processes."""
    try:
        act()
    except ConfigError as error:
        return 2, str(error)
    except CheckpointError as error:
        return 1, str(error)
    except OSError as error:
        return 0, str(error)
    return None


def _is_seen(mark: Path) -> bool:
    """Return whether a file is there, or appears soon: a network file system may lag."""
    deadline = time.monotonic() + _PATIENCE_S
    while not (is_seen := mark.is_file()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return is_seen


def _pull_only(mirror: Mirror) -> None:
    try:
        pull(mirror, owns=False)
    except OSError as error:
        if isinstance(error, StoreError) and error.is_temporary:
            raise
        raise ConfigError(str(error)) from None


def _bytes_of(path: Path) -> int:
    """Return the size of a checkpoint, as an estimate of the next."""
    try:
        return sum(one["size_bytes"] for one in files_of(path).values())
    except (OSError, ValueError):
        return 0


def _mirror_at(folder: Path | None) -> Mirror | None:
    """Return the mirror whose folder this is; None = a plain folder."""
    if folder is None:
        return None
    mirror = mirror_of(folder)
    return mirror if mirror is not None and mirror.path == Path(os.path.realpath(folder)) else None


def _check_apart(home: StoreUrl, root: StoreUrl) -> None:
    """Raise a `ConfigError` if one of two prefixes is inside of the other."""
    first, second = f"{home}/", f"{root}/"
    if first.startswith(second) or second.startswith(first):
        raise ConfigError(
            f"checkpoint.checkpoint_root '{root}' and model_dir '{home}' are in one another. Omit "
            f"checkpoint_root to write checkpoints to model_dir, or use a prefix beside it."
        )
