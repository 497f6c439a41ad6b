"""Every optimizer and schedule, compared with recorded values of the Cerebras Model Zoo 2.10.

`recorded/settings.json`: the arguments, the values of schedules before each of 60 steps, and which
arguments the original refuses. `recorded/optimizers.safetensors`: the weights after some of 50
steps.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.optim import OPTIMIZERS, SCHEDULERS

RECORDED: Final = Path(__file__).parent / "recorded"
SETTINGS: Final = json.loads((RECORDED / "settings.json").read_text(encoding="utf-8"))
WEIGHTS: Final = load_file(RECORDED / "optimizers.safetensors")
STEPS: Final = (0, 1, 2, 4, 9, 19, 24, 25, 29, 39, 49)
TOLERANCE: Final = 1e-6

DOCUMENTED: Final = {
    "NAdam": "`NAdam`",
    "NAdam/wd": "`NAdam`",
    "Adafactor/b1": "`Adafactor` with `beta1`, `clip_threshold` or `relative_step`",
    "Adafactor/clip": "`Adafactor` with `beta1`, `clip_threshold` or `relative_step`",
    "Muon": "`Muon`",
    "LinearLR/cycle": "`cycle: true` of `LinearLR`, `PolynomialLR`",
    "PolynomialLR/cycle": "`cycle: true` of `LinearLR`, `PolynomialLR`",
    "CosineAnnealingWarmRestarts": "`CosineAnnealingWarmRestarts`",
    "CosineAnnealingWarmRestarts/2": "`CosineAnnealingWarmRestarts` with `T_mult` above 1",
    "CosineAnnealingWarmRestarts/3": "`CosineAnnealingWarmRestarts` with `T_mult` above 1",
    "CyclicLR/exp_cycle": "`CyclicLR` with `exp_range` and `scale_mode: cycle`",
    "OneCycleLR": "`OneCycleLR`, `OneCycleWD` after `total_steps`",
    "OneCycleLR/lin": "`OneCycleLR`, `OneCycleWD` after `total_steps`",
    "OneCycleLR/3": "`OneCycleLR`, `OneCycleWD` after `total_steps`",
    "OneCycleWD": "`OneCycleLR`, `OneCycleWD` after `total_steps`",
    "SequentialLR/gap": "`milestones` of `SequentialLR` that are not the ends of its schedules",
    "SequentialLR/poly2": "`milestones` of `SequentialLR` that are not the ends of its schedules",
}
"""What differs, with the row of docs/from_cerebras.md that says so."""


def parts(*members: tuple[str, dict[str, Any]]) -> list[Any]:
    return [SCHEDULERS[name](None, **arguments) for name, arguments in members]


def line(start: float, end: float, length: int, name: str = "LinearLR", **more: Any) -> Any:
    rates = {"initial_learning_rate": start, "end_learning_rate": end}
    return name, {**rates, "total_iters": length, **more}


def composed(name: str) -> dict[str, Any]:
    """Return the arguments of a composed schedule."""
    warm_up = line(0.0, 1.0, 5)
    usual = (warm_up, line(1.0, 0.1, 10, "CosineDecayLR"), ("ConstantLR", {"learning_rate": 0.1}))
    if name == "ChainedScheduler":
        halved = {"initial_learning_rate": 1.0, "gamma": 0.5, "milestones": [10]}
        chain = parts(line(1.0, 0.1, 20, "CosineDecayLR"), ("MultiStepLR", halved))
        return {"schedulers": chain}
    if name == "SequentialLR/poly2":
        steps = {"initial_learning_rate": 1.0, "gamma": 0.5, "step_size": 4}
        poly = line(0.5, 0.0, 9, "PolynomialLR", power=1.0, cycle=True)
        return {"schedulers": parts(warm_up, ("StepLR", steps), poly), "milestones": [6, 21]}
    return {
        "schedulers": parts(*usual),
        "milestones": {"SequentialLR": [5, 15], "SequentialLR/gap": [8, 25]}[name],
    }


def values_of(name: str) -> list[float]:
    """Return the value of a schedule before each of 60 steps."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.7, weight_decay=0.2)
    arguments = SETTINGS["schedules"][name]["arguments"]
    if arguments is None:
        arguments = composed(name)
    schedule = SCHEDULERS[name.partition("/")[0]](optimizer, **arguments)
    found = []
    for _ in range(60):
        found.append(optimizer.param_groups[0][schedule.param_group_key])
        optimizer.step()
        schedule.step()
    return found


def weights_of(name: str) -> Tensor:
    """Return the weights of a small model after the recorded steps."""
    layers = [nn.Linear(6, 5), nn.LayerNorm(5), nn.Linear(5, 3, bias=False)]
    params = [param for layer in layers for param in layer.parameters()]
    draw = torch.Generator().manual_seed(1)
    for param in params:
        param.data = torch.randn(param.shape, generator=draw)
    arguments = SETTINGS["optimizers"][name]["arguments"]
    given = {key: tuple(one) if isinstance(one, list) else one for key, one in arguments.items()}
    optimizer = OPTIMIZERS[name.partition("/")[0]](params, **given)
    draw.manual_seed(2)
    found = []
    for step in range(50):
        if step == 25:
            for group in optimizer.param_groups:
                group["lr"] /= 2
        for param in params:
            scale = 1 + param.detach().abs().mean()
            param.grad = torch.randn(param.shape, generator=draw) * scale
        optimizer.step()
        if step in STEPS:
            found.append(torch.cat([param.detach().flatten() for param in params]))
    return torch.stack(found)


def is_equal(found: Tensor, expected: Tensor) -> bool:
    return bool(((found - expected).abs() <= TOLERANCE * expected.abs().clamp(min=1)).all())


def undocumented(part: str) -> list[str]:
    return [name for name in SETTINGS[part] if name not in DOCUMENTED]


@pytest.mark.parametrize("name", undocumented("optimizers"))
@pytest.mark.slow_cases(every=4)
def test_an_optimizer_has_the_weights_of_the_original(name: str) -> None:
    assert is_equal(weights_of(name), WEIGHTS[name])


@pytest.mark.parametrize("name", undocumented("schedules"))
def test_a_schedule_has_the_values_of_the_original(name: str) -> None:
    expected = SETTINGS["schedules"][name]["values"]
    assert values_of(name) == pytest.approx(expected, abs=TOLERANCE)


@pytest.mark.parametrize("name", DOCUMENTED)
def test_what_is_documented_differs(name: str) -> None:
    is_schedule = name in SETTINGS["schedules"]
    theirs = SETTINGS["schedules" if is_schedule else "optimizers"][name]
    if theirs["refused"]:
        found = torch.tensor(values_of(name)) if is_schedule else weights_of(name)
        assert found.isfinite().all()  # works here
    elif name.startswith("SequentialLR"):
        with pytest.raises(ConfigError):
            values_of(name)
    elif is_schedule:
        assert not is_equal(torch.tensor(values_of(name)), torch.tensor(theirs["values"]))
    else:
        assert not is_equal(weights_of(name), WEIGHTS[name])


def test_all_that_differs_is_documented() -> None:
    docs = Path(__file__).parents[2] / "docs"
    page = (docs / "from_cerebras.md").read_text(encoding="utf-8")
    section = page.partition("## Optimizers and schedules\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)
    assert set(rows) == set(DOCUMENTED.values())


def test_every_name_of_the_original_is_compared() -> None:
    names = {name.partition("/")[0] for part in SETTINGS.values() for name in part}
    assert names <= OPTIMIZERS.keys() | SCHEDULERS.keys()
    assert len(SETTINGS["optimizers"]) == 39
    assert len(SETTINGS["schedules"]) == 42
