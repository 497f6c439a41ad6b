"""Correctness checks of `benchmarks.gpu`: each yields rows of the table."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from torch.autograd.profiler_util import FunctionEvent

from backends import HostReadError
from benchmarks.gpu_runs import (
    CUDA,
    DETERMINISTIC,
    FLOAT32_LIMIT,
    HALF_LIMIT,
    HIGHEST,
    NO_DROPOUT,
    ON_CPU,
    Actions,
    After,
    Batch,
    Losses,
    Row,
    Setup,
    attempted,
    build,
    cycled,
    difference,
    loop_of,
    losses_of,
    precision_of,
    small,
    token_batches,
    train,
)
from modelzoo_trainer import Checkpoint

FIRST, LAST = 10, 30  # between these steps, nothing may wait for the device
ATTENTION: Final = ("cudnn", "flash", "efficient")  # kernels of scaled_dot_product_attention
GROUPED: Final = (9, 10)  # capabilities on which experts use grouped_mm


def correct(setup: Setup) -> Iterator[Row]:
    """Compare losses with the CPU, from the same weights."""
    settings = small(setup, **NO_DROPOUT)
    data = cycled(token_batches(settings, 4, setup.pick(4, 2)), setup.pick(24, 8))

    def losses(device: str, dtype: str) -> list[float]:
        options = {"device": device, "backend": HIGHEST, "precision": precision_of(dtype)}
        return losses_of(setup, partial(build, settings), data, **options)

    def compared(dtype: str, reference: str, limit: float) -> Iterator[Row]:
        found = losses(setup.tested, dtype)
        largest = difference(found, losses("cpu", reference))
        note = f"limit {limit:g}; {len(found)} steps, loss {found[0]:.2f} to {found[-1]:.2f}"
        what = f"{dtype}: losses relative to {reference} on the CPU"
        yield Row("correct", what, f"{largest:.1e}", largest < limit, note)

    for dtype, reference, limit in (
        ("float32", "float32", FLOAT32_LIMIT),
        ("bfloat16", "bfloat16", HALF_LIMIT),
        ("float16", "float32", HALF_LIMIT),  # the CPU has no loss scaler
    ):
        yield from attempted("correct", dtype, compared(dtype, reference, limit))


def resume(setup: Setup) -> Iterator[Row]:
    """Compare a resumed run with an uninterrupted one, bit by bit."""
    for dtype in ("float32", "bfloat16", "float16"):
        what = f"{dtype}, deterministic"
        yield from attempted("resume", what, resumed(setup, what, dtype, DETERMINISTIC))
    yield from resumed(setup, "bfloat16, default", "bfloat16", {})


def resumed(setup: Setup, what: str, dtype: str, backend: dict[str, Any]) -> Iterator[Row]:
    """Train 8 steps at once, and 5 steps and the rest from a checkpoint; compare the weights."""
    settings = small(setup)
    data = token_batches(settings, 8, setup.pick(4, 2))
    options: dict[str, Any] = {"device": setup.tested, "backend": backend}

    def fit(**others: Any) -> tuple[dict[str, Tensor], int]:
        losses = Losses()
        given = {**options, **others, "precision": precision_of(dtype), "loggers": [losses]}
        trainer = train(setup, partial(build, settings), data, log_steps=1, **given)
        weights = {name: value.cpu() for name, value in trainer.model.state_dict().items()}
        return weights, len(losses.values)

    whole, _ = fit()
    options["model_dir"] = setup.new_folder()
    fit(loop=loop_of(5), checkpoint=Checkpoint(steps=5))
    rest, steps = fit(checkpoint=Checkpoint(steps=8, asynchronous=True))
    unequal = [name for name in whole if not torch.equal(whole[name], rest[name])]
    value = f"{len(unequal)} of {len(whole)} tensors differ" if unequal else "equal bits"
    ok = not unequal and steps == 3
    is_required = bool(backend) or not setup.is_cuda
    yield Row("resume", what, value, ok if is_required else None, f"{steps} steps after resuming")


# ---- what happens in a step


def sync(setup: Setup) -> Iterator[Row]:
    """Count operations in steady steps that wait for the device."""
    compiled = {"backend": {"compile": setup.compiler or True}}
    cases: tuple[tuple[str, str, dict[str, Any]], ...] = (
        ("bfloat16", "bfloat16", {}),
        ("float16 with loss scaler", "float16", {}),
        ("bfloat16, log_steps 1", "bfloat16", {"log_steps": 1}),
        ("bfloat16, compiled", "bfloat16", compiled),
    )
    for what, dtype, options in cases:
        setup.clean()
        yield from attempted("sync", what, waits(setup, what, dtype, options))
    if not setup.is_cuda:
        yield Row("sync", "guard: warn, guard: error", ON_CPU)
        return
    for what, backend in (
        ("guard: warn, compiled", {"guard": "warn", "compile": True}),
        ("guard: error", {"guard": "error"}),
        ("guard: error, compiled", {"guard": "error", "compile": True}),
    ):
        setup.clean()
        yield from attempted("sync", what, guarded(setup, what, backend))


def waits(setup: Setup, what: str, dtype: str, options: dict[str, Any]) -> Iterator[Row]:
    """Count waits between two steps, without the trainer's own guard."""
    found = refused(setup, dtype, options) if not setup.is_cuda else warned(setup, dtype, options)
    value = f"{len(found)} in {LAST - FIRST} steps"
    yield Row("sync", what, value, not found, ", ".join(sorted(set(found))))


def refused(setup: Setup, dtype: str, options: dict[str, Any]) -> list[str]:
    """Return what the fake device refuses, at most one read."""
    try:
        run_steps(setup, dtype, **options)
    except HostReadError as error:
        return [str(error)]
    return []


def warned(setup: Setup, dtype: str, options: dict[str, Any]) -> list[str]:
    """Return the line of each warning of torch."""
    found: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")

        def begin() -> None:
            caught.clear()
            CUDA.set_sync_debug_mode("warn")

        def end() -> None:
            CUDA.set_sync_debug_mode("default")
            found.extend(places_in(caught))

        backend = {"guard": "off", **options.get("backend", {})}
        given = {**options, "backend": backend, "callbacks": [After({FIRST: begin, LAST: end})]}
        try:
            run_steps(setup, dtype, **given)
        finally:
            CUDA.set_sync_debug_mode("default")
    return found


def guarded(setup: Setup, what: str, backend: dict[str, Any]) -> Iterator[Row]:
    """Train with the trainer's guard, which must find nothing."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run_steps(setup, "bfloat16", backend=backend)
    found = places_in(caught)
    value = f"{len(found)} warnings in {LAST} steps"
    yield Row("sync", what, value, not found, ", ".join(sorted(set(found))))


def places_in(caught: list[Any]) -> list[str]:
    """Return the lines that wait, from torch's warnings."""
    return [
        f"{Path(one.filename).name}:{one.lineno}"
        for one in caught
        if "called a synchronizing" in str(one.message)
    ]


def run_steps(setup: Setup, dtype: str, **options: Any) -> None:
    """Train for a few more steps than `LAST`."""
    settings = small(setup)
    data = cycled(token_batches(settings, 4, setup.pick(4, 2)), LAST + 2)
    given = {"precision": precision_of(dtype), "device": setup.tested, "loggers": [Losses()]}
    train(setup, partial(build, settings), data, **given | options)


# ---- compiled code and kernels


def graphs(setup: Setup) -> Iterator[Row]:
    """Compare compiled runs with an eager run, and count graphs."""
    settings = small(setup, **NO_DROPOUT)
    data = cycled(token_batches(settings, 4, setup.pick(4, 2)), setup.pick(16, 6))

    def losses(batches: list[Batch], **backend: Any) -> list[float]:
        options = {"device": setup.tested, "precision": precision_of("bfloat16")}
        return losses_of(setup, partial(build, settings), batches, backend=backend, **options)

    def compared(what: str, given: dict[str, str]) -> Iterator[Row]:
        begin = time.perf_counter()
        largest = difference(losses(data, compile={**given, **setup.compiler}), expected)
        seconds = time.perf_counter() - begin
        note = f"limit {HALF_LIMIT:g}; graphs: {num_graphs()}, {seconds:.0f} s"
        yield Row("graphs", what, f"{largest:.1e}", largest < HALF_LIMIT, note)

    def smaller_batch() -> Iterator[Row]:
        smaller = {key: value[:-1] for key, value in data[0].items()}
        losses([*data[:3], smaller, *data[:2]], compile=setup.compiler or True)
        note = "2 = compiled again, for any batch size"
        yield Row("graphs", "one smaller batch", f"graphs: {num_graphs()}", None, note)

    expected = losses(data)
    for key, value in (("target", "model"), ("target", "blocks"), ("mode", "reduce-overhead")):
        what = f"compile.{key}: {value}"
        if key == "mode" and not setup.is_cuda:
            yield Row("graphs", f"{what} (CUDA graphs)", ON_CPU)
            continue
        setup.clean()
        yield from attempted("graphs", what, compared(what, {key: value}))
    setup.clean()
    yield from smaller_batch()


def num_graphs() -> int:
    """Return how many graphs torch.compile has made since `clean`."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def experts(setup: Setup) -> Iterator[Row]:
    """Check losses and kernels of a mixture of experts, a sliding window and packed rows."""
    span, batch_size = setup.pick(1024, 8), setup.pick(4, 2)
    mixture = {"num_experts": 8, "top_k": 2, "load_balancing_loss_coef": 0.01}
    settings = small(setup, **NO_DROPOUT, moe=mixture)
    data = token_batches(settings, 4, batch_size)
    rows = one_kernel(setup, "experts", settings, data, "grouped_mm")
    yield from attempted("experts", "experts", rows)
    settings = small(setup, **NO_DROPOUT, max_position_embeddings=setup.pick(8192, 32))
    data = token_batches(settings, 4, 1)
    windowed = {**settings, "attention_sliding_window_length": span}
    what = f"window of {span}"
    rows = one_kernel(setup, what, windowed, data, "flex_attention")
    yield from attempted("experts", what, rows)
    what = f"packed rows of {span}"
    rows = one_kernel(setup, what, settings, [packed(one, span) for one in data], "flex_attention")
    yield from attempted("experts", what, rows)


def packed(batch: Batch, span: int) -> Batch:
    """Return a batch whose rows are packed sequences of equal length."""
    places = torch.arange(batch["input_ids"].shape[1]).expand_as(batch["input_ids"])
    spans = (span - 1 - places % span).int()
    return {**batch, "attention_span": spans, "position_ids": (places % span).int()}


def one_kernel(
    setup: Setup, name: str, settings: dict[str, Any], data: list[Batch], kernel: str
) -> Iterator[Row]:
    """Compare losses with the CPU, and look for a kernel in the last step."""
    setup.clean()
    fit = partial(losses_of, setup, partial(build, settings), data)
    profile, actions = profile_of(setup, first=len(data) - 1, last=len(data))
    options = {"device": setup.tested, "precision": precision_of("bfloat16")}
    largest = difference(fit(callbacks=[After(actions)], **options), fit(device="cpu"))
    note = f"limit {HALF_LIMIT:g}; {settings['max_position_embeddings']} tokens a row"
    what = f"{name}: losses relative to float32 on the CPU"
    yield Row("experts", what, f"{largest:.1e}", largest < HALF_LIMIT, note)
    if not setup.is_cuda:
        yield Row("experts", f"{name}: kernel {kernel}", ON_CPU)
        return
    found = [one for one in profile.names if kernel in one.lower()]
    others = sorted({one for one in profile.names if one.startswith("triton")})
    note = found[0] if found else f"Triton kernels: {', '.join(others[:3]) or 'none'}"
    is_required = kernel != "grouped_mm" or CUDA.get_device_capability()[0] in GROUPED
    ok = bool(found) if is_required else None
    yield Row("experts", f"{name}: kernel {kernel}", "yes" if found else "no", ok, note)


# ---- profiles


@dataclass
class Profile:
    """Operations and kernels of some steps.

    Args:
        names: Of operations on the host and kernels on the device.
        kernels: Start and end of each kernel in microseconds, sorted.
    """

    names: list[str] = field(default_factory=list)
    kernels: list[tuple[float, float]] = field(default_factory=list)

    def read(self, events: list[FunctionEvent]) -> None:
        """Add the events of torch's profiler."""
        for event in events:
            if event.is_user_annotation:
                continue  # spans many kernels
            self.names.append(event.name)
            is_copy = event.name.startswith(("Memcpy", "Memset"))
            if event.device_type.name == "CUDA" and not is_copy:
                self.kernels.append((event.time_range.start, event.time_range.end))
        self.kernels.sort()

    def busy(self) -> tuple[float, float]:
        """Return the share of time in which a kernel runs, and the longest gap in microseconds."""
        if not self.kernels:
            return math.nan, math.nan
        first = end = self.kernels[0][0]
        busy = gap = 0.0
        for begin, stop in self.kernels:
            gap = max(gap, begin - end)
            busy += max(0.0, stop - max(begin, end))
            end = max(end, stop)
        return busy / (end - first), gap

    def attention(self) -> str:
        """Return which attention kernel ran."""
        names = set(self.names)
        for kind in ATTENTION:
            if any(f"_scaled_dot_product_{kind}_attention" in name for name in names):
                return kind
        return "math"

    def has_fused_adamw(self) -> bool:
        """Return whether the optimizer was fused."""
        return any("_fused_adamw_" in name for name in self.names)


def profile_of(setup: Setup, first: int, last: int) -> tuple[Profile, Actions]:
    """Return a profile, and what to call after the steps `first` and `last` to fill it."""
    from torch.profiler import ProfilerActivity, profile

    found = Profile()
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if setup.is_cuda else [])]
    profiler: Any = profile(activities=kinds)

    def stop() -> None:
        setup.synchronize()
        profiler.stop()
        found.read(profiler.events())

    return found, {first: profiler.start, last: stop}
