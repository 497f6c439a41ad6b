"""Peak memory of `checkpoint convert` from and to Hugging Face.

python benchmarks/convert.py [--mb 600] [--shard-mb 100]

A llama of `--mb` megabytes of random float32 weights is written as weights of this trainer, then
converted to Hugging Face and back, each in a new process. "peak": the most resident memory of that
process over that before the conversion (Linux only), beside the largest tensor.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any, Final

import torch

from modelzoo_trainer.checkpointing.weights import write_weights
from modelzoo_trainer.cli.command import main as command
from modelzoo_trainer.config.loader import to_yaml
from modelzoo_trainer.zoo.models.gpt2 import Gpt2

MB: Final = 1_000_000
WIDTH: Final = 1024
SETTINGS: Final[dict[str, Any]] = {
    "vocab_size": 16384,  # the largest tensor: 67.1 MB
    "hidden_size": WIDTH,
    "num_heads": 16,
    "filter_size": 4 * WIDTH,
    "max_position_embeddings": 128,
    "position_embedding_type": "rotary",
    "rotary_dim": WIDTH // 16,
    "norm_type": "rmsnorm",
    "nonlinearity": "swiglu",
    "share_embedding_weights": False,
    "use_projection_bias_in_attention": False,
    "use_ffn_bias_in_attention": False,
    "use_ffn_bias": False,
}


def resident(field: str) -> int:
    """Return a figure of this process's memory in bytes: VmRSS, or its peak, VmHWM."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"this system has no {field}")


def measure(words: list[str]) -> None:
    """Run the command, and print the peak of this process's memory and the seconds."""
    with torch.device("meta"):  # the first use imports 80 MB of torch
        Gpt2(vocab_size=8, hidden_size=8, num_heads=1, num_hidden_layers=1)
    torch.set_num_threads(1)
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    start = time.perf_counter()
    code = command(["checkpoint", "convert", *words])
    seconds = time.perf_counter() - start
    print("measured", resident("VmHWM") - before, seconds, flush=True)
    sys.exit(code)


def make(folder: Path, mb: int) -> tuple[int, int]:
    """Write the weights; return their bytes, and those of the largest tensor."""
    per_layer = 4 * (4 * WIDTH**2 + 3 * WIDTH * SETTINGS["filter_size"])
    ends = 2 * 4 * SETTINGS["vocab_size"] * WIDTH
    settings = SETTINGS | {"num_hidden_layers": max(1, round((mb * MB - ends) / per_layer))}
    folder.mkdir()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state = Gpt2(**settings).state_dict()
    write_weights(state, folder / "model.safetensors")
    text = to_yaml({"model": {"name": "llama", **settings}})
    (folder / "model.yaml").write_text(text, encoding="utf-8")
    sizes = [tensor.nbytes for tensor in state.values()]
    return sum(sizes), max(sizes)


def main() -> None:
    """Measure both directions and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--mb", type=int, default=600)
    parser.add_argument("--shard-mb", type=int, default=100)
    args, words = parser.parse_known_args()
    if words:
        measure(words)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        total, largest = make(folder / "ours", args.mb)
        shard = f"{args.shard_mb}MB"
        print(f"{total / MB:.1f} MB, largest tensor {largest / MB:.1f} MB, shards of {shard}")
        print(f"{'':<24}{'peak, MB':>12}{'seconds':>10}")
        for source, target, flag in (("ours", "hf", "--to"), ("hf", "back", "--from")):
            own = [str(folder / source), str(folder / target), flag, "hf", "--shard-size", shard]
            done = subprocess.run(
                [sys.executable, __file__, *own], check=True, capture_output=True, text=True
            )
            peak, seconds = done.stdout.split("measured")[1].split()
            print(f"{flag + ' hf':<24}{int(peak) / MB:>12.1f}{float(seconds):>10.1f}", flush=True)


if __name__ == "__main__":
    main()
