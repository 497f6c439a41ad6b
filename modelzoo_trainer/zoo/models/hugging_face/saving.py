"""Folders of `save_pretrained`, with merged adapters."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.nn import Module, Parameter

from modelzoo_trainer.errors import ConfigError, reason_of
from modelzoo_trainer.zoo.models.hugging_face.adapters import ORIGINAL, PlainNames


def save(model: Any, folder: str | Path) -> None:
    """Write a folder that `from_pretrained` loads.

    Args:
        model: Of `transformers`, with adapters or without. The weights are bitwise the same after
            it.
        folder: Created if it is missing.

    Raises:
        ConfigError: If the weights are sharded, adapters of this kind cannot be merged, or shared
            weights have become different in a way that config.json cannot express.
    """
    from torch.distributed.tensor import DTensor  # takes long to import

    if any(isinstance(one, DTensor) for one in model.parameters()):
        raise ConfigError(
            f"save_pretrained: the weights of {type(model).__name__} are sharded over processes, "
            f"none of which has all. Add the callback HuggingFaceCheckpoint, which writes the same "
            f"folder, or convert a checkpoint: modelzoo-trainer checkpoint convert CHECKPOINT DIR "
            f"--to hf."
        )
    shared = shared_names(model)
    config = model.config
    with _merged_state(model) as state:
        different = [names for names in shared if len({state[one].data_ptr() for one in names}) > 1]
        try:
            if different:
                check_different(model, different)
                model.config = copy.deepcopy(config)
                model.config.tie_word_embeddings = False
            model.save_pretrained(folder, state_dict=state)
        finally:
            model.config = config


def shared_names(model: Module) -> list[list[str]]:
    """Return the plain names of tensors, grouped by the parameter that they share."""
    plain = PlainNames(model.state_dict()).plain
    groups: dict[int, list[str]] = {}
    for name, one in model.named_parameters(remove_duplicate=False):
        if name in plain:
            groups.setdefault(id(one), []).append(plain[name])
    return [names for names in groups.values() if len(names) > 1]


def check_different(model: Any, groups: Iterable[list[str]]) -> None:
    """Refuse shared tensors that have become different, besides the embedding and the output layer.

    Raises:
        ConfigError: If there are any.
    """
    embeddings = embeddings_of(model)
    for names in groups:
        if not set(names) <= embeddings:
            raise ConfigError(
                f"The tensors {', '.join(names)} share their weights, but have different adapters "
                f"or trained copies; a folder of Hugging Face cannot express that. Choose other "
                f"target_modules or modules_to_save."
            )


def embeddings_of(model: Any) -> set[str]:
    """Return the names of the weights of the embedding and of the output layer."""
    parts = []
    with suppress(NotImplementedError):  # of a model without tokens
        parts = [model.get_input_embeddings(), model.get_output_embeddings()]
    return {
        f"{name}.weight"
        for name, one in model.named_modules()
        if any(one is part for part in parts)
    }


@contextmanager
def _merged_state(model: Module) -> Iterator[dict[str, Tensor]]:
    """Context manager: the weights of a model, with adapters merged into them, by plain names.

    Raises:
        ConfigError: If adapters of this kind cannot be merged.
    """
    with ExitStack() as stack:
        for layer in [one for one in model.modules() if _is_adapted(one)]:
            stack.enter_context(_merged(layer))
        state = model.state_dict()
        names = PlainNames(state)
        yield {
            names.plain[name]: value
            for name, value in state.items()
            if name in names.plain and ORIGINAL not in name
        }


def _is_adapted(module: Any) -> bool:
    return hasattr(module, "base_layer") and hasattr(module, "merge")


@contextmanager
def _merged(layer: Any) -> Iterator[None]:
    """Context manager: a layer has an own weight, with its adapter merged into it.

    The weight is put back after it: subtracting is not exact, and another layer may share it.
    """
    base = layer.get_base_layer()
    own = dict(base._parameters)
    try:
        for name, param in own.items():
            if param is not None:
                base._parameters[name] = Parameter(param.detach().clone(), requires_grad=False)
        _merge(layer)
        yield
    finally:
        if layer.merged:
            layer.unmerge()
        base._parameters.update(own)


def _merge(layer: Any) -> None:
    try:
        layer.merge()
    except (AttributeError, NotImplementedError, ValueError) as error:
        why = reason_of(error)
        raise ConfigError(
            f"The adapters in {type(layer).__name__} cannot be merged into the weights ({why}). "
            f"Save a checkpoint of the trainer instead."
        ) from error
