"""The names of the Cerebras Model Zoo for the weights of our decoders, in both directions.

There, the rotated dimensions of queries and keys are interleaved pairs. The final norm is there
twice: as `transformer_decoder.norm` and as `ln_f`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final

import torch

from modelzoo_trainer.checkpointing.lazy_weights import LazyWeights, open_weights
from modelzoo_trainer.errors import CheckpointError, ConfigError
from modelzoo_trainer.zoo.conversion.cerebras_experts import implementation_of, rule_of_experts
from modelzoo_trainer.zoo.conversion.cerebras_models import aliases_of_model, rules_of_model
from modelzoo_trainer.zoo.conversion.engine import (
    OUR_EMBEDDING,
    ConversionPlan,
    TensorSource,
    plan_named_as_ours,
    plan_theirs,
)
from modelzoo_trainer.zoo.conversion.families.bloom import OUR_SLOPES, Slopes
from modelzoo_trainer.zoo.conversion.rules import Copy, InterleavedRows, Rule
from modelzoo_trainer.zoo.conversion.weights_folder import Shape
from modelzoo_trainer.zoo.models.bert.settings import EncoderSettings
from modelzoo_trainer.zoo.models.decoder_settings import DecoderSettings
from modelzoo_trainer.zoo.models.published_names import published_name

PREFIX: Final = "model."
"""What precedes the names in checkpoints of a run there."""
_QUERIES_AND_KEYS: Final = re.compile(r"layers\.\d+\.attention\.[qk]_proj\.(weight|bias)")
_ROUTER: Final = re.compile(r"layers\.(\d+)\.ffn\.router\.(weight|bias)")
_POST_NORM: Final = re.compile(r"layers\.(\d+)\.(attention|ffn)_post_norm\.(\w+)")
_SLOPES: Final = "embedding_layer.position_embed_helper.slopes"
_OLDER: Final = {  # before version 2.1
    _SLOPES: "relative_pe_helper.slopes",
    "embedding_layer.position_embeddings.embed.weight": (
        "embedding_layer.position_embeddings.weight"
    ),
}
_FINAL_NORM: Final = {
    f"transformer_decoder.norm.{kind}": f"ln_f.{kind}" for kind in ("weight", "bias")
}
"""Its name that is read, and its name again."""
_UNUSED_ROUTER: Final = re.compile(r"\.ffn\.gate\.(weight|bias)$")
_HDF5: Final = (".mdl", ".h5", ".hdf5")


def rules_of(
    settings: DecoderSettings,
    shapes: Mapping[str, Shape],
    prefix: str = PREFIX,
    names: Collection[str] | None = None,
) -> list[Rule]:
    """Return the rules of a decoder's tensors for the names of the Model Zoo.

    Args:
        settings: Of our decoder.
        shapes: Of its tensors, by name.
        prefix: What precedes the names there: of a run, or "" of the converters of the Model Zoo.
        names: Those in a file, which may be of an older version, and of another implementation of
            experts than in the settings; None = of the current one.

    Raises:
        ConfigError: If a tensor has no published name.
    """
    rules: list[Rule] = []
    experts = settings.experts
    found = implementation_of(names or ())
    for name in shapes:
        if experts is not None:
            rule = rule_of_experts(name, prefix, experts, found or experts.moe_implementation)
            if rule is not None:
                rules.append(rule)
                continue
        their = _their_name(name)
        older = _OLDER.get(their, their)
        their = f"{prefix}{older if names and f'{prefix}{older}' in names else their}"
        is_made = name == OUR_SLOPES and not getattr(settings, "alibi_trainable_slopes", False)
        if is_made and names is not None and their not in names:
            rules.append(Slopes(settings.num_heads))
        else:
            rules.append(_rule(name, their, settings))
    return rules


def _rule(name: str, their: str, settings: DecoderSettings) -> Rule:
    if settings.position_embedding_type == "rotary" and _QUERIES_AND_KEYS.fullmatch(name):
        return InterleavedRows(name, their, settings.head_dim, settings.turning_dim)
    return Copy(name, their)


def _their_name(name: str) -> str:
    if name == OUR_SLOPES:
        return _SLOPES
    found = _ROUTER.fullmatch(name)
    if found is not None:
        return f"transformer_decoder.layers.{found[1]}.ffn.gate.{found[2]}"
    found = _POST_NORM.fullmatch(name)
    if found is not None:
        number = "1" if found[2] == "attention" else "3"
        return f"transformer_decoder.layers.{found[1]}.norm{number}_post.{found[3]}"
    published = published_name(name)
    if published is None:
        raise ConfigError(
            f"The tensor {name!r} of the model has no name in the Cerebras Model Zoo, so its "
            f"weights cannot be converted to or from it."
        )
    return published.removeprefix(PREFIX)


def open_cerebras(path: Path, *, key: str) -> LazyWeights:
    """Open weights with the names of the Model Zoo: a file of torch.save, or safetensors.

    Args:
        path: The file, or a folder of weights.
        key: The option that gives it, for messages.

    Raises:
        ConfigError: If it is an HDF5 file.
        CheckpointError: If it is missing or cannot be read.
    """
    inside = [] if not path.is_dir() else [one for one in path.iterdir() if _is_hdf5(one)]
    if _is_hdf5(path) or inside:
        shown = str(path if not inside else inside[0])
        raise ConfigError(
            f"{key}: {shown!r} is a checkpoint of the Cerebras software in its HDF5 format, "
            f"which has no documented reader. Where that software is installed, load it with "
            f"cstorch.load and save its 'model' with torch.save(state['model'], 'weights.pt'), "
            f"then convert weights.pt."
        )
    return open_weights(path)


def _is_hdf5(path: Path) -> bool:
    if path.suffix.lower() in _HDF5:
        return True
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(8) == b"\x89HDF\r\n\x1a\n"


def plan_from_cerebras(
    source: TensorSource,
    settings: Any,
    shapes: Mapping[str, Shape],
    *,
    where: str,
    dtype: torch.dtype | None = None,
) -> ConversionPlan:
    """Plan our weights from the Model Zoo's.

    Args:
        source: Their tensors.
        settings: Of our decoder, or another model of ours without values.
        shapes: Of its tensors: see `engine.shapes_of`.
        where: Where their tensors are, for messages.
        dtype: Of the weights; None = as of the source.

    Raises:
        ConfigError: If a tensor has no published name.
        CheckpointError: If the tensors do not match the settings.
    """
    names = source.names()
    prefix = PREFIX if any(name.startswith(PREFIX) for name in names) else ""
    if not _is_decoder(settings):
        aliases = {
            f"{prefix}{one}": prefix + two for one, two in aliases_of_model(settings).items()
        }
        for alias, name in aliases.items():
            _check_equal(source, name, alias, where, "though both are the same weights")
        rules = rules_of_model(settings, shapes, prefix)
        return plan_named_as_ours(rules, source, shapes, ignored=aliases, where=where, dtype=dtype)
    ignored = {f"{prefix}{again}" for again in _FINAL_NORM.values()}
    if settings.experts is not None and settings.experts.routing_algorithm != "learned":
        ignored |= {name for name in names if _UNUSED_ROUTER.search(name)}
    head, embedding = f"{prefix}lm_head.weight", f"{prefix}{_their_name(OUR_EMBEDDING)}"
    if settings.share_embedding_weights and head in names:
        why = "but share_embedding_weights is true. Set it to false in the model's settings"
        _check_equal(source, embedding, head, where, why)
        ignored.add(head)
    for once, again in _FINAL_NORM.items():
        why = "though both are the final norm. Remove the one that was not trained"
        _check_equal(source, f"{prefix}{once}", f"{prefix}{again}", where, why)
    rules = rules_of(settings, shapes, prefix, names)
    return plan_named_as_ours(rules, source, shapes, ignored=ignored, where=where, dtype=dtype)


def _is_decoder(settings: Any) -> bool:
    """Return whether settings belong to a decoder, and not to another model."""
    return isinstance(settings, DecoderSettings) and not isinstance(settings, EncoderSettings)


def _check_equal(source: TensorSource, one: str, other: str, where: str, why: str) -> None:
    """Refuse two tensors that are there and differ."""
    names = source.names()
    if one in names and other in names and not torch.equal(source.read(one), source.read(other)):
        raise CheckpointError(f"{where}: {other} differs from {one}, {why}.")


def plan_to_cerebras(
    source: TensorSource,
    settings: Any,
    shapes: Mapping[str, Shape],
    *,
    where: str,
    dtype: torch.dtype | None = None,
) -> ConversionPlan:
    """Plan the weights of the Model Zoo from ours; arguments as of `plan_from_cerebras`."""
    if _is_decoder(settings):
        rules = rules_of(settings, shapes)
    else:
        rules = rules_of_model(settings, shapes, PREFIX)
    return plan_theirs(rules, source, shapes, where=where, dtype=dtype)


def aliases_of(settings: Any, names: Collection[str]) -> dict[str, str]:
    """Return further names of tensors there, as the state of such a model has them.

    Args:
        settings: Of our decoder.
        names: Of the tensors there.
    """
    if not _is_decoder(settings):
        return {f"{PREFIX}{one}": PREFIX + two for one, two in aliases_of_model(settings).items()}
    found = {f"{PREFIX}{again}": f"{PREFIX}{once}" for once, again in _FINAL_NORM.items()}
    if settings.share_embedding_weights:
        found[f"{PREFIX}lm_head.weight"] = f"{PREFIX}{_their_name(OUR_EMBEDDING)}"
    return {alias: name for alias, name in found.items() if name in names}


def state_of(plan: ConversionPlan, settings: Any) -> dict[str, Any]:
    """Return the state for a file of torch.save, as a checkpoint of the Model Zoo has it.

    Cost: All tensors in host memory.
    """
    model = dict(plan.tensors())
    model |= {alias: model[name] for alias, name in aliases_of(settings, model).items()}
    return {"model": model}
