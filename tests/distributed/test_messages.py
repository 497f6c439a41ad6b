"""What processes send each other besides tensors: plain values, without a pickle."""

from __future__ import annotations

import json
import math
import pickle
from collections import OrderedDict
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from backends.coordination.messages import pack, unpack
from backends.coordination.world import join
from backends.errors import BackendError
from tests.distributed.ranks import run_ranks, try_ranks

PLAIN = [
    None,
    True,
    -(2**70),
    1e-300,
    math.inf,
    "caf\u00e9 \ud800 \0",
    b"\x80\x04\x00",
    Path("/a/b"),
    ...,
    [],
    (),
    {},
    {1: "a", "tuple": (1, [2, (3,)]), None: {"path": "x"}, (1, 2): 3.5},
]


@pytest.mark.parametrize("value", PLAIN, ids=repr)
def test_plain_values_arrive_as_they_were(value) -> None:
    found = unpack(pack(value))
    assert found == value
    assert type(found) is type(value)


def test_subclasses_of_plain_values_arrive_as_the_plain_ones() -> None:
    found = unpack(pack([OrderedDict(a=1), torch.Size([2, 3]), np.float64(0.5)]))
    assert found == [{"a": 1}, (2, 3), 0.5]
    assert [type(value) for value in found] == [dict, tuple, float]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6.0, dtype=torch.bfloat16).reshape(2, 3).t(),
        torch.tensor(7),
        torch.tensor([True, False]),
        torch.empty(0, 3),
        torch.tensor([1 + 2j]).conj(),
        torch.nn.Parameter(torch.ones(2)),
    ],
    ids=lambda tensor: f"{tensor.dtype}{list(tensor.shape)}",
)
def test_tensors_arrive_bit_by_bit(tensor) -> None:
    first, found = unpack(pack([b"before", tensor]))
    assert first == b"before"
    assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
    assert torch.equal(found, tensor)


def test_arrays_and_numbers_of_numpy_arrive() -> None:
    array, number = unpack(pack([np.arange(6, dtype=">i2").reshape(2, 3), np.int8(5)]))
    assert array.dtype == np.dtype(">i2")
    assert array.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert (type(number), number) == (np.int8, 5)


class Colour(Enum):
    RED = 1


@pytest.mark.parametrize(
    "value",
    [
        object(),
        ValueError("x"),
        Colour.RED,
        {1, 2},
        len,
        torch.ones(2, device="meta"),
        torch.eye(2).to_sparse(),
        np.array([object()]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_not_plain_is_refused_by_its_type(value) -> None:
    with pytest.raises(BackendError, match=f"type {type(value).__name__} cannot be sent"):
        pack({"inner": [value]})


def test_a_pickle_in_a_message_is_not_loaded() -> None:
    class Mean:
        def __reduce__(self) -> Any:
            return (pytest.fail, ("it was unpickled",))

    content = pickle.dumps(Mean.__reduce__(Mean()))
    assert unpack(pack(content)) == content
    text = json.dumps({"__class__": ["os.system", "true"]}).encode()
    with pytest.raises(BackendError, match="kind '__class__'"):
        unpack(len(text).to_bytes(8, "little") + text)


def _exchange(rank: int) -> Any:
    processes = join()

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("something was pickled")

    torch.distributed.distributed_c10d._object_to_tensor = refuse
    value = {"rank": rank, "path": Path("x" * (5 * rank)), "part": torch.arange(2 + 3 * rank)}
    told = processes.broadcast_object((value["path"], ...) if rank == 0 else object())
    found = processes.gather_object(value)
    parts = [part.pop("part").tolist() for part in found]
    return told, found, parts


@pytest.mark.slow
def test_processes_exchange_values_without_pickles() -> None:
    told = (Path(), ...)
    found = [{"rank": rank, "path": Path("x" * (5 * rank))} for rank in range(2)]
    parts = [[0, 1], [0, 1, 2, 3, 4]]
    assert run_ranks(2, _exchange) == [(told, found, parts)] * 2


def _send_too_much(rank: int) -> None:
    join().gather_object(open)


@pytest.mark.slow
def test_a_process_that_sends_what_is_not_plain_says_so() -> None:
    found = try_ranks(2, _send_too_much)
    assert "builtin_function_or_method cannot be sent" in found[0][1]
