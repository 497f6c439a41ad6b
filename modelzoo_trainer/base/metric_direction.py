"""Which of two values of a metric is better, and in which direction, by its name."""

from __future__ import annotations

import re
from typing import Final, Literal

Direction = Literal["min", "max"]

_ROUNDING: Final = 1e-6  # relative; averages of the same float32 values differ by less

_LESS_IS_BETTER: Final = re.compile(
    r".*(?:loss|perplexity|nll|error|rmse|bits_per_byte)"
    r"|(?:.*[_.-])?(?:ppl|err|mse|mae|wer|cer|bpb|error_rate)"
)
_MORE_IS_BETTER: Final = re.compile(
    r".*(?:accuracy|precision|recall|f1|f1_?score|auroc|bleu|rouge\w*|exact_match|dice|iou)"
    r"|(?:.*[_.-])?(?:acc|auc|map|r2|top_?\d+)"
)


def direction_of(name: str) -> Direction | None:
    """Return "min" or "max" if lower or higher values are better; None if it is not known.

    Only the part after the last "/" counts, without `_epoch` at its end.
    """
    last = name.rpartition("/")[2].lower().removesuffix("_epoch")
    if _LESS_IS_BETTER.fullmatch(last):
        return "min"
    return "max" if _MORE_IS_BETTER.fullmatch(last) else None


def is_better(value: float, best: float, mode: str, min_delta: float = 0.0) -> bool:
    """Return whether a value is better than the best one by more than `min_delta`.

    Values that differ by less than a millionth are equal: averages of the same samples in batches
    of other sizes are rounded differently.
    """
    gain = best - value if mode == "min" else value - best
    return gain > min_delta + _ROUNDING * abs(best)
