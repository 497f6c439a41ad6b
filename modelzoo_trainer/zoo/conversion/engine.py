"""Apply rules: plan the tensors of the other side without reading, then make them one by one."""

from __future__ import annotations

import re
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol

import torch
from torch import Tensor, nn

from modelzoo_trainer.errors import CheckpointError
from modelzoo_trainer.zoo.conversion.family import Family
from modelzoo_trainer.zoo.conversion.rules import Copy, Rule, common_dtype
from modelzoo_trainer.zoo.conversion.weights_folder import Shape, TensorSpec
from modelzoo_trainer.zoo.models.decoder import Decoder

_DTYPES: Final = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_OLDER_NORM: Final = re.compile(r"(LayerNorm)\.(gamma|beta)$")
OUR_HEAD: Final = "lm_head.weight"
OUR_EMBEDDING: Final = "token_embeddings.weight"


class TensorSource(Protocol):
    """Tensors that are read one at a time, such as `checkpointing.lazy_weights.LazyWeights`."""

    def names(self) -> Collection[str]:
        """Return the names of all tensors."""
        ...

    def shape(self, name: str) -> Shape:
        """Return the shape of a tensor, without reading it."""
        ...

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor, without reading it."""
        ...

    def read(self, name: str) -> Tensor:
        """Read a tensor, on the host."""
        ...


class InMemory:
    """A source of tensors that are in memory."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def names(self) -> list[str]:
        """Return the names of all tensors."""
        return list(self._tensors)

    def shape(self, name: str) -> Shape:
        """Return the shape of a tensor."""
        return tuple(self._tensors[name].shape)

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor."""
        return self._tensors[name].dtype

    def read(self, name: str) -> Tensor:
        """Return a tensor on the host, which shares its memory if it is there already."""
        return self._tensors[name].detach().cpu()


class PartOf:
    """The tensors of a part of a model, by their names in the part.

    Args:
        source: Tensors of the model.
        prefix: What their names there start with.
    """

    def __init__(self, source: TensorSource, prefix: str) -> None:
        self._source = source
        self._prefix = prefix

    def names(self) -> list[str]:
        """Return the names of all tensors of the part."""
        found = (name for name in self._source.names() if name.startswith(self._prefix))
        return [name.removeprefix(self._prefix) for name in found]

    def shape(self, name: str) -> Shape:
        """Return the shape of a tensor, without reading it."""
        return self._source.shape(self._prefix + name)

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor, without reading it."""
        return self._source.dtype(self._prefix + name)

    def read(self, name: str) -> Tensor:
        """Read a tensor, on the host."""
        return self._source.read(self._prefix + name)


def shapes_of(cls: type[nn.Module], arguments: Mapping[str, Any]) -> dict[str, Shape]:
    """Return the shapes of the tensors of a model, without allocating any.

    Tied weights, such as an output layer with the weights of the embedding, are listed once.
    """
    model = on_meta(cls, arguments)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    for alias in tied_names(model):
        del shapes[alias]
    return shapes


def on_meta(cls: Any, arguments: Mapping[str, Any]) -> Any:
    """Return a model without values, which has its settings as attributes."""
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of settings without effect: said when a run begins
        return cls(**arguments)


def settings_of(cls: Any, arguments: Mapping[str, Any]) -> Any:
    """Return the settings of a decoder, or another model without values, which has them."""
    return cls.settings_of(**arguments) if issubclass(cls, Decoder) else on_meta(cls, arguments)


def tied_names(model: nn.Module) -> dict[str, str]:
    """Return the names of tensors that share their values with one of an earlier name: this."""
    first: dict[int, str] = {}
    found: dict[str, str] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        kept = first.setdefault(id(tensor), name)
        if kept != name:
            found[name] = kept
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    rule: Rule
    towards: Literal["ours", "theirs"]
    inputs: tuple[str, ...]  # names in the source
    outputs: tuple[str, ...]
    dtype: torch.dtype  # in which the inputs are read
    shapes: tuple[Shape, ...]  # of ours


class ConversionPlan:
    """The tensors of the target: what they are, and how they are made; a `TensorSource` itself.

    Attributes:
        specs: The tensors by name, in the order in which they are made.
        num_rounded: Number of values made by `tensors` so far that do not give the original value
            on the way back, because their difference to it has no exact float32.
    """

    def __init__(
        self, specs: Mapping[str, TensorSpec], steps: Sequence[_Step], source: TensorSource
    ) -> None:
        self.specs = specs
        self._steps = steps
        self._source = source
        self._step_of = {name: step for step in steps for name in step.outputs}
        self.num_rounded = 0

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Make the tensors one at a time, in the order of `specs`.

        Cost: In host memory, a tensor of each side at a time; with rules that combine tensors, the
            combined one and one of its parts.
        """
        for step in self._steps:
            for name, tensor in _made(step, self._source, self.specs):
                if step.rule.ours_in_float32 and step.towards == "theirs":
                    self.num_rounded += _num_rounded(step, self._source, tensor)
                yield name, tensor

    def names(self) -> list[str]:
        """Return the names of all tensors."""
        return list(self.specs)

    def shape(self, name: str) -> Shape:
        """Return the shape of a tensor, without making it."""
        return self.specs[name].shape

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor, without making it."""
        return self.specs[name].dtype

    def read(self, name: str) -> Tensor:
        """Make one tensor; of several that are made of the same, each call reads that again."""
        made = _made(self._step_of[name], self._source, self.specs)
        return next(tensor for found, tensor in made if found == name)

    def original_of(self, name: str) -> str | None:
        """Return the tensor of the source that a tensor is a copy of, None if it is none."""
        step = self._step_of[name]
        is_copy = type(step.rule) is Copy and step.dtype == self.specs[name].dtype
        return step.inputs[0] if is_copy else None


def _made(
    step: _Step, source: TensorSource, specs: Mapping[str, TensorSpec]
) -> Iterator[tuple[str, Tensor]]:
    def read(number: int) -> Tensor:
        return source.read(step.inputs[number]).to(step.dtype)

    if step.towards == "theirs":
        tensors = step.rule.to_theirs(read)
    else:
        tensors = step.rule.to_ours(read, step.shapes)
    for name, tensor in zip(step.outputs, tensors, strict=True):
        yield name, _as_dtype(tensor, specs[name].dtype, name)


def _as_dtype(tensor: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    """Return a tensor in another dtype; refuse one with values that are infinite in it alone."""
    if tensor.dtype == dtype:
        return tensor
    found = tensor.to(dtype)
    is_narrower = torch.finfo(dtype).max < torch.finfo(tensor.dtype).max
    if is_narrower and bool((found.isinf() & tensor.isfinite()).any()):
        largest = tensor.abs().nan_to_num(0.0, 0.0).max().item()
        raise CheckpointError(
            f"Tensor {name!r} has values up to {largest:.3g}, which {dtype} cannot represent. Use "
            f"bfloat16 or float32 as dtype."
        )
    return found


def _num_rounded(step: _Step, source: TensorSource, made: Tensor) -> int:
    """Return how many values of our tensor do not come back from `made`, which is made of it."""
    if made.dtype.itemsize < 4:
        return 0  # a dtype that was asked for, or that of ours
    (back,) = step.rule.to_ours(lambda number: made, step.shapes)
    return int((back != source.read(step.inputs[0])).sum())


def plan_theirs(
    rules: Sequence[Rule],
    source: TensorSource,
    shapes: Mapping[str, Shape],
    *,
    where: str,
    dtype: torch.dtype | None = None,
) -> ConversionPlan:
    """Plan the tensors of the other layout from the tensors of one of our decoders.

    Args:
        rules: As of a `Family`.
        source: Our tensors.
        shapes: Those that they must have, by name: see `shapes_of`.
        where: Where the tensors are, for messages.
        dtype: Of floating-point tensors of the target; None = as of the source.

    Raises:
        CheckpointError: If a tensor is missing, has another shape, or has no rule.
    """
    _check_covered(rules, shapes)
    own = {name: name for name in source.names()}
    _check_names(source, shapes, own, ignored={OUR_HEAD}, where=where)
    specs: dict[str, TensorSpec] = {}
    steps: list[_Step] = []
    for rule in rules:
        ours = tuple(shapes[name] for name in rule.ours)
        common = _dtype_of(source, rule.ours)
        target = _as_asked(common, dtype)
        for name, shape in zip(rule.theirs, rule.their_shapes(ours), strict=True):
            specs[name] = TensorSpec(shape=shape, dtype=target)
        steps.append(
            _Step(
                rule=rule,
                towards="theirs",
                inputs=rule.ours,
                outputs=rule.theirs,
                dtype=common,
                shapes=ours,
            )
        )
    return ConversionPlan(specs, steps, source)


def plan_ours(
    rules: Sequence[Rule],
    source: TensorSource,
    shapes: Mapping[str, Shape],
    family: Family,
    *,
    where: str,
    dtype: torch.dtype | None = None,
) -> ConversionPlan:
    """Plan the tensors of one of our decoders from the tensors of a Hugging Face family.

    Arguments are as of `plan_theirs`; `source` has their tensors.

    Raises:
        CheckpointError: If a tensor is missing, has another shape, or is not expected.
    """
    _check_covered(rules, shapes)
    expected = _their_shapes(rules, shapes)
    names = _names_in(source, expected, family.base_prefix)
    unread = [name for rule in rules if not rule.ours for name in rule.theirs]
    rules = [rule for rule in rules if rule.ours or not rule.theirs]
    expected = {name: shape for name, shape in expected.items() if name not in unread}
    dropped = {*_matching(names, family.dropped), *unread}
    for name, again in family.same.items():
        if name in names and again in names:
            _check_same(source, names[name], names[again], where)
            dropped.add(name)
    is_tied = family.head not in expected
    if is_tied and family.head in names:
        _check_tied(source, names, family, where)
        dropped.add(family.head)
    _check_names(source, expected, names, ignored=dropped, where=where)
    return _planned_ours(rules, source, shapes, names, dtype)


def plan_named_as_ours(
    rules: Sequence[Rule],
    source: TensorSource,
    shapes: Mapping[str, Shape],
    *,
    ignored: Collection[str],
    where: str,
    dtype: torch.dtype | None = None,
) -> ConversionPlan:
    """Plan the tensors of one of our decoders from a layout with the names of the rules.

    `ignored`: tensors of the source that are not expected, but no error. The others as of
    `plan_theirs`.

    Raises:
        CheckpointError: If a tensor is missing, has another shape, or is not expected.
    """
    _check_covered(rules, shapes)
    expected = _their_shapes(rules, shapes)
    names = {name: name for name in source.names()}
    _check_names(source, expected, names, ignored=ignored, where=where)
    return _planned_ours(rules, source, shapes, names, dtype)


def _their_shapes(rules: Sequence[Rule], shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    """Return the shapes of the tensors there that rules make of ours."""
    found: dict[str, Shape] = {}
    for rule in rules:
        ours = tuple(shapes[name] for name in rule.ours)
        found |= zip(rule.theirs, rule.their_shapes(ours), strict=True)
    return found


def _planned_ours(
    rules: Sequence[Rule],
    source: TensorSource,
    shapes: Mapping[str, Shape],
    names: Mapping[str, str],
    dtype: torch.dtype | None,
) -> ConversionPlan:
    """`names`: the names in the source by the names of the rules."""
    specs: dict[str, TensorSpec] = {}
    steps: list[_Step] = []
    for rule in rules:
        ours = tuple(shapes[name] for name in rule.ours)
        inputs = tuple(names[name] for name in rule.theirs)
        common = _dtype_of(source, inputs)
        target = _as_asked(common, dtype)
        if rule.ours_in_float32:
            target = torch.promote_types(target, torch.float32)
        for name, shape in zip(rule.ours, ours, strict=True):
            specs[name] = TensorSpec(shape=shape, dtype=target)
        steps.append(
            _Step(
                rule=rule,
                towards="ours",
                inputs=inputs,
                outputs=rule.ours,
                dtype=common,
                shapes=ours,
            )
        )
    return ConversionPlan(specs, steps, source)


def _check_covered(rules: Sequence[Rule], shapes: Mapping[str, Shape]) -> None:
    named = [name for rule in rules for name in rule.ours]
    if sorted(named) != sorted(shapes):
        odd = sorted({*named} ^ {*shapes}) or sorted(named)
        raise CheckpointError(
            f"The tensor {odd[0]!r} of the model has no counterpart in the other layout, or two."
        )


def _dtype_of(source: TensorSource, names: Sequence[str]) -> torch.dtype:
    dtypes = [source.dtype(name) for name in names]
    return common_dtype(dtypes) if dtypes else torch.float32


def _as_asked(found: torch.dtype, asked: torch.dtype | None) -> torch.dtype:
    return asked if asked is not None and found.is_floating_point else found


def _names_in(source: TensorSource, expected: Collection[str], prefix: str) -> dict[str, str]:
    """Return the names in the source by their full names, with the prefix if they lack it."""
    found = source.names()
    lacks_prefix = not any(name.startswith(prefix) for name in found)
    full: dict[str, str] = {}
    for name in found:
        known = name if name in expected or not lacks_prefix else f"{prefix}{name}"
        full[_OLDER_NORM.sub(_as_today, known)] = name
    return full


def _as_today(found: re.Match[str]) -> str:
    return f"{found[1]}.{'weight' if found[2] == 'gamma' else 'bias'}"


def _matching(names: Collection[str], patterns: Sequence[str]) -> list[str]:
    return [name for name in names if any(re.fullmatch(one, name) for one in patterns)]


def _check_same(source: TensorSource, one: str, other: str, where: str) -> None:
    is_equal = source.shape(one) == source.shape(other)
    if not is_equal or not torch.equal(source.read(one), source.read(other)):
        raise CheckpointError(
            f"{where}: {one} differs from {other}, but they are the same weights in the models of "
            f"this package."
        )


def _check_tied(source: TensorSource, names: Mapping[str, str], family: Family, where: str) -> None:
    """Refuse an output layer that differs from the embedding, though config.json ties them."""
    if family.embedding not in names:
        return  # reported as missing
    head, embedding = names[family.head], names[family.embedding]
    is_equal = source.shape(head) == source.shape(embedding)
    if not is_equal or not torch.equal(source.read(head), source.read(embedding)):
        raise CheckpointError(
            f"{where}: {head} differs from {embedding}, but config.json has "
            f"tie_word_embeddings: true. Set it to false if the output layer has its own weights."
        )


def _check_names(
    source: TensorSource,
    expected: Mapping[str, Shape],
    names: Mapping[str, str],
    *,
    ignored: Collection[str],
    where: str,
) -> None:
    """Refuse the first tensor of the source that is missing, unexpected, or unlike a weight.

    `names`: the names in the source, by full name. `ignored`: full names.
    """
    missing = [name for name in expected if name not in names]
    if missing:
        total = f" (missing in total: {len(missing)})" if len(missing) > 1 else ""
        raise CheckpointError(
            f"{where} has no tensor {missing[0]!r}, which a model of these settings has"
            f"{total}. Do the settings match the weights, and are all files there?"
        )
    for name, shape in expected.items():
        found = source.shape(names[name])
        if found != shape:
            raise CheckpointError(
                f"{where}: tensor {names[name]!r} has the shape {list(found)}, but the "
                f"settings give {list(shape)}. Use the settings with which the weights were made."
            )
        dtype = source.dtype(names[name])
        if dtype not in _DTYPES:
            raise CheckpointError(
                f"{where}: tensor {names[name]!r} is of {dtype}; supported: "
                f"{', '.join(map(str, _DTYPES))}. If the weights are quantized, save the model "
                f"without: dequantize, then save_pretrained, of transformers."
            )
    odd = [names[name] for name in names if name not in expected and name not in ignored]
    if odd:
        total = f" (such tensors in total: {len(odd)})" if len(odd) > 1 else ""
        raise CheckpointError(
            f"{where} has the tensor {odd[0]!r}, which a model of these settings does not "
            f"have{total}. Use the settings with which the weights were made."
        )
