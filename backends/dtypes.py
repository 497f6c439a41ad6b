"""Names of data types. torch is not imported."""

from collections.abc import Mapping
from typing import Any, Final

ALIASES: Final[Mapping[str, tuple[str, ...]]] = {
    "bfloat16": ("bf16", "bfloat"),
    "float16": ("fp16", "half"),
    "float32": ("fp32", "float", "single"),
    "float64": ("fp64", "double"),
}
"""The usual aliases of floating-point types, by torch's name."""

_PREFIX: Final = "torch."
_NAMES: Final = {alias: name for name, others in ALIASES.items() for alias in (name, *others)}


def dtype_name(given: Any) -> Any:
    """Return torch's name of a data type: "bfloat16" for "BF16" or `torch.bfloat16`.

    Anything else is returned unchanged.
    """
    is_type = isinstance(given, str) or str(type(given)) == "<class 'torch.dtype'>"
    text = str(given).lower().removeprefix(_PREFIX) if is_type else ""
    return _NAMES.get(text, given)
