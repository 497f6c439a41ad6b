"""Dataloaders of llm-foundry."""

from __future__ import annotations

from typing import Any, Final

from modelzoo_trainer.tools.foreign_configs.findings import FindingKind, Findings
from modelzoo_trainer.tools.foreign_configs.llm_foundry.keys import MDS
from modelzoo_trainer.tools.foreign_configs.section import Section

PROCESSOR: Final = "HuggingFaceDataProcessor"
_FORMATS: Final = ("json", "csv", "parquet", "text", "arrow")


class Data:
    """The dataloaders of a file.

    Attributes:
        train: Arguments of `fit.train_dataloader`.
        validation: Arguments of `fit.val_dataloader`, or a list of several; None = none.
        run_name: The name of the run, or one instead of it.
        labels: The labels of the validation dataloaders, in their order.
        samples_per_step: Of all processes; None = not in the file.
        tokens_per_sample: None = not the same for all samples.
    """

    def __init__(self, root: Section, findings: Findings) -> None:
        self._root = root
        self._findings = findings
        self.run_name: str = root.text("run_name") or "llm_foundry_run"
        self._max_length = root.integer("max_seq_len")
        tokenizer = root.inside("tokenizer")
        self._tokenizer = tokenizer.text("name")
        tokenizer.inside("kwargs")
        self.labels: list[str] = []
        self.samples_per_step: int | None = root.integer("global_train_batch_size")
        self.train, is_whole = self._loader(root.inside("train_loader", "loader"), self._batch())
        self.tokens_per_sample = self.train.get("max_sequence_length") if is_whole else None
        self.validation = self._validation()

    def tokenizer_besides(self, model: str | None) -> str | None:
        """Return the tokenizer, or None if it is the model folder's."""
        return None if self._tokenizer == model else self._tokenizer

    def _batch(self) -> dict[str, Any]:
        size = self._root.integer("device_train_batch_size")
        if self.samples_per_step is not None:
            return {"global_batch_size": self.samples_per_step}
        if size is None:
            self._findings.mistake(
                "global_train_batch_size: is missing; the number of samples of a step."
            )
        return {"batch_size": size}

    def _validation(self) -> Any:
        size = {"batch_size": self._root.integer("device_eval_batch_size", 1)}
        loaders = self._root.each("eval_loader", "loader")
        loaders += self._root.each("eval_loaders", "loader")
        found: list[dict[str, Any]] = []
        for section in loaders:
            self.labels.append(str(section.take("label", f"eval_{len(found)}")))
            found.append(self._loader(section, size)[0])
        return found if len(found) > 1 else found[0] if found else None

    def _loader(self, section: Section, batch: dict[str, Any]) -> tuple[dict[str, Any], bool]:
        """Return the arguments of a dataloader, and whether all its samples have one length."""
        kind = section.text("name")
        dataset = section.inside("dataset", "dataset")
        loader: dict[str, Any] = {"data_processor": PROCESSOR}
        if kind == "text":
            loader |= self._text(dataset)
        elif kind == "finetuning":
            loader |= self._finetuning(dataset)
            why = "rows that are too long are skipped; there their ends are cut. Set truncation."
            self._findings.add(FindingKind.DIFFERENT, dataset.path, ..., why)
        else:
            self._findings.mistake(
                f"{section.where('name')}: {kind!r} has no counterpart; text and finetuning have."
            )
        if self._tokenizer is not None:
            loader["tokenizer"] = self._tokenizer
        loader["max_sequence_length"] = dataset.integer("max_seq_len", self._max_length)
        packing = dataset.take("packing_ratio")
        if packing is not None:
            loader["packing"] = True
            why = "rows are filled with as many samples as fit, not with this number of them."
            dataset.differs("packing_ratio", why)
        loader |= batch
        loader["shuffle"] = dataset.flag("shuffle", False)
        seed = dataset.integer("shuffle_seed")
        if seed is not None:
            loader["shuffle_seed"] = seed
        loader["drop_last"] = section.flag("drop_last", False)
        for key in ("num_workers", "prefetch_factor", "persistent_workers"):
            value = section.take(key)
            if value is not None:
                loader[key] = value
        return loader, kind == "text"

    def _text(self, dataset: Section) -> dict[str, Any]:
        """Return the arguments for samples of the streaming library."""
        if dataset.take("hf_name") is not None:
            return {"task": "text", **_source(dataset)}
        folder = dataset.text("local") or dataset.text("remote") or "./data"
        split = dataset.text("split")
        loader: dict[str, Any] = {"task": "text", "path": "json"}
        loader["data_files"] = f"{folder}/{split}/*.jsonl" if split else f"{folder}/*.jsonl"
        loader["text_column"] = "text"
        loader["packing"] = True
        for key in ("local", "remote", "streams"):
            if key in dataset:
                dataset.left_out(key, MDS)
        why = (
            "documents that share a row do not see each other here; there they do, unless the "
            "model has attn_uses_sequence_id."
        )
        dataset.findings.add(FindingKind.DIFFERENT, dataset.path, ..., why)
        return loader

    def _finetuning(self, dataset: Section) -> dict[str, Any]:
        if dataset.take("hf_name") is None:
            loader = {**self._text(dataset), **_ANSWERS}
            for key in ("packing", "text_column"):
                loader.pop(key, None)
            return loader
        return {**_ANSWERS, **_source(dataset)}


_ANSWERS: Final = {
    "task": "instruction",
    "prompt_column": "prompt",
    "response_column": "response",
    "separator": "",  # theirs are joined as they are
}


def _source(dataset: Section) -> dict[str, Any]:
    """Return the arguments that name a dataset of the library `datasets`."""
    options = dataset.inside("hf_kwargs")
    name = str(dataset.text("hf_name"))
    if "://" in name:
        why = "a dataset is not downloaded from there. Download it, and name its folder in path."
        dataset.note(FindingKind.ABSENT, "hf_name", why)
    source: dict[str, Any] = {"path": name}
    keys = ("name", "data_dir", "data_files")
    for key in keys if name in _FORMATS else (*keys, "revision"):
        value = options.take(key)
        if value is not None:
            source[key] = value
    split = dataset.text("split")
    if split is not None:
        source["split"] = split
    return source
