"""Training over processes is training on the whole batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel

from backends.blocks import CompileOptions, checkpoint_activations
from backends.errors import BackendError
from backends.parallel.apply import accumulating
from backends.parallel.fsdp import choose_cast
from modelzoo_trainer.zoo.models.decoder_names import Llama
from tests.distributed.engines import PLAN, data, make_net, spread, train, train_parallel
from tests.distributed.ranks import run_ranks

SHARD = {"parallel": {"shard": -1}}
ARRANGEMENTS = {
    "copies": (2, {}),
    "sharded": (2, SHARD),
    "sharded, kept": (2, SHARD | {"sharding": {"reshard_after_forward": False}}),
    "sharded, by name": (2, SHARD | {"sharding": {"blocks": ["Layer"]}}),
    "uneven": (3, SHARD),
    "copies, sharded": (4, {"parallel": {"shard": 2}}),
    "split": (2, {"parallel": {"tensor": 2}, "tensor_plan": PLAN}),
    "split, sharded": (4, {"parallel": {"tensor": 2, "shard": 2}, "tensor_plan": PLAN}),
    "split, copies": (4, {"parallel": {"tensor": 2}, "tensor_plan": PLAN}),
}
SLOW = pytest.mark.slow


def close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("name", ARRANGEMENTS)
def test_it_equals_one_process_with_the_whole_batch(name: str) -> None:
    num, options = ARRANGEMENTS[name]
    model = make_net()
    expected = train(model, model)

    found = run_ranks(num, train_parallel, options)

    close(found[0], expected)
    assert [result["norms"] for result in found] == [found[0]["norms"]] * num
    assert max(expected["norms"]) > 0.3
    assert max(expected["clipped"]) < 0.3 + 1e-6


def _same_steps(rank: int) -> list[list[Any]]:
    """Return the gradients of equal steps."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(7, 5, sparse=True), nn.Linear(5, 33), nn.Tanh(), nn.Linear(33, 3)
    )
    module, _ = spread(model, {})
    grads = []
    for _ in range(3):
        module.zero_grad()
        module(torch.tensor([rank, 5, 6])).square().sum().backward()
        grads.append([param.grad.to_dense().tolist() for param in model.parameters()])
    return grads


@pytest.mark.slow
def test_the_first_step_adds_up_in_the_order_of_all_others() -> None:
    for first, *others in run_ranks(3, _same_steps):
        assert any(map(any, first[1]))
        assert others == [first] * 2


@pytest.mark.slow_cases("copies", "sharded")
@pytest.mark.parametrize("name", ["copies", "sharded", pytest.param("split, copies", marks=SLOW)])
def test_batches_can_be_accumulated(name: str) -> None:
    num, options = ARRANGEMENTS[name]
    model = make_net()
    expected = train(model, model)

    found = run_ranks(num, train_accumulating, options)

    close(found[0]["weights"], expected["weights"])
    close(found[0]["norms"], expected["norms"])


def train_accumulating(rank: int, options: dict[str, Any]) -> dict[str, Any]:
    return train_parallel(rank, options, num_parts=3)


# CI: each engine, and each target.
@pytest.mark.soak_cases("copies-model", "sharded-blocks", "split-model")
@SLOW
@pytest.mark.parametrize("target", ["blocks", "model"])
@pytest.mark.parametrize("name", ["copies", "sharded", "split"])
def test_compiled_it_is_the_same(name: str, target: Any) -> None:
    num, options = ARRANGEMENTS[name]
    model = make_net()
    expected = train(model, model)

    found = run_ranks(num, train_compiled, options, target)

    close(found[0], expected)


def train_compiled(rank: int, options: dict[str, Any], target: Any) -> dict[str, Any]:
    model = make_net(seed=rank)
    checkpoint_activations(model, "full")
    is_whole_graph = target == "blocks"
    compile = CompileOptions(target=target, backend="eager", fullgraph=is_whole_graph)
    module, part = spread(model, options, compile)
    return train(model, module, part)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {"allreduce_": 1, "broadcast_": 1}),  # gradients, and the buffer that is saved
        (SHARD, {"_allgather_base_": 7, "_reduce_scatter_base_": 4}),
    ],
    ids=["copies", "sharded"],
)
def test_there_are_as_many_collectives_as_in_a_loop_by_hand(
    options: dict[str, Any], expected: dict[str, int]
) -> None:
    assert run_ranks(2, count_collectives, options) == [(expected, expected)] * 2


def count_collectives(rank: int, options: dict[str, Any]) -> tuple[dict[str, int], ...]:
    module, _ = spread(make_net(), options)
    by_hand = make_net()
    if not options:
        return collectives_of(module), collectives_of(DistributedDataParallel(by_hand))
    for layer in by_hand.layers:
        fully_shard(layer)
    fully_shard(by_hand)
    return collectives_of(module), collectives_of(by_hand)


def collectives_of(module: nn.Module) -> dict[str, int]:
    tokens = data()[0]
    for _ in range(2):  # the first steps do more
        module(tokens).backward()
        module.zero_grad()
    with CommDebugMode() as count:
        module(tokens).backward()
    return {str(op).rpartition(".")[2]: num for op, num in count.get_comm_counts().items()}


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, SHARD], ids=["copies", "sharded"])
def test_inside_accumulation_no_gradients_are_exchanged(options: dict[str, Any]) -> None:
    assert run_ranks(2, count_reductions, options) == [(0, True)] * 2


def count_reductions(rank: int, options: dict[str, Any]) -> tuple[int, bool]:
    model = make_net()
    module, _ = spread(model, options)
    inside, outside = CommDebugMode(), CommDebugMode()
    with inside, accumulating(module, model):
        module(data()[0]).backward()
    with outside:
        module(data()[0]).backward()
    return num_reductions(inside), num_reductions(outside) > 0


def num_reductions(count: CommDebugMode) -> int:
    return sum(num for op, num in count.get_comm_counts().items() if "reduce" in str(op))


@pytest.mark.slow
def test_each_process_holds_its_part() -> None:
    assert run_ranks(2, count_elements, {}) == [2 * 8 * 16 * 3 + 24 * 3 + 16 * 3 + 88 + 16] * 2
    halves = run_ranks(2, count_elements, SHARD)
    assert sum(halves) == 2 * 8 * 16 * 3 + 24 * 3 + 16 * 3 + 88 + 16


def count_elements(rank: int, options: dict[str, Any]) -> int:
    model = make_net()
    spread(model, options)
    return sum(
        (param.to_local() if isinstance(param, DTensor) else param).numel()
        for param in model.parameters()
    )


@pytest.mark.slow
def test_a_parameter_shared_by_two_blocks_is_refused() -> None:
    facts = ("embedding.weight and head.weight", "backend.sharding.blocks")
    options = SHARD | {"sharding": {"blocks": ["Linear"]}}
    for message in run_ranks(2, refusal, options):
        assert [fact for fact in facts if fact not in message] == []


@pytest.mark.slow
def test_a_block_that_is_misspelt_is_refused() -> None:
    options = SHARD | {"sharding": {"blocks": ["Lyer"]}}
    (message, _) = run_ranks(2, refusal, options)
    assert message == (
        "backend.sharding.blocks: no module of Net is a 'Lyer'. Did you mean 'Layer'?"
    )


@pytest.mark.slow
def test_trained_parameters_of_two_dtypes_in_a_block_are_refused() -> None:
    # Frozen ones may have another dtype, as below adapters.
    assert run_ranks(2, two_dtypes, False) == [""] * 2
    for message in run_ranks(2, two_dtypes, True):
        assert "weight is torch.float32 and " in message
        assert "bias is torch.bfloat16" in message


def two_dtypes(rank: int, is_trained: bool) -> str:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8))
    model[0].bias = torch.nn.Parameter(
        torch.zeros(8, dtype=torch.bfloat16), requires_grad=is_trained
    )
    try:
        module, _ = spread(model, SHARD | {"sharding": {"blocks": ["Linear"]}})
    except BackendError as error:
        return str(error)
    module[0].weight.to_local()
    return ""


def refusal(rank: int, options: dict[str, Any]) -> str:
    with pytest.raises(BackendError) as caught:
        spread(make_net(), options)
    return str(caught.value)


def test_only_saved_buffers_are_broadcast_from_copy_to_copy() -> None:
    assert run_ranks(2, buffers_after_a_step, {}) == [(0.0, 0.0), (0.0, 1.0)]


def buffers_after_a_step(rank: int, options: dict[str, Any]) -> tuple[float, float]:
    model = make_net()
    module, _ = spread(model, options)
    model.saved.fill_(rank)
    model.passing.fill_(rank)
    module(data()[0])
    return model.saved[0].item(), model.passing[0].item()


@pytest.mark.slow
def test_sharded_parameters_can_be_computed_with_in_another_type() -> None:
    sharding = {"param_dtype": "bfloat16", "reduce_dtype": "float32"}
    options = SHARD | {"sharding": sharding}
    assert run_ranks(2, types_of, options) == [("torch.bfloat16", "torch.float64")] * 2


def types_of(rank: int, options: dict[str, Any]) -> tuple[str, str]:
    model = make_net()
    module, _ = spread(model, options)
    seen: list[torch.dtype] = []
    model.layers[0].up.register_forward_hook(lambda part, _, out: seen.append(out.dtype))
    module(data()[0]).backward()
    grad = model.head.weight.grad
    assert grad is not None
    return str(seen[0]), str(grad.dtype)


class Scaled(nn.Module):
    """Two inputs of floating-point numbers, of which `cast_inputs` may name one."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)
        self.seen: list[torch.dtype] = []

    def forward(self, hidden: Tensor, factors: tuple[Tensor, int], shift: Tensor) -> Tensor:
        self.seen = [hidden.dtype, factors[0].dtype, shift.dtype]
        return self.up(hidden) * factors[0] + shift


class Choosy(Scaled):
    cast_inputs = ("hidden", "shift")


class Scaling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Scaled(), Choosy()])

    def forward(self, values: Tensor) -> Tensor:
        for layer in self.layers:
            values = layer(values.float(), (torch.ones(4), 1), shift=torch.ones(4))
        return values.sum()


def inputs_of(rank: int) -> list[list[str]]:
    sharding = {"param_dtype": "bfloat16", "reduce_dtype": "float32"}
    model = Scaling()
    spread(model, SHARD | {"sharding": sharding})[0](torch.ones(2, 4)).backward()
    seen = [layer.seen for layer in model.layers]
    decoder = Llama(
        vocab_size=8,
        hidden_size=8,
        num_heads=2,
        num_hidden_layers=1,
        filter_size=8,
        max_position_embeddings=4,
        position_embedding_type="rotary",
        rotary_dim=4,
    )
    spread(decoder, SHARD | {"sharding": sharding})
    turning: list[torch.dtype] = []

    def see(_: nn.Module, args: tuple[Any, ...]) -> None:
        turning.extend([args[0].dtype, args[1].angles[0].dtype])

    decoder.layers[0].attention.register_forward_pre_hook(see)
    decoder({"input_ids": torch.ones(2, 4).long(), "labels": torch.ones(2, 4).long()})
    return [[str(dtype).removeprefix("torch.") for dtype in one] for one in (*seen, turning)]


@pytest.mark.slow
def test_a_block_chooses_which_of_its_inputs_are_cast() -> None:
    half, full = "bfloat16", "float32"
    expected = [[half] * 3, [half, full, half], [half, full]]
    assert run_ranks(2, inputs_of) == [expected] * 2


def test_an_input_to_cast_that_the_block_lacks_is_refused() -> None:
    block = Scaled()
    block.cast_inputs = ("hiden",)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    with pytest.raises(BackendError, match=r"Scaled\.cast_inputs: 'hiden'.* 'hidden'"):
        choose_cast(block, policy)
    assert choose_cast(block, MixedPrecisionPolicy()) == MixedPrecisionPolicy()


@pytest.mark.slow
def test_a_model_without_gradients_is_not_copied() -> None:
    assert run_ranks(2, is_itself, {}) == [True, True]


def is_itself(rank: int, options: dict[str, Any]) -> bool:
    model = make_net().requires_grad_(False)
    return spread(model, options)[0] is model
