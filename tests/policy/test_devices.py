"""Outside backends/ no device, rank or environment variable has a name."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Any

import pytest

LIBRARIES = {"torch_tpu", "torch_xla"}
DEVICE_MODULES = {"accelerator", "cuda", "mps", "xpu"}  # of torch
OF_THE_ENVIRONMENT = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}  # of os
NAME = re.compile(
    r"(cuda|hpu|mps|xla|xpu)(:\d+)?"
    r"|(LOCAL_|GROUP_|NODE_)?RANK|(LOCAL_)?WORLD_SIZE|MASTER_(ADDR|PORT)"
    r"|(CUDA|XLA|PJRT|NCCL|SLURM|TORCH|PYTORCH)_[A-Z_]+"
)


def names_of_devices(tree: ast.AST) -> Iterator[str]:
    """Yield "line: what" for everything that only a backend may know."""
    for node in ast.walk(tree):
        yield from (f"{getattr(node, 'lineno', 0)}: {what}" for what in findings(node))


def findings(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.Import(names=names):
            yield from (name.name for name in names if is_library(name.name))
        case ast.ImportFrom(module=str(module), names=names):
            full = [module, *(f"{module}.{name.name}" for name in names)]
            yield from (name for name in full if is_library(name))
        case ast.Attribute(value=ast.Name(id="torch"), attr=attr) if attr in DEVICE_MODULES:
            yield f"torch.{attr}"
        case ast.Attribute(value=ast.Name(id="os"), attr=attr) if attr in OF_THE_ENVIRONMENT:
            yield f"os.{attr}"
        case ast.Attribute(attr="is_cuda" | "is_mps" | "is_xla" | "is_xpu" as attr):
            yield f".{attr}"
        case ast.Compare(left=left, comparators=[right]) if compares_a_type(left, right):
            yield ast.unparse(node)
        case ast.Constant(value=str(text)) if NAME.fullmatch(text):
            yield repr(text)


def is_library(name: str) -> bool:
    first, *rest = name.split(".")
    return (
        first in LIBRARIES
        or (first == "torch" and bool(rest) and rest[0] in DEVICE_MODULES)
        or name in {f"os.{attr}" for attr in OF_THE_ENVIRONMENT}
    )


def compares_a_type(left: ast.expr, right: ast.expr) -> bool:
    """Whether one side is `.type` and the other one a string."""
    kinds = {type(left), type(right)}
    attributes = {side.attr for side in (left, right) if isinstance(side, ast.Attribute)}
    return kinds == {ast.Attribute, ast.Constant} and attributes == {"type"}


@pytest.mark.parametrize(
    "code",
    [
        "import torch_xla",
        "import torch_xla.core.xla_model as xm",
        "from torch import cuda",
        "from torch.cuda import Stream",
        "torch.cuda.synchronize()",
        "torch.accelerator.current_device_index()",
        "if tensor.device.type == 'cpu': pass",
        "if 'cpu' != tensor.device.type: pass",
        "tensor.to('cuda:1')",
        "tensor.is_cuda",
        "os.environ['HOME']",
        "os.getenv('HOME')",
        "os.putenv('HOME', 'x')",
        "os.unsetenv('HOME')",
        "from os import environ",
        "from os import putenv",
        "read('LOCAL_RANK')",
        "read('CUDA_VISIBLE_DEVICES')",
    ],
)
def test_the_walk_sees_what_names_a_device(code: str) -> None:
    assert list(names_of_devices(ast.parse(code)))


@pytest.mark.parametrize(
    "code", ["import torch", "torch.zeros(1)", "x.type == y.type", "'cudal'", "rank = 0", "os.name"]
)
def test_the_walk_lets_everything_else_pass(code: str) -> None:
    assert list(names_of_devices(ast.parse(code))) == []


def test_nothing_outside_backends_names_a_device(sources: list[Any]) -> None:
    found = [
        f"{source.name}:{what}"
        for source in sources
        if source.name.startswith("modelzoo_trainer/")
        for what in names_of_devices(source.tree)
    ]
    assert found == []
