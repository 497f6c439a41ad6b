"""Folders of Hugging Face from models of `transformers`."""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import Module

from modelzoo_trainer.base.regular_files import require_inside
from modelzoo_trainer.errors import CheckpointError, ConfigError
from modelzoo_trainer.zoo.conversion.adapters import LoraLayer, MergedAdapters
from modelzoo_trainer.zoo.conversion.engine import PartOf, TensorSource
from modelzoo_trainer.zoo.conversion.tokenizer_files import (
    GENERATION,
    TokenizerFiles,
    read_tokenizer,
)
from modelzoo_trainer.zoo.conversion.weights_folder import (
    Shape,
    TensorSpec,
    new_folder,
    num_bytes_of,
    write_tensors,
    write_text,
)
from modelzoo_trainer.zoo.hugging_face.stored_names import StoredTensors, on_disk
from modelzoo_trainer.zoo.models.hugging_face.adapters import PlainNames
from modelzoo_trainer.zoo.models.hugging_face.saving import (
    check_different,
    embeddings_of,
    shared_names,
)
from modelzoo_trainer.zoo.models.hugging_face.wrapper import TransformersModel

FSDP: Final = "FSDP"
"""What precedes the name of a class that FSDP2 has derived for a sharded module."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TheirModel:
    """A model of `transformers` in a run's model.

    Attributes:
        module: The model, with adapters or without.
        prefix: What precedes the names of its tensors in the state of the run.
        wrapper: The model of the run, if it is `hf_causal_lm` or `hf_model`.
    """

    module: Any
    prefix: str = ""
    wrapper: TransformersModel | None = None

    @property
    def vocab_size(self) -> int | None:
        """Number of token ids; None without tokens."""
        found = getattr(self.module.config.get_text_config(), "vocab_size", None)
        return found if isinstance(found, int) else None

    def folder(self) -> Path | None:
        """Return the local folder that the model was made from, if it is known."""
        if self.wrapper is not None:
            return self.wrapper.settings.folder()
        name = getattr(self.module, "name_or_path", "")
        return Path(name) if name and Path(name).is_dir() else None


def their_model(model: Module) -> TheirModel | None:
    """Return the model of `transformers` in a run's model, None if it is another model."""
    if isinstance(model, TransformersModel):
        return TheirModel(module=model.model, prefix="model.", wrapper=model)
    peft, transformers = sys.modules.get("peft"), sys.modules.get("transformers")
    if peft is not None and isinstance(model, peft.PeftModel):
        return TheirModel(module=model.get_base_model(), prefix="base_model.model.")
    if transformers is not None and isinstance(model, transformers.PreTrainedModel):
        return TheirModel(module=model)
    return None


def tokenizer_beside(model: TheirModel) -> TokenizerFiles:
    """Return the tokenizer in the folder that a model was made from: no files without one."""
    folder = model.folder()
    return TokenizerFiles() if folder is None else read_tokenizer(folder, is_required=False)


class StoredPlan:
    """The tensors of a folder, made from a model's tensors.

    Attributes:
        specs: The tensors by name, in the order in which they are made.
    """

    def __init__(
        self, groups: list[StoredTensors], source: TensorSource, dtype: torch.dtype | None
    ) -> None:
        self._groups = groups
        self._source = source
        self.specs = {
            name: TensorSpec(shape=tuple(one.shape), dtype=_as_asked(one.dtype, dtype))
            for group in groups
            for name, one in group.stored.items()
        }

    @property
    def num_rounded(self) -> int:
        """Number of values that are not exact: none."""
        return 0

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Make the tensors, in the order of `specs`.

        Cost: In host memory, a tensor of the model at a time and what is made of it.
        """
        for group in self._groups:
            for name, tensor in group.make(self._source.read).items():
                yield name, tensor.to(self.specs[name].dtype)


def _as_asked(own: torch.dtype, asked: torch.dtype | None) -> torch.dtype:
    return asked if asked is not None and own.is_floating_point else own


@dataclass(frozen=True, slots=True, kw_only=True)
class TheirExport:
    """What a folder will have: planned, not written.

    Attributes:
        config: The text of config.json.
        generation: The text of generation_config.json; None if the model does not generate.
        plan: The tensors.
        vocab_size: Number of token ids; None without tokens.
        architecture: The name of the class.
        code: Files of an architecture that is not part of `transformers`.
    """

    config: str
    generation: str | None
    plan: StoredPlan
    vocab_size: int | None
    architecture: str
    code: tuple[Path, ...] = ()


def plan_transformers(
    source: TensorSource,
    model: TheirModel,
    layers: Mapping[str, LoraLayer],
    *,
    where: str,
    dtype: torch.dtype | None = None,
) -> TheirExport:
    """Plan a folder for the weights of a model of `transformers`, with merged adapters.

    Args:
        source: The tensors, by the names of the state of the run.
        model: The model; its values are not read, so it may be on `meta` or sharded.
        layers: Its adapters, by the name of the layer.
        where: Where the tensors are, for messages.
        dtype: Of the weights; None = as of the source.

    Raises:
        ConfigError: If the model is quantized, weights that are shared have become different in a
            way that config.json cannot express, or code to copy is a link out of its folder.
        CheckpointError: If the tensors do not match the model.
    """
    module = model.module
    if getattr(module, "hf_quantizer", None) is not None:
        raise ConfigError(
            f"{where}: the weights of {type(module).__name__} are quantized; these are not "
            f"exported. Call save_pretrained of the model instead."
        )
    merged = MergedAdapters(PartOf(source, model.prefix), layers, where=where)
    own = _shapes_of(module)
    left_out = _repeated(module, merged)
    _check(own, merged, left_out, where)
    ignored = [re.compile(one) for one in getattr(module, "_keys_to_ignore_on_save", None) or ()]
    names = [
        name
        for name in own
        if name not in left_out and not any(one.search(name) for one in ignored)
    ]
    tensors = {
        name: torch.empty(merged.shape(name), dtype=merged.dtype(name), device="meta")
        for name in names
    }
    plan = StoredPlan(list(on_disk(module, tensors)), merged, dtype)
    config = copy.deepcopy(module.config)
    architecture = type(module).__name__.removeprefix(FSDP)
    config.architectures = [architecture]
    config.dtype = str(_main_dtype(plan.specs)).removeprefix("torch.")
    if not _is_tied(module, left_out):
        config.tie_word_embeddings = False
    return TheirExport(
        config=config.to_json_string(use_diff=True),
        generation=_generation_of(model),
        plan=plan,
        vocab_size=model.vocab_size,
        architecture=architecture,
        code=_code_of(model) if getattr(config, "auto_map", None) else (),
    )


def _code_of(model: TheirModel) -> tuple[Path, ...]:
    """Return the Python files in the folder that a model was made from."""
    folder = model.folder()
    found = () if folder is None else tuple(sorted(folder.glob("*.py")))
    for path in found:
        assert folder is not None
        require_inside(path, folder)
    return found


def _shapes_of(module: Module) -> dict[str, Shape]:
    """Return the shapes of the tensors by their names without adapters."""
    state = module.state_dict()
    names = PlainNames(state)
    return {
        plain: tuple(state[name].shape)
        for name, plain in names.plain.items()
        if isinstance(state[name], Tensor)
    }


def _check(
    own: Mapping[str, Shape], merged: MergedAdapters, left_out: set[str], where: str
) -> None:
    found = set(merged.names())
    for name, shape in own.items():
        if name in left_out:
            continue
        if name not in found:
            raise CheckpointError(
                f"{where} has no tensor {name!r}, which a model of these settings has. Are the "
                f"settings right for the weights, and are all files there?"
            )
        if merged.shape(name) != shape:
            raise CheckpointError(
                f"{where}: tensor {name!r} has the shape {list(merged.shape(name))}, but the "
                f"settings give {list(shape)}. Use the settings with which the weights were made."
            )
    odd = sorted(found - own.keys())
    if odd:
        raise CheckpointError(
            f"{where} has the tensor {odd[0]!r}, which a model of these settings does not have. "
            f"Use the settings with which the weights were made."
        )


def _repeated(module: Any, merged: MergedAdapters) -> set[str]:
    """Return the names of tensors that share their values with one that is written.

    Raises:
        ConfigError: If adapters have made shared tensors different, besides the embedding and the
            output layer.
    """
    tied = getattr(module, "all_tied_weights_keys", None) or {}
    different: list[list[str]] = []
    left_out: set[str] = set()
    for names in shared_names(module):
        if any(merged.is_changed(name) for name in names):
            different.append(names)
            continue
        first = next((name for name in names if name not in tied), names[0])
        left_out |= {name for name in names if name != first}
    check_different(module, different)
    return left_out


def _is_tied(module: Any, left_out: set[str]) -> bool:
    """Return whether config.json is right about the output layer."""
    if not getattr(module.config.get_text_config(), "tie_word_embeddings", False):
        return True
    names = embeddings_of(module)
    return len(names) < 2 or bool(names & left_out)


def _main_dtype(specs: Mapping[str, TensorSpec]) -> torch.dtype:
    """Return the dtype of the first floating-point tensor, as `transformers` does."""
    found = [one.dtype for one in specs.values() if one.dtype.is_floating_point]
    return found[0] if found else torch.float32


def _generation_of(model: TheirModel) -> str | None:
    """Return the text of generation_config.json."""
    if not model.module.can_generate():
        return None
    text: str = model.module.generation_config.to_json_string(use_diff=True)
    return text


def write_transformers(
    export: TheirExport,
    folder: Path,
    *,
    tokenizer: TokenizerFiles,
    tokenizer_where: str,
    shard_bytes: int,
) -> None:
    """Write a folder that `transformers` loads: all of it, or nothing.

    Args:
        export: What `plan_transformers` returned.
        folder: The new folder; its parent must exist.
        tokenizer: Files to write with it, except generation_config.json, which the model has.
        tokenizer_where: Where they are from, for messages.
        shard_bytes: Maximum size of a file of weights.

    Raises:
        ConfigError: If the tokenizer has more ids than the model has embeddings.
        CheckpointError: If the folder exists or cannot be written, or the source is damaged.
    """
    if export.vocab_size is not None:
        tokenizer.check(export.vocab_size, tokenizer_where)
    specs = export.plan.specs
    with new_folder(folder, num_bytes_of(specs)) as hidden:
        write_text(hidden / "config.json", export.config)
        for path in export.code:
            write_text(hidden / path.name, path.read_text(encoding="utf-8"))
        tokenizer.without(GENERATION).write(hidden)
        if export.generation is not None:
            write_text(hidden / GENERATION, export.generation)
        write_tensors(hidden, specs, export.plan.tensors(), shard_bytes=shard_bytes)
