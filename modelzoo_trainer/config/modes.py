"""What a configuration can run."""

from __future__ import annotations

from typing import Final

MODES: Final = {
    "train": "fit",
    "train_and_eval": "fit",
    "eval": "validate",
    "eval_all": "validate_all",
    "test": "test",
    "predict": "predict",
}
"""For each mode, the section that it runs, which is the trainer's method as well."""

DEFAULT_MODE: Final = "train_and_eval"
