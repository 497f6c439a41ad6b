"""Time of a step of AdamW: torch's, and ours with eps before and after the bias correction.

python benchmarks/adam.py [--device cpu] [--rounds 60] [--width 512] [--layers 4]

The parameters are matrices and biases, as in a stack of layers. The three optimizers step in
turns, with one thread; the table shows the lower quartile of the rounds in milliseconds. `default`
is what torch chooses; `fused` are its fused kernels, which runs on a GPU use. With weight decay,
eps before the correction reads and writes the parameters once more than the fused kernel.
"""

from __future__ import annotations

import argparse
import time
from typing import Any, Final

import torch
from torch import nn

from modelzoo_trainer.optim import AdamW

KINDS: Final[dict[str, Any]] = {
    "torch": lambda groups: torch.optim.AdamW(groups, lr=1e-3, weight_decay=0.1),
    "before": lambda groups: AdamW(groups, lr=1e-3, weight_decay=0.1),
    "after": lambda groups: AdamW(groups, lr=1e-3, weight_decay=0.1, eps_after_correction=True),
}


def parameters(width: int, layers: int, device: str) -> list[nn.Parameter]:
    """Return parameters with gradients."""
    shapes = [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)]
    shapes = [one for shape in shapes for one in (shape, shape[:1])] * layers
    params = [nn.Parameter(torch.randn(shape, device=device)) for shape in shapes]
    for param in params:
        param.grad = torch.randn_like(param)
    return params


def wait(device: str) -> None:
    """Wait for the device."""
    if torch.device(device).type != "cpu":
        torch.accelerator.synchronize()


def measure(options: argparse.Namespace, flags: dict[str, bool]) -> dict[str, float]:
    """Return the milliseconds of a step by kind."""
    optimizers = {}
    for name, make in KINDS.items():
        params = parameters(options.width, options.layers, options.device)
        optimizers[name] = make([{"params": params, **flags}])
    times: dict[str, list[float]] = {name: [] for name in KINDS}
    for _ in range(options.rounds):
        for name, optimizer in optimizers.items():
            wait(options.device)
            start = time.perf_counter()
            optimizer.step()
            wait(options.device)
            times[name].append(1000 * (time.perf_counter() - start))
    return {name: sorted(found)[len(found) // 4] for name, found in times.items()}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cpu")
    for name, default in {"rounds": 60, "width": 512, "layers": 4}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("| | " + " | ".join(KINDS) + " |\n|" + "---|" * (len(KINDS) + 1))
    cases: dict[str, dict[str, bool]] = {"default": {}, "fused": {"fused": True}}
    for name, flags in cases.items():
        row = measure(options, flags)
        print(f"| {name} | " + " | ".join(f"{value:.2f}" for value in row.values()) + " |")


if __name__ == "__main__":
    main()
