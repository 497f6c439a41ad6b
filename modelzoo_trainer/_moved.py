"""Modules under their former paths, until 1.0: the same objects, with a DeprecationWarning.

Little is imported here: this is a part of every program that imports the package.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import CodeType, MappingProxyType, ModuleType
from typing import Any, Final

_PACKAGE: Final = "modelzoo_trainer."
_INTO: Final = MappingProxyType(
    {
        "base": """
            annotations config.secret_forms config.secrets constraints constructor_arguments
            devices dtypes exit_codes foreign_names metric_direction nested_settings
            regular_files shown_path sibling stderr user_modules versions
        """,
        "callbacks.parts": """
            callbacks.activation_hooks callbacks.metric_watch callbacks.side_checkpoints
            callbacks.tensor_listeners
        """,
        "checkpointing": "stores",
        "core.parts": """
            closures core.checkpoint_writer core.manual_steps core.memory_snapshots
            core.model_call core.named_checkpoints core.optimizer_facts core.optimizer_state
            core.prediction_store core.run_log core.scheduler_settings core.states
            core.step_check core.trainer_arguments core.unlogged_metrics data.model_length
            models.shared_weights models.structure optim.run_hints predictions results
            results_log run_context summaries watchdog watched_metrics
        """,
        "hooks": "advice interceptors loggers.logger plugins",
        "loading": "data.batches data.sharded_stream data.stream",
        "loggers": "console",
        "optim": "sparsity",
        "tools": """
            callbacks.lr_finder callbacks.notification callbacks.run_snapshot planning report
            supervisor
        """,
        "tools.checkpoints": """
            checkpointing.compare checkpointing.overview checkpointing.store_arguments
        """,
        "tools.launch": "callbacks.ray_train_report",
        "tools.report": "callbacks.run_history",
        "zoo": "conversion data evaluation hugging_face models",
        "zoo.callbacks": """
            callbacks.compute_norm_gns callbacks.csx_noops callbacks.eleuther_eval_harness
            callbacks.expert_load callbacks.flags callbacks.generate_text
            callbacks.hugging_face_checkpoint callbacks.lora callbacks.model_zoo_params_metadata
            callbacks.move_modules callbacks.per_example_norms csx_flags models.sync_batch_norm
        """,
        "zoo.conversion": "checkpointing.lazy_checkpoint checkpointing.weights_folder",
        "zoo.rows": "hdf5_format preprocessing",
    }
)
"""Packages, and what has moved into them from other paths."""
_RENAMED: Final = MappingProxyType(
    {
        "callback_list": "hooks.order",
        "callbacks.report": "tools.report.callback",
        "checkpointing.commands": "cli.checkpoints",
        "config.foreign": "tools.foreign_configs",
        "config.report": "config.printout",
        "launch": "cli.ray_worker",
        "metrics": "core.logging",
        "preprocessing.command": "cli.preprocessing",
        "preprocessing.settings": "config.preprocessing",
        "token_rows": "zoo.rows",
    }
)
MOVED: Final = MappingProxyType(
    {
        **{
            old: f"{package}.{old.rpartition('.')[2]}"
            for package, names in _INTO.items()
            for old in names.split()
        },
        **_RENAMED,
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


class MovedModules:
    """Finds and loads modules under their former paths."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return how to load a module that has moved, with a warning; None = it has not."""
        found = _present_spec(fullname)
        if found is None:
            return None
        warnings.warn(
            f"{fullname} is now {found.name}; the former path will be removed in version 1.0.",
            DeprecationWarning,
            stacklevel=2,
        )
        if fullname.endswith(".__main__"):  # a program, run under its own name
            return _spec_of_file(fullname, found)
        loader: Any = self  # without the base class, whose module imports much
        is_package = found.submodule_search_locations is not None
        return ModuleSpec(fullname, loader, is_package=is_package)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the module under its present path."""
        module = import_module(_PACKAGE + str(present_path(spec.name.removeprefix(_PACKAGE))))
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Undo what the import has changed in the module, which was executed when it was made."""
        spec: Any = module.__spec__
        module.__spec__ = spec.loader_state

    def get_code(self, fullname: str) -> CodeType | None:
        """Return the code of a module that `python -m` runs."""
        found: Any = _present_spec(fullname)
        code: CodeType | None = found.loader.get_code(found.name)
        return code


def _present_spec(fullname: str) -> ModuleSpec | None:
    """Return the spec of a module that has moved, under its present path."""
    if not fullname.startswith(_PACKAGE):
        return None
    new = present_path(fullname.removeprefix(_PACKAGE))
    if new is None:
        return None
    from importlib.util import find_spec

    return find_spec(_PACKAGE + new)


def _spec_of_file(name: str, found: ModuleSpec) -> ModuleSpec | None:
    from importlib.util import spec_from_file_location

    return spec_from_file_location(name, found.origin)


def find_moved_modules() -> None:
    """Find moved modules from now on. Idempotent."""
    if not any(isinstance(finder, MovedModules) for finder in sys.meta_path):
        # First: what lies beside a moved package is also found by its path, as another module.
        sys.meta_path.insert(0, MovedModules())
