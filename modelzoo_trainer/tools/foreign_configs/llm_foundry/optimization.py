"""Optimizers, schedules and clipping of llm-foundry and Composer."""

from __future__ import annotations

from typing import Any, Final

from modelzoo_trainer.tools.foreign_configs.duration import RunLengths, read_duration, tidy
from modelzoo_trainer.tools.foreign_configs.findings import FindingKind
from modelzoo_trainer.tools.foreign_configs.section import Section

_OPTIMIZERS: Final = {
    "decoupled_adamw": ("AdamW", [0.9, 0.95], 1e-8, 1e-5),
    "decoupled_lionw": ("Lion", [0.9, 0.99], None, 0.0),
}
"""Class here, and Composer's defaults of betas, eps and weight decay."""
_EXEMPT: Final = (
    "biases and normalization layers have no weight decay here; in llm-foundry all parameters do."
)


def convert_optimizer(root: Section) -> dict[str, Any] | None:
    """Return the section `optimizer`.

    Composer's decoupled optimizers shrink parameters by weight_decay * lr / initial lr in each
    step, those here by weight_decay * lr, so weight decay is divided by the initial learning rate.
    """
    section = root.inside("optimizer")
    name = section.text("name")
    if name not in _OPTIMIZERS:
        why = (
            f"it is unknown; {' and '.join(_OPTIMIZERS)} have counterparts. The converted file has "
            f"AdamW with the same lr: set another class."
        )
        section.note(FindingKind.ABSENT, "name", why)
        return {"AdamW": {"lr": section.number("lr", 1e-3)}}
    kind, betas, eps, decay = _OPTIMIZERS[name]
    lr = section.number("lr", 1e-3)
    arguments = {"lr": float(lr), "betas": section.betas("betas", betas)}
    if kind == "AdamW":
        arguments["eps"] = float(section.number("eps", eps))
        arguments["eps_after_correction"] = True
        if section.flag("amsgrad", False):
            arguments["amsgrad"] = True
    decay = section.number("weight_decay", decay)
    arguments["weight_decay"] = tidy(decay / lr) if lr else 0.0
    if decay:
        section.differs("weight_decay", _EXEMPT)
    return {kind: arguments}


def convert_scheduler(root: Section, run: RunLengths) -> list[dict[str, Any]]:
    """Return the section `schedulers`; empty = a constant learning rate."""
    if "scheduler" not in root:
        return []
    section = root.inside("scheduler")
    lr = float(root.inside("optimizer").number("lr", 1e-3))
    name = str(section.text("name"))
    main = _MAIN.get(name)
    if main is None:
        why = (
            f"it is unknown; {', '.join(_MAIN)} have counterparts. The learning rate is constant: "
            f"set schedulers, see docs/optimizers.md."
        )
        section.note(FindingKind.ABSENT, "name", why)
        return []
    warmup = _steps(section, "t_warmup", "0ba", run)
    if name == "constant_with_warmup":
        if section.take("t_max", "1dur") != "1dur":
            section.differs("t_max", "the learning rate stays constant until the run ends.")
        length = warmup
    else:
        length = _steps(section, "t_max", "1dur", run)
    if warmup is None or length is None:
        return []
    rest = main(section, lr, max(length - warmup, 1))
    if not warmup:
        return [rest]
    top = next(iter(rest.values()))
    peak = top.get("learning_rate", top.get("initial_learning_rate"))
    rise = {"initial_learning_rate": 0.0, "end_learning_rate": peak, "total_iters": warmup}
    if main is not _constant and warmup >= length:  # the run ends before the warm-up does
        return [{"LinearLR": rise}]
    return [{"SequentialLR": {"schedulers": [{"LinearLR": rise}, rest]}}]


def _steps(section: Section, key: str, default: str, run: RunLengths) -> int | None:
    """Return a length of a schedule in steps; None, with a finding, if it is unknown."""
    value = section.take(key, default)
    time = read_duration(value)
    if time is None:
        section.findings.mistake(
            f"{section.where(key)}: {value!r} is not a length of time, such as 100ba or 0.1dur."
        )
        return None
    steps = run.steps(time, up=False) if time.value else 0
    if steps is None:
        why = f"{run.why_unknown(time)} Until then the learning rate is constant."
        section.note(FindingKind.MISSING, key, why)
        for factor in ("alpha", "alpha_f", "alpha_i"):  # the schedule that is listed has them
            section.take(factor)
    return steps


def _constant(section: Section, lr: float, length: int) -> dict[str, Any]:
    return {"ConstantLR": {"learning_rate": tidy(lr * section.number("alpha", 1.0))}}


def _linear(section: Section, lr: float, length: int) -> dict[str, Any]:
    return {"LinearLR": _between(section, lr, length, section.number("alpha_i", 1.0))}


def _cosine(section: Section, lr: float, length: int) -> dict[str, Any]:
    return {"CosineDecayLR": _between(section, lr, length, 1.0)}


def _between(section: Section, lr: float, length: int, start: float) -> dict[str, Any]:
    return {
        "initial_learning_rate": tidy(lr * start),
        "end_learning_rate": tidy(lr * section.number("alpha_f", 0.0)),
        "total_iters": length,
    }


_MAIN: Final = {
    "cosine_with_warmup": _cosine,
    "linear_decay_with_warmup": _linear,
    "constant_with_warmup": _constant,
}


def convert_clipping(root: Section) -> dict[str, Any]:
    """Return the arguments of `precision` that clip gradients."""
    if "algorithms" not in root:
        return {}
    algorithms = root.inside("algorithms")
    if "gradient_clipping" not in algorithms:
        return {}
    section = algorithms.inside("gradient_clipping")
    kind = section.text("clipping_type")
    limit = section.number("clipping_threshold")
    name = {"norm": "max_gradient_norm", "value": "max_gradient_value"}.get(str(kind))
    if name is None:
        why = "adaptive clipping is not here. Set precision.max_gradient_norm."
        section.note(FindingKind.ABSENT, "clipping_type", why)
        return {}
    return {} if limit is None else {name: float(limit)}
