"""What the command `checkpoint convert` does."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

import torch

from modelzoo_trainer.base.regular_files import require_files_inside
from modelzoo_trainer.checkpointing.lazy_weights import LazyWeights, is_checkpoint, open_weights
from modelzoo_trainer.checkpointing.manifest import SUFFIX
from modelzoo_trainer.checkpointing.torch_file import SUFFIXES
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.conversion import cerebras
from modelzoo_trainer.zoo.conversion.adapter_folder import plan_adapters, write_adapters
from modelzoo_trainer.zoo.conversion.adapters import MergedAdapters, has_adapters
from modelzoo_trainer.zoo.conversion.averages import Averaged
from modelzoo_trainer.zoo.conversion.engine import ConversionPlan, PartOf, TensorSource, shapes_of
from modelzoo_trainer.zoo.conversion.hugging_face import (
    aliases_of,
    arguments_of,
    merged_settings,
    plan_export,
    plan_import,
    tokenizer_of,
    write_export,
    write_ours,
)
from modelzoo_trainer.zoo.conversion.lazy_checkpoint import open_average, open_model
from modelzoo_trainer.zoo.conversion.model_settings import (
    MODEL_YAML,
    ModelSettings,
    ModelsIn,
    RootSettings,
    find_settings,
)
from modelzoo_trainer.zoo.conversion.run_model import decoder_layers, restore_settings, their_run
from modelzoo_trainer.zoo.conversion.transformers_model import (
    plan_transformers,
    tokenizer_beside,
    write_transformers,
)
from modelzoo_trainer.zoo.conversion.weights_folder import (
    Shape,
    TensorSpec,
    check_target,
    new_folder,
    num_bytes_of,
    save_file,
    write_tensors,
)
from modelzoo_trainer.zoo.hugging_face.folders import CONFIG_FILE, SETTINGS_PATTERNS, local_folder
from modelzoo_trainer.zoo.models.hugging_face.saving import shared_names

Layout: TypeAlias = Literal["hf", "cerebras"]
_READ: Final = (*SETTINGS_PATTERNS, "*.yaml", f"*{SUFFIX}", *(f"*{one}" for one in SUFFIXES))


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
        merge_adapters: Whether LoRA adapters are merged; false = written alone.
        averaged: Whether to write the averaged weights of `ModelEma`.
        models_in: Reads the models of a configuration.
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
    merge_adapters: bool
    averaged: bool
    models_in: ModelsIn
    to_yaml: Callable[[Any], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Weights:
    """The weights of one of our decoders, from any layout."""

    source: TensorSource
    model: ModelSettings
    path: Path  # where they are from
    what: str = ""  # that is not said by the name of the model
    plan: ConversionPlan | None = None  # the source, if it is converted itself

    @property
    def where(self) -> str:
        return repr(str(self.path))


def convert(request: Request) -> list[str]:
    """Convert weights and return what to print: lines with the target, and with the settings.

    Raises:
        ConfigError: If the settings of the model or a tokenizer is invalid, or has no counterpart.
        CheckpointError: If weights are damaged, do not match the settings, or cannot be
            written.
    """
    check_target(request.target)
    if request.origin is None:
        path, source = _open_ours(request)
        settings = find_settings(path, request.params, request.models_in)
        if isinstance(settings, RootSettings):
            return _convert_theirs(request, path, source, settings)
        weights = _read_ours(request, path, source, settings)
    else:
        read = {"hf": _read_hugging_face, "cerebras": _read_cerebras}
        weights = read[request.origin](request)
    write = {None: _write_ours, "hf": _write_hugging_face, "cerebras": _write_cerebras}
    what, plan = write[request.layout](request, weights)
    lines = [_line(request, what + weights.what, plan.specs, weights.model.where)]
    if plan.num_rounded:
        lines.append(
            f"{plan.num_rounded} values of norms are rounded to float32 after 1 was subtracted, as "
            f"this family has them: converted back, they differ by less than 1e-7."
        )
    return lines


def _refuse_links(path: Path) -> None:
    """Refuse links out of the folder of a source among the files that are read of it."""
    is_index = path.name.endswith(".index.json")
    if is_index or path.is_dir():
        require_files_inside(path.parent if is_index else path, _READ)


def _line(request: Request, what: str, specs: Mapping[str, TensorSpec], where: str) -> str:
    size = f"{num_bytes_of(specs) / (1 << 20):.1f} MiB"
    return f"{request.target}: {what}, {size} (settings of the model: {where})"


def _own_dtype(request: Request) -> torch.dtype | None:
    """Return the dtype of our weights, if these are the target."""
    return request.dtype if request.layout is None else None


def _open_ours(request: Request) -> tuple[Path, LazyWeights]:
    path = Path(request.source)
    path = path.resolve() if path.is_dir() else path  # latest is a link
    if (path / CONFIG_FILE).is_file():
        raise ConfigError(
            f"{request.source!r} is a folder of Hugging Face, not a checkpoint of this trainer. "
            f"Pass --from hf."
        )
    _refuse_links(path)
    is_of_run = path.is_dir() and is_checkpoint(path)
    if request.averaged and not is_of_run:
        raise ConfigError(
            f"--averaged: {request.source!r} is not a checkpoint, which alone has the state of "
            f"ModelEma. Omit it, or pass a checkpoint."
        )
    return path, (open_model(path) if is_of_run else open_weights(path))


def _part_of(
    request: Request,
    path: Path,
    weights: LazyWeights,
    prefix: str,
    shared: Iterable[Collection[str]] = (),
) -> TensorSource:
    """Return the weights of a part of a model, or their averages."""
    if not any(name.startswith(prefix) for name in weights.names()):
        prefix = ""  # weights of the part alone
    source: TensorSource = PartOf(weights, prefix)
    if not request.averaged:
        return source
    averages = PartOf(open_average(path), prefix)
    return Averaged(source, averages, shared=shared, where=repr(str(path)))


def _read_ours(
    request: Request, path: Path, weights: LazyWeights, model: ModelSettings
) -> _Weights:
    if not request.merge_adapters:
        raise ConfigError(
            f"--no-merge-adapters: the model is the decoder {model.name}; only the adapters of "
            f"models of transformers can be written alone. Omit it."
        )
    source = _part_of(request, path, weights, model.prefix)
    what = ", averaged weights" if request.averaged else ""
    if has_adapters(source):
        assert model.root is not None
        layers = decoder_layers(model.root, model.prefix)
        source = MergedAdapters(source, layers, where=repr(str(path)))
        model = replace(model, arguments=arguments_of(merged_settings(model.settings, layers)))
        what += ", with merged adapters"
    return _Weights(source=source, model=model, path=path, what=what)


def _convert_theirs(
    request: Request, path: Path, weights: LazyWeights, settings: RootSettings
) -> list[str]:
    """Convert weights of a model of `transformers` to its own layout."""
    where = repr(str(path))
    if request.layout != "hf":
        raise ConfigError(f"--to {request.layout}: {_kind_of(settings)}. Pass --to hf.")
    if request.family is not None:
        raise ConfigError(
            f"--family: {_kind_of(settings)}, with a config.json of its own. Omit it."
        )
    run = their_run(settings)
    shared = [
        [run.model.prefix + name for name in names] for names in shared_names(run.model.module)
    ]
    source = _part_of(request, path, weights, run.prefix, shared)
    tokenizer, tokenizer_where = tokenizer_of(request.tokenizer, path)
    if request.tokenizer is None and not tokenizer.content:
        tokenizer = tokenizer_beside(run.model)
    what = ", averaged weights" if request.averaged else ""
    if not request.merge_adapters:
        restore_settings(run.model, settings)
        adapters = plan_adapters(source, run.model, run.layers, dtype=request.dtype)
        write_adapters(adapters, request.target, tokenizer=tokenizer)
        name = f"adapters of {type(run.model.module).__name__}"
        return [_line(request, name + what, adapters.specs, settings.where)]
    export = plan_transformers(source, run.model, run.layers, where=where, dtype=request.dtype)
    write_transformers(
        export,
        request.target,
        tokenizer=tokenizer,
        tokenizer_where=tokenizer_where,
        shard_bytes=request.shard_bytes,
    )
    what += ", with merged adapters" if has_adapters(source) else ""
    return [_line(request, export.architecture + what, export.plan.specs, settings.where)]


def _kind_of(settings: RootSettings) -> str:
    return f"{settings.where}: {settings.name} has a model of transformers"


def _read_hugging_face(request: Request) -> _Weights:
    folder = local_folder(request.source, key="--from hf")
    if (folder / MODEL_YAML).is_file() and not (folder / CONFIG_FILE).is_file():
        raise ConfigError(
            f"{request.source!r} has weights of this trainer ({MODEL_YAML}), not a folder of "
            f"Hugging Face. Omit --from hf."
        )
    _refuse_links(folder)
    found = plan_import(folder, key="--from hf", dtype=_own_dtype(request))
    model = ModelSettings(
        name=found.family.model_name,
        model_class=found.family.model_class,
        arguments=found.arguments,
        where=str(folder / CONFIG_FILE),
    )
    return _Weights(source=found.plan, model=model, path=folder, plan=found.plan)


def _read_cerebras(request: Request) -> _Weights:
    path = Path(request.source)
    _refuse_links(path)
    source = cerebras.open_cerebras(path, key="--from cerebras")
    model = find_settings(path, request.params, request.models_in)
    if isinstance(model, RootSettings):
        raise ConfigError(f"--from cerebras: {_kind_of(model)}. Pass the settings of a decoder.")
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


def _write_ours(request: Request, weights: _Weights) -> tuple[str, ConversionPlan]:
    plan, model = weights.plan, weights.model
    assert plan is not None
    tokenizer, where = tokenizer_of(request.tokenizer, weights.path)
    settings = model.settings
    if (vocab_size := getattr(settings, "vocab_size", None)) is not None:
        tokenizer.check(vocab_size, where)
    arguments = {key: value for key, value in model.arguments.items() if value is not None}
    text = request.to_yaml({"model": {"name": model.name, **arguments}})
    write_ours(
        request.target,
        plan,
        aliases=aliases_of(settings),
        model_yaml=f"# The settings of the model whose weights are in this folder.\n{text}",
        tokenizer=tokenizer,
        shard_bytes=request.shard_bytes,
    )
    return f"weights of {model.name}", plan


def _write_hugging_face(request: Request, weights: _Weights) -> tuple[str, ConversionPlan]:
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
    what: str = export.config["architectures"][0]
    return f"{what}, scales multiplied into its weights" if export.factors else what, export.plan


def _write_cerebras(request: Request, weights: _Weights) -> tuple[str, ConversionPlan]:
    settings = weights.model.settings
    plan = cerebras.plan_to_cerebras(
        weights.source, settings, _shapes(weights.model), where=weights.where, dtype=request.dtype
    )
    num_bytes = num_bytes_of(plan.specs)
    if request.target.suffix == ".pt":
        save_file(request.target, cerebras.state_of(plan, settings), num_bytes)
    else:
        aliases = cerebras.aliases_of(settings, plan.specs)
        with new_folder(request.target, num_bytes) as hidden:
            write_tensors(
                hidden,
                plan.specs,
                plan.tensors(),
                shard_bytes=request.shard_bytes,
                aliases=aliases,
            )
    what = "weights with the names of the Cerebras Model Zoo"
    experts = getattr(settings, "experts", None)
    return what if experts is None else f"{what} ({experts.moe_implementation} experts)", plan
