"""Device backends behind one interface; independent of the trainer.

`make_backend("cpu")` creates one; `Backend` is the interface, and `FakeBackend` (in `fake.py`) a
device for tests that raises on host reads inside a step.

The names below are imported lazily: `backends.coordination.launch` can be used before torch is
imported.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .attention_kernels import has_fused_dropout, has_trained_flex_attention
    from .backend import Backend, Caps
    from .blocks import CompileOptions
    from .comm import Comm, Exchange
    from .coordination.failures import Failure
    from .coordination.restarts import StopRecord
    from .coordination.world import World, join, joined
    from .environment import (
        LIMIT_BATCHES,
        MODELZOO_ROOT,
        NOTIFICATION_ENDPOINT,
        NOTIFICATION_MAILFROM,
        NOTIFICATION_PASSWORD,
        SLACK_BOT_TOKEN,
        from_environment,
        hold_hf_cache_dir,
        hold_lm_eval_in_process,
        limit_batches,
        loaded_hf_libraries,
    )
    from .errors import (
        BackendError,
        BackendUnavailable,
        HostReadError,
        UnsplittableBatch,
        is_too_large,
    )
    from .grouped_products import grouped_linear, moved_rows
    from .operators import attention_formulas, define_operator, refuse_second_derivatives
    from .parallel.collectives import collective_of
    from .parallel.context import ContextParallel
    from .parallel.fake_world import (
        fake_world,
        fake_world_backend,
        is_for_real,
        num_buckets,
    )
    from .peak_rates import device_name, peak_flops
    from .placement import map_tensors
    from .process_settings import (
        held_switches,
        hold_switches,
        is_switch,
        switch_names,
        switch_problem,
    )
    from .reads import can_pin, host_value
    from .recorded import truncated_normal_
    from .seeds import Stream, step_seed
    from .select import backend_names, make_backend
    from .speed import faster_than, speed_of

_HOMES = {
    "attention_kernels": ("has_fused_dropout", "has_trained_flex_attention"),
    "backend": ("Backend", "Caps"),
    "blocks": ("CompileOptions",),
    "comm": ("Comm", "Exchange"),
    "coordination.failures": ("Failure",),
    "coordination.restarts": ("StopRecord",),
    "coordination.world": ("World", "join", "joined"),
    "environment": (
        "NOTIFICATION_ENDPOINT",
        "NOTIFICATION_MAILFROM",
        "NOTIFICATION_PASSWORD",
        "SLACK_BOT_TOKEN",
        "from_environment",
        "hold_hf_cache_dir",
        "hold_lm_eval_in_process",
        "loaded_hf_libraries",
        "LIMIT_BATCHES",
        "MODELZOO_ROOT",
        "limit_batches",
    ),
    "errors": (
        "BackendError",
        "BackendUnavailable",
        "HostReadError",
        "UnsplittableBatch",
        "is_too_large",
    ),
    "grouped_products": ("grouped_linear", "moved_rows"),
    "operators": ("attention_formulas", "define_operator", "refuse_second_derivatives"),
    "parallel.collectives": ("collective_of",),
    "parallel.context": ("ContextParallel",),
    "parallel.fake_world": ("fake_world_backend", "is_for_real", "num_buckets", "fake_world"),
    "peak_rates": ("device_name", "peak_flops"),
    "reads": ("can_pin", "host_value"),
    "recorded": ("truncated_normal_",),
    "seeds": ("Stream", "step_seed"),
    "select": ("backend_names", "make_backend"),
    "speed": ("faster_than", "speed_of"),
    "process_settings": (
        "held_switches",
        "hold_switches",
        "is_switch",
        "switch_names",
        "switch_problem",
    ),
    "placement": ("map_tensors",),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "LIMIT_BATCHES",
    "MODELZOO_ROOT",
    "NOTIFICATION_ENDPOINT",
    "NOTIFICATION_MAILFROM",
    "NOTIFICATION_PASSWORD",
    "SLACK_BOT_TOKEN",
    "Backend",
    "BackendError",
    "BackendUnavailable",
    "Caps",
    "Comm",
    "CompileOptions",
    "ContextParallel",
    "Exchange",
    "Failure",
    "HostReadError",
    "StopRecord",
    "Stream",
    "UnsplittableBatch",
    "World",
    "attention_formulas",
    "backend_names",
    "can_pin",
    "collective_of",
    "define_operator",
    "device_name",
    "fake_world",
    "fake_world_backend",
    "faster_than",
    "from_environment",
    "grouped_linear",
    "has_fused_dropout",
    "has_trained_flex_attention",
    "held_switches",
    "hold_hf_cache_dir",
    "hold_lm_eval_in_process",
    "hold_switches",
    "host_value",
    "is_for_real",
    "is_switch",
    "is_too_large",
    "join",
    "joined",
    "limit_batches",
    "loaded_hf_libraries",
    "make_backend",
    "map_tensors",
    "moved_rows",
    "num_buckets",
    "peak_flops",
    "refuse_second_derivatives",
    "speed_of",
    "step_seed",
    "switch_names",
    "switch_problem",
    "truncated_normal_",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
