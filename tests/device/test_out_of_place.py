"""What is computed beside and copied has the bits of what is done in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from backends.xla.tensors import _METHODS, OutOfPlace
from modelzoo_trainer.optim.adam import Lamb

FLOATS = [torch.float32, torch.float64, torch.bfloat16]
METHODS = [name for name in _METHODS if hasattr(Tensor, f"{name}_")]
LISTS = [name for name in _METHODS if hasattr(torch, f"_foreach_{name}_")]
WHOLE = ["add", "sub", "mul", "neg", "abs", "sign", "pow", "clamp", "clamp_min", "clamp_max"]
WHOLE_LISTS = [
    *("add", "sub", "mul", "neg", "abs", "sign", "pow", "clamp_min", "clamp_max"),
    *("maximum", "minimum"),
]


def values(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return numbers of either sign, none of them near 0."""
    generator = torch.Generator().manual_seed(seed)
    found = torch.rand(shape, generator=generator) + 0.5
    signs = torch.randint(0, 2, shape, generator=generator) * 2 - 1
    return (found * signs * (1 if dtype.is_floating_point else 9)).to(dtype)


def arguments(name: str, other: Tensor, third: Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return what a method takes."""
    if name in ("add", "sub"):
        return (other,), {"alpha": 3}
    if name in ("mul", "div", "maximum", "minimum"):
        return (other,), {}
    if name == "lerp":
        return (other, 0.3), {}
    if name in ("addcmul", "addcdiv"):
        return (other, third), {"value": 0.7}
    if name == "addmm":
        return (other, third), {"beta": 0.9, "alpha": 1.1}
    return ({"pow": (3,), "clamp": (-1, 2), "clamp_min": (1,), "clamp_max": (1,)}.get(name, ())), {}


def call(name: str, target: Tensor, *args: Any, **kwargs: Any) -> Any:
    return getattr(target, f"{name}_")(*args, **kwargs)


def call_beside(name: str, target: Tensor, *args: Any, **kwargs: Any) -> Any:
    with OutOfPlace():
        return call(name, target, *args, **kwargs)


def same(first: Tensor, second: Tensor) -> bool:
    """Return whether two tensors have the same bits; a root of less than 0 is nan."""
    return first.dtype == second.dtype and bool(
        torch.all((first == second) | (first.isnan() & second.isnan()))
    )


def check(name: str, make: Callable[[], Tensor], *args: Any, **kwargs: Any) -> None:
    """Check that a method does the same to two equal tensors."""
    expected, found = make(), make()
    call(name, expected, *args, **kwargs)
    place, version = found.data_ptr(), found._version
    result = call_beside(name, found, *args, **kwargs)
    assert same(found, expected)
    assert not same(found, make())
    assert result is found
    assert (found.data_ptr(), found._version) == (place, version + 1)
    assert found.stride() == expected.stride()


def test_all_names_are_methods_or_functions_of_lists() -> None:
    assert sorted(set(_METHODS) - set(METHODS)) == ["maximum", "minimum"]
    assert sorted(set(_METHODS) - set(LISTS)) == ["addmm", "clamp"]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", METHODS)
def test_a_method_gives_the_same_bits_in_the_same_place(name: str, dtype: torch.dtype) -> None:
    args, kwargs = arguments(
        name, values(17, 17, seed=2, dtype=dtype), values(17, 17, seed=3, dtype=dtype)
    )
    check(name, lambda: values(17, 17, seed=1, dtype=dtype), *args, **kwargs)


@pytest.mark.parametrize("name", WHOLE)
def test_a_method_gives_the_same_whole_numbers(name: str) -> None:
    other = values(17, 17, seed=2, dtype=torch.int64)
    args, kwargs = arguments(name, other, other)
    check(name, lambda: values(17, 17, seed=1, dtype=torch.int64), *args, **kwargs)


@pytest.mark.parametrize(
    "view",
    [lambda base: base[:, ::2], lambda base: base.t(), lambda base: base[3:20, 2:19]],
    ids=["strided", "transposed", "inner"],
)
@pytest.mark.parametrize("name", METHODS)
def test_a_view_is_changed_where_it_lies_and_nothing_beside_it(
    name: str, view: Callable[[Tensor], Tensor]
) -> None:
    first, second = values(40, 40, seed=1), values(40, 40, seed=1)
    shape = view(first).shape
    num = shape[1] if name == "addmm" else None
    other = values(shape[0], num or shape[1], seed=2).t().contiguous().t()
    third = values(num or shape[0], shape[1], seed=3).t().contiguous().t()
    args, kwargs = arguments(name, other, third)
    call(name, view(first), *args, **kwargs)
    call_beside(name, view(second), *args, **kwargs)
    # The kernel of a product, and so its rounding, depends on how the result lies in memory.
    rounding = 1e-5 if name == "addmm" else 0
    torch.testing.assert_close(second, first, rtol=0, atol=rounding, equal_nan=True)
    assert not same(second, values(40, 40, seed=1))


@pytest.mark.parametrize("name", ["add", "sub", "mul", "div", "lerp", "addcmul", "addcdiv"])
@pytest.mark.parametrize("shape", [(1, 5), (4, 1), (5,), ()], ids=str)
def test_operands_are_broadcast(name: str, shape: tuple[int, ...]) -> None:
    args, kwargs = arguments(name, values(*shape, seed=2), values(*shape, seed=3))
    check(name, lambda: values(4, 5, seed=1), *args, **kwargs)


@pytest.mark.parametrize("name", [name for name in METHODS if name != "addmm"])
def test_a_tensor_without_dimensions_keeps_its_place(name: str) -> None:
    args, kwargs = arguments(name, torch.tensor(0.7), torch.tensor(1.3))
    start = -1.6 if name in ("abs", "clamp", "clamp_min") else 1.6
    check(name, lambda: torch.tensor(start), *args, **kwargs)


@pytest.mark.parametrize("target", FLOATS, ids=str)
@pytest.mark.parametrize("operand", [*FLOATS, torch.int64], ids=str)
@pytest.mark.parametrize("shape", [(4, 5), ()], ids=str)
@pytest.mark.parametrize("name", ["add", "mul", "div", "pow"])
@pytest.mark.slow_cases(every=4)
def test_operands_of_another_type_leave_that_of_the_target(
    name: str, target: torch.dtype, operand: torch.dtype, shape: tuple[int, ...]
) -> None:
    other = (values(*shape, seed=2) * 3).to(operand)
    check(name, lambda: values(4, 5, seed=1, dtype=target), other)


def test_a_target_among_the_operands_is_read_before_it_is_changed() -> None:
    found = torch.tensor([1.0, 2.0, 3.0])
    with OutOfPlace():
        found.addcmul_(found, found, value=2)
    assert found.tolist() == [3.0, 10.0, 21.0]


def test_operands_may_have_names() -> None:
    found = torch.tensor([1.0, 2.0])
    with OutOfPlace():
        found.add_(other=torch.tensor([1.0, 1.0]), alpha=2)
        found.clamp_(max=3.5)
    assert found.tolist() == [3.0, 3.5]


def test_operands_too_large_for_the_target_are_refused() -> None:
    with OutOfPlace(), pytest.raises(RuntimeError, match=r"shape \[3\] doesn't match the broadcas"):
        torch.ones(3).add_(torch.ones(2, 3))


def test_a_parameter_is_refused_as_it_is_in_place() -> None:
    with OutOfPlace(), pytest.raises(RuntimeError, match=r"a leaf Variable that requires grad"):
        nn.Parameter(torch.ones(3)).mul_(2)


def test_gradients_go_through() -> None:
    leaf = torch.ones(3, requires_grad=True)
    with OutOfPlace():
        (leaf * 2).mul_(3).sum().backward()
    assert leaf.grad.tolist() == [6.0, 6.0, 6.0]


# ---- operators


@pytest.mark.parametrize(
    ("operate", "expected"),
    [
        (lambda x: x.__iadd__(2), [5.0, 8.0]),
        (lambda x: x.__isub__(2), [1.0, 4.0]),
        (lambda x: x.__imul__(2), [6.0, 12.0]),
        (lambda x: x.__itruediv__(2), [1.5, 3.0]),
    ],
    ids=["+=", "-=", "*=", "/="],
)
def test_a_special_method_keeps_the_place(
    operate: Callable[[Tensor], Tensor], expected: list[float]
) -> None:
    found = torch.tensor([3.0, 6.0])
    with OutOfPlace():
        result = operate(found)
    assert result is found
    assert (found.tolist(), found._version) == (expected, 1)


def test_operators_keep_the_place() -> None:
    found = kept = torch.tensor([3.0, 6.0])
    with OutOfPlace():
        found += 1
        found -= 2
        found *= 3
        found /= 4
    assert found is kept
    assert found.tolist() == [1.5, 3.75]


# ---- lists


def some(seed: int, dtype: torch.dtype) -> list[Tensor]:
    """Return tensors of several shapes, one of them without dimensions, one a view."""
    return [
        values(17, 17, seed=seed, dtype=dtype),
        values(3, seed=seed + 1, dtype=dtype),
        values(seed=seed + 2, dtype=dtype),
        values(8, 6, seed=seed + 3, dtype=dtype)[:, ::2],
    ]


def list_arguments(name: str, dtype: torch.dtype) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return what a function of lists takes: lists for operands, numbers for others."""
    if name in ("pow", "clamp_min", "clamp_max"):
        return (3 if name == "pow" else 1,), {}
    args, kwargs = arguments(name, torch.zeros(()), torch.zeros(()))
    seeds = iter((20, 30))
    return tuple(
        some(next(seeds), dtype) if isinstance(arg, Tensor) else arg for arg in args
    ), kwargs


def check_list(name: str, make: Callable[[], list[Tensor]], *args: Any, **kwargs: Any) -> None:
    function = getattr(torch, f"_foreach_{name}_")
    expected, found = make(), make()
    function(expected, *args, **kwargs)
    before = [(tensor.data_ptr(), tensor._version + 1, tensor.stride()) for tensor in found]
    with OutOfPlace():
        function(found, *args, **kwargs)
    assert all(map(same, found, expected))
    assert not all(map(same, found, make()))
    assert [(tensor.data_ptr(), tensor._version, tensor.stride()) for tensor in found] == before


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", LISTS)
def test_a_function_of_lists_gives_the_same_bits_in_the_same_places(
    name: str, dtype: torch.dtype
) -> None:
    args, kwargs = list_arguments(name, dtype)
    check_list(name, lambda: some(1, dtype), *args, **kwargs)


@pytest.mark.parametrize("name", WHOLE_LISTS)
def test_a_function_of_lists_gives_the_same_whole_numbers(name: str) -> None:
    args, kwargs = list_arguments(name, torch.int64)
    check_list(name, lambda: some(1, torch.int64), *args, **kwargs)


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("add", 2.5),
        ("mul", torch.tensor(2.5)),
        ("div", [2.0, 3.0, 4.0, 5.0]),
        ("mul", [torch.tensor(2.0), torch.tensor(3.0), torch.tensor(4.0), torch.tensor(5.0)]),
        ("pow", [2.0, 3.0, 1.0, 4.0]),
    ],
    ids=["number", "tensor", "numbers", "tensors", "powers"],
)
def test_a_list_is_combined_with_one_operand_or_one_for_each(name: str, other: Any) -> None:
    check_list(name, lambda: some(1, torch.float32), other)


def test_lists_of_several_types_keep_them() -> None:
    def make() -> list[Tensor]:
        return [values(5, seed=seed, dtype=dtype) for seed, dtype in enumerate(FLOATS)]

    # 1.5 is a bfloat16: on the host, torch rounds other numbers to one in place alone.
    check_list("mul", make, 1.5)


# ---- the mode


def test_other_functions_pass() -> None:
    found = torch.zeros(3)
    with OutOfPlace():
        found.fill_(2).zero_()
        result = torch.arange(3) + 1
    assert (found.tolist(), result.tolist()) == ([0.0, 0.0, 0.0], [1, 2, 3])


def test_a_method_is_computed_beside_within_the_mode_alone() -> None:
    class Log(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            names.append(func.__name__)
            return func(*args, **(kwargs or {}))

    names: list[str] = []
    found = [torch.ones(2)]
    with Log():
        with OutOfPlace():
            found[0].mul_(2)
            torch._foreach_sqrt_(found)
        found[0].mul_(2)
        torch._foreach_sqrt_(found)
    in_place = [name for name in names if name.endswith("_") and not name.endswith("__")]
    assert in_place == ["copy_", "copy_", "mul_", "_foreach_sqrt_"]


# ---- optimizers

OPTIMIZERS = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.1, foreach=True),
    "AdamW-single": lambda params: torch.optim.AdamW(params, lr=0.1, foreach=False, amsgrad=True),
    "AdamW-tensors": lambda params: torch.optim.AdamW(
        params, lr=torch.tensor(0.1), capturable=False, foreach=False
    ),
    "SGD": lambda params: torch.optim.SGD(
        params, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1
    ),
    "SGD-single": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, foreach=False),
    "Lamb": lambda params: Lamb(params, lr=0.1, weight_decay=0.1),
}


def trained(make: Callable[[Any], Any], mode: Any) -> list[Tensor]:
    """Return the parameters and the optimizer's state after five steps."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 1))
    optimizer = make(list(model.parameters()))
    inputs = values(16, 6, seed=4)
    for _ in range(5):
        (model(inputs) ** 2).mean().backward()
        if mode is None:
            optimizer.step()
        else:
            with mode:
                optimizer.step()
        optimizer.zero_grad()
    states = [
        value
        for param in model.parameters()
        for value in optimizer.state[param].values()
        if isinstance(value, Tensor)
    ]
    return [*(param.detach() for param in model.parameters()), *states]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_run_beside_is_a_run_in_place_bit_for_bit(name: str) -> None:
    expected = trained(OPTIMIZERS[name], None)
    found = trained(OPTIMIZERS[name], OutOfPlace())
    assert len(found) >= 12
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
