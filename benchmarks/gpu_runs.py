"""Models, data and runs of `benchmarks.gpu`: with the trainer and with a hand-written loop."""

from __future__ import annotations

import gc
import math
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import torch
from torch import Tensor, nn
from typing_extensions import override

from backends.blocks import CompileOptions, compile_model
from modelzoo_trainer import Callback, Logger, Logging, MixedPrecision, Trainer, TrainingLoop
from modelzoo_trainer.zoo.models.registry import model_class

T = TypeVar("T")
Batch = dict[str, Tensor]
Actions = Mapping[int, Callable[[], object]]
"""What to call after which step, counted from 1."""

CUDA: Final[Any] = torch.get_device_module("cuda")
GIB: Final = 1 << 30
ON_CPU: Final = "not on a CPU"
SMALLEST_CARD: Final = 75 * GIB  # below it, batches are smaller
LLAMA_STYLE: Final[dict[str, Any]] = {
    "position_embedding_type": "rotary",
    "norm_type": "rmsnorm",
    "nonlinearity": "swiglu",
    "use_projection_bias_in_attention": False,
    "use_ffn_bias_in_attention": False,
    "use_ffn_bias": False,
}
FLOAT32_LIMIT, HALF_LIMIT = 1e-4, 2e-2  # relative differences of losses
HIGHEST: Final = {"matmul_precision": "highest"}  # float32 without TF32
DETERMINISTIC: Final = {"deterministic": True}
NO_DROPOUT: Final = {"dropout_rate": 0.0, "attention_dropout_rate": 0.0}


@dataclass(frozen=True)
class Row:
    """A row of the table; `ok` None = for information."""

    check: str
    what: str
    value: str
    ok: bool | None = None
    note: str = ""

    @property
    def result(self) -> str:
        """PASS, FAIL or info."""
        return "info" if self.ok is None else "PASS" if self.ok else "FAIL"


def attempted(check: str, what: str, rows: Iterator[Row]) -> Iterator[Row]:
    """Yield rows; an error is a row, too, so that the next checks still run."""
    try:
        yield from rows
    except Exception as error:  # noqa: BLE001  # of any kind
        traceback.print_exc()
        message = next(iter(str(error).splitlines()), "")
        yield Row(check, what, type(error).__name__, False, message)


@dataclass(frozen=True)
class Setup:
    """What is tested.

    Args:
        kind: "cuda" or "cpu".
        is_tiny: Whether sizes are those for a CPU.
        folder: For the runs' files.
    """

    kind: str
    is_tiny: bool
    folder: Path

    @property
    def is_cuda(self) -> bool:
        """Whether the device is a GPU."""
        return self.kind == "cuda"

    @property
    def tested(self) -> str:
        """The trainer's device; on a CPU, the fake one, which refuses host reads in a step."""
        return "cuda" if self.is_cuda else "fake"

    @property
    def compiler(self) -> dict[str, Any]:
        """Options of `backend.compile`."""
        return {} if self.is_cuda else {"backend": "aot_eager"}

    def pick(self, full: T, tiny: T) -> T:
        """Return a size."""
        return tiny if self.is_tiny else full

    def judged(self, ok: bool) -> bool | None:
        """Return the result of a limit that applies only to a GPU and full sizes."""
        return ok if self.is_cuda and not self.is_tiny else None

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.is_cuda:
            CUDA.synchronize()

    def clean(self) -> None:
        """Delete what earlier runs left: memory, compiled code, files."""
        for path in self.folder.iterdir():
            shutil.rmtree(path, ignore_errors=True)
        if "torch._dynamo" in sys.modules:
            torch.compiler.reset()
            torch._dynamo.utils.counters.clear()
        gc.collect()
        if self.is_cuda:
            CUDA.empty_cache()
            CUDA.reset_peak_memory_stats()

    def new_folder(self) -> str:
        """Return a new folder for a run."""
        return tempfile.mkdtemp(dir=self.folder)

    def peak_gib(self) -> float:
        """Return the device's peak memory since `clean`, or since a trainer was created."""
        return CUDA.max_memory_allocated() / GIB if self.is_cuda else math.nan


# ---- models and data


def small(setup: Setup, **changes: Any) -> dict[str, Any]:
    """Return the settings of a llama of two layers, with dropout."""
    size = setup.pick(128, 32)
    return {
        **LLAMA_STYLE,
        "vocab_size": setup.pick(512, 64),
        "hidden_size": size,
        "num_hidden_layers": 2,
        "num_heads": setup.pick(4, 2),
        "rotary_dim": setup.pick(32, 16),
        "filter_size": 2 * size,
        "max_position_embeddings": setup.pick(64, 16),
        "dropout_rate": 0.1,
        "attention_dropout_rate": 0.1,
        **changes,
    }


def build(settings: Mapping[str, Any], device: str = "cpu") -> nn.Module:
    """Return a decoder; the same weights in each call for a device, others on another device."""
    torch.manual_seed(0)
    with torch.device(device):
        return model_class("gpt2")(**settings)


def token_batches(settings: Mapping[str, Any], num: int, batch_size: int) -> list[Batch]:
    """Return batches of random tokens; each label depends on its token, so the loss falls."""
    vocab, size = settings["vocab_size"], (batch_size, settings["max_position_embeddings"])
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(vocab, size, generator=generator) for _ in range(num)]
    return [{"input_ids": one, "labels": (7 * one + 3) % vocab} for one in ids]


def cycled(batches: Sequence[T], steps: int) -> list[T]:
    """Return a batch for each step, as one epoch."""
    return [batches[idx % len(batches)] for idx in range(steps)]


@dataclass(frozen=True)
class Workload:
    """A model and its batches, to measure speed and memory."""

    name: str
    settings: Mapping[str, Any]
    batch_size: int
    steps: int
    warm: int
    target: str = "model"  # what is compiled

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.batch_size * int(self.settings["max_position_embeddings"])

    def batches(self) -> list[Batch]:
        """Return a batch for each step."""
        return cycled(token_batches(self.settings, 8, self.batch_size), self.steps)

    def compile_options(self, setup: Setup) -> dict[str, Any]:
        """Return the options of `backend.compile`."""
        return {"target": self.target, **setup.compiler}

    def flops(self) -> float:
        """Return the model FLOPs of a step, by Chowdhery et al. 2022 (PaLM), appendix B.

        N counts the parameters in matrix products: a tied output layer once, positions not at all.
        """
        settings = self.settings
        named = build(settings, "meta").named_parameters()
        num = sum(one.numel() for name, one in named if name != "position_embeddings.weight")
        width = settings["num_hidden_layers"] * settings["hidden_size"]
        return float(self.tokens * (6 * num + 12 * width * settings["max_position_embeddings"]))


def gpt2(setup: Setup) -> Workload:
    """Return GPT-2 with 124 million parameters."""
    sizes = {
        "vocab_size": setup.pick(50304, 64),
        "hidden_size": setup.pick(768, 32),
        "num_hidden_layers": setup.pick(12, 2),
        "num_heads": setup.pick(12, 2),
        "filter_size": setup.pick(3072, 64),
        "max_position_embeddings": setup.pick(1024, 16),
        "nonlinearity": "gelu_new",
        **NO_DROPOUT,
    }
    steps, warm = setup.pick((32, 8), (6, 2))
    name = setup.pick("GPT-2 124M", "tiny GPT-2")
    return Workload(name, sizes, _batch_size(setup, 32), steps, warm)


def llama(setup: Setup) -> Workload:
    """Return a llama with 1.2 billion parameters; blocks are compiled, to save time."""
    sizes = small(setup, **NO_DROPOUT, attention_module="multiquery_attention")
    sizes["extra_attention_params"] = {"num_kv_groups": setup.pick(8, 1)}
    if not setup.is_tiny:
        sizes |= {"vocab_size": 128256, "hidden_size": 2048, "num_hidden_layers": 16}
        sizes |= {"num_heads": 32, "rotary_dim": 64, "filter_size": 8192}
        sizes |= {"max_position_embeddings": 2048, "rope_theta": 500000.0}
    steps, warm = setup.pick((17, 5), (6, 2))
    name = setup.pick("llama 1.2B", "tiny llama")
    return Workload(name, sizes, _batch_size(setup, 4), steps, warm, target="blocks")


def _batch_size(setup: Setup, full: int) -> int:
    if setup.is_tiny:
        return 2
    memory: int = CUDA.get_device_properties(0).total_memory
    return max(1, math.floor(full * min(1.0, memory / SMALLEST_CARD)))


# ---- runs


def precision_of(name: str) -> MixedPrecision:
    """Return a precision by the name of its dtype; gradients are clipped."""
    if name == "float32":
        return MixedPrecision(enabled=False, max_gradient_norm=1.0)
    half: Any = name
    return MixedPrecision(fp16_type=half, loss_scaling_factor=None, max_gradient_norm=1.0)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of all runs."""
    return torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)


class Losses(Logger):
    """Keep the loss of each log step."""

    def __init__(self) -> None:
        self.values: list[float] = []

    @override
    def log_metrics(self, metrics: dict[str, Any], step: int) -> None:
        if "loss" in metrics:
            self.values.append(float(metrics["loss"]))


class After(Callback):
    """Call functions after some steps."""

    def __init__(self, actions: Actions) -> None:
        self.actions = actions

    @override
    def on_step_committed(self, trainer: Trainer) -> None:
        if trainer.global_step in self.actions:
            self.actions[trainer.global_step]()


class Timer:
    """Times at which the device was idle."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.times: list[float] = []

    def mark(self) -> None:
        """Wait for the device, and record the time."""
        self.setup.synchronize()
        self.times.append(time.perf_counter())

    def seconds(self, steps: int) -> float:
        """Return the time of a step between the first two marks."""
        return (self.times[1] - self.times[0]) / steps


def loop_of(steps: int) -> TrainingLoop:
    """Return a training loop that ends after a number of steps in all."""
    return TrainingLoop(max_steps=steps, eval_frequency=None)


def train(setup: Setup, model: Any, data: Any, **options: Any) -> Trainer:
    """Train on `data`, by default once; return the trainer.

    `options`: of the trainer, and `log_steps`.
    """
    given: dict[str, Any] = {
        "device": setup.kind,
        "optimizer": adamw,
        "checkpoint": None,
        "logging": Logging(log_steps=options.pop("log_steps", 10)),
        "seed": 1,
        "progress": "none",
        **options,
    }
    if "loop" not in given:
        given["loop"] = loop_of(len(data))
    if "model_dir" not in given:
        given["model_dir"] = setup.new_folder()
    with Trainer(model=model, **given) as trainer:
        trainer.fit(data)
    return trainer


def losses_of(setup: Setup, model: Any, data: Any, **options: Any) -> list[float]:
    """Return the loss of each step of a run."""
    losses = Losses()
    train(setup, model, data, loggers=[losses], log_steps=1, **options)
    return losses.values


def by_trainer(
    setup: Setup, work: Workload, *, compiled: bool, actions: Actions | None = None, **options: Any
) -> float:
    """Train in bfloat16 with the trainer; return the seconds of a step.

    `actions`: to call after some steps. `options`: of the trainer.
    """
    timer = Timer(setup)
    marks = {work.warm: timer.mark, work.steps: timer.mark, **(actions or {})}
    backend = {"compile": work.compile_options(setup)} if compiled else {}
    callbacks = [After(marks), *options.pop("callbacks", ())]
    options = {"precision": precision_of("bfloat16"), **options, "callbacks": callbacks}
    options["backend"] = backend | options.get("backend", {})
    train(setup, lambda: build(work.settings, setup.kind), work.batches(), **options)
    return timer.seconds(work.steps - work.warm) if len(timer.times) > 1 else math.nan


def by_hand(
    setup: Setup,
    work: Workload,
    *,
    compiled: bool,
    actions: Actions | None = None,
    make: Callable[[], nn.Module] | None = None,
) -> float:
    """Train in bfloat16 with a loop as in torch's tutorials; return the seconds of a step.

    Autocast, fused AdamW, gradient clipping, and copies of the next batch from pinned memory.
    `make`: returns another model; its output is a mapping with `loss`.
    """
    timer = Timer(setup)
    marks = {work.warm: timer.mark, work.steps: timer.mark, **(actions or {})}
    model = build(work.settings, setup.kind) if make is None else make()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    if compiled:
        compile_model(model, CompileOptions(**work.compile_options(setup)))
    batches = work.batches()
    batch = moved(setup, batches[0])
    for step in range(1, work.steps + 1):
        with torch.autocast(setup.kind, torch.bfloat16):
            loss = model(batch)["loss"]
        batch = moved(setup, batches[step % work.steps])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step in marks:
            marks[step]()
    return timer.seconds(work.steps - work.warm) if len(timer.times) > 1 else math.nan


def moved(setup: Setup, batch: Batch) -> Batch:
    """Start copying a batch to the device."""
    if not setup.is_cuda:
        return batch
    return {key: value.pin_memory().to("cuda", non_blocking=True) for key, value in batch.items()}


def difference(found: Sequence[float], expected: Sequence[float]) -> float:
    """Return the largest relative difference of losses; inf if one is not finite or missing."""
    if len(found) != len(expected) or not all(map(math.isfinite, (*found, *expected))):
        return math.inf
    pairs = zip(found, expected, strict=True)
    return max((abs(one - two) / abs(two) for one, two in pairs), default=math.inf)
