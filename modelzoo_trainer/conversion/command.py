"""What the command `checkpoint convert` does."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch

from modelzoo_trainer.checkpointing.lazy_checkpoint import open_model
from modelzoo_trainer.checkpointing.lazy_weights import is_checkpoint, open_weights
from modelzoo_trainer.checkpointing.weights_folder import (
    Shape,
    check_target,
    new_folder,
    num_bytes_of,
    save_file,
    write_tensors,
)
from modelzoo_trainer.conversion import cerebras
from modelzoo_trainer.conversion.engine import PartOf, Plan, Source, shapes_of
from modelzoo_trainer.conversion.hugging_face import (
    aliases_of,
    plan_export,
    plan_import,
    tokenizer_of,
    write_export,
    write_ours,
)
from modelzoo_trainer.conversion.model_settings import ModelSettings, ReadYaml, find_settings
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.hugging_face.folders import local_folder

Layout: TypeAlias = Literal["hf", "cerebras"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What to convert.

    Attributes:
        source: What has the weights, as given.
        target: The folder to write, or with `to: cerebras` a file whose name ends in `.pt`.
        origin: The layout of the source; None = of this trainer.
        layout: The layout of the target; None = of this trainer.
        params: A YAML file with the settings of the model; None = found beside the source.
        tokenizer: A folder or tokenizer.json; None = the files of the source.
        dtype: Of the weights; None = as of the source.
        shard_bytes: Maximum size of a file of weights.
        family: The `model_type` for `layout: hf`; None = the first that fits.
        read_yaml: Reads a YAML file.
        to_yaml: Writes YAML.
    """

    source: str
    target: Path
    origin: Layout | None
    layout: Layout | None
    params: Path | None
    tokenizer: Path | None
    dtype: torch.dtype | None
    shard_bytes: int
    family: str | None
    read_yaml: ReadYaml
    to_yaml: Callable[[Any], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Weights:
    """The weights of one of our decoders, from any layout."""

    source: Source
    model: ModelSettings
    path: Path  # where they are from
    plan: Plan | None = None  # the source, if it is converted itself

    @property
    def where(self) -> str:
        return repr(str(self.path))


def convert(request: Request) -> list[str]:
    """Convert weights and return what to print: lines with the target, and with the settings.

    Raises:
        ConfigError: If the settings of the model or a tokenizer is invalid, or has no counterpart.
        CheckpointError: If weights are damaged, are not those of the settings, or cannot be
            written.
    """
    check_target(request.target)
    read = {None: _read_ours, "hf": _read_hugging_face, "cerebras": _read_cerebras}
    weights = read[request.origin](request)
    write = {None: _write_ours, "hf": _write_hugging_face, "cerebras": _write_cerebras}
    what, plan = write[request.layout](request, weights)
    size = f"{num_bytes_of(plan.specs) / (1 << 20):.1f} MiB"
    lines = [f"{request.target}: {what}, {size} (settings of the model: {weights.model.where})"]
    if plan.num_rounded:
        lines.append(
            f"{plan.num_rounded} values of norms are rounded to float32 after 1 was subtracted, as "
            f"this family has them: converted back, they differ by less than 1e-7."
        )
    return lines


def _own_dtype(request: Request) -> torch.dtype | None:
    """Return the dtype of our weights, if these are the target."""
    return request.dtype if request.layout is None else None


def _read_ours(request: Request) -> _Weights:
    path = Path(request.source)
    path = path.resolve() if path.is_dir() else path  # latest is a link
    if (path / "config.json").is_file():
        raise ConfigError(
            f"{request.source!r} is a folder of Hugging Face, not a checkpoint of this trainer. "
            f"Pass --from hf."
        )
    source = open_model(path) if path.is_dir() and is_checkpoint(path) else open_weights(path)
    model = find_settings(path, request.params, request.read_yaml)
    if any(name.startswith(model.prefix) for name in source.names()):
        return _Weights(source=PartOf(source, model.prefix), model=model, path=path)
    return _Weights(source=source, model=model, path=path)


def _read_hugging_face(request: Request) -> _Weights:
    folder = local_folder(request.source, key="--from hf")
    found = plan_import(folder, key="--from hf", dtype=_own_dtype(request))
    model = ModelSettings(
        name=found.family.model_name,
        model_class=found.family.model_class,
        arguments=found.arguments,
        where=str(folder / "config.json"),
    )
    return _Weights(source=found.plan, model=model, path=folder, plan=found.plan)


def _read_cerebras(request: Request) -> _Weights:
    path = Path(request.source)
    source = cerebras.open_cerebras(path, key="--from cerebras")
    model = find_settings(path, request.params, request.read_yaml)
    plan = cerebras.plan_from_cerebras(
        source,
        model.settings,
        _shapes(model),
        where=repr(str(path)),
        dtype=_own_dtype(request),
    )
    return _Weights(source=plan, model=model, path=path, plan=plan)


def _shapes(model: ModelSettings) -> dict[str, Shape]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of settings without effect
        return shapes_of(model.model_class, model.arguments)


def _write_ours(request: Request, weights: _Weights) -> tuple[str, Plan]:
    plan, model = weights.plan, weights.model
    assert plan is not None
    tokenizer, where = tokenizer_of(request.tokenizer, weights.path)
    tokenizer.check(model.settings.vocab_size, where)
    arguments = {key: value for key, value in model.arguments.items() if value is not None}
    text = request.to_yaml({"model": {"name": model.name, **arguments}})
    write_ours(
        request.target,
        plan,
        aliases=aliases_of(model.settings),
        model_yaml=f"# The settings of the model whose weights are in this folder.\n{text}",
        tokenizer=tokenizer,
        shard_bytes=request.shard_bytes,
    )
    return f"weights of {model.name}", plan


def _write_hugging_face(request: Request, weights: _Weights) -> tuple[str, Plan]:
    export = plan_export(
        weights.source,
        weights.model.settings,
        where=weights.where,
        name=weights.model.name,
        family=request.family,
        dtype=request.dtype,
    )
    tokenizer, where = tokenizer_of(request.tokenizer, weights.path)
    write_export(
        export,
        request.target,
        tokenizer=tokenizer,
        tokenizer_where=where,
        shard_bytes=request.shard_bytes,
    )
    what = f"{export.config['architectures'][0]}"
    return f"{what}, scales multiplied into its weights" if export.factors else what, export.plan


def _write_cerebras(request: Request, weights: _Weights) -> tuple[str, Plan]:
    settings = weights.model.settings
    plan = cerebras.plan_to_cerebras(
        weights.source, settings, _shapes(weights.model), where=weights.where, dtype=request.dtype
    )
    num_bytes = num_bytes_of(plan.specs)
    if request.target.suffix == ".pt":
        save_file(request.target, cerebras.state_of(plan, settings), num_bytes)
    else:
        aliases = cerebras.aliases_of(settings)
        with new_folder(request.target, num_bytes) as hidden:
            write_tensors(
                hidden,
                plan.specs,
                plan.tensors(),
                shard_bytes=request.shard_bytes,
                aliases=aliases,
            )
    return "weights with the names of the Cerebras Model Zoo", plan
