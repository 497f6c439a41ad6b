"""Weights in files of `torch.save`: read with `weights_only=True`, on a torch where that is safe.

CVE-2026-24747 is a memory corruption in the unpickler that `weights_only=True` uses: a crafted file
can run code in spite of it. All releases before 2.10.0 are affected, 2.10.0 has the fix (advisory
GHSA-63cw-57p8-fm3p of pytorch/pytorch, CVE record of 2026-01-27, pytorch/pytorch issue 163105).
On an affected torch such files are refused. There is no unsafe fall-back.
"""

from __future__ import annotations

import logging
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import Parameter

from modelzoo_trainer.errors import CheckpointError

log = logging.getLogger("modelzoo_trainer.checkpoint")

SUFFIXES: Final = (".pt", ".pth", ".bin", ".ckpt")
FIXED_IN: Final = "2.10.0"
"""The first release of torch without CVE-2026-24747."""
CONVERT: Final = (
    "If you trust the file, load it into a model yourself and convert it: "
    "safetensors.torch.save_model(model, 'model.safetensors')."
)
_WRAPPED: Final = ("model", "state_dict", "model_state_dict")  # where trainers keep the weights
_MOST: Final = 5  # names in a message
_OBJECT: Final = re.compile(r"GLOBAL (\w[\w.]*)")  # in what torch's unpickler raises


def open_torch_file(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a file that `torch.save` has written, mapped into memory.

    The file holds a model's `state_dict()`, alone or as `model`, `state_dict` or
    `model_state_dict` of a mapping. The tensors hang on the file: copy what has to stay.

    Args:
        path: The file.

    Raises:
        CheckpointError: If torch is older than 2.10.0, or the file is damaged, holds other objects
            than tensors and plain values, or no weights.

    Cost: Reads the file once, to check its CRC-32 sums. Files from before torch 1.6 have no sums (a
        changed bit goes unnoticed) and are not mapped: their tensors are in host memory.
    """
    _require_fixed(path)
    is_zip = _check_archive(path)
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    except Exception as error:  # noqa: BLE001  # of a dozen types; torch advises to trust the file
        raise _refused(path, error) from None
    return _weights_in(content, path)


def _refused(path: Path, error: Exception) -> CheckpointError:
    found = _OBJECT.search(str(error))
    if found is not None:
        return CheckpointError(
            f"{str(path)!r} contains {found[1]}, which torch.load does not load with "
            f"weights_only=True because it may run code. The file must contain a state_dict "
            f"(tensors by name). {CONVERT}"
        )
    return CheckpointError(
        f"{str(path)!r} is damaged, or was not written by torch.save ({type(error).__name__})."
    )


def _require_fixed(path: Path) -> None:
    if torch.__version__ < FIXED_IN:
        raise CheckpointError(
            f"{str(path)!r} is a pickle, which may run code when torch {torch.__version__} loads "
            f"it, even with weights_only=True (CVE-2026-24747). Use torch {FIXED_IN} or newer, or "
            f"a safetensors file. {CONVERT}"
        )


def _check_archive(path: Path) -> bool:
    """Return whether a file is a zip archive, as torch writes them since 1.6; it is intact then."""
    try:
        if not zipfile.is_zipfile(path):
            return False
        with zipfile.ZipFile(path) as archive:
            is_packed = any(one.compress_type != zipfile.ZIP_STORED for one in archive.infolist())
            damaged = None if is_packed else archive.testzip()
    except (OSError, ValueError, zipfile.BadZipFile, NotImplementedError, RuntimeError) as error:
        raise CheckpointError(f"{str(path)!r} cannot be read: {error}.") from None
    if is_packed:
        raise CheckpointError(
            f"{str(path)!r} is a compressed archive, so it was not written by torch.save (which "
            f"does not compress). Unpack it first."
        )
    if damaged is not None:
        raise CheckpointError(
            f"{str(path)!r} is damaged: the CRC-32 of {damaged!r} does not match. Download it "
            f"again. (If it was saved with torch.serialization.set_crc32_options(False), save it "
            f"again without that.)"
        )
    return True


def _weights_in(content: Any, path: Path) -> dict[str, Tensor]:
    """Return the state of a model, wherever in the content it is."""
    if _holds_tensors(content):
        return _checked(content, path)
    keys = list(content) if isinstance(content, Mapping) else []
    found = [key for key in _WRAPPED if key in keys and _holds_tensors(content[key])]
    if len(found) == 1:
        others = [str(key) for key in keys if key != found[0]]
        more = f" and {len(others) - _MOST} more" if len(others) > _MOST else ""
        shown = ", ".join(others[:_MOST]) + more
        log.info("%s: loading the entry %r; not loading: %s.", path, found[0], shown or "nothing")
        return _checked(content[found[0]], path)
    kind = type(content).__name__
    what = f"{kind} with the keys {', '.join(map(repr, keys[:_MOST]))}" if keys else kind
    raise CheckpointError(
        f"{str(path)!r} contains an object of type {what}, not the weights of one model. Save "
        f"model.state_dict(), alone or in a dict under one of the keys "
        f"{', '.join(map(repr, _WRAPPED))}."
    )


def _holds_tensors(value: Any) -> bool:
    """Return whether it is a model's state: a mapping with tensors at its top."""
    return isinstance(value, Mapping) and any(isinstance(one, Tensor) for one in value.values())


def _checked(state: Mapping[Any, Any], path: Path) -> dict[str, Tensor]:
    for name, value in state.items():
        if not isinstance(name, str):
            raise CheckpointError(f"{str(path)!r} has the key {name!r}; keys must be strings.")
        kind = _unsupported(value)
        if kind is not None:
            raise CheckpointError(
                f"{str(path)!r}: the entry {name!r} is {kind}; only dense tensors can be loaded."
            )
    return dict(state)


def _unsupported(value: Any) -> str | None:
    """Return what a value is if it is not a dense tensor."""
    if type(value) not in (Tensor, Parameter):
        return f"an object of type {type(value).__name__}"
    if value.layout is not torch.strided:
        return f"a tensor of layout {value.layout}"
    if value.is_quantized:
        return "a quantized tensor"
    return "a tensor on the meta device" if value.is_meta else None


def copied_tensors(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors that do not hang on their file; those that share memory still do."""
    storages: dict[tuple[int, int], torch.UntypedStorage] = {}
    copies: dict[str, Tensor] = {}
    for name, tensor in state.items():
        storage = tensor.untyped_storage()
        key = storage.data_ptr(), storage.nbytes()
        if key not in storages:
            storages[key] = storage.clone()  # type: ignore[no-untyped-call]  # torch's
        own = storages[key]
        copies[name] = torch.empty(0, dtype=tensor.dtype).set_(
            own, tensor.storage_offset(), tensor.shape, tensor.stride()
        )
    return copies
