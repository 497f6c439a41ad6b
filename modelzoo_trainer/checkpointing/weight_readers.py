"""The weights of a file or folder, for a model: formats are readers, registered by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, TypeAlias

from torch import Tensor, nn

from modelzoo_trainer.base.exports import load
from modelzoo_trainer.checkpointing.lazy_tensors import lazy_state
from modelzoo_trainer.checkpointing.lazy_weights import is_checkpoint, open_weights
from modelzoo_trainer.checkpointing.weights import holds_weights

WeightsReader: TypeAlias = Callable[[nn.Module, Path], Mapping[str, Tensor] | None]
"""Called with the model and a file or folder that exists and is not a checkpoint. Returns tensors
by their names in the model's state, or None if the format is another one."""

_readers: Final[dict[str, WeightsReader | str]] = {
    "hugging_face": "modelzoo_trainer.zoo.conversion.loading:read_hugging_face",
}


def register_weights_reader(name: str, reader: WeightsReader | str) -> None:
    """Let `ckpt_path` accept another format of weights. Readers are asked in reverse order.

    Args:
        name: The format; a reader of the same name is replaced.
        reader: A function of the model and the path, or "module:function", imported when a path is
            read that is not a checkpoint. It returns the tensors by their names in the model's
            state (`LazyTensor`s, for example), or None if the path has another format.
    """
    _readers.pop(name, None)
    _readers[name] = reader


def read_weights_for(model: nn.Module, path: Path) -> dict[str, Tensor] | None:
    """Return the weights of a file or folder by their names in a model; None = it has none.

    Without a reader that knows the format, it is one of `open_weights`, read tensor by tensor when
    their values are needed.

    Raises:
        CheckpointError: If the files are damaged.
        ConfigError: If the weights belong to another model.
    """
    if not path.exists() or (path.is_dir() and is_checkpoint(path)):
        return None
    for reader in reversed(_readers.values()):
        read: WeightsReader = load(reader) if isinstance(reader, str) else reader
        found = read(model, path)
        if found is not None:
            return dict(found)
    return lazy_state(open_weights(path)) if holds_weights(path) else None
