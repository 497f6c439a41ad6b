"""Each mode from files to rows: what is written, and that processes do not change a byte."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from modelzoo_trainer.config.preprocessing import parse_settings
from modelzoo_trainer.zoo.rows.preprocessing import readers
from modelzoo_trainer.zoo.rows.preprocessing.choice import mode_of
from modelzoo_trainer.zoo.rows.preprocessing.pipeline import preprocess
from tests.zoo.rows.preprocessing.runs import rows_of, text_of, tree_digest
from tests.zoo.rows.toys import byte_tokenizer

HOOKS = "modelzoo_trainer.zoo.rows.preprocessing.hooks:"
TEXT = f"read_hook: '{HOOKS}text_read_hook', read_hook_kwargs: {{text_key: text}}"
PAIR = (
    f"read_hook: '{HOOKS}prompt_completion_text_read_hook', "
    "read_hook_kwargs: {prompt_key: prompt, completion_key: text}"
)
CHAT = (
    f"read_hook: '{HOOKS}chat_read_hook', read_hook_kwargs: {{multi_turn_key: chat, "
    "multi_turn_role_key: role, multi_turn_content_key: content}"
)
DPO = (
    f"read_hook: '{HOOKS}dpo_read_hook', read_hook_kwargs: "
    "{prompt_key: prompt, chosen_key: text, rejected_key: other}"
)
NLG = (
    f"read_hook: '{HOOKS}nlg_read_hook', read_hook_kwargs: "
    "{context_key: ids, completion_key: more_ids}"
)
FIM = (
    "training_objective: fim, fim_rate: 0.5, spm_rate: 0.5, fim_prefix_tok: <pre>, "
    "fim_middle_tok: <mid>, fim_suffix_tok: <suf>"
)
RUNS = {
    "vsl": ("pretraining", TEXT, "use_vsl: true"),
    "fim": ("pretraining", TEXT, FIM),
    "mlm": ("pretraining", TEXT, "training_objective: mlm"),
    "mlm, gathered, vsl": (
        "pretraining",
        TEXT,
        "training_objective: mlm, use_vsl: true, mlm_with_gather: true",
    ),
    "bert": ("pretraining", TEXT, "training_objective: bert_pretraining"),
    "finetuning": ("finetuning", PAIR, "truncate_to_msl: {}"),
    "chat, vsl": ("finetuning", CHAT, "use_vsl: true"),
    "dpo": ("dpo", DPO, "max_prompt_length: 20"),
    "nlg": ("nlg", NLG, ""),
}
FEATURES = {
    "vsl": 5,
    "fim": 3,
    "mlm": 2,
    "mlm, gathered, vsl": 4,
    "bert": 3,
    "finetuning": 3,
    "chat, vsl": 5,
    "dpo": 6,
    "nlg": 3,
}
LENGTH = 160


def entries(count: int) -> list[dict[str, Any]]:
    made = []
    for number in range(count):
        text, prompt = f"text {number} " + "of a word " * (number % 7), f"prompt {number}"
        roles = [("user", prompt), ("assistant", text)]
        made.append(
            {
                "text": text,
                "prompt": prompt,
                "other": text[::-1],
                "chat": [{"role": role, "content": content} for role, content in roles],
                "ids": list(range(10, 20 + number % 5)),
                "more_ids": [30, 31],
            }
        )
    return made


def settings_of(folder: Path, name: str, *, processes: int = 1, out: str = "out") -> Any:
    mode, hook, dataset = RUNS[name]
    if not (folder / "bytes").exists():
        byte_tokenizer(folder / "bytes")
    settings, notes = parse_settings(
        f"setup: {{mode: {mode}, data: {{type: local, source: {folder / 'in'}}}, "
        f"output_dir: {folder / out}, processes: {processes}}}\n"
        f"processing: {{huggingface_tokenizer: {folder / 'bytes'}, max_seq_length: {LENGTH}, "
        f"min_sequence_len: 1, {hook}}}\n"
        f"dataset: {{{dataset}}}\n"
    )
    assert notes == []
    return settings


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "in").mkdir()
    lines = [json.dumps(entry) + "\n" for entry in entries(60)]
    (tmp_path / "in" / "a.jsonl").write_text("".join(lines), encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize("name", list(RUNS))
@pytest.mark.slow_cases(every=4)
def test_each_mode_writes_its_rows_and_counts(source: Path, name: str) -> None:
    settings = settings_of(source, name)
    [facts] = preprocess(settings, save_s=0)
    rows = rows_of(source / "out")
    params = json.loads((source / "out" / "data_params.json").read_text("utf-8"))
    assert rows.shape == (facts.stats.rows, FEATURES[name], LENGTH)
    assert params["features"] == list(mode_features(settings))
    stats = facts.stats
    assert (stats.documents, stats.documents_skipped) == (60, 0)
    assert stats.tokens + stats.padding == len(rows) * LENGTH * (2 if name == "dpo" else 1)
    assert stats.padding >= 0
    assert stats.loss_tokens == counted(name, source / "out", rows)


def mode_features(settings: Any) -> tuple[str, ...]:
    from modelzoo_trainer.zoo.rows.tokenizers import tokenizer_of

    return mode_of(settings)(settings, tokenizer_of(settings)).features


def counted(name: str, folder: Path, rows: Any) -> int:
    """Return how many labels count."""
    if name.startswith("mlm"):
        return int((rows_of(folder, "labels")[:, 0] != -100).sum())
    masks = {"dpo": [1, 4], "bert": []}.get(name, [1])
    return int(rows[:, masks].sum())


def test_rows_of_the_modes_are_those_of_their_documents(source: Path) -> None:
    preprocess(settings_of(source, "finetuning"), save_s=0)
    rows = rows_of(source / "out")
    ids, mask, labels = rows[0]
    assert text_of(labels[mask == 1]) == "text 0 |"
    assert text_of(ids[:8]) == "prompt 0"


def test_masks_of_both_answers_can_be_inverted(source: Path) -> None:
    settings = settings_of(source, "dpo")
    preprocess(settings, save_s=0)
    text = "processing: {inverted_mask: true, "
    other, _ = parse_settings(inverted(source, text))
    preprocess(other, save_s=0)
    plain, changed = rows_of(source / "out"), rows_of(source / "inverted")
    assert (changed[:, [1, 4]] == 1 - plain[:, [1, 4]]).all()
    np.testing.assert_array_equal(changed[:, [0, 2, 3, 5]], plain[:, [0, 2, 3, 5]])


def inverted(folder: Path, processing: str) -> str:
    return (
        f"setup: {{mode: dpo, data: {{type: local, source: {folder / 'in'}}}, "
        f"output_dir: {folder / 'inverted'}, processes: 1}}\n"
        f"{processing}huggingface_tokenizer: {folder / 'bytes'}, max_seq_length: {LENGTH}, "
        f"min_sequence_len: 1, {DPO}}}\n"
        "dataset: {max_prompt_length: 20}\n"
    )


# CI: each way to make rows: packed, gathered, of messages, and in pairs.
@pytest.mark.soak_cases("fim", "mlm", "bert", "finetuning", "nlg")
@pytest.mark.slow
@pytest.mark.parametrize("name", list(RUNS))
def test_three_processes_write_the_same_bytes_as_one(
    source: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers, "UNIT_BYTES", 2000)
    for processes in (1, 3):
        out = f"out{processes}"
        preprocess(settings_of(source, name, processes=processes, out=out), save_s=0)
    assert tree_digest(source / "out1") == tree_digest(source / "out3")


def test_pairs_of_answers_train_a_policy(source: Path) -> None:
    from modelzoo_trainer.zoo.data.hdf5.dpo import DpoHDF5DataProcessor
    from modelzoo_trainer.zoo.models.dpo import Dpo

    preprocess(settings_of(source, "dpo"), save_s=0)
    data = DpoHDF5DataProcessor(data_dir=str(source / "out"), batch_size=2)
    policy = {"name": "gpt2", "vocab_size": 266, "hidden_size": 8, "num_heads": 1}
    small = {"num_hidden_layers": 1, "filter_size": 8, "max_position_embeddings": LENGTH}
    model = Dpo(policy_model=policy | small)
    outputs = model(next(iter(data.create_dataloader())))
    assert outputs["loss"].item() == pytest.approx(np.log(2), rel=1e-5)
    assert outputs["logps_chosen"].item() < 0
