"""From text to a trained model, on one process and on two: python -m benchmarks.text_to_model.

Writes the text of Python's standard library as JSON lines, with a tokenizer of bytes or one that is
trained on it, preprocesses the text (`configs/preprocessing/text.yaml`), and trains
`configs/llama_30m.yaml` on the rows: on one process, then on two, sharded with FSDP2. Prints the
validation loss after each step, the largest difference between the two runs, and their time and
memory. Batches and rows are smaller than in the file, the model is not.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_ROOT: Final = Path(__file__).resolve().parents[1]
_CONFIGS: Final = _ROOT / "configs"
_END: Final = "<eos>"
VOCAB_SIZES: Final = {"bpe": 8192, "bytes": 257}
LAYERS: Final = {"bpe": 8, "bytes": 9}
"""With these both models have about 30 million parameters."""


def texts(max_bytes: int | None = None) -> Iterator[str]:
    """Yield the modules of the standard library, the smallest first.

    `max_bytes`: stop after so many; None = all.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    paths = [*folder.glob("*.py"), *folder.glob("[a-z]*/*.py")]
    kept = [path for path in paths if path.parent.name not in ("test", "site-packages")]
    left = sys.maxsize if max_bytes is None else max_bytes
    for size, path in sorted((path.stat().st_size, path) for path in kept):
        left -= size
        if left < 0:
            return
        yield path.read_text(encoding="utf-8", errors="replace")


def write_corpus(folder: Path, vocab_size: int, max_bytes: int | None = None) -> None:
    """Write `texts/stdlib.jsonl` and `tokenizer.json`.

    Args:
        folder: Where; created.
        vocab_size: Of the tokenizer; 257 = bytes and the token that ends a document.
        max_bytes: As for `texts`.
    """
    corpus = list(texts(max_bytes))
    (folder / "texts").mkdir(parents=True, exist_ok=True)
    with (folder / "texts/stdlib.jsonl").open("w", encoding="utf-8") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in corpus)
    _save_tokenizer(folder / "tokenizer.json", corpus, vocab_size)


def _save_tokenizer(path: Path, corpus: Sequence[str], vocab_size: int) -> None:
    """Train byte-level BPE; with 257 tokens there are no merges."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    tokenizer.save(str(path))


def write_rows(folder: Path, length: int) -> str:
    """Preprocess with the shipped configuration in `folder`; return the report.

    Args:
        folder: As `write_corpus` left it; receives `rows`.
        length: Tokens in a row.
    """
    settings = (_CONFIGS / "preprocessing/text.yaml").read_text(encoding="utf-8")
    changed = settings.replace("max_seq_length: 512", f"max_seq_length: {length}")
    changed = changed.replace("mode: pretraining", "mode: pretraining\n  processes: 1")
    (folder / "text.yaml").write_text(changed, encoding="utf-8")
    words = ["-m", "modelzoo_trainer", "data_preprocess", "text.yaml"]
    return _run([sys.executable, *words], folder).output


def arguments(run: str, steps: int, changes: Sequence[str]) -> list[str]:
    """Return the arguments of a fit that validates after each step, in the folder with `rows`.

    Args:
        run: Folder of the run.
        steps: Training steps.
        changes: Further values for `--set`.
    """
    given = [
        "init.device=cpu",
        f"init.model_dir={run}",
        f"init.loop.max_steps={steps}",
        "init.loop.eval_frequency=1",
        "init.loop.eval_steps=2",
        "init.checkpoint.steps=null",
        "init.logging.log_steps=1",
        "init.callbacks=[]",
        "fit.train_dataloader.num_workers=0",
        "fit.val_dataloader.num_workers=0",
        *changes,
    ]
    words = [word for one in given for word in ("--set", one)]
    return ["fit", str(_CONFIGS / "llama_30m.yaml"), *words]


def validation_losses(run: Path) -> list[float]:
    """Return the validation loss after each step of a run."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return [line["validate_0/loss"] for line in lines if "validate_0/loss" in line]


# ---- whole runs


@dataclass(frozen=True, slots=True)
class Ended:
    """What a command printed, its time, and the memory of its largest process."""

    output: str
    seconds: float
    mib: float


def _run(command: Sequence[str], folder: Path) -> Ended:
    """Run a command to its end.

    Raises:
        SystemExit: If it fails, with what it printed.
    """
    env = os.environ | {"PYTHONPATH": str(_ROOT), "OMP_NUM_THREADS": "1"}
    start = time.perf_counter()
    with tempfile.TemporaryFile("w+") as file:
        process = subprocess.Popen(
            command, cwd=folder, env=env, stdout=file, stderr=subprocess.STDOUT
        )
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        file.seek(0)
        output = file.read()
    if process.returncode:
        raise SystemExit(f"{' '.join(command)}\n{output}")
    return Ended(output, time.perf_counter() - start, usage.ru_maxrss / 1024)


def compare(folder: Path, steps: int, changes: Sequence[str]) -> None:
    """Train on one process and on two; print a table."""
    found, ends = {}, []
    for num in (1, 2):
        run = f"runs/{num}"
        start = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num}"]
        words = [*(start if num > 1 else []), "-m", "modelzoo_trainer"]
        ended = _run([sys.executable, *words, *arguments(run, steps, changes)], folder)
        found[num] = validation_losses(folder / run)
        first = next(line for line in ended.output.splitlines() if line.startswith("Training "))
        ends.append(f"{first}: {ended.seconds:.0f} s, {ended.mib:.0f} MiB per process")
    print("| step | 1 process | 2 processes | difference |\n|---|---|---|---|")
    differences = [abs(one - two) for one, two in zip(found[1], found[2], strict=True)]
    for step, values in enumerate(zip(found[1], found[2], differences, strict=True), 1):
        print("| {} | {:.7f} | {:.7f} | {:.1e} |".format(step, *values))
    print(f"\nlargest difference: {max(differences):.1e}", *ends, "", sep="\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--kinds", nargs="+", choices=VOCAB_SIZES, default=list(VOCAB_SIZES))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--length", type=int, default=128, help="tokens in a row")
    parser.add_argument("--batch", type=int, default=8, help="rows in a batch")
    parser.add_argument("--max_bytes", type=int, default=None, help="of the text; default: all")
    given = parser.parse_args()
    for kind in given.kinds:
        changes = [
            f"init.model.vocab_size={VOCAB_SIZES[kind]}",
            f"init.model.num_hidden_layers={LAYERS[kind]}",
            f"fit.train_dataloader.batch_size={given.batch}",
            f"fit.val_dataloader.batch_size={given.batch}",
        ]
        with tempfile.TemporaryDirectory() as name:
            start = time.perf_counter()
            write_corpus(Path(name), VOCAB_SIZES[kind], given.max_bytes)
            print(f"{kind}: text and tokenizer: {time.perf_counter() - start:.0f} s")
            print(write_rows(Path(name), given.length), flush=True)
            compare(Path(name), given.steps, changes)


if __name__ == "__main__":
    main()
