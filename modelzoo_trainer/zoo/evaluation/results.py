"""The results of `lm_eval`: metrics, a table and files."""

from __future__ import annotations

import json
import logging
import math
import os
from numbers import Real
from pathlib import Path
from typing import Any, Final

from modelzoo_trainer.base.shown_path import shown_path

log = logging.getLogger("modelzoo_trainer.evaluation")

_OF_A_COUNT: Final = frozenset({"alias", "name", "sample_len", "sample_count"})


def metrics_of(results: dict[str, Any]) -> dict[str, float]:
    """Return the numbers of all tasks and groups, as `<task>/<metric>`.

    The filter of the answers, if there is one, is part of the name: `<metric>_<filter>`.
    """
    found: dict[str, float] = {}
    for task, values in results["results"].items():
        for key, value in values.items():
            metric, _, kind = key.partition(",")
            if key in _OF_A_COUNT or not isinstance(value, Real) or isinstance(value, bool):
                continue
            name = metric if kind in ("", "none") else f"{metric}_{kind}"
            if not (metric.endswith("_stderr") and math.isnan(value)):
                found[f"{task}/{name}"] = float(value)
    return found


def table_of(results: dict[str, Any]) -> str:
    """Return the table of the tasks, and a table of the groups if there are any."""
    from lm_eval.utils import make_table

    tables = [make_table(results)]
    if results.get("groups"):
        tables.append(make_table(results, "groups"))
    return "\n".join(str(table).rstrip() for table in tables)


def write_results(
    folder: Path, results: dict[str, Any], step: int, samples: dict[str, Any] | None
) -> None:
    """Write `results_<step>.json`, and answers as `samples_<task>_<step>.jsonl`.

    A failure is logged: it must not end a training.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for task, rows in (samples or {}).items():
            lines = "".join(f"{_dumped(row)}\n" for row in rows)
            _replace(folder / f"samples_{task.replace('/', '_')}_{step}.jsonl", lines)
        path = folder / f"results_{step}.json"
        _replace(path, f"{_dumped(results, indent=2)}\n")
    except OSError as error:
        log.warning("Cannot write the results to %s: %s", folder, error.strerror or error)
        return
    log.info("Saved the results to %s.", shown_path(path))


def _dumped(value: Any, indent: int | None = None) -> str:
    from lm_eval.utils import handle_non_serializable

    return json.dumps(value, indent=indent, default=handle_non_serializable, ensure_ascii=False)


def _replace(path: Path, text: str) -> None:
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)
