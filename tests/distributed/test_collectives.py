"""A training step sends no more messages than one in a loop by hand."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from modelzoo_trainer import Callback, Logging, Trainer, TrainingLoop
from modelzoo_trainer.callbacks import default_callbacks
from tests.distributed.ranks import run_ranks
from tests.distributed.training import Net, loader

pytestmark = pytest.mark.slow

ENGINES = {"DDP": {}, "FSDP2": {"parallel": {"shard": -1}}}
EACH = ["DDP", pytest.param("FSDP2", marks=pytest.mark.slow)]
UNUSED = {"find_unused_parameters": True}
OPTIONS = ENGINES | {"DDP, unused": UNUSED}
CASES = [(1, None), (1, "int"), (1, "tensor"), (3, None), (3, "tensor")]
BATCH, NUM_STEPS, LOG_STEPS = 4, 6, 3
NUM_SAMPLES = 2 * BATCH * NUM_STEPS
IS_LOGGED = [step % LOG_STEPS == 0 for step in range(2, NUM_STEPS + 1)]  # the first step sets up
Sent = tuple[str, int]  # what, and how many elements
LOSS: Sent = ("allreduce_", 2)  # its sum and its weight
WEIGHT: Sent = ("allreduce_", 1)
LOGGED: dict[str, list[Sent]] = {"DDP": [], "FSDP2": [LOSS]}


class Partly(Net):
    """Has parameters that get no gradient."""

    def __init__(self, counts: str | None) -> None:
        super().__init__(counts)
        self.unused = nn.Linear(2, 2).double()


class Messages(TorchDispatchMode):
    """Notes what is sent, of all kinds and groups, also by what torch does in a backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[Sent] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        space, _, name = function._schema.name.partition("::")
        if space in ("c10d", "_c10d_functional") and "wait" not in name:
            sizes = [leaf.numel() for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
            self.sent.append((name, max(sizes, default=0)))
        return function(*args, **(kwargs or {}))

    def take(self) -> list[Sent]:
        """Return what was noted, and start anew."""
        sent, self.sent = self.sent, []
        return sent


class StepMessages(Callback):
    """Keeps what was sent from one step boundary to the next."""

    def __init__(self, messages: Messages) -> None:
        self.messages = messages
        self.steps: list[list[Sent]] = []
        self.numbers: list[int] = []

    def on_step_boundary(self, trainer: Trainer) -> None:
        self.steps.append(self.messages.take())
        self.numbers.append(num_started())


class StopInOne(Callback):
    """One process asks for the end of the run, of which the others do not know."""

    def on_step_boundary(self, trainer: Trainer) -> None:
        if trainer.global_step == LOG_STEPS and not trainer.backend.comm.is_main:
            trainer.early_exit.stop("enough")


def num_started() -> int:
    """Return how many collectives all groups have started, from whatever thread."""
    groups = dist.distributed_c10d._world.pg_map
    return sum(group._get_sequence_number_for_group() for group in groups)


# ---- the two loops


def wrap(engine: str) -> nn.Module:
    torch.manual_seed(0)
    net = Net("tensor")
    if engine == "DDP":
        return DistributedDataParallel(net)
    if engine == "DDP, unused":
        return DistributedDataParallel(Partly("tensor"), **UNUSED)
    for block in net.blocks:
        fully_shard(block)
    return fully_shard(net)


def by_hand(engine: str, accumulate: int) -> list[list[Sent]]:
    """Return what each step sends once torch has packed the gradients of copies anew."""
    module = wrap(engine)
    optimizer = torch.optim.AdamW(module.parameters())
    batch = next(iter(loader(BATCH)))
    steps = []
    with Messages() as messages:
        for _ in range(NUM_STEPS + 1):
            for part in range(1, accumulate + 1):
                is_last = part == accumulate
                if isinstance(module, FSDPModule):
                    module.set_requires_gradient_sync(is_last)
                    module.set_is_last_backward(is_last)
                quiet = isinstance(module, DistributedDataParallel) and not is_last
                with module.no_sync() if quiet else nullcontext():
                    (module(batch)["loss"] / accumulate).backward()
            optimizer.step()
            optimizer.zero_grad()
            steps.append(messages.take())
    return steps[2:]


def by_trainer(
    folder: Path, engine: str, accumulate: int = 1, *, extra: Any = (), **options: Any
) -> StepMessages:
    net = options.pop("net", Net)
    counts, num = options.pop("counts", None), options.pop("num", accumulate * NUM_SAMPLES)
    with Messages() as messages:
        kept = StepMessages(messages)
        trainer = Trainer(
            device="cpu",
            backend=OPTIONS[engine],
            model_dir=folder,
            model=lambda: net(counts),
            optimizer=lambda model: torch.optim.AdamW(model.parameters()),
            loop=TrainingLoop(grad_accum_steps=accumulate, eval_frequency=None, **options),
            logging=Logging(log_steps=LOG_STEPS),
            callbacks=[*extra, kept],
            seed=1,
        )
        trainer.fit(loader(BATCH, num))
    return kept


def both(rank: int, folder: Path, engine: str) -> dict[str, Any]:
    """Return what is sent by hand, and by the trainer, in each case."""
    found: dict[str, Any] = {}
    for accumulate, counts in CASES:
        name = f"{accumulate} {counts}"
        kept = by_trainer(folder / name, engine, accumulate, counts=counts)
        found[name] = kept.steps[1:]
        starts = zip(kept.numbers, kept.numbers[1:], strict=False)
        found[f"{name} started"] = [after - before for before, after in starts]
    for accumulate in (1, 3):
        found[f"{accumulate} by hand"] = by_hand(engine, accumulate)
    uneven = {"num": NUM_SAMPLES - 2 * BATCH + 1, "num_epochs": 2}
    found["uneven"] = by_trainer(folder / "uneven", engine, **uneven).steps[1:]
    found["defaults"] = by_trainer(folder / "defaults", engine, extra=default_callbacks()).steps[1:]
    endless = {"num_epochs": 10_000, "extra": [StopInOne()]}
    found["stopped"] = by_trainer(folder / "stopped", engine, **endless).steps[1:]
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    """Return what was sent with an engine; each is run once."""
    runs: dict[str, dict[str, Any]] = {}

    def run(engine: str) -> dict[str, Any]:
        if engine not in runs:
            one, other = run_ranks(2, both, tmp_path_factory.mktemp(engine), engine)
            assert one == other
            runs[engine] = one
        return runs[engine]

    return run


# ---- tests


@pytest.mark.slow
@pytest.mark.parametrize(("accumulate", "counts"), CASES)
@pytest.mark.parametrize("engine", EACH)
def test_all_that_is_started_is_noted(
    found: Any, engine: str, accumulate: int, counts: str | None
) -> None:
    runs = found(engine)
    started = runs[f"{accumulate} {counts} started"]
    assert [len(sent) for sent in runs[f"{accumulate} {counts}"]] == started
    assert min(started) > 0


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("engine", EACH)
def test_a_step_sends_what_one_by_hand_sends_and_a_log_step_of_shards_the_loss(
    found: Any, engine: str, accumulate: int
) -> None:
    runs = found(engine)
    hand = runs[f"{accumulate} by hand"]
    assert shapes(runs[f"{accumulate} None"]) == shapes(with_extra(hand, logged=LOGGED[engine]))


@pytest.mark.parametrize(("accumulate", "counts"), [case for case in CASES if case[1]])
@pytest.mark.parametrize("engine", EACH)
def test_weights_travel_with_gradients_or_in_one_number(
    found: Any, engine: str, accumulate: int, counts: str
) -> None:
    runs = found(engine)
    quiet = [] if engine == "DDP" else [WEIGHT]
    expected = with_extra(runs[f"{accumulate} by hand"], quiet=quiet, logged=LOGGED[engine])
    assert shapes(runs[f"{accumulate} {counts}"]) == shapes(expected)


def test_copies_send_two_numbers_more_with_their_gradients(found: Any) -> None:
    runs = found("DDP")
    sizes = {name: max(size for _, size in runs[name][1]) for name in ("1 by hand", "1 None")}
    assert sizes["1 None"] == sizes["1 by hand"] + 2


def test_a_last_batch_that_does_not_divide_costs_copies_nothing(found: Any) -> None:
    runs = found("DDP")
    steps = runs["uneven"]
    assert len(steps) == 2 * NUM_STEPS - 1
    usual = shapes([runs["1 by hand"][-1]])[0]
    assert shapes(steps)[1:] == [usual] * (len(steps) - 1)


@pytest.mark.parametrize("engine", EACH)
def test_default_callbacks_send_nothing_between_log_steps(found: Any, engine: str) -> None:
    runs = found(engine)
    hand, defaults = shapes(runs["1 by hand"]), shapes(runs["defaults"])
    quiet = [idx for idx, is_logged in enumerate(IS_LOGGED) if not is_logged]
    assert [defaults[idx] for idx in quiet] == [hand[idx] for idx in quiet]


@pytest.mark.parametrize("engine", EACH)
def test_a_decision_of_all_sends_nothing(found: Any, engine: str) -> None:
    runs = found(engine)
    steps = shapes(runs["stopped"])
    usual = shapes([runs["1 by hand"][-1]])[0]
    assert LOG_STEPS <= len(steps) + 1 < 10_000
    for number, sent in enumerate(steps[1:], 3):
        assert sent in (usual, sorted([*usual, *LOGGED[engine]])), number
        assert number % LOG_STEPS == 0 or sent == usual, number


@pytest.mark.slow
def test_where_parameters_may_be_unused_weights_are_one_number(tmp_path: Path) -> None:
    for hand, ours in run_ranks(2, with_unused, tmp_path):
        assert shapes(ours) == shapes(with_extra(hand, quiet=[WEIGHT], logged=[LOSS]))


def with_unused(rank: int, folder: Path) -> tuple[list[list[Sent]], list[list[Sent]]]:
    ours = by_trainer(folder, "DDP, unused", net=Partly, counts="tensor").steps[1:]
    return by_hand("DDP, unused", 1), ours


def with_extra(steps: list[list[Sent]], *, quiet: Any = (), logged: Any = ()) -> list[list[Sent]]:
    return [
        [*sent, *(logged if is_logged else quiet)]
        for sent, is_logged in zip(steps, IS_LOGGED, strict=True)
    ]


def shapes(steps: list[list[Sent]]) -> list[list[Sent]]:
    """Return messages in any order, those of gradients without their sizes."""
    return [sorted((name, size if size <= 2 else -1) for name, size in sent) for sent in steps]
