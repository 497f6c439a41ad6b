"""muP over the width: sizes of activations (coordinate check), and the best learning rate.

python benchmarks/mup.py coordinates [--pictures docs/images]
python benchmarks/mup.py rates [--pictures docs/images]
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from modelzoo_trainer.optim import OPTIMIZERS
from modelzoo_trainer.zoo.models.registry import model_class

WIDTHS: Final = (64, 128, 256, 512)
PARTS: Final = ("embedding", "attention", "ffn", "logits")
SMALL: Final[Mapping[str, Any]] = {
    "num_heads": 4,  # heads get wider, which is what the factor 1 / D on scores is for
    "num_hidden_layers": 2,
    "vocab_size": 64,
    "max_position_embeddings": 32,
    "dropout_rate": 0.0,
    "embedding_dropout_rate": 0.0,
    "attention_dropout_rate": 0.0,
}
NUM_NEXT: Final = 4  # tokens that may follow a token, with equal probability
WIDTH, HEIGHT, LEFT, BOTTOM, TOP, GAP = 330, 230, 46, 36, 40, 16
COLORS: Final = ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd")
Figures = dict[bool, dict[float, dict[str, float]]]  # muP or not; x; line; y


def make_model(name: str, width: int, *, uses_mup: bool, base: int = 64, **settings: Any) -> Any:
    """Return a small decoder of a width, with muP from the width `base` or without."""
    bases = {"mup_base_hidden_size": base, "mup_base_filter_size": 4 * base} if uses_mup else {}
    sizes = {"hidden_size": width, "filter_size": 4 * width}
    return model_class(name)(**{**SMALL, **sizes, **bases, **settings})


def make_optimizer(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """Return AdamW with an eps that is small beside the gradients of every width."""
    return OPTIMIZERS["AdamW"](model, lr=lr, weight_decay=0.0, eps=1e-8)


def coordinates(
    make: Callable[[int], Any], widths: Sequence[int] = WIDTHS, *, lr: float = 0.003, steps: int = 4
) -> dict[int, dict[str, float]]:
    """Return the mean absolute activation of each of `PARTS` after some steps, by width.

    All widths start from the same seed, and train on one fixed batch with AdamW.
    """
    found = {}
    for width in widths:
        torch.manual_seed(0)
        model = make(width)
        ids = torch.randint(model.vocab_size, (8, 17))
        batch = {"input_ids": ids[:, :-1], "labels": ids[:, 1:]}
        optimizer = make_optimizer(model, lr)
        for _ in range(steps):
            train(model, optimizer, batch)
        found[width] = sizes_of(model, batch["input_ids"])
    return found


def sizes_of(model: Any, input_ids: Tensor) -> dict[str, float]:
    """Return the mean absolute value of the activations in the last layer, and of embeddings."""
    seen: dict[str, Tensor] = {}

    def keep_input(_: nn.Module, args: Any) -> None:
        seen["embedding"] = args[0]

    def keep(name: str) -> Callable[..., None]:
        return lambda module, args, output: seen.update({name: output})

    handles = [
        model.layers[0].register_forward_pre_hook(keep_input),
        model.layers[-1].attention.register_forward_hook(keep("attention")),
        model.layers[-1].ffn.register_forward_hook(keep("ffn")),
    ]
    with torch.no_grad():
        seen["logits"] = model.logits(input_ids)
    for handle in handles:
        handle.remove()
    return {part: seen[part].abs().mean().item() for part in PARTS}


def train(model: Any, optimizer: Any, batch: Mapping[str, Tensor]) -> float:
    """Take one step and return the loss."""
    optimizer.zero_grad()
    loss: Tensor = model(batch)["loss"]
    torch.autograd.backward(loss)
    optimizer.step()
    return loss.item()


def final_loss(width: int, *, uses_mup: bool, lr: float, base: int, steps: int) -> float:
    """Return the mean loss of the last tenth of the steps on a random process over tokens.

    Every token has `NUM_NEXT` successors, so the best possible loss is ln(NUM_NEXT). The learning
    rate rises over the first tenth of the steps, then falls to 0.
    """
    torch.manual_seed(0)
    model = make_model("gpt2", width, uses_mup=uses_mup, base=base)
    optimizer = make_optimizer(model, lr)
    rates = [group["lr"] for group in optimizer.param_groups]
    generator = torch.Generator().manual_seed(1)
    nexts = torch.randint(model.vocab_size, (model.vocab_size, NUM_NEXT), generator=generator)
    losses = []
    for step in range(steps):
        ids = [torch.randint(model.vocab_size, (16,), generator=generator)]
        for _ in range(model.max_position_embeddings):
            choice = torch.randint(NUM_NEXT, (16,), generator=generator)
            ids.append(nexts[ids[-1], choice])
        rows = torch.stack(ids, dim=1)
        share = (step + 1) / steps
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * min(10 * share, (1 - share) / 0.9 + 1e-3)
        losses.append(train(model, optimizer, {"input_ids": rows[:, :-1], "labels": rows[:, 1:]}))
    last = losses[-max(steps // 10, 1) :]
    return sum(last) / len(last)


@dataclass(frozen=True)
class Plot:
    """Two plots side by side that share both axes: standard parametrization, and muP.

    Args:
        title: What is drawn.
        figures: The values.
        x_name: Name of the values on the horizontal axis, which have equal distances.
        y_name: Name of the vertical axis, above the plots.
        log_y: Whether the vertical axis is logarithmic.
    """

    title: str
    figures: Figures
    x_name: str
    y_name: str
    log_y: bool

    def svg(self) -> str:
        """Return the picture."""
        rows = next(iter(self.figures.values()))
        names = list(next(iter(rows.values())))
        values = [
            self._scaled(y)
            for rows in self.figures.values()
            for row in rows.values()
            for y in row.values()
        ]
        low, high = min(values), max(values)
        total = 2 * WIDTH + GAP
        lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{total}" height="{HEIGHT}" '
            f'viewBox="0 0 {total} {HEIGHT}" role="img">',
            f"<title>{self.title}</title>",
            _text(LEFT, 32, self.y_name),
        ]
        for number, (uses_mup, rows) in enumerate(sorted(self.figures.items())):
            start = LEFT + number * (WIDTH + GAP)
            lines.append(_text(start, 14, "muP" if uses_mup else "standard parametrization"))
            lines += self._half(start, rows, names, low, high)
        place = LEFT + WIDTH + GAP
        for color, name in zip(COLORS, names, strict=False):
            lines.append(_text(place, 32, name, color=color))
            place += 12 + 7 * len(name)
        return "\n".join([*lines, "</svg>", ""])

    def _half(
        self,
        start: int,
        rows: Mapping[float, Mapping[str, float]],
        names: Sequence[str],
        low: float,
        high: float,
    ) -> list[str]:
        stop, base = start + WIDTH - LEFT - 8, HEIGHT - BOTTOM
        step = (stop - start - 24) / max(len(rows) - 1, 1)
        across = {x: start + 12 + step * idx for idx, x in enumerate(sorted(rows))}

        def up(scaled: float) -> float:
            return base - 6 - (scaled - low) / (high - low) * (base - TOP - 12)

        lines = [f'<path d="M{start} {TOP} V{base} H{stop}" fill="none" stroke="#999"/>']
        for x, place in across.items():
            label = f"{x:g}" if x >= 1 else f"2^{math.log2(x):.0f}"
            lines.append(_text(place, base + 13, label, anchor="middle"))
        lines.append(_text(start, HEIGHT - 6, self.x_name))
        for scaled in (low, high):
            label = f"{10**scaled if self.log_y else scaled:.2g}"
            lines.append(_text(start - 4, up(scaled) + 4, label, anchor="end"))
        for color, name in zip(COLORS, names, strict=False):
            places = (
                f"{across[x]:.1f},{up(self._scaled(row[name])):.1f}"
                for x, row in sorted(rows.items())
            )
            lines.append(
                f'<polyline points="{" ".join(places)}" fill="none" stroke="{color}" '
                f'stroke-width="2"/>'
            )
        return lines

    def _scaled(self, value: float) -> float:
        return math.log10(value) if self.log_y else value


def _text(x: float, y: float, text: str, *, color: str = "#666", anchor: str = "start") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-family="sans-serif" '
        f'font-size="11" fill="{color}">{text}</text>'
    )


def show(figures: Figures, x_name: str) -> None:
    """Print a table per parametrization."""
    for uses_mup, rows in figures.items():
        names = list(next(iter(rows.values())))
        print(f"\n{'muP' if uses_mup else 'standard parametrization'}")
        print(f"| {x_name} | " + " | ".join(names) + " |")
        print("|---" * (len(names) + 1) + "|")
        for x, row in rows.items():
            print(f"| {x:.5g} | " + " | ".join(f"{row[name]:.4g}" for name in names) + " |")


def check_coordinates(args: argparse.Namespace) -> None:
    """Measure, print and draw sizes of activations."""
    figures: Figures = {
        uses_mup: {
            float(width): sizes
            for width, sizes in coordinates(
                lambda width, uses_mup=uses_mup: make_model("gpt2", width, uses_mup=uses_mup)
            ).items()
        }
        for uses_mup in (False, True)
    }
    show(figures, "hidden_size")
    if args.pictures is not None:
        title = "Mean absolute activations after 4 steps, over the width"
        plot = Plot(title, figures, "hidden_size", "mean absolute activation", log_y=True)
        text = plot.svg()
        (args.pictures / "mup_coordinates.svg").write_text(text, encoding="utf-8")


def check_rates(args: argparse.Namespace) -> None:
    """Measure, print and draw losses over learning rates."""
    powers = range(args.first, args.last + 1)
    figures: Figures = {False: {}, True: {}}
    for uses_mup, rows in figures.items():
        for power in powers:
            rows[2.0**power] = {
                f"{width}": final_loss(
                    width, uses_mup=uses_mup, lr=2.0**power, base=args.widths[0], steps=args.steps
                )
                for width in args.widths
            }
    show(figures, "learning rate")
    for uses_mup, rows in figures.items():
        best = {
            name: f"2^{math.log2(min(rows, key=lambda lr, name=name: rows[lr][name])):.0f}"
            for name in map(str, args.widths)
        }
        print(f"best, {'muP' if uses_mup else 'standard'}: {best}")
    if args.pictures is not None:
        title = "Final loss over the learning rate, by width"
        plot = Plot(title, figures, "learning rate", "final loss", log_y=False)
        text = plot.svg()
        (args.pictures / "mup_rates.svg").write_text(text, encoding="utf-8")


def main() -> None:
    """Run one of the measurements."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["coordinates", "rates"])
    parser.add_argument("--pictures", type=Path, help="folder for an SVG")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--widths", type=int, nargs="+", default=[32, 64, 128, 256])
    parser.add_argument("--first", type=int, default=-11, help="smallest power of two of the rate")
    parser.add_argument("--last", type=int, default=-5)
    args = parser.parse_args()
    (check_coordinates if args.what == "coordinates" else check_rates)(args)


if __name__ == "__main__":
    main()
