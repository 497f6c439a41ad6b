"""Data types as arguments: any usual alias is accepted, in any case."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, Literal

from modelzoo_trainer.base.sibling import require_sibling

if TYPE_CHECKING:
    import torch
    from pydantic import GetCoreSchemaHandler
    from pydantic_core import CoreSchema


@dataclass(frozen=True, slots=True)
class AnyAlias:
    """Marks a `Literal` of names of data types; a value from a file becomes the literal."""

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        from pydantic_core import core_schema

        return core_schema.no_info_before_validator_function(dtype_name, handler(source))


Float = Annotated[Literal["float32", "bfloat16", "float16"], AnyAlias()]
"""Of weights."""
FloatOfAverage = Annotated[Literal["float32", "float64", "bfloat16"], AnyAlias()]
HalfFloat = Annotated[Literal["bfloat16", "float16", "cbfloat16"], AnyAlias()]
"""Of mixed precision, as the format names them."""


def aliases() -> Mapping[str, tuple[str, ...]]:
    """Return the usual aliases by torch's name."""
    found: Mapping[str, tuple[str, ...]] = _of_backends().ALIASES
    return found


def dtype_name(given: Any) -> Any:
    """Return torch's name of a data type; see `backends.dtypes.dtype_name`."""
    return _of_backends().dtype_name(given)


def torch_dtype(given: Any) -> torch.dtype:
    """Return the data type that a checked argument means."""
    import torch

    found: torch.dtype = getattr(torch, dtype_name(given))
    return found


@cache
def _of_backends() -> Any:
    require_sibling("backends")
    from backends import dtypes

    return dtypes
