"""Modules under their former paths, until 1.0: the same objects, with a DeprecationWarning."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, spec_from_file_location, spec_from_loader
from types import MappingProxyType, ModuleType
from typing import Any, Final

from typing_extensions import override

_PACKAGE: Final = "modelzoo_trainer."
MOVED: Final = MappingProxyType(
    {
        "advice": "hooks.advice",
        "closures": "core.parts.closures",
        "console": "loggers.console",
        "constraints": "base.constraints",
        "conversion": "zoo.conversion",
        "data": "zoo.data",
        "data.batches": "loading.batches",
        "data.sharded_stream": "loading.sharded_stream",
        "data.stream": "loading.stream",
        "evaluation": "zoo.evaluation",
        "hdf5_format": "zoo.rows.hdf5_format",
        "hugging_face": "zoo.hugging_face",
        "interceptors": "hooks.interceptors",
        "launch": "cli.ray_worker",
        "loggers.logger": "hooks.logger",
        "models": "zoo.models",
        "models.shared_weights": "core.parts.shared_weights",
        "models.sync_batch_norm": "zoo.callbacks.sync_batch_norm",
        "planning": "tools.planning",
        "plugins": "hooks.plugins",
        "predictions": "core.parts.predictions",
        "preprocessing": "zoo.rows.preprocessing",
        "report": "tools.report",
        "sparsity": "optim.sparsity",
        "stores": "checkpointing.stores",
        "summaries": "core.parts.summaries",
        "supervisor": "tools.supervisor",
        "token_rows": "zoo.rows",
    }
)
"""Former paths of modules, and of packages with all that is in them, to the present ones."""


def present_path(path: str) -> str | None:
    """Return the present path of a module, or None if it has not moved.

    `path`: with dots, without `modelzoo_trainer.`.
    """
    known, inside = path, ""
    while known:
        if known in MOVED:
            return MOVED[known] + inside
        known, dot, last = known.rpartition(".")
        inside = f"{dot}{last}{inside}"
    return None


class MovedModules(MetaPathFinder, Loader):
    """Finds modules under their former paths."""

    @override
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith(_PACKAGE):
            return None
        new = present_path(fullname.removeprefix(_PACKAGE))
        found = None if new is None else find_spec(_PACKAGE + new)
        if found is None:
            return None
        warnings.warn(
            f"{fullname} is now {found.name}; the former path will be removed in version 1.0.",
            DeprecationWarning,
            stacklevel=2,
        )
        if fullname.endswith(".__main__"):  # a program, run under its own name
            return spec_from_file_location(fullname, found.origin)
        return spec_from_loader(fullname, self, is_package=bool(found.submodule_search_locations))

    @override
    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = import_module(_PACKAGE + str(present_path(spec.name.removeprefix(_PACKAGE))))
        spec.loader_state = module.__spec__
        return module

    @override
    def exec_module(self, module: ModuleType) -> None:
        """Undo what the import has changed in the module, which was executed when it was made."""
        spec: Any = module.__spec__
        module.__spec__ = spec.loader_state


def find_moved_modules() -> None:
    """Find moved modules from now on. Idempotent."""
    if not any(isinstance(finder, MovedModules) for finder in sys.meta_path):
        # First: what lies beside a moved package is also found by its path, as another module.
        sys.meta_path.insert(0, MovedModules())
