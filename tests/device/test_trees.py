"""Structures of tensors."""

from __future__ import annotations

from collections import OrderedDict, UserDict, namedtuple
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from backends import map_tensors

Pair = namedtuple("Pair", "x y")


def double(tensor: Tensor) -> Tensor:
    return tensor * 2


def test_structures_keep_their_kind() -> None:
    one = torch.tensor(1)
    tree = {
        "list": [one],
        "tuple": (one, "text"),
        "named": Pair(one, None),
        "ordered": OrderedDict(a=one),
        "user": UserDict(a=one),
        "proxy": MappingProxyType({"a": one}),
    }
    mapped: dict[str, Any] = map_tensors(tree, double)
    assert mapped["list"] == [2]
    assert mapped["tuple"] == (2, "text")
    assert mapped["named"] == Pair(2, None)
    assert isinstance(mapped["named"], Pair)
    assert isinstance(mapped["ordered"], OrderedDict)
    assert mapped["ordered"]["a"] == 2
    assert isinstance(mapped["user"], UserDict)
    assert mapped["user"]["a"] == 2
    assert mapped["proxy"]["a"] == 2
    assert one == 1


def test_objects_that_move_themselves_are_asked_to() -> None:
    class Graph:
        def to(self, device: str) -> str:
            return f"graph on {device}"

    graph = Graph()
    assert map_tensors([graph], double) == [graph]
    assert map_tensors([graph], double, lambda item: item.to("there")) == ["graph on there"]
