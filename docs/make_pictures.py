"""Draws each schedule as docs/pictures/NAME.svg: python docs/make_pictures.py [folder]

The values are those of the shipped classes; the same arguments stand in reference/schedules.md.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, Final

from modelzoo_trainer.optim import SCHEDULERS, Scheduler

STEPS: Final = 1000
WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 360, 150, 52, 24, 10
RIGHT: Final = 12

WARMUP: Final[dict[str, Any]] = {
    "LinearLR": {"initial_learning_rate": 0.0, "end_learning_rate": 0.01, "total_iters": 200}
}
DECAY: Final[dict[str, Any]] = {
    "CosineDecayLR": {"initial_learning_rate": 0.01, "end_learning_rate": 0.0, "total_iters": 800}
}
RATE: Final[dict[str, Any]] = {"initial_learning_rate": 0.01}
EXAMPLES: Final[dict[str, dict[str, Any]]] = {
    "ConstantLR": {"learning_rate": 0.01},
    "LinearLR": {**RATE, "end_learning_rate": 0.001, "total_iters": 800},
    "CosineDecayLR": {**RATE, "end_learning_rate": 0.001, "total_iters": 800},
    "PolynomialLR": {**RATE, "end_learning_rate": 0.001, "total_iters": 800, "power": 2.0},
    "ExponentialLR": {**RATE, "total_iters": 400, "decay_rate": 0.3},
    "InverseExponentialTimeDecayLR": {
        **RATE,
        "step_exponent": 1.0,
        "total_iters": 200,
        "decay_rate": 1.0,
    },
    "InverseSquareRootDecayLR": {
        "initial_learning_rate": 0.1,
        "scale": 1.0,
        "warmup_steps": 100,
    },
    "StepLR": {**RATE, "step_size": 250, "gamma": 0.5},
    "MultiStepLR": {**RATE, "gamma": 0.3, "milestones": [400, 800]},
    "PiecewiseConstantLR": {"learning_rates": [0.002, 0.01, 0.005], "milestones": [200, 700]},
    "MultiplicativeLR": {**RATE, "coefficient": 0.997},
    "CosineAnnealingLR": {**RATE, "T_max": 400, "eta_min": 0.001},
    "CosineAnnealingWarmRestarts": {**RATE, "T_0": 140, "T_mult": 2},
    "CyclicLR": {"base_lr": 0.001, "max_lr": 0.01, "step_size_up": 150, "mode": "triangular2"},
    "OneCycleLR": {"initial_learning_rate": 0.001, "max_lr": 0.01, "total_steps": 900},
    "WarmupStableDecay": {
        "learning_rate": 0.01,
        "total_iters": 950,
        "warmup_steps": 100,
        "decay_ratio": 0.2,
    },
    "SequentialLR": {"schedulers": [WARMUP, DECAY]},
    "ChainedScheduler": {
        "schedulers": [
            {"CosineDecayLR": {**RATE, "end_learning_rate": 0.001, "total_iters": 1000}},
            {"StepLR": {"initial_learning_rate": 1.0, "step_size": 300, "gamma": 0.7}},
        ]
    },
}
"""The arguments of each picture, as in a configuration file."""


def make(name: str, arguments: dict[str, Any]) -> Scheduler:
    """Return a schedule without an optimizer."""
    given = dict(arguments)
    if "schedulers" in given:
        given["schedulers"] = [make(*next(iter(one.items()))) for one in given["schedulers"]]
    return SCHEDULERS[name](None, **given)


def values_of(name: str) -> list[float]:
    """Return the value at each step of a picture."""
    schedule = make(name, EXAMPLES[name])
    return [schedule.value(step) for step in range(STEPS + 1)]


def points(values: list[float]) -> list[tuple[int, float]]:
    """Return the steps that a line needs: both sides of a jump, and enough of a curve."""
    top = max(values)
    kept = [
        step
        for step in range(len(values))
        if step % 10 == 0
        or abs(values[step] - values[step - 1]) > top / 50
        or (step + 1 < len(values) and abs(values[step + 1] - values[step]) > top / 50)
    ]
    return [(step, values[step]) for step in kept]


def picture(name: str) -> str:
    """Return the SVG of a schedule."""
    values = values_of(name)
    top = max(values)
    across = (WIDTH - LEFT - RIGHT) / STEPS
    up = (HEIGHT - TOP - BOTTOM) / top
    base = HEIGHT - BOTTOM
    line = " ".join(f"{LEFT + x * across:.1f},{base - y * up:.1f}" for x, y in points(values))
    text = 'font-family="sans-serif" font-size="11" fill="#666"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" '
            f'viewBox="0 0 {WIDTH} {HEIGHT}" role="img">',
            f"<title>{name}: learning rate over {STEPS} steps</title>",
            f'<path d="M{LEFT} {TOP} V{base} H{WIDTH - RIGHT}" fill="none" stroke="#999"/>',
            f'<polyline points="{line}" fill="none" stroke="#1f77b4" stroke-width="2"/>',
            f'<text x="{LEFT - 4}" y="{TOP + 8}" text-anchor="end" {text}>{top:.3g}</text>',
            f'<text x="{LEFT - 4}" y="{base}" text-anchor="end" {text}>0</text>',
            f'<text x="{LEFT}" y="{HEIGHT - 8}" {text}>step 0</text>',
            f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 8}" text-anchor="end" {text}>{STEPS}</text>',
            "</svg>",
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=Path(__file__).parent / "pictures")
    folder: Path = parser.parse_args().folder
    folder.mkdir(exist_ok=True)
    for name in EXAMPLES:
        (folder / f"{name}.svg").write_text(picture(name), encoding="utf-8")


if __name__ == "__main__":
    main()
