"""Processes that make the same rows at the same time, or are killed while they read."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from modelzoo_trainer.zoo.data import processor_class
from tests.zoo.rows.toys import byte_tokenizer

pytestmark = pytest.mark.slow
pytest.importorskip("datasets", reason="needs datasets")

NUM = 400
ROWS = """
import logging, os, signal, sys, time
from pathlib import Path
from modelzoo_trainer.zoo.data import processor_class
from modelzoo_trainer.zoo.data.hugging_face import row_cache
from modelzoo_trainer.zoo.data.hugging_face.encoding import TurnsEncoding

folder, kill_at, seconds = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])
logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
row_cache.CHUNK = 50
make, write = TurnsEncoding.rows, row_cache.write_tokens

def rows(self, examples, first, stats):
    if kill_at == f"row {first}":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(seconds)
    return make(self, examples, first, stats)

def write_tokens(path, *others):
    write(path, *others)
    if kill_at == ("ends" if path.stem.endswith("-ends") else "values"):
        os.kill(os.getpid(), signal.SIGKILL)

TurnsEncoding.rows, row_cache.write_tokens = rows, write_tokens
(folder / f"ready-{os.getpid()}").touch()
while len(list(folder.glob("ready-*"))) < int(sys.argv[4]):
    time.sleep(0.01)
made = processor_class("HuggingFaceDataProcessor")(
    path=str(folder / "data.jsonl"), tokenizer=str(folder / "bytes"), max_sequence_length=32,
    batch_size=4, cache_dir=str(folder / "cache"), shuffle=False,
)
print("path", made.dataset.path)
"""
STREAM = """
import os, signal, sys
from pathlib import Path
import torch
from modelzoo_trainer import Callback, Checkpoint, Trainer, TrainingLoop
from modelzoo_trainer.zoo.data import processor_class
from modelzoo_trainer.zoo.data.hugging_face import stream

stream.CHUNK = 17
folder, model_dir, kill_at, workers = Path(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:])

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Embedding(266, 1)
    def forward(self, batch):
        return self.layer(batch["input_ids"].long()).sin().mean()

class Kill(Callback):
    def on_train_step_end(self, trainer, model, outputs, batch):
        if trainer.global_step == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    made = processor_class("HuggingFaceDataProcessor")(
        path=str(folder / "data.jsonl"), tokenizer=str(folder / "bytes"), max_sequence_length=48,
        batch_size=4, streaming=True, packing=True, num_workers=workers,
        cache_dir=str(folder / "cache"),
    )
    trainer = Trainer(
        model=Model, optimizer=lambda m: torch.optim.AdamW(m.parameters(), lr=0.01),
        loop=TrainingLoop(max_steps=40), checkpoint=Checkpoint(steps=7), model_dir=model_dir,
        callbacks=[Kill()], seed=1,
    )
    trainer.fit(made.create_dataloader())
    print("weights", trainer.model.layer.weight.detach().numpy().tobytes().hex())
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rows = [json.dumps({"text": f"<{row:03}>" * (1 + row % 3)}) + "\n" for row in range(NUM)]
    (tmp_path / "data.jsonl").write_text("".join(rows))
    byte_tokenizer(tmp_path / "bytes")
    (tmp_path / "rows.py").write_text(ROWS)
    (tmp_path / "stream.py").write_text(STREAM)
    return tmp_path


def start(folder: Path, program: str, *arguments: Any) -> subprocess.Popen[str]:
    command = [sys.executable, str(folder / program), str(folder), *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def run(folder: Path, program: str, *arguments: Any) -> tuple[int, str]:
    process = start(folder, program, *arguments)
    output, _ = process.communicate(timeout=120)
    return process.returncode, output


def texts_of(folder: Path) -> list[str]:
    """Return the texts of the cached rows, which must be there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("modelzoo_trainer.zoo.data.hugging_face.row_cache.CHUNK", 50)
        patch.setattr("modelzoo_trainer.zoo.data.hugging_face.row_cache._write", None)
        made: Any = processor_class("HuggingFaceDataProcessor")(
            path=str(folder / "data.jsonl"),
            tokenizer=str(folder / "bytes"),
            max_sequence_length=32,
            batch_size=1,
            cache_dir=str(folder / "cache"),
            shuffle=False,
        )
    rows = [batch["input_ids"][0].tolist() for batch in made.create_dataloader()]
    return [made.tokenizer.decode(row).replace("<pad>", "").replace("<eos>", "") for row in rows]


EXPECTED = [f"<{row:03}>" * (1 + row % 3) for row in range(NUM)]


def test_of_two_processes_one_makes_the_rows_and_the_other_waits(folder: Path) -> None:
    processes = [start(folder, "rows.py", "never", 0.1, 2) for _ in range(2)]
    outputs = [process.communicate(timeout=120)[0] for process in processes]

    assert [process.returncode for process in processes] == [0, 0], outputs
    assert sorted(text.count("Tokenizing") for text in outputs) == [0, 1]
    assert sorted(text.count("Waiting for another process") for text in outputs) == [0, 1]
    assert texts_of(folder) == EXPECTED


def read_until(process: subprocess.Popen[str], text: str) -> None:
    """Read the lines of a process up to one with a text."""
    assert process.stdout is not None
    assert any(text in line for line in process.stdout), process.wait()


def test_a_process_that_waits_for_a_killed_one_makes_the_rows(folder: Path) -> None:
    first = start(folder, "rows.py", "never", 600, 1)
    read_until(first, "Tokenizing")
    second = start(folder, "rows.py", "never", 0, 1)
    read_until(second, "Waiting for another process")

    first.kill()
    first.communicate(timeout=120)
    output, _ = second.communicate(timeout=120)

    assert second.returncode == 0, output
    assert "Tokenizing" in output
    assert texts_of(folder) == EXPECTED


# CI: a kill in each phase: among the rows, their values and their ends.
@pytest.mark.soak_cases("row 0")
@pytest.mark.parametrize("kill_at", ["row 0", "row 150", "values", "ends"])
def test_a_killed_process_leaves_nothing_that_is_used(folder: Path, kill_at: str) -> None:
    code, _ = run(folder, "rows.py", kill_at, 0, 1)
    assert code == -signal.SIGKILL
    assert not list((folder / "cache").glob("*.json"))

    code, output = run(folder, "rows.py", "never", 0, 1)

    assert code == 0, output
    assert "Tokenizing" in output
    assert texts_of(folder) == EXPECTED
    [name] = [one.stem for one in (folder / "cache").glob("*.json")]
    left = {one.name for one in (folder / "cache").iterdir() if name in one.name}
    assert left == {f"{name}.npy", f"{name}-ends.npy", f"{name}.json", f"{name}.lock"}


# CI: with workers, which have more to restore.
@pytest.mark.soak_cases("0")
@pytest.mark.parametrize("workers", [0, 2])
def test_a_killed_run_with_a_stream_resumes_with_the_same_bits(folder: Path, workers: int) -> None:
    code, expected = run(folder, "stream.py", folder / "whole", -1, workers)
    assert code == 0, expected

    assert run(folder, "stream.py", folder / "cut", 5, workers)[0] == -signal.SIGKILL
    assert run(folder, "stream.py", folder / "cut", 17, workers)[0] == -signal.SIGKILL
    assert run(folder, "stream.py", folder / "cut", 38, workers)[0] == -signal.SIGKILL
    code, output = run(folder, "stream.py", folder / "cut", -1, workers)

    assert code == 0, output
    weights = [text[text.index("weights") :].split()[1] for text in (expected, output)]
    assert weights[0] == weights[1]
    assert "may differ" not in output
