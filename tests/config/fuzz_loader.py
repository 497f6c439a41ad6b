"""Coverage-guided inputs for the loader: `python tests/config/fuzz_loader.py -runs=20000`.

It ends at the first finding, which it prints; the input is written to the current folder. Options
are libFuzzer's: `-seed=N` repeats a run. A folder may follow: inputs to begin with are read from
it, and new ones are written there. The first byte of an input is for the mode, the rest the file.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import atheris

_ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(_ROOT))

with atheris.instrument_imports(include=["modelzoo_trainer.config", "yaml"]):
    from modelzoo_trainer.config.modes import MODES
    from modelzoo_trainer.config.shipped import shipped_names
    from tests.config.attempts import Attempts

_WORDS = (
    "trainer init fit validate validate_all model name optimizer AdamW schedulers SequentialLR "
    "LinearLR callbacks loggers loop max_steps checkpoint precision logging log_steps sparsity "
    "backend backend_type device train_dataloader val_dataloader data_processor DigitsProcessor "
    "batch_size ckpt_path seed fc_mnist gpt2 runconfig train_input eval_input learning_rate"
)


def main() -> None:
    """Run libFuzzer over the shipped files, or the folder that the command line names."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        attempts = Attempts(folder, shipped_names())
        dictionary = folder / "words"
        lines = [f'"{word}: "' for word in _WORDS.split()] + [
            '"\\x0a  "',
            '"- "',
            '"<<: *"',
            '"&a "',
        ]
        dictionary.write_text("\n".join(lines) + "\n", encoding="ascii")
        seeds = folder / "seeds"
        seeds.mkdir()
        for path in sorted((_ROOT / "configs").glob("*.yaml")):
            (seeds / path.name).write_bytes(b"\x00" + path.read_bytes())
        modes = (None, *MODES)

        def one(data: bytes) -> None:
            choice = data[0] if data else 0
            mode = modes[choice % len(modes)]
            attempts.load(data[1:], mode=mode, for_a_run=bool(choice & 128))

        given = sys.argv[1:]
        options = ["-max_len=4096", "-timeout=20", f"-dict={dictionary}"]
        child = os.fork()  # libFuzzer ends its process, and the folder would stay
        if not child:
            atheris.Setup([sys.argv[0], *options, *given, str(seeds)], one)
            atheris.Fuzz()
        _, status = os.waitpid(child, 0)
    sys.exit(os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main()
