"""Settings of a model of trunks, heads and losses, checked and read."""

# Annotations are evaluated here: the fields are read for the checks of settings.
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from modelzoo_trainer.base.constraints import FiniteFloat, Size, UnitInterval, checked_dataclass
from modelzoo_trainer.base.nested_settings import made, refuse_misspelt_name
from modelzoo_trainer.errors import ConfigError, suggest
from modelzoo_trainer.zoo.models.vision.dino.head import DinoHeadSettings
from modelzoo_trainer.zoo.models.vision.dino.losses import DistillationSettings
from modelzoo_trainer.zoo.models.vision.dino.references import (
    BATCH,
    HEADS,
    LOSSES,
    TRUNKS,
    BatchEntry,
    Call,
    Module,
    Output,
    read_calls,
    read_module,
)
from modelzoo_trainer.zoo.models.vision.multi_image import MultiImageSettings

DINO_LOSS: Final = "DinoDistillationLoss"
PATCH_LOSS: Final = "iBOTPatchLoss"
_INNER: Final = {TRUNKS: "image_model", HEADS: "head_model", LOSSES: "loss"}
_CLASSES: Final[Mapping[str, Mapping[str, type[Any]]]] = {
    TRUNKS: {"MultiImageViTModel": MultiImageSettings},
    HEADS: {"DinoHead": DinoHeadSettings},
    LOSSES: {DINO_LOSS: DistillationSettings, PATCH_LOSS: DistillationSettings},
}
_NUM_ARGUMENTS: Final = {
    "MultiImageViTModel": (1, 3),
    "DinoHead": (1, 1),
    DINO_LOSS: (2, 3),
    PATCH_LOSS: (3, 3),
}
_TEACHERS: Final = {DINO_LOSS: 1, PATCH_LOSS: 0}  # the argument with the scores of the teacher
_KEYS: Final = {"MultiImageViTModel": (0, 2), PATCH_LOSS: (2,)}  # arguments that a batch has
_NUM_OUTPUTS: Final = {TRUNKS: 2, HEADS: 1, LOSSES: 1}
_MASKS: Final = 2  # the argument of a trunk


@checked_dataclass(kw_only=True)
class _PartSettings:
    forward_args: list[Any]
    image_model: dict[str, Any] | None = None
    head_model: dict[str, Any] | None = None
    loss: dict[str, Any] | None = None
    stop_grad: bool = False
    loss_weight: FiniteFloat = 1.0


@checked_dataclass(kw_only=True)
class CosineDecay:
    """The share of a teacher that stays in an update, by step.

    Args:
        ema_decay_start: Before the first step.
        ema_decay_end: In the last step, and after it.
        total_steps: Steps between them.
    """

    ema_decay_start: UnitInterval
    ema_decay_end: UnitInterval
    total_steps: Size


@checked_dataclass(kw_only=True)
class _AverageSettings:
    source: str
    target: str
    scheduler_name: Literal["cosine"]
    scheduler_params: dict[str, Any]


@checked_dataclass(kw_only=True)
class _CopySettings:
    source: str
    target: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPart:
    """A trunk, a head or a loss.

    Args:
        name: Of its class.
        settings: Of its class.
        calls: The arguments of each call.
        stop_grad: Whether it is called without gradients.
        weight: Of a loss.
    """

    name: str
    settings: Any
    calls: Sequence[Call]
    stop_grad: bool
    weight: float


@dataclass(frozen=True, slots=True)
class Pair:
    """Two parts with equal parameters; `decay`: of an average, None = a copy."""

    source: Module
    target: Module
    decay: CosineDecay | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DinoPlan:
    """Settings of a model of several parts."""

    trunks: Sequence[ModelPart]
    heads: Sequence[ModelPart]
    losses: Sequence[ModelPart]
    copies: Sequence[Pair]
    averages: Sequence[Pair]

    @property
    def keys(self) -> list[str]:
        """The entries of a batch that the model reads."""
        parts = [*self.trunks, *self.heads, *self.losses]
        arguments = [one for part in parts for call in part.calls for one in call]
        return list(dict.fromkeys(one.name for one in arguments if isinstance(one, BatchEntry)))


def read_plan(
    trunks: object, heads: object, losses: object, copies: object, averages: object
) -> DinoPlan:
    """Return the settings of a model.

    Raises:
        ConfigError: If one is invalid, or they do not fit each other.
    """
    earlier: dict[str, list[list[int]]] = {}
    lists: dict[str, list[ModelPart]] = {}
    for kind, given in ((TRUNKS, trunks), (HEADS, heads), (LOSSES, losses)):
        if not isinstance(given, list) or not given:
            raise ConfigError(f"{kind}: expected a list with at least one part, got {given!r}.")
        lists[kind] = [
            _part(kind, one, f"{kind}[{number}]", earlier) for number, one in enumerate(given)
        ]
        num = _NUM_OUTPUTS[kind]
        earlier[kind] = [[num] * len(part.calls) for part in lists[kind]]
    sizes = {kind: len(parts) for kind, parts in lists.items()}
    plan = DinoPlan(
        trunks=lists[TRUNKS],
        heads=lists[HEADS],
        losses=lists[LOSSES],
        copies=_copies(copies, sizes),
        averages=_averages(averages, sizes),
    )
    _check_widths(plan)
    _check_teachers(plan)
    _check_pairs(plan)
    return plan


def _part(kind: str, given: object, where: str, earlier: Mapping[str, Any]) -> ModelPart:
    found = made(_PartSettings, given, where)
    _check_keys(kind, given, where)
    inside = f"{where}.{_INNER[kind]}"
    settings = dict(getattr(found, _INNER[kind]) or {})
    refuse_misspelt_name(settings, inside)
    name, known = settings.pop("name", None), _CLASSES[kind]
    if not isinstance(name, str) or name not in known:
        raise ConfigError(
            f"{inside}.name: {name!r} is not in this package. {suggest(str(name), known)} "
            f"Supported: {', '.join(known)}."
        )
    calls = read_calls(found.forward_args, f"{where}.forward_args", earlier)
    part = ModelPart(
        name=name,
        settings=made(known[name], settings, inside),
        calls=calls,
        stop_grad=found.stop_grad,
        weight=found.loss_weight,
    )
    for number, call in enumerate(calls):
        _check_call(name, call, f"{where}.forward_args[{number}]")
        if kind == TRUNKS and len(call) > _MASKS and call[_MASKS] is not None:
            _check_masks(part, f"{where}.forward_args[{number}][{_MASKS}]", inside)
    if kind == LOSSES and len(calls) > 1:
        raise ConfigError(
            f"{where}.forward_args: a loss has one call, got {len(calls)}. Add a loss for each."
        )
    return part


def _check_keys(kind: str, given: Any, where: str) -> None:
    """Check that a part has no setting of another kind."""
    for key in given:
        if key in _INNER.values() and key != _INNER[kind]:
            raise ConfigError(f"{where}.{key}: parts of {kind} have {_INNER[kind]}. Rename it.")
    if kind != LOSSES and "loss_weight" in given:
        raise ConfigError(f"{where}.loss_weight: only a loss has a weight. Remove it.")


def _check_masks(part: ModelPart, where: str, inside: str) -> None:
    if not part.settings.use_masked_patches:
        raise ConfigError(
            f"{where} masks patches, but {inside}.use_masked_patches is false. Set it to true."
        )


def _check_call(name: str, call: Call, where: str) -> None:
    least, most = _NUM_ARGUMENTS[name]
    if not least <= len(call) <= most or any(one is None for one in call[:1]):
        raise ConfigError(
            f"{where}: {name} requires {least if least == most else f'{least} to {most}'} "
            f"arguments, the first not null, got {len(call)}."
        )
    if name == "MultiImageViTModel" and len(call) > 1 and call[1] is not None:
        raise ConfigError(f"{where}[1]: this argument of {name} is not supported. Set it to null.")
    if name in (DINO_LOSS, PATCH_LOSS) and any(one is None for one in call[:least]):
        raise ConfigError(f"{where}: an argument of {name} is null. Give it an output.")
    for place, one in enumerate(call):
        is_of_batch = place in _KEYS.get(name, ())
        if one is not None and isinstance(one, BatchEntry) != is_of_batch:
            expected = "an entry of the batch" if is_of_batch else "an output of a trunk or a head"
            raise ConfigError(
                f"{where}[{place}]: {name} expects {expected} here, got {_text_of(one)}. Check the "
                f"order of the arguments."
            )


def _text_of(one: BatchEntry | Output) -> str:
    if isinstance(one, BatchEntry):
        return f"{BATCH}.output({one.name!r})"
    return f"{one.kind}.output({one.part}, {one.call}, {one.number})"


def _copies(given: object, sizes: Mapping[str, int]) -> list[Pair]:
    pairs = []
    for where, one in _entries("copy_init_weights", given):
        found = made(_CopySettings, one, where)
        pairs.append(_pair(found, where, sizes))
    return pairs


def _averages(given: object, sizes: Mapping[str, int]) -> list[Pair]:
    pairs: list[Pair] = []
    for where, one in _entries("ema", given):
        found = made(_AverageSettings, one, where)
        decay = made(CosineDecay, found.scheduler_params, f"{where}.scheduler_params")
        pair = _pair(found, where, sizes)
        if any(pair.target == other.target for other in pairs):
            raise ConfigError(f"{where}.target: {pair.target} is already averaged. Remove one.")
        pairs.append(Pair(pair.source, pair.target, decay))
    return pairs


def _entries(name: str, given: object) -> list[tuple[str, object]]:
    if given is None:
        return []
    if not isinstance(given, list):
        raise ConfigError(f"{name}: expected a list of mappings, got {given!r}.")
    return [(f"{name}[{number}]", one) for number, one in enumerate(given)]


def _pair(given: _CopySettings | _AverageSettings, where: str, sizes: Mapping[str, int]) -> Pair:
    source = read_module(given.source, f"{where}.source", sizes)
    target = read_module(given.target, f"{where}.target", sizes)
    if source == target:
        raise ConfigError(f"{where}: source and target are both {source}. Change one of them.")
    return Pair(source, target)


def _check_widths(plan: DinoPlan) -> None:
    """Check that parts have the widths of what they get."""
    widths = {
        TRUNKS: [part.settings.hidden_size for part in plan.trunks],
        HEADS: [part.settings.output_size for part in plan.heads],
    }
    names = {TRUNKS: "hidden_size", HEADS: "output_size"}
    for kind, parts in ((HEADS, plan.heads), (LOSSES, plan.losses)):
        for number, part in enumerate(parts):
            for one in (one for call in part.calls for one in call if isinstance(one, Output)):
                given, size = part.settings.input_size, widths[one.kind][one.part]
                if given != size:
                    raise ConfigError(
                        f"{kind}[{number}].{_INNER[kind]}.input_size is {given}, but "
                        f"{one.kind}[{one.part}] has the {names[one.kind]} {size}. Make them equal."
                    )


def _check_teachers(plan: DinoPlan) -> None:
    """Check that losses get the scores of a teacher where they expect them."""
    parts = {TRUNKS: plan.trunks, HEADS: plan.heads}
    for number, part in enumerate(plan.losses):
        place = _TEACHERS[part.name]
        one = part.calls[0][place]
        if isinstance(one, Output) and not parts[one.kind][one.part].stop_grad:
            raise ConfigError(
                f"{LOSSES}[{number}].forward_args[0][{place}]: {part.name} expects the scores of "
                f"a teacher here, but {one.kind}[{one.part}].stop_grad is false. Set it to true, "
                f"or exchange the arguments for student and teacher."
            )


def _check_pairs(plan: DinoPlan) -> None:
    """Check that pairs have the same parameters, as far as settings say."""
    parts = {TRUNKS: plan.trunks, HEADS: plan.heads}
    for name, pairs in (("copy_init_weights", plan.copies), ("ema", plan.averages)):
        for number, pair in enumerate(pairs):
            source, target = (parts[one.kind][one.part].name for one in (pair.source, pair.target))
            if source != target:
                raise ConfigError(
                    f"{name}[{number}]: {pair.source} is a {source}, {pair.target} a {target}. "
                    f"Name parts of the same class."
                )
