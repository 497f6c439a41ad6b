"""Whether the tensors of a folder match a model of `transformers`."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Sequence
from importlib import import_module
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Final

import torch
from torch.nn import Module

from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.hugging_face.folders import weight_files
from modelzoo_trainer.zoo.models.hugging_face.adapters import PlainNames
from modelzoo_trainer.zoo.models.hugging_face.settings import FOLDER_KEY

# Tensors of older versions, which the library computes: frequencies and masks of attention.
_COMPUTED: Final = (r"rotary_emb\.inv_freq$", r"(^|\.)(attn|attention)\.(masked_)?bias$")
_POSITIONS: Final = r"(^|\.)position_ids$"


def check_files(folder: Path) -> None:
    """Refuse files of weights that cannot be read.

    Raises:
        ConfigError: If one is damaged, or has more than tensors.
    """
    for path in weight_files(folder, key=FOLDER_KEY):
        try:
            _open(path)
        except Exception as error:  # of several classes
            reason = str(error).strip().splitlines()[0]
            if isinstance(error, UnpicklingError):  # torch advises to load it all the same
                reason = "torch.load refuses it with weights_only=True"
            raise ConfigError(
                f"{FOLDER_KEY}: {str(path)!r} cannot be read ({reason}). Save or download the "
                f"folder again; a file of torch.save may have tensors only."
            ) from error


def _open(path: Path) -> None:
    if path.suffix == ".safetensors":
        with import_module("safetensors").safe_open(path, framework="pt"):
            pass
    else:
        torch.load(path, map_location="meta", weights_only=True)


def unused(model: Any, names: Iterable[str]) -> list[str]:
    """Return the tensors, among those that a model does not have, that it would have to have.

    Those that the library ignores without a report are not among them.

    Args:
        model: A model of `transformers`.
        names: Tensors of a folder that the model does not have.
    """
    patterns = [*_COMPUTED, *(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())]
    if any(name.endswith("position_ids") for name, _ in model.named_buffers()):
        patterns.append(_POSITIONS)
    ignored = re.compile("|".join(f"({one})" for one in patterns))
    return sorted(name for name in names if not ignored.search(name))


def warn_of_unused(folder: str, model: str, names: Sequence[str]) -> None:
    """Warn of tensors of a folder that are not loaded.

    Args:
        folder: Where the weights are.
        model: The class of the model.
        names: The tensors, as `unused` returns them.
    """
    if names:
        warnings.warn(
            f"{FOLDER_KEY}: {len(names)} tensors in {folder!r} are not loaded, because "
            f"{model} does not have them: {_some(names)}. This is normal for the head of another "
            f"task; otherwise correct config_overrides, or config.json.",
            stacklevel=6,
        )


def check_missing(
    folder: str,
    model: str,
    missing: list[str],
    others: Sequence[str] = (),
    *,
    may_start_anew: bool,
) -> None:
    """Refuse weights that lack tensors of the model, or warn of them.

    Args:
        folder: Where the weights are.
        model: The class of the model.
        missing: The tensors that they lack; at least one.
        others: Tensors that the model does not have.
        may_start_anew: Whether these may have initial values.

    Raises:
        ConfigError: If they may not.
    """
    if not may_start_anew:
        raise ConfigError(
            f"{FOLDER_KEY}: the weights in {folder!r} lack {len(missing)} tensors of {model}, "
            f"first {missing[0]!r}"
            + (f", and have others, first {others[0]!r}" if others else "")
            + ". Give the folder of a model of this kind, or set pretrained: false."
        )
    warnings.warn(
        f"{FOLDER_KEY}: the weights in {folder!r} lack {len(missing)} tensors of {model}, which "
        f"start from initial values: {_some(missing)}.",
        stacklevel=6,
    )


def warn_of_frozen(model: Module, missing: Iterable[str]) -> None:
    """Warn of tensors with initial values that stay so, because only adapters are trained.

    Args:
        model: A model of `transformers`, possibly with adapters.
        missing: Its tensors that the weights of a folder lack, by their names without adapters.
    """
    params = dict(model.named_parameters())
    if all(one.requires_grad for one in params.values()):
        return  # there are no adapters
    names = PlainNames(model.state_dict())
    trained = {names.plain.get(name) for name, one in params.items() if one.requires_grad}
    frozen = sorted(set(missing) - trained)
    if frozen:
        layers = list(dict.fromkeys(one.rpartition(".")[0] for one in frozen))
        warnings.warn(
            f"{len(frozen)} tensors of {type(model).__name__} start from initial values and are "
            f"not trained, because they are no adapters: {_some(frozen)}. To train them, set "
            f"modules_to_save: [{', '.join(layers)}] in peft_config of the model.",
            stacklevel=6,
        )


def check_shapes(folder: str, mismatched: Any) -> None:
    """Refuse weights of other shapes than the model's.

    Args:
        folder: Where the weights are.
        mismatched: Name, shape there and shape in the model of each such tensor.

    Raises:
        ConfigError: If there is one.
    """
    if not mismatched:
        return
    name, theirs, ours = min(mismatched, key=lambda one: str(one[0]))
    raise ConfigError(
        f"{FOLDER_KEY}: {len(mismatched)} tensors in {folder!r} have other shapes than the "
        f"model, first {name!r}: {tuple(theirs)} in the file, {tuple(ours)} in the model. Correct "
        f"config_overrides or its config.json, or set pretrained: false. More tokens: set "
        f"resize_token_embeddings instead of vocab_size."
    )


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
