"""Speed and memory checks of `benchmarks.gpu`: each yields rows of the table."""

from __future__ import annotations

import importlib.util
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset
from typing_extensions import override

from backends.errors import is_out_of_memory
from backends.peak_rates import rates_of
from benchmarks.gpu_checks import Profile, profile_of
from benchmarks.gpu_runs import (
    CUDA,
    GIB,
    ON_CPU,
    After,
    Batch,
    Row,
    Setup,
    Timer,
    Workload,
    attempted,
    by_hand,
    by_trainer,
    gpt2,
    llama,
    loop_of,
    precision_of,
    train,
)
from modelzoo_trainer import Callback, Checkpoint, Trainer
from modelzoo_trainer.callbacks import FlopUtilization

LEAST_SPEED, MOST_MEMORY = 0.97, 1.05  # relative to the hand-written loop
LEAST_BUSY: Final = 0.95  # of the time
MOST_POINTS: Final = 3.0  # difference of two MFU in percent
ASSUMED_PEAK: Final = 1e12  # FLOP/s where the peak is unknown
TRAINER, HAND, THEIRS = "trainer", "hand-written loop", "transformers"
PROFILED: Final = 5  # steps
WAITS: Final = (
    "cudaStreamSynchronize",
    "cudaDeviceSynchronize",
    "cudaEventSynchronize",
    "cudaMemcpy",
    "cudaMalloc",
    "cudaFree",
    "cudaHostAlloc",
)


def gaps(setup: Setup) -> Iterator[Row]:
    """Measure gaps between kernels in steady steps, and find the attention kernel."""
    work = gpt2(setup)
    work = replace(work, steps=work.warm + setup.pick(PROFILED, 2))
    for name, run in ((TRAINER, by_trainer), (HAND, by_hand)):
        setup.clean()
        found, actions = profile_of(setup, work.warm, work.steps)
        run(setup, work, compiled=False, actions=actions)
        yield from rows_of(setup, name, found)


def rows_of(setup: Setup, name: str, found: Profile) -> Iterator[Row]:
    """Return the rows of a profile."""
    is_fused = found.has_fused_adamw()
    value = f"{found.attention()} attention, AdamW {'' if is_fused else 'not '}fused"
    ok = found.attention() in ("flash", "cudnn") and is_fused
    yield Row("gaps", f"{name}: kernels", value, setup.judged(ok))
    what = f"{name}: busy, longest gap"
    if not found.kernels:
        value = "no kernels recorded" if setup.is_cuda else ON_CPU
        yield Row("gaps", what, value, None, f"{len(found.names)} operations on the host")
        return
    busy, gap = found.busy()
    counts = {wait: found.names.count(wait) for wait in WAITS if wait in found.names}
    waits = ", ".join(f"{num} {wait}" for wait, num in counts.items())
    note = f"{len(found.kernels)} kernels; {waits or 'no waits'}"
    ok_busy = setup.judged(busy > LEAST_BUSY) if name == TRAINER else None
    yield Row("gaps", what, f"{busy:.1%}, {gap:.0f} us", ok_busy, note)


# ---- speed


def speed(setup: Setup) -> Iterator[Row]:
    """Measure tokens per second and MFU beside a hand-written loop and transformers."""
    for work in (gpt2(setup), llama(setup)):
        for compiled in (False, True):
            rows = compared(setup, work, compiled=compiled)
            yield from attempted("speed", work.name, rows)
    yield from own_utilization(setup)


@dataclass
class Best:
    """The best of some runs.

    Args:
        seconds: Of a step; infinite if no run succeeded.
        peak_gib: Peak memory of the last run.
        error: Why the last run failed.
    """

    seconds: float = math.inf
    peak_gib: float = math.nan
    error: str = ""

    def add(self, setup: Setup, run: Callable[[], float]) -> None:
        """Run once more."""
        setup.clean()
        try:
            self.seconds = min(self.seconds, run())
        except Exception as error:  # noqa: BLE001  # the others still run
            is_full = is_out_of_memory(error)
            self.error = "out of memory" if is_full else f"{type(error).__name__}: {error}"
        self.peak_gib = setup.peak_gib()


def compared(setup: Setup, work: Workload, *, compiled: bool) -> Iterator[Row]:
    """Run all in turn; yield a row for each."""
    runs: dict[str, Callable[[], float]] = {
        TRAINER: lambda: by_trainer(setup, work, compiled=compiled),
        HAND: lambda: by_hand(setup, work, compiled=compiled),
    }
    if importlib.util.find_spec(THEIRS):
        make = partial(Theirs, work, setup.kind)
        runs[THEIRS] = lambda: by_hand(setup, work, compiled=compiled, make=make)
    best = {name: Best() for name in runs}
    for _ in range(setup.pick(2, 1)):
        for name, run in runs.items():
            best[name].add(setup, run)
    kind = f"compiled {work.target}" if compiled else "eager"
    for name, one in best.items():
        yield row_of(setup, work, f"{work.name}, {kind}: {name}", one, best)
    if THEIRS not in runs:
        yield Row("speed", f"{work.name}, {kind}: {THEIRS}", "not installed")


def row_of(setup: Setup, work: Workload, what: str, one: Best, best: dict[str, Best]) -> Row:
    """Return the row of a run; the trainer must be about as fast as the hand-written loop."""
    is_trainer, limit = one is best[TRAINER], best[HAND].seconds
    if math.isinf(one.seconds):
        is_lost = is_trainer and math.isfinite(limit)
        return Row("speed", what, one.error.splitlines()[0], False if is_lost else None)
    rate, peak = work.flops() / one.seconds, peak_flops(setup)
    parts = [f"{limit / one.seconds:.3f} of the {HAND}"] if math.isfinite(limit) else []
    parts += [f"{1e3 * one.seconds:.1f} ms a step", f"{rate / 1e12:.3g} TFLOP/s"]
    parts += [f"MFU {100 * rate / peak:.1f} %"] if peak else []
    parts += [f"peak {one.peak_gib:.1f} GiB"] if setup.is_cuda else []
    ok = setup.judged(limit >= LEAST_SPEED * one.seconds) if is_trainer else None
    value = f"{work.tokens / one.seconds:,.0f} tokens/s"
    return Row("speed", what, value, ok if math.isfinite(limit) else None, ", ".join(parts))


def peak_flops(setup: Setup) -> float | None:
    """Return the device's peak FLOP/s in bfloat16; None = unknown."""
    rates = rates_of(CUDA.get_device_name()) if setup.is_cuda else None
    return rates[torch.bfloat16] if rates and torch.bfloat16 in rates else None


def own_utilization(setup: Setup) -> Iterator[Row]:
    """Compare the callback `FlopUtilization` with the formula, over the same time."""
    setup.clean()
    work = gpt2(setup)
    callback = FlopUtilization(peak_flops=peak_flops(setup) or ASSUMED_PEAK)
    by_trainer(setup, work, compiled=False, callbacks=[callback])
    found = callback.perf_metrics["flops_utilization"]
    share = callback.perf_metrics["total_flops"] / work.flops() / (work.steps - 1)
    value = f"{found:.3g} %, {found / share:.3g} %"
    note = f"counted: {share:.3f} of the formula's FLOPs; including the first steps"
    ok = abs(found - found / share) < MOST_POINTS
    yield Row("speed", f"{work.name}: FlopUtilization, formula", value, setup.judged(ok), note)


class Theirs(nn.Module):
    """A model of transformers with the sizes of a workload and random weights."""

    def __init__(self, work: Workload, device: str) -> None:
        super().__init__()
        import transformers

        ours = work.settings
        sizes: dict[str, Any] = {
            "vocab_size": ours["vocab_size"],
            "hidden_size": ours["hidden_size"],
            "num_hidden_layers": ours["num_hidden_layers"],
            "num_attention_heads": ours["num_heads"],
            "max_position_embeddings": ours["max_position_embeddings"],
            "tie_word_embeddings": True,
        }
        config: Any
        if ours.get("position_embedding_type") == "rotary":
            groups = ours["extra_attention_params"]["num_kv_groups"]
            sizes |= {"intermediate_size": ours["filter_size"], "num_key_value_heads": groups}
            config = transformers.LlamaConfig(**sizes)
        else:
            sizes |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
            sizes |= dict.fromkeys(("bos_token_id", "eos_token_id"))
            config = transformers.GPT2Config(n_inner=ours["filter_size"], **sizes)
        maker: Any = transformers.AutoModelForCausalLM
        with torch.device(device):
            model = maker.from_config(config, attn_implementation="sdpa")
        self.model = model.float().train()

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """Return the loss; transformers shifts the labels itself."""
        ids = batch["input_ids"]
        return {"loss": self.model(input_ids=ids, labels=ids, use_cache=False).loss}


# ---- memory


def memory(setup: Setup) -> Iterator[Row]:
    """Measure peak memory, and run out of memory."""
    work = replace(gpt2(setup), steps=4, warm=1)
    peaks: list[float] = []
    for mode in (None, "selective", "full"):
        setup.clean()
        backend = {"activation_checkpointing": mode}
        by_trainer(setup, work, compiled=False, backend=backend)
        peaks.append(setup.peak_gib())
    setup.clean()
    by_hand(setup, work, compiled=False)
    by_loop = setup.peak_gib()
    what, relative = (
        "peak with activation checkpointing off, selective, full",
        f"peak relative to the {HAND}",
    )
    if not setup.is_cuda:
        for one in (what, relative, "out of memory"):
            yield Row("memory", one, ON_CPU)
        return
    ok = peaks[0] > peaks[1] > peaks[2]
    value = ", ".join(f"{peak:.2f} GiB" for peak in peaks)
    yield Row("memory", what, value, setup.judged(ok))
    ratio, note = peaks[0] / by_loop, f"{by_loop:.2f} GiB"
    ok = ratio <= MOST_MEMORY
    yield Row("memory", relative, f"{ratio:.3f}", setup.judged(ok), note)
    yield from attempted("memory", "out of memory", out_of_memory(replace(setup, is_tiny=False)))


def out_of_memory(setup: Setup) -> Iterator[Row]:
    """Train without enough memory: the error has advice, and memory is free after it."""
    setup.clean()
    free, _ = CUDA.mem_get_info()
    used = torch.empty(max(0, free - GIB), dtype=torch.uint8, device=setup.kind)
    notes, name, ok = "", "no error", False
    try:
        by_trainer(setup, gpt2(setup), compiled=False)
    except RuntimeError as error:
        notes, name = " ".join(getattr(error, "__notes__", ())), type(error).__name__
        ok = is_out_of_memory(error) and "activation_checkpointing" in notes
    yield Row("memory", "out of memory", name, ok, notes)
    del used
    setup.clean()
    left = CUDA.memory_allocated() / GIB
    yield Row("memory", "allocated after the error", f"{left:.2f} GiB", left < 0.1)


# ---- saves and data


class Laps(Callback):
    """Record the time at the end of each step, before checkpoints."""

    def __init__(self, wait: Callable[[], None]) -> None:
        self.wait = wait
        self.times: list[float] = []

    @override
    def on_train_batch_end(
        self, trainer: Trainer, model: nn.Module, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.wait()
        self.times.append(time.perf_counter())


def saves(setup: Setup) -> Iterator[Row]:
    """Measure how long a checkpoint pauses training."""
    every = setup.pick(12, 3)
    work = replace(gpt2(setup), steps=2 * every + 1, warm=1)
    for name, is_async in (("foreground", False), ("asynchronous", True)):
        setup.clean()
        laps, checkpoint = Laps(setup.synchronize), Checkpoint(steps=every, asynchronous=is_async)
        by_trainer(setup, work, compiled=False, callbacks=[laps], checkpoint=checkpoint)
        spans = [end - begin for begin, end in zip(laps.times, laps.times[1:], strict=False)]
        usual = statistics.median(spans)
        pauses = [spans[step - 1] - usual for step in (every, 2 * every)]
        value = ", ".join(f"{1e3 * max(0.0, pause):.0f} ms" for pause in pauses)
        note = f"first and second checkpoint; a step takes {1e3 * usual:.1f} ms"
        yield Row("saves", f"{name}: pause", value, None, note)


class Images(IterableDataset[Any]):
    """Batches of images; no time is spent on making them."""

    def __init__(self, batch_size: int, side: int) -> None:
        images: Any = torch.rand(batch_size, 3, side, side)
        self.images: Tensor = images.share_memory_()  # not copied from one process to another
        self.labels = torch.zeros(batch_size, dtype=torch.int64)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            yield self.images, self.labels


class ConvNet(nn.Module):
    """Convolutions that take longer than a copy of their input."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, channels, 7, 4)
        self.layers = nn.ModuleList(nn.Conv2d(channels, channels, 3, padding=1) for _ in range(12))
        self.last = nn.Linear(channels, 10)

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Return the loss."""
        states = self.first(batch[0]).relu()
        for layer in self.layers:
            states = layer(states).relu()
        return nn.functional.cross_entropy(self.last(states.mean((2, 3))), batch[1])


def feeding(setup: Setup) -> Iterator[Row]:
    """Compare large batches from a DataLoader with batches on the device."""
    batch_size, side, channels = setup.pick((256, 224, 128), (2, 16, 4))
    steps, warm = setup.pick((24, 8), (6, 2))
    images = Images(batch_size, side)
    ready = tuple(one.to(setup.kind) for one in (images.images, images.labels))
    loader = partial(DataLoader, images, batch_size=None, num_workers=setup.pick(1, 0))
    cases: dict[str, Callable[[], Any]] = {
        "batches on the device": lambda: [ready] * steps,
        "DataLoader with pin_memory": lambda: loader(pin_memory=setup.is_cuda),
        "DataLoader": loader,
    }
    times: dict[str, float] = {}
    for name, make in cases.items():
        setup.clean()
        timer = Timer(setup)
        marks = After({warm: timer.mark, steps: timer.mark})
        options = {"precision": precision_of("bfloat16"), "loop": loop_of(steps)}
        train(setup, lambda: ConvNet(channels), make(), callbacks=[marks], **options)
        times[name] = timer.seconds(steps - warm)
        ratio = times[name] / times["batches on the device"]
        note = f"{images.images.nbytes / 2**20:.0f} MiB a batch, {1e3 * times[name]:.1f} ms a step"
        yield Row("feeding", f"{name}: relative time", f"{ratio:.2f}", None, note)
