"""The device of a run, the options of its backend, and options of Cerebras hardware."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Final

from modelzoo_trainer.base.constraints import checked_dataclass
from modelzoo_trainer.base.user_modules import is_path
from modelzoo_trainer.config.arguments import check_arguments, schema_of
from modelzoo_trainer.config.components import check_plain
from modelzoo_trainer.config.names import Names
from modelzoo_trainer.config.positions import (
    Entry,
    Lack,
    Mapping,
    Place,
    Problems,
    describe,
    is_null,
    to_plain,
)
from modelzoo_trainer.errors import ConfigError, suggest
from modelzoo_trainer.zoo.callbacks.csx_flags import flag_problem, is_flag

FOREIGN: Final = "csx"  # Cerebras hardware, not supported


@checked_dataclass
class ClusterConfig:
    """The keys of `cluster_config`, without effect here."""

    num_csx: int | None = None
    max_wgt_servers: int | None = None
    max_act_per_csx: int | None = None
    num_workers_per_csx: int | None = None
    mount_dirs: str | list[str] | None = None
    python_paths: str | list[str] | None = None
    mgmt_address: str | None = None
    mgmt_namespace: str | None = None
    credentials_path: str | None = None
    cbcore_image: str | None = None
    job_labels: list[str] | None = None
    job_priority: str | None = None
    job_time_sec: int | None = None
    disable_version_check: bool | None = None
    workflow_id: str | None = None


@checked_dataclass
class CerebrasOptions:
    """The options of `backend` that the format has for Cerebras hardware, without effect here."""

    compile_dir: str | None = None
    compile_only: bool | None = None
    validate_only: bool | None = None
    cluster_config: dict[str, Any] | None = None
    artifact_dir: str | None = None
    enable_distributed: bool | None = None
    main_process_id: int | None = None
    dist_backend: str | None = None
    init_method: str | None = None
    sync_batchnorm: bool | None = None


def check_device(
    device: Place | None, backend: Place | None, names: Names, problems: Problems
) -> tuple[str | None, dict[str, Any] | None]:
    """Return the device's name in lower case, and the backend's options.

    `device`: `init.device`. `backend`: `init.backend`; its `backend_type` is the device as well.
    """
    given = [place for place in (device,) if place is not None and not is_null(place.node)]
    options: dict[str, Any] | None = None
    if backend is not None and not is_null(backend.node):
        if isinstance(backend.node, Mapping):
            options = _take_out_foreign(backend, problems)
            kind = backend.key("backend_type")
            options.pop("backend_type", None)
            given += [kind] if kind is not None and not is_null(kind.node) else []
        else:
            what = f"expected a mapping of options, got {describe(backend.node)}."
            problems.add(backend.node.at, backend.path, what)
    values = [check_plain(place, str, problems) for place in given]
    if not all(isinstance(value, str) for value in values):
        return None, options
    if len(values) > 1 and values[1].lower() == FOREIGN:  # the device says what to use instead
        given, values = given[:1], values[:1]
    if len({value.lower() for value in values}) > 1:
        problems.add(
            given[0].node.at,
            given[0].path,
            f"{values[0]!r} and backend.backend_type {values[1]!r} are both given. Remove "
            f"one of them.",
        )
    elif values and values[0].lower() == FOREIGN:
        problems.add(
            given[0].node.at,
            given[0].path,
            f"{values[0]!r} is hardware that this trainer does not support. Use --device cpu, gpu "
            f"or auto (the best device available).",
        )
    elif values or options:
        _try_backend(given, backend, values[0] if values else None, options, names, problems)
    name = values[0] if values else None
    return name if name is None or is_path(name) else name.lower(), options


def _take_out_foreign(backend: Place, problems: Problems) -> dict[str, Any]:
    """Return the options, without Cerebras hardware's, which are checked and noted."""
    known = schema_of(CerebrasOptions).parameters
    foreign: dict[Any, Entry] = {}
    own: dict[str, Any] = {}
    for key, place in backend.pairs():
        if key in known:
            foreign[key] = place.entry
        elif is_flag(key):
            _check_flag(key, place, problems)
        elif key != "backend_type" and (meant := _meant(str(key), known)):
            problems.add(place.key_at, place.path, f"no such option. {meant}")
        else:
            own[key] = to_plain(place.node)
    there = Place(Mapping(foreign, backend.node.at), backend.path, backend.key_at)
    check_arguments(there, schema_of(CerebrasOptions, owner="backend"), problems)
    cluster = backend.key("cluster_config")
    if cluster is not None and isinstance(cluster.node, Mapping):
        schema = schema_of(ClusterConfig, owner="cluster_config")
        check_arguments(cluster, schema, problems)
    set_keys = [key for key, entry in foreign.items() if not is_null(entry.node)]
    if set_keys:
        first = there.key(set_keys[0])
        assert first is not None  # it is one of its keys
        what = f"{', '.join(set_keys)}: no effect here (options of Cerebras hardware)."
        problems.note(first.key_at, backend.path, what)
    return own


def _meant(key: str, known: Iterable[str]) -> str:
    """Return a suggestion for a misspelt option; "" if none is near."""
    advice = suggest(key, (*known, "backend_type"), cutoff=0.85)
    return advice if advice.startswith("Did") else ""


def _check_flag(key: str, place: Place, problems: Problems) -> None:
    wrong = flag_problem(key, to_plain(place.node))
    if wrong is not None:
        problems.add(place.key_at, place.path, wrong)
    else:
        problems.note(place.key_at, place.path, "no effect on this hardware.")


def _try_backend(
    given: list[Place],
    backend: Place | None,
    device: str | None,
    options: dict[str, Any] | None,
    names: Names,
    problems: Problems,
) -> None:
    """Add what the backend rejects: its name, an option, or a device that is missing."""
    try:
        lacks = names.try_backend(device, options or {})
    except ConfigError as error:
        place = backend if str(error).startswith("backend") or not given else given[0]
        assert place is not None  # there is a device or a backend
        init = place.path[: place.path.index(".init") + len(".init")]
        about = re.match(r"backend\.(\w+)", str(error))
        inner = place.key(about[1]) if about else None
        at, said = place.node.at if inner is None else inner.key_at, f"{init}.{error}"
        if given and str(error).startswith("device: "):  # as it was given, perhaps backend_type
            said = given[0].path + str(error).removeprefix("device")
        problems.add(at, "", said)
        return
    if lacks is not None:
        what = lacks.removeprefix("device: ")
        problems.add_to_run(given[0].node.at, given[0].path, what, Lack("device", device or "cpu"))
