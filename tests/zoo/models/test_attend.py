"""Attention: every implementation against loops over numbers; its dtypes and gradients."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from modelzoo_trainer.zoo.models.attend import attend
from modelzoo_trainer.zoo.models.masks import merge_bias, visible_keys
from modelzoo_trainer.zoo.models.position_bias import AlibiBias, RelativeBias
from tests.zoo.models.attention_reference import attention, no_bias

CPU = torch.device("cpu")
LENGTH, HEADS = 7, 4
SPANS = torch.tensor([[3, 2, 1, 0, 2, 1, 0], [6, 5, 4, 3, 2, 1, 0]])  # two sequences; one


def states(num_groups: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(num_groups)
    heads = (HEADS, num_groups, num_groups)
    queries, keys, values = (
        (2 * torch.randn(2, num, LENGTH, 3, dtype=torch.float64, generator=generator)).to(dtype)
        for num in heads
    )
    return queries, keys, values


WINDOWS: dict[str, tuple[dict[str, Any], Callable[[int, int, int], bool]]] = {
    "causal": ({}, lambda row, query, key: True),
    "window": ({"window": 3}, lambda row, query, key: query - key < 3),
    "sinks": ({"window": 2, "sinks": 2}, lambda row, query, key: query - key < 2 or key < 2),
    "packed": ({"spans": SPANS}, lambda row, query, key: query - key <= int(SPANS[row, key])),
}


def make_bias(name: str) -> torch.nn.Module | None:
    torch.manual_seed(0)
    kinds: dict[str, Callable[[], torch.nn.Module]] = {
        "alibi": lambda: AlibiBias(HEADS, scaling_factor=2.0),
        "relative": lambda: RelativeBias(HEADS, 6),
    }
    return kinds[name]().double() if name in kinds else None


def bias_by_hand(name: str, module: Any) -> Callable[[int, int, int], float]:
    if name == "alibi":
        return lambda head, query, key: -(2.0 ** (-2 * (head + 1))) * (query - key) / 2.0
    if name == "relative":
        table = module.buckets.weight.tolist()
        return lambda head, query, key: table[[0, 1, 2, 3, 3, 3, 3][query - key]][head]
    return no_bias


@pytest.mark.slow_cases("1-*", "4-window-*", "4-sinks-*", every=4)
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("bias", ["none", "alibi", "relative"])
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("num_groups", [4, 2, 1])
def test_attention_is_the_formula(
    num_groups: int, window: str, bias: str, softcap: float | None
) -> None:
    queries, keys, values = states(num_groups)
    settings, sees = WINDOWS[window]
    module = make_bias(bias)
    added = None if module is None else module(LENGTH, CPU)
    mask = merge_bias(added, visible_keys(LENGTH, CPU, **settings), LENGTH, CPU)

    found = attend(queries, keys, values, scale=0.7, mask=mask, softcap=softcap)

    expected = attention(queries, keys, values, 0.7, sees, bias_by_hand(bias, module), softcap)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


# CI: each mask with a bias, each bias with a mask.
@pytest.mark.soak_cases("window-none-*", "window-alibi-*", "sinks-none-*", "sinks-relative-*")
@pytest.mark.slow_cases("window-*", "sinks-*", "*-relative-*")
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("bias", ["none", "alibi", "relative"])
@pytest.mark.parametrize("window", WINDOWS)
def test_gradients_are_those_of_the_output(window: str, bias: str, softcap: float | None) -> None:
    inputs = [part[:, :, :5, :2].requires_grad_() for part in states(2)]
    settings = {
        key: value[:, :5] if key == "spans" else value for key, value in WINDOWS[window][0].items()
    }
    module = make_bias(bias)
    trained = [] if module is None else list(module.parameters())
    for param in trained:
        param.requires_grad_()

    def run(queries: Tensor, keys: Tensor, values: Tensor, *_: Tensor) -> Tensor:
        added = None if module is None else module(5, CPU)
        mask = merge_bias(added, visible_keys(5, CPU, **settings), 5, CPU)
        return attend(queries, keys, values, scale=0.7, mask=mask, softcap=softcap)

    assert torch.autograd.gradcheck(run, (*inputs, *trained), fast_mode=True)


@contextmanager
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    calls: list[dict[str, Any]] = []
    own = functional.scaled_dot_product_attention

    def record(*args: Tensor, **kwargs: Any) -> Tensor:
        calls.append({"keys": args[1].shape[1], **kwargs})
        return own(*args, **kwargs)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", record)
    yield calls


def test_without_a_mask_the_causal_kernel_gets_grouped_heads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with recorded(monkeypatch) as calls:
        attend(*states(2), scale=1.0)
        attend(*states(4), scale=1.0)

    assert [call["is_causal"] for call in calls] == [True, True]
    assert [call["enable_gqa"] for call in calls] == [True, False]
    assert [call["keys"] for call in calls] == [2, 4]


def test_with_a_mask_keys_are_repeated_for_every_head(monkeypatch: pytest.MonkeyPatch) -> None:
    with recorded(monkeypatch) as calls:
        attend(*states(2), scale=1.0, mask=visible_keys(LENGTH, CPU, window=2))

    assert calls[0]["keys"] == HEADS
    assert not calls[0].get("is_causal")
    assert calls[0]["attn_mask"].dtype == torch.bool


@pytest.mark.parametrize("softcap", [None, 1.5])
def test_half_precision_keeps_its_dtype_and_the_visible_keys(softcap: float | None) -> None:
    queries, keys, values = states(2, torch.bfloat16)
    visible = visible_keys(LENGTH, CPU, window=3)
    bias = AlibiBias(HEADS)(LENGTH, CPU)

    found = attend(
        queries,
        keys,
        values,
        scale=0.7,
        mask=merge_bias(bias, visible, LENGTH, CPU),
        softcap=softcap,
    )

    expected = attention(
        queries,
        keys,
        values,
        0.7,
        lambda row, query, key: query - key < 3,
        lambda head, query, key: -(2.0 ** (-2 * (head + 1))) * (query - key),
        softcap,
    )
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), expected, rtol=0.03, atol=0.03)


def test_scores_with_a_softcap_are_float32_under_autocast() -> None:
    queries, keys, values = (part.float() for part in states(4))

    with torch.autocast("cpu", torch.bfloat16):
        found = attend(queries, keys, values, scale=0.7, softcap=1.5)

    expected = attention(queries, keys, values, 0.7, softcap=1.5)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("window", [None, 3])
def test_dropout_is_of_the_weights(softcap: float | None, window: int | None) -> None:
    torch.manual_seed(0)
    queries, keys, _ = states(4)
    mask = visible_keys(LENGTH, CPU, window=window)
    ones = torch.ones(2, 4, LENGTH, 3, dtype=torch.float64)

    def run(rate: float) -> Tensor:
        return attend(queries, keys, ones, scale=0.7, mask=mask, softcap=softcap, dropout=rate)

    drawn = torch.stack([run(0.3) for _ in range(400)])

    torch.testing.assert_close(run(0.0), ones)  # weights add up to 1
    assert not torch.equal(drawn[0], drawn[1])
    torch.testing.assert_close(drawn.mean(0), ones, rtol=0, atol=0.15)


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_shapes_need_no_values(softcap: float | None, bias: bool, device: str) -> None:
    with torch.device(device):
        queries = torch.zeros(2, HEADS, LENGTH, 3, requires_grad=True)
        keys = torch.zeros(2, 2, LENGTH, 3, requires_grad=True)
        added = AlibiBias(HEADS, trainable=True) if bias else None
        where = torch.device(device)
        mask = merge_bias(
            None if added is None else added(LENGTH, where),
            visible_keys(LENGTH, where, spans=torch.zeros(2, LENGTH, dtype=torch.int32)),
            LENGTH,
            where,
        )
        attend(queries, keys, keys, scale=1.0, mask=mask, softcap=softcap).sum().backward()

    assert queries.grad is not None
    assert keys.grad is not None
    assert added is None or added.slopes.weight.grad is not None
