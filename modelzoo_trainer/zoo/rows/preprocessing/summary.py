"""The facts of finished rows: `data_params.json`, and the report that a run prints."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from modelzoo_trainer.errors import ConfigError, reason_of
from modelzoo_trainer.zoo.rows.hdf5_format import PARAMS, SUFFIX
from modelzoo_trainer.zoo.rows.interface import Stats
from modelzoo_trainer.zoo.rows.places import DocumentPlace
from modelzoo_trainer.zoo.rows.preprocessing.journal import rows_settings
from modelzoo_trainer.zoo.rows.sections import PreprocessingSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderFacts:
    """What was written to one folder."""

    folder: str
    length: int
    """Tokens of a row."""
    num_files: int
    stats: Stats
    first_skipped: dict[str, str] = field(default_factory=dict)
    """Place of the first skipped document of each reason."""


def params_text(
    settings: PreprocessingSettings,
    facts: FolderFacts,
    *,
    features: Sequence[str],
    ids: dict[str, int | None],
    num_inputs: int,
) -> str:
    """Return the content of `data_params.json`, with nothing of this machine.

    Args:
        settings: The settings of the run.
        facts: Of the folder.
        features: Names of the second dimension of `data`.
        ids: `eos_id`, `pad_id` and `vocab_size`.
        num_inputs: Files read.
    """
    sections: dict[str, Any] = {"setup": {}, "processing": {}, "dataset": {}}
    sections |= rows_settings(settings.given)
    processing = settings.processing
    sections["processing"] |= {
        **ids,
        "max_seq_length": facts.length,
        "read_hook": processing.read_hook,
    }
    content = {
        **sections,
        "features": list(features),
        "post-process": post_process(facts, num_inputs),
    }
    return json.dumps(content, indent=4, sort_keys=True) + "\n"


def post_process(facts: FolderFacts, num_inputs: int) -> dict[str, Any]:
    """Return the counts of a folder, under their published names."""
    stats = facts.stats
    rows = max(1, stats.rows)
    counts: dict[str, Any] = {
        "discarded_files": 0,
        "processed_files": num_inputs,
        "successful_files": num_inputs,
        "n_examples": stats.rows,
        "num_tokens": stats.tokens + stats.padding,
        "num_pad_tokens": stats.padding,
        "non_pad_tokens": stats.tokens,
        "num_masked_tokens": stats.tokens + stats.padding - stats.loss_tokens,
        "loss_valid_tokens": stats.loss_tokens,
        "raw_chars_count": stats.raw_chars,
        "raw_bytes_count": stats.raw_bytes,
        "normalized_chars_count": stats.normalized_chars,
        "normalized_bytes_count": stats.normalized_bytes,
        "average_chars_per_sequence": stats.normalized_chars // rows,
        "average_bytes_per_sequence": stats.normalized_bytes // rows,
        "total_raw_docs": stats.documents,
        "raw_docs_skipped": stats.documents_skipped,
        "documents_truncated": stats.documents_truncated,
        "answers_cut": stats.answers_cut,
        "tokens_dropped": stats.tokens_dropped,
        "skipped": {reason: count for reason, (count, _) in stats.skipped.items()},
        "first_skipped": facts.first_skipped,
    }
    if stats.sequences:
        counts["num_sequences_before_packing"] = stats.sequences
        counts["vsl_packing_factor"] = round(stats.sequences / rows, 4)
    return counts


def facts_of(folder: Path) -> FolderFacts:
    """Return the facts of a folder that an earlier run has completed, from its `data_params.json`.

    Raises:
        ConfigError: If the file cannot be read.
    """
    path = folder / PARAMS
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        counts = content["post-process"]
        first = dict(counts["first_skipped"])
        stats = Stats(
            documents=counts["total_raw_docs"],
            documents_truncated=counts["documents_truncated"],
            answers_cut=counts.get("answers_cut", 0),
            raw_chars=counts["raw_chars_count"],
            raw_bytes=counts["raw_bytes_count"],
            normalized_chars=counts["normalized_chars_count"],
            normalized_bytes=counts["normalized_bytes_count"],
            sequences=counts.get("num_sequences_before_packing", 0),
            rows=counts["n_examples"],
            tokens=counts["non_pad_tokens"],
            padding=counts["num_pad_tokens"],
            tokens_dropped=counts["tokens_dropped"],
            loss_tokens=counts["loss_valid_tokens"],
            skipped={
                reason: (count, DocumentPlace(first[reason], 0))
                for reason, count in counts["skipped"].items()
            },
        )
        length = content["processing"]["max_seq_length"]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(
            f"setup.output_dir: {str(path)!r} cannot be read: {reason_of(error)}. Remove the "
            "folder to write it again."
        ) from error
    return FolderFacts(
        folder=str(folder),
        length=length,
        num_files=len([*folder.glob(f"*{SUFFIX}")]),
        stats=stats,
        first_skipped=first,
    )


def lack_of(facts: FolderFacts) -> str | None:
    """Return a warning if a folder has no rows, so that no data processor reads it."""
    stats = facts.stats
    if stats.rows:
        return None
    if not stats.documents:
        return (
            f"{facts.folder} has no rows: it got none of the documents. Increase its fraction in "
            "setup.data_splits or context_splits, add input, or remove the split."
        )
    others = stats.documents - stats.documents_skipped
    return (
        f"{facts.folder} has no rows: of its {stats.documents:,} documents, "
        f"{stats.documents_skipped:,} were skipped and {others:,} are too short. Add input, or "
        "decrease processing.min_sequence_len."
    )


def report(facts: Sequence[FolderFacts]) -> str:
    """Return the report of a run: a block of lines for each folder."""
    return "\n".join(line for one in facts for line in _lines(one))


def _lines(facts: FolderFacts) -> list[str]:
    stats = facts.stats
    total = stats.tokens + stats.padding
    lines = [
        f"{facts.folder}: {stats.rows:,} rows of {facts.length:,} tokens in "
        f"{facts.num_files:,} files",
        f"  documents  {stats.documents:,}, {stats.documents_skipped:,} skipped, "
        f"{stats.documents_truncated:,} truncated",
        f"  tokens     {stats.tokens:,}, {_percent(stats.loss_tokens, stats.tokens)} of them in "
        f"the loss",
        f"  padding    {_percent(stats.padding, total)} of all positions",
    ]
    if not stats.rows:
        lines.append("  warning    no rows: training and validation on this folder will fail")
    if stats.tokens_dropped:
        lines.append(f"  dropped    {stats.tokens_dropped:,} tokens, too few for a row")
    if stats.answers_cut:
        lines.append(
            f"  answers    {stats.answers_cut:,} have lost their ends, which a model then does not "
            f"learn"
        )
    if stats.sequences:
        factor = stats.sequences / max(1, stats.rows)
        lines.append(f"  packing    {factor:.2f} sequences per row")
    for reason, (count, _) in sorted(stats.skipped.items()):
        first = facts.first_skipped.get(reason)
        shown = "" if first is None else f" (first: {first})"
        lines.append(f"  skipped    {count:,} {reason}{shown}")
    return lines


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.2f} %" if whole else "none"
