"""Attention: every implementation against loops over numbers; its dtypes and gradients."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from backends.blocks import checkpoint_activations
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.models import attend_blocks, attend_flex
from modelzoo_trainer.zoo.models.attend import Implementation, attend
from modelzoo_trainer.zoo.models.position_bias import AlibiBias, RelativeBias
from modelzoo_trainer.zoo.models.visible import Visible, mask_of, whole
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


RULES: dict[str, tuple[dict[str, Any], Callable[[int, int, int], bool]]] = {
    "causal": ({}, lambda row, query, key: True),
    "window": ({"window": 3}, lambda row, query, key: query - key < 3),
    "sinks": ({"window": 2, "sinks": 2}, lambda row, query, key: query - key < 2 or key < 2),
    "packed": ({"after": SPANS}, lambda row, query, key: query - key <= int(SPANS[row, key])),
}
IMPLEMENTATIONS: tuple[Implementation, ...] = ("auto", "blocks", "dense")


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make blocks of two queries."""
    monkeypatch.setattr(attend_blocks, "block_height", lambda *_: 2)


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
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("num_groups", [4, 2, 1])
@pytest.mark.usefixtures("small_blocks")
def test_attention_is_the_formula(
    num_groups: int, rule: str, bias: str, softcap: float | None
) -> None:
    queries, keys, values = states(num_groups)
    settings, sees = RULES[rule]
    module = make_bias(bias)
    visible = Visible(**settings, bias=None if module is None else module(LENGTH, CPU))

    expected = attention(queries, keys, values, 0.7, sees, bias_by_hand(bias, module), softcap)
    for kind in IMPLEMENTATIONS:
        found = attend(
            queries,
            keys,
            values,
            scale=0.7,
            visible=visible,
            softcap=softcap,
            implementation=kind,
        )
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


MORE_RULES: dict[str, dict[str, Any]] = {
    **{name: rule for name, (rule, _) in RULES.items()},
    "padding": {"padding": SPANS == 3},
    "padding of a window": {"padding": SPANS > 3, "window": 2, "sinks": 1},
    "encoder": {"causal": False},
    "padding of an encoder": {"causal": False, "padding": SPANS == 2},
    "packed encoder": {"causal": False, "after": SPANS, "before": SPANS.flip(1)},
    "later queries": {"offset": 3, "window": 3, "sinks": 1},
    "later queries of a packed row": {"offset": 3, "after": SPANS},
}


@pytest.mark.slow_cases(every=4)
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("num_groups", [4, 2])
@pytest.mark.parametrize("rule", MORE_RULES)
@pytest.mark.usefixtures("small_blocks")
def test_blocks_and_their_gradients_are_those_of_dense_attention(
    rule: str, num_groups: int, has_bias: bool, softcap: float | None
) -> None:
    inputs = list(states(num_groups))
    visible = Visible(**MORE_RULES[rule])
    inputs[0] = inputs[0][:, :, visible.offset :]
    if has_bias:
        num = LENGTH if visible.causal else 2 * LENGTH - 1
        inputs.append(torch.randn(HEADS, num, dtype=torch.float64))
    upstream = torch.randn(2, HEADS, LENGTH - visible.offset, 3, dtype=torch.float64)

    def run(kind: Implementation) -> list[Tensor]:
        own = [part.clone().requires_grad_() for part in inputs]
        rule = visible._replace(bias=own[3]) if has_bias else visible
        found = attend(*own[:3], scale=0.7, visible=rule, softcap=softcap, implementation=kind)
        return [found, *torch.autograd.grad(found, own, upstream)]

    expected = run("dense")
    for kind in IMPLEMENTATIONS[:2]:
        for ours, theirs in zip(run(kind), expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("rule", ["causal", "sinks"])
@pytest.mark.usefixtures("small_blocks")
def test_gradients_are_those_of_the_output(rule: str, softcap: float | None) -> None:
    inputs = [part[:, :, :5, :2].requires_grad_() for part in states(2)]
    table = torch.randn(HEADS, 5, dtype=torch.float64, requires_grad=True)

    def run(queries: Tensor, keys: Tensor, values: Tensor, table: Tensor) -> Tensor:
        torch.manual_seed(1)  # the same weights are dropped
        visible = Visible(**RULES[rule][0], bias=table)
        return attend(
            queries,
            keys,
            values,
            scale=0.7,
            visible=visible,
            softcap=softcap,
            dropout=0.3,
        )

    assert torch.autograd.gradcheck(run, (*inputs, table), fast_mode=True)


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


def test_with_padding_keys_are_repeated_for_every_head(monkeypatch: pytest.MonkeyPatch) -> None:
    padding = torch.zeros(2, LENGTH, dtype=torch.bool)
    with recorded(monkeypatch) as calls:
        attend(*states(2), scale=1.0, visible=Visible(causal=False, padding=padding))

    assert calls[0]["keys"] == HEADS
    assert not calls[0].get("is_causal")
    assert calls[0]["attn_mask"].shape == (2, 1, 1, LENGTH)


@pytest.mark.parametrize("kind", IMPLEMENTATIONS)
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_half_precision_keeps_its_dtype_and_the_visible_keys(
    softcap: float | None, kind: Implementation
) -> None:
    queries, keys, values = states(2, torch.bfloat16)

    found = attend(
        queries,
        keys,
        values,
        scale=0.7,
        visible=Visible(window=3, bias=AlibiBias(HEADS)(LENGTH, CPU)),
        softcap=softcap,
        implementation=kind,
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
@pytest.mark.parametrize("kind", IMPLEMENTATIONS)
def test_dropout_is_of_the_weights(
    kind: Implementation, softcap: float | None, window: int | None
) -> None:
    torch.manual_seed(0)
    queries, keys, _ = states(4)
    ones = torch.ones(2, 4, LENGTH, 3, dtype=torch.float64)

    def run(rate: float) -> Tensor:
        return attend(
            queries,
            keys,
            ones,
            scale=0.7,
            visible=Visible(window=window),
            softcap=softcap,
            dropout=rate,
            implementation=kind,
        )

    drawn = torch.stack([run(0.3) for _ in range(400)])

    torch.testing.assert_close(run(0.0), ones)  # weights add up to 1
    assert not torch.equal(drawn[0], drawn[1])
    torch.testing.assert_close(drawn.mean(0), ones, rtol=0, atol=0.15)


def test_dropped_weights_are_independent_of_each_other_and_of_the_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    queries = torch.zeros(2, HEADS, 64, 8)
    values = torch.eye(64).expand(2, HEADS, 64, 64)  # the output is the weights

    def weights(height: int) -> Tensor:
        monkeypatch.setattr(attend_blocks, "block_height", lambda *_: height)
        torch.manual_seed(5)
        visible = Visible(causal=False)
        return attend(queries, queries, values, scale=1.0, visible=visible, dropout=0.3)

    kept = weights(7) > 0
    assert torch.equal(kept, weights(64) > 0)
    assert 0.69 < kept.double().mean() < 0.71
    for rows in (
        kept.flatten(0, 2),
        kept.transpose(2, 3).flatten(0, 2),
        kept.flatten(2).flatten(0, 1),
    ):
        correlations = torch.corrcoef(rows.double()).fill_diagonal_(0)
        assert correlations.abs().max() < 6 * rows.shape[1] ** -0.5
        assert correlations.mean().abs() < 0.01


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_shapes_need_no_values(softcap: float | None, bias: bool, device: str) -> None:
    with torch.device(device):
        queries = torch.zeros(2, HEADS, LENGTH, 3, requires_grad=True)
        keys = torch.zeros(2, 2, LENGTH, 3, requires_grad=True)
        added = AlibiBias(HEADS, trainable=True) if bias else None
        visible = Visible(
            after=torch.zeros(2, LENGTH, dtype=torch.int32),
            bias=None if added is None else added(LENGTH, torch.device(device)),
        )
        attend(queries, keys, keys, scale=1.0, visible=visible, softcap=softcap).sum().backward()

    assert queries.grad is not None
    assert keys.grad is not None
    assert added is None or added.slopes.weight.grad is not None


class Largest(TorchDispatchMode):
    """Remember the largest tensor that an operation returns."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(found) if isinstance(leaf, Tensor)]
        self.numel = max([self.numel, *sizes])
        return found


@pytest.mark.parametrize(
    ("rule", "options"),
    [
        ({"window": 16}, {}),
        ({"after": torch.zeros(1, 2048, dtype=torch.int32)}, {}),
        ({"bias": torch.zeros(2, 2048)}, {}),
        ({}, {"softcap": 2.0}),
        ({}, {"dropout": 0.1}),
    ],
)
def test_nothing_has_the_size_of_all_pairs_of_positions(
    rule: dict[str, Any], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attend_blocks, "block_height", lambda *_: 16)
    queries = torch.zeros(1, 2, 2048, 4, requires_grad=True)

    def run(kind: Implementation) -> int:
        with Largest() as found:
            attend(
                queries,
                queries,
                queries,
                scale=1.0,
                visible=Visible(**rule),
                implementation=kind,
                **options,
            ).sum().backward()
        return found.numel

    with Largest() as inside:
        attend_blocks._attend(*operands(queries, rule, options))
    assert run("auto") <= 2 * 2048 * 4
    assert inside.numel <= 2 * 16 * 2 * 2048
    if not options.get("dropout"):
        assert run("dense") >= 2048 * 2048


def operands(queries: Tensor, rule: dict[str, Any], options: dict[str, Any]) -> list[Any]:
    """Return the arguments of the operation."""
    states = [queries.detach()] * 3
    tensors = [rule.get(name) for name in ("after", "before", "padding", "bias")]
    seed = torch.zeros(1, dtype=torch.int32) if "dropout" in options else None
    scoring = [1.0, options.get("softcap", 0.0), options.get("dropout", 0.0)]
    return [*states, *tensors, seed, [1, rule.get("window", 0), 0, 0], scoring]


@pytest.mark.parametrize(
    ("queries", "visible", "dropout", "fact"),
    [
        (torch.zeros(1, 1, 4, 2), Visible(), 0.0, "device cpu"),
        (torch.zeros(1, 1, 4, 2), Visible(), 0.1, "attention_dropout_rate"),
        (
            torch.zeros(1, 1, 4, 2),
            Visible(padding=torch.zeros(1, 4, dtype=torch.bool)),
            0.0,
            "padding",
        ),
        (torch.zeros(1, 1, 4, 2, device="meta"), Visible(), 0.0, "at least 16 numbers"),
    ],
)
def test_an_implementation_that_a_device_lacks_is_refused(
    queries: Tensor, visible: Visible, dropout: float, fact: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = sys.modules[attend.__module__]
    monkeypatch.setattr(module, "has_trained_flex_attention", lambda device: device.type == "meta")
    with pytest.raises(ConfigError, match=fact) as caught:
        attend(
            queries,
            queries,
            queries,
            scale=1.0,
            visible=visible,
            dropout=dropout,
            implementation="flex",
        )

    assert "attention: auto" in str(caught.value) or "auto or blocks" in str(caught.value)


@pytest.mark.slow_cases(every=4)
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    "rule", [one for one in MORE_RULES if one not in ("padding", "padding of a window")]
)
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_is_dense_attention(
    rule: str, has_bias: bool, softcap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.nn.attention.flex_attention import flex_attention

    monkeypatch.setattr(attend_flex, "_flex_attention", lambda: flex_attention)
    queries, keys, values = states(2, torch.float32)
    visible = Visible(**MORE_RULES[rule])
    if has_bias:
        num = LENGTH if visible.causal else 2 * LENGTH - 1
        visible = visible._replace(bias=torch.randn(HEADS, num))
    own = queries[:, :, visible.offset :]

    found = attend_flex.attend_by_flex(own, keys, values, visible, scale=0.7, softcap=softcap)

    expected = attend(
        own,
        keys,
        values,
        scale=0.7,
        visible=visible,
        softcap=softcap,
        implementation="dense",
    )
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rule", [one for one in MORE_RULES if "padding of a" not in one])
def test_flex_attention_skips_only_blocks_without_visible_pairs(
    rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attend_flex, "_SIDE", 2)
    visible = Visible(**MORE_RULES[rule])
    num = LENGTH - visible.offset

    seen, is_full = attend_flex.blocks_seen(visible, num, LENGTH, CPU)

    mask = mask_of(visible, whole(num, LENGTH), LENGTH, CPU)
    mask = torch.ones(1, num, LENGTH, dtype=torch.bool) if mask is None else mask
    if rule == "padding":  # a query that would see nothing sees itself: not in flex attention
        mask = mask & ~MORE_RULES[rule]["padding"][:, None]
    rows, columns = -num % 2, -LENGTH % 2
    padded = torch.nn.functional.pad(mask, (0, columns, 0, rows))
    blocks = padded.unflatten(2, (-1, 2)).unflatten(1, (-1, 2))
    has_pair, has_all = blocks.any(dim=(2, 4)), blocks.all(dim=(2, 4))
    assert seen.shape[2:] == is_full.shape[2:] == has_pair.shape[1:]
    assert (seen[:, 0] | ~has_pair).all()
    assert (has_all | ~is_full[:, 0] | (torch.arange(blocks.shape[1]) >= num // 2)[:, None]).all()
    if rule in ("causal", "window", "sinks", "packed"):
        assert not seen.all()
        assert torch.equal(seen[:, 0].expand_as(has_pair), has_pair)


def test_second_derivatives_by_blocks_are_refused() -> None:
    own = states(4)[0].requires_grad_()
    found = attend(own, own, own, scale=0.7, visible=Visible(window=3), implementation="blocks")
    with pytest.raises(RuntimeError, match=r"create_graph=True.*dense"):
        torch.autograd.grad(found.sum(), [own], create_graph=True)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("mode", ["full", "selective"])
def test_recomputed_attention_has_the_same_bits(mode: Any, dropout: float) -> None:
    class Layer(torch.nn.Module):
        def forward(self, states: Tensor) -> Tensor:
            visible = Visible(window=3)
            return attend(states, states, states, scale=0.7, visible=visible, dropout=dropout)

    def run(*, recomputes: bool) -> list[Tensor]:
        model = torch.nn.ModuleList([torch.nn.ModuleList([Layer(), Layer()])])
        if recomputes:
            checkpoint_activations(model, mode)
        own = states(4)[0].requires_grad_()
        torch.manual_seed(3)
        found = model[0][1](model[0][0](own))  # type: ignore[index]
        return [found, *torch.autograd.grad(found.square().sum(), own)]

    for ours, theirs in zip(run(recomputes=True), run(recomputes=False), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("options", [{}, {"softcap": 2.0}, {"dropout": 0.3}])
def test_the_operation_is_what_torch_expects_of_one(options: dict[str, Any]) -> None:
    queries = states(4)[0].requires_grad_()
    arguments = operands(queries, {"window": 3, "after": SPANS}, options)
    arguments[:3] = [queries, *states(4)[1:]]

    torch.library.opcheck(torch.ops.modelzoo_trainer.attend, tuple(arguments))
