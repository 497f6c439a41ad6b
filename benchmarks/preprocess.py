"""Throughput of `data_preprocess` relative to bare tokenizers: python benchmarks/preprocess.py.

The text is the standard library of this Python. Runs with two processes alternate with two
processes that each call `encode_batch` of the tokenizers library, and `.ids`, on half of the same
documents, which they have read beforehand. The start of the processes counts for preprocessing
alone, so the ratio is a lower bound, and a useful one only if the text takes many seconds.

With `--cpu`, both run in one process, and CPU time is compared, which depends less on what else the
machine does; it lacks only the pipes between the processes.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sysconfig
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from modelzoo_trainer.config.preprocessing import parse_settings
from modelzoo_trainer.zoo.rows.preprocessing import pipeline
from modelzoo_trainer.zoo.rows.sections import PreprocessingSettings

PROCESSES = 2
HOOK = "modelzoo_trainer.zoo.rows.preprocessing.hooks:text_read_hook"


def texts_of_library(most: float) -> list[str]:
    """Return files of up to so many million characters in all."""
    root = Path(sysconfig.get_path("stdlib"))
    paths = [path for path in sorted(root.rglob("*.py")) if "site-packages" not in path.parts]
    found = []
    for path in paths:
        try:
            found.append(path.read_text(encoding="utf-8").strip())
        except UnicodeDecodeError:
            continue
    found = [text for text in found if text]
    size = sum(map(len, found)) / 1e6
    return found[:: max(1, round(size / most))]


def make_tokenizers(folder: Path, texts: list[str]) -> dict[str, Path]:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    paths = {}
    for name, size in {"byte-level": 257, "BPE of 8,000": 8000}.items():
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=size,
            special_tokens=["<eos>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        tokenizer.train_from_iterator(texts[::5], trainer)
        paths[name] = folder / f"{size}.json"
        tokenizer.save(str(paths[name]))
    return paths


def tokenize(path: str, texts: list[str], start: Any, times: Any) -> None:
    """Tokenize all texts, in batches of about a MiB, and report seconds and tokens."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(path)
    batches: list[list[str]] = [[]]
    size = 0
    for text in texts:
        if size > 1 << 20:
            batches.append([])
            size = 0
        batches[-1].append(text)
        size += len(text)
    [one.ids for one in tokenizer.encode_batch(batches[0])]
    start.wait()
    begin = time.perf_counter()
    num_tokens = sum(len(one.ids) for batch in batches for one in tokenizer.encode_batch(batch))
    times.put((begin, time.perf_counter(), num_tokens))


def bare_cpu(path: Path, texts: list[str]) -> float:
    """Return tokens per second of CPU time of tokenization alone."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(path))
    begin = time.process_time()
    num_tokens = 0
    for start in range(0, len(texts), 64):
        batch = tokenizer.encode_batch(texts[start : start + 64])
        num_tokens += sum(len(one.ids) for one in batch)
    return num_tokens / (time.process_time() - begin)


def preprocessed_cpu(settings: PreprocessingSettings) -> float:
    """Return tokens per second of CPU time of a whole run in this process."""
    settings = replace(settings, setup=replace(settings.setup, processes=1))
    begin = time.process_time()
    [facts] = pipeline.preprocess(settings)
    return facts.stats.tokens / (time.process_time() - begin)


def bare(path: Path, texts: list[str]) -> float:
    """Return tokens/s of two processes that only tokenize."""
    context = multiprocessing.get_context("spawn")
    start, times = context.Barrier(PROCESSES), context.Queue()
    shares = [texts[one::PROCESSES] for one in range(PROCESSES)]
    workers = [
        context.Process(target=tokenize, args=(str(path), share, start, times)) for share in shares
    ]
    for worker in workers:
        worker.start()
    found = [times.get() for _ in workers]
    for worker in workers:
        worker.join()
    seconds = max(end for _, end, _ in found) - min(begin for begin, _, _ in found)
    return sum(count for _, _, count in found) / seconds


def preprocessed(settings: PreprocessingSettings) -> float:
    """Return tokens/s of a whole run, with the start of its processes and the writing of all files.

    Leaving out the start by not counting the first unit would favour it: by the time of the first
    result, the other processes have done units too, which would count without their time.
    """
    begin = time.perf_counter()
    [facts] = pipeline.preprocess(settings)
    return facts.stats.tokens / (time.perf_counter() - begin)


def settings_for(folder: Path, tokenizer: Path, uses_ftfy: bool) -> PreprocessingSettings:
    out = tempfile.mkdtemp(dir=folder)
    text = f"""
setup: {{mode: pretraining, processes: {PROCESSES}, output_dir: {out},
        data: {{type: local, source: {folder / "in"}}}}}
processing: {{huggingface_tokenizer: {tokenizer}, tokenizer_params: {{eos_token: <eos>}},
             use_ftfy: {str(uses_ftfy).lower()}, max_seq_length: 2048,
             read_hook: "{HOOK}", read_hook_kwargs: {{text_key: text}}}}
"""
    return parse_settings(text)[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--size", type=float, default=100, help="of the text, in million characters"
    )
    parser.add_argument("--cpu", action="store_true", help="compare CPU time in one process")
    options = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    texts = texts_of_library(options.size)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "in").mkdir()
        lines = (json.dumps({"text": text}) + "\n" for text in texts)
        (folder / "in" / "a.jsonl").write_text("".join(lines), encoding="utf-8")
        size = sum(map(len, texts)) / 1e6
        print(f"{len(texts)} documents, {size:.1f} million characters, {PROCESSES} processes")
        for kind, path in make_tokenizers(folder, texts).items():
            ratios: dict[bool, list[float]] = {True: [], False: []}
            best: dict[str, float] = {}
            for _ in range(options.repeats):
                for uses_ftfy, found in ratios.items():
                    settings = settings_for(folder, path, uses_ftfy)
                    speed = (bare_cpu if options.cpu else bare)(path, texts)
                    ours = (preprocessed_cpu if options.cpu else preprocessed)(settings)
                    found.append(ours / speed)
                    best["bare"] = max(best.get("bare", 0), speed)
                    key = "with ftfy" if uses_ftfy else "without ftfy"
                    best[key] = max(best.get(key, 0), ours)
            for uses_ftfy, found in ratios.items():
                shown = ", ".join(f"{one:.0%}" for one in sorted(found))
                print(
                    f"{kind}, {'with' if uses_ftfy else 'without'} ftfy: median "
                    f"{statistics.median(found):.0%} ({shown})"
                )
            print("  best, million tokens/s:", {k: round(v / 1e6, 2) for k, v in best.items()})


if __name__ == "__main__":
    main()
