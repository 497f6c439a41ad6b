"""Folders of Hugging Face from our decoders, and our weights from such folders."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from modelzoo_trainer.checkpointing.lazy_weights import LazyWeights, open_weights
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.conversion.engine import (
    OUR_EMBEDDING,
    OUR_HEAD,
    ConversionPlan,
    TensorSource,
    plan_ours,
    plan_theirs,
    settings_of,
    shapes_of,
    tied_names,
)
from modelzoo_trainer.zoo.conversion.family import (
    Family,
    families,
    family_for,
    family_of,
    other_families,
)
from modelzoo_trainer.zoo.conversion.scales import FACTORS, Scaled, without_factors
from modelzoo_trainer.zoo.conversion.tokenizer_files import (
    GENERATION,
    TokenizerFiles,
    read_tokenizer,
)
from modelzoo_trainer.zoo.conversion.weights_folder import (
    new_folder,
    num_bytes_of,
    write_json,
    write_tensors,
    write_text,
)
from modelzoo_trainer.zoo.hugging_face.folders import read_config, weight_files
from modelzoo_trainer.zoo.models.decoder import Decoder
from modelzoo_trainer.zoo.models.decoder_settings import DecoderSettings

MODEL_YAML: Final = "model.yaml"
SHARD_BYTES: Final = 5_000_000_000
"""The default maximum size of a file of weights."""


def arguments_of(settings: Any) -> dict[str, Any]:
    """Return the constructor arguments of a decoder with these settings."""
    cls = type(settings)
    if isinstance(settings, Decoder):
        cls = settings.SETTINGS
    return {one.name: getattr(settings, one.name) for one in fields(cls) if one.init}


def merged_settings(settings: DecoderSettings, layers: Collection[str]) -> DecoderSettings:
    """Return the settings of a decoder after its adapters are merged.

    An output layer no longer shares the weights of the embedding if one of them has an adapter.

    Args:
        settings: Of the model with adapters.
        layers: The names of the layers with adapters.
    """
    ends = {OUR_HEAD.removesuffix(".weight"), OUR_EMBEDDING.removesuffix(".weight")}
    if not settings.share_embedding_weights or ends.isdisjoint(layers):
        return settings
    return _settings_with(settings, {**arguments_of(settings), "share_embedding_weights": False})


def _settings_with(settings: DecoderSettings, arguments: Mapping[str, Any]) -> DecoderSettings:
    cls: Any = settings.SETTINGS if isinstance(settings, Decoder) else type(settings)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of settings without effect: said when the model was made
        found: DecoderSettings = cls(**arguments)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """What a folder of Hugging Face will have: planned, not written.

    Attributes:
        family: The family.
        config: The content of config.json.
        plan: The tensors.
        factors: Those that are multiplied into the weights, by layer.
    """

    family: Family
    config: Mapping[str, Any]
    plan: ConversionPlan
    factors: Mapping[str, float]


def plan_export(
    source: TensorSource,
    settings: Any,
    *,
    where: str,
    name: str | None = None,
    family: str | None = None,
    dtype: torch.dtype | None = None,
) -> Export:
    """Plan a folder of Hugging Face for the weights of one of our decoders.

    Args:
        source: The tensors, by the names of the model's state.
        settings: Of the model.
        where: Where the tensors are, for messages.
        name: The name of the model in its configuration; its family is tried first.
        family: The name of the family; None = the first that fits.
        dtype: Of the weights; None = as of the source.

    Raises:
        ConfigError: If a setting has no counterpart.
        CheckpointError: If the tensors do not match the settings.
    """
    found, config, settings, factors = family_fitting(settings, name=name, family=family)
    source = Scaled(source, factors) if factors else source
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of settings without effect: said when the model was made
        shapes = shapes_of(found.model_class, arguments_of(settings))
    plan = plan_theirs(found.rules(settings), source, shapes, where=where, dtype=dtype)
    embedding = plan.specs[found.embedding].dtype
    config = config | {"dtype": str(embedding).removeprefix("torch.")}
    config["torch_dtype"] = config["dtype"]  # the key before transformers 5
    return Export(family=found, config=config, plan=plan, factors=factors)


def family_fitting(
    settings: Any, *, name: str | None = None, family: str | None = None
) -> tuple[Family, dict[str, Any], Any, dict[str, float]]:
    """Return the family of our settings, its config.json, and the settings that it fits.

    These differ from ours if the factors of muP and others are to be multiplied into the weights.

    Args:
        settings: Of our decoder.
        name: The name of the model in its configuration; its family is tried first.
        family: The name of the family; None = the first that fits.

    Returns:
        The family, config.json, the settings, and the factors: see `scales.without_factors`.

    Raises:
        ConfigError: If a setting has no counterpart.
    """

    def fit(one: Any) -> tuple[Family, dict[str, Any]]:
        if family is None:
            return family_for(one, name)
        asked = _family_asked(family)
        return asked, asked.make_config(one)

    refusals: list[ConfigError] = []
    for one, factors in _with_fewer_factors(settings):
        try:
            return *fit(one), one, factors
        except ConfigError as error:
            refusals.append(error)
    others = (one for one in refusals if str(one).partition(":")[0] not in FACTORS)
    raise next(others, refusals[0])


def _with_fewer_factors(
    settings: Any,
) -> Iterator[tuple[Any, dict[str, float]]]:
    """Yield the settings, then those with factors multiplied into the weights."""
    yield settings, {}
    if isinstance(settings, nn.Module) and not isinstance(settings, Decoder):
        return
    for of_embedding in dict.fromkeys((False, settings.embeddings_scale != 1)):
        arguments, factors = without_factors(
            settings, arguments_of(settings), of_embedding=of_embedding
        )
        if factors:
            yield _settings_with(settings, arguments), factors


def _family_asked(name: str) -> Family:
    known = families() | other_families()
    if name not in known:
        raise ConfigError(f"--family: {name!r} is not one of {', '.join(sorted(known))}.")
    return known[name]


def write_export(
    export: Export,
    folder: Path,
    *,
    tokenizer: TokenizerFiles | None = None,
    tokenizer_where: str = "",
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a folder that transformers loads: all of it, or nothing.

    Args:
        export: What `plan_export` returned.
        folder: The new folder; its parent must exist.
        tokenizer: Files to write with it.
        tokenizer_where: Where they are from, for messages.
        shard_bytes: Maximum size of a file of weights.

    Raises:
        ConfigError: If the tokenizer has more ids than the model has embeddings.
        CheckpointError: If the folder exists or cannot be written, or the source is damaged.
    """
    tokenizer = tokenizer or TokenizerFiles()
    if "vocab_size" in export.config:
        tokenizer.check(export.config["vocab_size"], tokenizer_where)
    # Given though they are null: classes have defaults of their own.
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    ids = {name: tokenizer.token_ids.get(name) for name in names}
    if export.family.kind != "decoder":
        ids = {name: one for name, one in ids.items() if one is not None}
    with new_folder(folder, num_bytes_of(export.plan.specs)) as hidden:
        write_json(hidden / "config.json", {**export.config, **ids})
        if GENERATION not in tokenizer.content and export.family.generates:
            write_json(hidden / GENERATION, {"_from_model_config": True, **ids})
        tokenizer.write(hidden)
        write_tensors(hidden, export.plan.specs, export.plan.tensors(), shard_bytes=shard_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Import:
    """Our weights of a folder of Hugging Face: planned, not written.

    Attributes:
        family: The family.
        arguments: The constructor arguments of our decoder.
        settings: Its settings.
        plan: The tensors, by the names of its state; an output layer that shares the weights of
            the embedding is not among them.
        weights: The tensors of the folder.
    """

    family: Family
    arguments: Mapping[str, Any]
    settings: Any
    plan: ConversionPlan
    weights: LazyWeights


def plan_import(folder: Path, *, key: str, dtype: torch.dtype | None = None) -> Import:
    """Plan our weights for a folder of Hugging Face.

    Args:
        folder: With config.json and weights: safetensors or files of torch.save.
        key: The setting or option that gives it, for messages.
        dtype: Of the weights; None = as in the files.

    Raises:
        ConfigError: If the folder has no config.json or weights, only pickles, or an architecture
            or option without counterpart.
        CheckpointError: If the tensors do not match config.json, or files are damaged.
    """
    config = read_config(folder, key=key)
    where = str(folder / "config.json")
    family = family_of(config, where=where)
    arguments = family.read_config(config, where)
    settings = settings_of(family.model_class, arguments)
    weight_files(folder, key=key)
    shapes = shapes_of(family.model_class, arguments)
    weights = open_weights(folder)
    plan = plan_ours(
        family.rules(settings),
        weights,
        shapes,
        family,
        where=repr(str(folder)),
        dtype=dtype,
    )
    return Import(family=family, arguments=arguments, settings=settings, plan=plan, weights=weights)


def write_ours(
    folder: Path,
    plan: ConversionPlan,
    *,
    aliases: Mapping[str, str],
    model_yaml: str,
    tokenizer: TokenizerFiles,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write our weights, `model.yaml` and the tokenizer: all of it, or nothing.

    Args:
        folder: The new folder; its parent must exist.
        plan: The tensors.
        aliases: Their further names: tied weights.
        model_yaml: The content of `model.yaml`.
        tokenizer: Files to write with it.
        shard_bytes: Maximum size of a file of weights.

    Raises:
        CheckpointError: If the folder exists or cannot be written, or the source is damaged.
    """
    with new_folder(folder, num_bytes_of(plan.specs)) as hidden:
        write_text(hidden / MODEL_YAML, model_yaml)
        tokenizer.write(hidden)
        write_tensors(hidden, plan.specs, plan.tensors(), shard_bytes=shard_bytes, aliases=aliases)


def aliases_of(settings: Any) -> dict[str, str]:
    """Return further names of our tensors: tied weights.

    `settings`: of a decoder, or another model without values.
    """
    if isinstance(settings, nn.Module):
        return tied_names(settings)
    return {OUR_HEAD: OUR_EMBEDDING} if settings.share_embedding_weights else {}


def tokenizer_of(given: Path | None, source: Path) -> tuple[TokenizerFiles, str]:
    """Return the files of a tokenizer and where they are from.

    Args:
        given: The one asked for; None = the source's, if it has one.
        source: The folder that is converted.

    Raises:
        ConfigError: If the one asked for does not exist, or is damaged.
    """
    if given is not None:
        return read_tokenizer(given), repr(str(given))
    if source.is_dir():
        return read_tokenizer(source, is_required=False), repr(str(source))
    return TokenizerFiles(), ""
