"""From files to rows: what the rows contain, and that only settings and input determine them."""

from __future__ import annotations

import gzip
import json
import re
from dataclasses import replace

import pytest

from modelzoo_trainer.config.preprocessing import read_settings
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.rows.preprocessing import readers
from modelzoo_trainer.zoo.rows.preprocessing.hooks import ReadHookError
from modelzoo_trainer.zoo.rows.preprocessing.pipeline import preprocess
from modelzoo_trainer.zoo.rows.preprocessing.summary import report
from tests.zoo.rows.preprocessing.runs import (
    PAD,
    rows_of,
    run,
    settings_for,
    text_of,
    tree_digest,
    write_lines,
)
from tests.zoo.rows.toys import byte_tokenizer

TEXTS = ["The first text.", "and", "", "a third one, longer than the others", "\u00e4 <b>"]
WHOLE = "".join(f"{text}|" for text in TEXTS if text)
TWO_SPLITS = "data_splits: {a: {split_fraction: 0.5}, b: {split_fraction: 0.5}}"


@pytest.fixture
def source(tmp_path):
    (tmp_path / "in").mkdir()
    write_lines(tmp_path / "in" / "a.jsonl", TEXTS)
    return tmp_path


def many(folder, count=120) -> None:
    texts = [f"document {number} " + "word " * (number % 13) for number in range(count)]
    write_lines(folder / "in" / "a.jsonl", texts)


def test_rows_are_the_documents_one_after_another(source) -> None:
    [facts] = run(source)
    rows = rows_of(source / "out")
    assert rows.dtype == "int32"
    ids, mask, labels = rows[:, 0].ravel(), rows[:, 1].ravel(), rows[:, 2].ravel()
    used = len(WHOLE.encode()) - 1
    assert text_of([*ids[:used], labels[used - 1]]) == WHOLE
    assert labels[:used].tolist() == [*ids[1:used].tolist(), 2]
    assert mask.tolist() == [1] * used + [0] * (len(mask) - used)
    assert set(ids[used:].tolist()) <= {PAD}
    assert (facts.stats.documents, facts.stats.documents_skipped) == (5, 1)
    assert (facts.stats.tokens, facts.stats.loss_tokens) == (used, used)
    assert facts.stats.padding == len(mask) - used
    assert facts.stats.raw_chars == len("".join(TEXTS))
    assert facts.stats.raw_bytes == len("".join(TEXTS).encode())


def test_without_packing_each_document_has_its_rows(source) -> None:
    run(source, dataset="pack_sequences: false")
    rows = rows_of(source / "out")
    texts = [
        text_of(row[0][: row[1].sum()]) + text_of(row[2][row[1].sum() - 1 :][:1]) for row in rows
    ]
    assert texts[:4] == ["The first", "t text.|", "and|", "a third o"]


def test_settings_of_rows_are_honoured(source) -> None:
    run(source, processing="inverted_mask: true, input_ids_dtype: int64, input_mask_dtype: int64")
    run(source, out="plain")
    inverted, plain = rows_of(source / "out"), rows_of(source / "plain")
    assert inverted.dtype == "int64"
    assert (inverted[:, 1] == 1 - plain[:, 1]).all()
    assert (inverted[:, 2] == plain[:, 2]).all()


def test_regions_without_weight_do_not_count(source) -> None:
    run(source, processing="semantic_loss_weight: {text: 0}")
    assert rows_of(source / "out")[:, 1].sum() == 0


def test_text_is_fixed_unless_the_settings_say_otherwise(source) -> None:
    write_lines(source / "in" / "a.jsonl", ["sch\u00c3\u00b6n"])
    [fixed] = run(source, out="fixed")
    [raw] = run(source, out="raw", processing="use_ftfy: false")
    assert (fixed.stats.normalized_chars, raw.stats.normalized_chars) == (5, 6)


@pytest.mark.parametrize("processing", ["", "use_ftfy: false"])
def test_half_of_a_surrogate_pair_is_replaced(source, processing) -> None:
    (source / "in" / "a.jsonl").write_text('{"text": "a\\ud800b"}\n', encoding="utf-8")
    run(source, processing=processing)
    assert text_of(rows_of(source / "out")[0, 0, :5]) == "a\ufffdb"


def test_a_text_may_be_tokenized_in_pieces(source) -> None:
    run(source)
    run(source, out="cut", dataset="split_text_to_tokenize: true, chunk_len_to_split: 5")
    assert rows_of(source / "cut").tolist() == rows_of(source / "out").tolist()


def test_files_have_equal_numbers_of_rows(source) -> None:
    many(source)
    [facts] = run(source, processing="write_chunk_size: 1")
    files = sorted((source / "out").glob("*.h5"))
    assert facts.num_files == len(files) == -(-facts.stats.rows // 10)  # 96 bytes per row
    run(source, out="one")
    assert rows_of(source / "out").tolist() == rows_of(source / "one").tolist()


def test_splits_have_a_folder_and_facts_of_their_own(source) -> None:
    many(source)
    contexts = "context_splits: {MSL_List: [8, 16], split_fractions: [0.5, 0.5]}"
    facts = run(source, setup=f"{TWO_SPLITS}, {contexts}")
    assert sum(one.stats.documents for one in facts) == 120
    for name, length in (("a/msl_8", 8), ("a/msl_16", 16), ("b/msl_8", 8), ("b/msl_16", 16)):
        rows = rows_of(source / "out" / name)
        params = json.loads((source / "out" / name / "data_params.json").read_text("utf-8"))
        assert rows.shape[2] == length == params["processing"]["max_seq_length"]
        assert params["post-process"]["n_examples"] == len(rows)
    assert {path.name for path in (source / "out").iterdir()} == {"a", "b"}


def test_subfolders_may_be_runs_of_their_own(source) -> None:
    for name in ("x", "y"):
        (source / "in" / name).mkdir()
        write_lines(source / "in" / name / "b.jsonl", [name * 30])
    settings = settings_for(source)
    settings.setup.data["top_level_as_subsets"] = True
    facts = preprocess(settings)
    assert [one.stats.documents for one in facts] == [1, 1]
    assert text_of(rows_of(source / "out" / "x")[0, 0]) == "x" * 8
    settings.setup.data["subsets"] = ["z"]
    with pytest.raises(ConfigError, match="'z'"):
        preprocess(settings)


@pytest.mark.parametrize("limit", [1, 40, 41, 300, 10_000])
def test_a_token_limit_ends_with_the_document_that_reaches_it(source, monkeypatch, limit) -> None:
    monkeypatch.setattr(readers, "UNIT_BYTES", 400)
    many(source)
    facts = run(source, setup=TWO_SPLITS, processing=f"token_limit: {limit}")
    texts = [f"document {number} " + "word " * (number % 13) for number in range(120)]
    lengths = [len(text.strip()) + 1 for text in texts]
    expected = next((n for n in range(121) if sum(lengths[:n]) >= limit), 120)
    assert sum(one.stats.documents for one in facts) == expected
    columns = [max(0, sum(one.stats.tokens for one in facts))]
    assert sum(lengths[:expected]) - 2 <= columns[0] <= sum(lengths[:expected])


def test_facts_are_written_and_name_nothing_of_the_machine(source) -> None:
    [facts] = run(source, dataset="pack_sequences: true")
    params = json.loads((source / "out" / "data_params.json").read_text("utf-8"))
    assert params["features"] == ["input_ids", "attention_mask", "labels"]
    assert params["processing"]["eos_id"] == 2
    assert params["dataset"] == {"pack_sequences": True}
    assert "processes" not in params["setup"]
    assert "output_dir" not in params["setup"]
    counts = params["post-process"]
    assert counts["num_tokens"] == counts["num_pad_tokens"] + counts["non_pad_tokens"]
    assert counts["total_raw_docs"] == 5
    assert counts["raw_docs_skipped"] == 1
    assert counts["n_examples"] == facts.stats.rows
    assert list(params) == sorted(params)


def test_the_report_has_the_counts(source) -> None:
    text = report(run(source))
    for fact in ("5, 1 skipped", "8 tokens", "1 empty (first: a.jsonl:3)"):
        assert fact in text


def test_answers_that_lose_their_ends_are_reported(source) -> None:
    lines = [{"text": "a", "answer": "b" * size} for size in (2, 50, 60)]
    content = "".join(json.dumps(line) + "\n" for line in lines)
    (source / "in" / "a.jsonl").write_text(content, encoding="utf-8")
    path = source / "cut.yaml"
    path.write_text(
        f"setup: {{mode: finetuning, data: {{type: local, source: {source / 'in'}}}, processes: 1, "
        f"output_dir: {source / 'cut'}}}\n"
        f"processing: {{huggingface_tokenizer: {source / 'bytes'}, max_seq_length: 16, "
        "min_sequence_len: 0, read_hook_kwargs: {prompt_key: text, completion_key: answer}, "
        "read_hook: 'modelzoo_trainer.zoo.rows.preprocessing.hooks:"
        "prompt_completion_text_read_hook'}\n"
        "dataset: {truncate_to_msl: {}}\n",
        encoding="utf-8",
    )
    byte_tokenizer(source / "bytes")
    settings, _ = read_settings(path)

    text = report(preprocess(settings, save_s=0))

    assert "3, 0 skipped, 2 truncated" in text
    assert "answers    2 have lost their ends" in text
    params = json.loads((source / "cut" / "data_params.json").read_text("utf-8"))
    assert params["post-process"]["answers_cut"] == 2


def test_the_place_of_a_skipped_document_is_that_of_its_file(source, monkeypatch) -> None:
    monkeypatch.setattr(readers, "UNIT_BYTES", 40)
    write_lines(source / "in" / "a.jsonl", ["x" * 30, "", "y" * 30, ""])
    write_lines(source / "in" / "b.jsonl", [""])
    [facts] = run(source)
    assert facts.first_skipped == {"empty": "a.jsonl:2"}
    params = json.loads((source / "out" / "data_params.json").read_text("utf-8"))
    assert params["post-process"]["first_skipped"] == facts.first_skipped
    write_parquet(source / "in" / "a.parquet", [{"text": "x"}, {"text": ""}])
    (source / "in" / "a.jsonl").unlink()
    [facts] = run(source, out="table")
    assert facts.first_skipped == {"empty": "a.parquet, row 1"}


def write_parquet(path, rows) -> None:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)


@pytest.mark.slow
def test_processes_do_not_change_a_byte(source, monkeypatch) -> None:
    many(source)
    run(source, out="one")
    run(source, out="two", processes=2)
    assert tree_digest(source / "one") == tree_digest(source / "two")


# CI: splits, an order, and packing.
@pytest.mark.soak_cases("options2")
@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"setup": TWO_SPLITS},
        {"processing": "shuffle: true, token_limit: 9000"},
        {"dataset": "pack_sequences: false"},
        {"dataset": "use_vsl: true"},
    ],
)
def test_three_processes_do_not_change_a_byte(source, monkeypatch, options) -> None:
    monkeypatch.setattr(readers, "UNIT_BYTES", 2000)
    many(source, 400)
    for processes in (1, 2, 3):
        run(source, out=f"out{processes}", processes=processes, **options)
    digests = {tree_digest(source / f"out{processes}") for processes in (1, 2, 3)}
    assert len(digests) == 1


@pytest.mark.parametrize(
    ("options", "fact"),
    [
        ({"processing": "input_mask_dtype: int64"}, "input_mask_dtype"),
        ({"processing": "custom_tokenizer: gpt2tokenizer"}, "huggingface_tokenizer"),
        ({"processing": "short_seq_prob: 0.1"}, "short_seq_prob"),
        ({"dataset": "training_objective: fum"}, "'fim'"),
        ({"setup": "data_splits: {a: {split_fraction: 0.5}}"}, "0.5"),
    ],
)
def test_invalid_settings_leave_no_folder(source, options, fact) -> None:
    with pytest.raises(ConfigError) as refused:
        run(source, **options)
    assert fact in str(refused.value)
    assert not (source / "out").exists()


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_an_invalid_entry_is_named_with_its_line(source, monkeypatch, pack) -> None:
    monkeypatch.setattr(readers, "UNIT_BYTES", 40)
    content = b'{"text": "a"}\n\n' * 5 + b'{"content": 3}\n'
    name = "b.jsonl" if pack is bytes else "b.jsonl.gz"
    (source / "in" / name).write_bytes(pack(content))
    with pytest.raises(ConfigError, match=re.compile(rf"{name}:11: .*'text'", re.DOTALL)):
        run(source)


def test_a_document_that_a_mode_refuses_is_named_with_its_line(source, monkeypatch) -> None:
    monkeypatch.setattr(readers, "UNIT_BYTES", 40)
    write_lines(source / "in" / "a.jsonl", ["a", "b", "c", "d"])
    base = settings_for(source)
    settings = replace(base, setup=replace(base.setup, mode="nlg"))
    with pytest.raises(ConfigError, match=r"a\.jsonl:1: nlg"):
        preprocess(settings)


@pytest.mark.slow_cases("2")
@pytest.mark.parametrize("processes", [1, 2])
def test_a_hook_that_raises_is_named_with_the_document(
    source, monkeypatch, caplog, processes
) -> None:
    (source / "failing_hook.py").write_text(
        "def read(entry, **keys):\n"
        "    if not entry['text']:\n"
        "        raise ZeroDivisionError('of the user')\n"
        "    return [{'content': [{'text': 'a'}]}]\n",
        encoding="utf-8",
    )
    monkeypatch.syspath_prepend(str(source))
    base = settings_for(source, processes=processes)
    processing = replace(base.processing, read_hook="failing_hook:read")
    settings = replace(base, processing=processing)
    with pytest.raises(ReadHookError) as raised:
        preprocess(settings)
    where = f"{source / 'failing_hook.py'}:3"
    for fact in ("a.jsonl:3: ", "failing_hook:read", f"ZeroDivisionError: of the user ({where})"):
        assert fact in str(raised.value)
    assert "'text'" in str(raised.value)  # the keys of the entry
    lines = caplog.text.splitlines()
    assert lines[-1] == "ZeroDivisionError: of the user"
    assert [line for line in lines if line.startswith("  File ")] == [
        f'  File "{source / "failing_hook.py"}", line 3, in read'
    ]


def test_a_setting_without_effect_is_reported(source, caplog) -> None:
    run(source, dataset="fim_rate: 0.5")
    assert "dataset.fim_rate" in caplog.text


def test_nothing_to_write_is_reported(source, caplog) -> None:
    write_lines(source / "in" / "a.jsonl", [""])
    [facts] = run(source)
    assert facts.stats.rows == 0
    assert f"{source / 'out'} has no rows" in caplog.text


def test_a_split_without_rows_is_reported(source, caplog) -> None:
    splits = "data_splits: {a: {split_fraction: 1}, b: {split_fraction: 0}}"
    text = report(run(source, setup=splits))
    assert f"{source / 'out' / 'b'} has no rows: it got none" in caplog.text
    assert f"{source / 'out' / 'a'} has no rows" not in caplog.text
    assert text.count("warning    no rows") == 1
    assert not [*(source / "out" / "b").glob("*.h5")]  # so that a check of a training file sees it
    write_lines(source / "in" / "a.jsonl", ["", ""])
    run(source, out="short", setup=splits)
    assert f"{source / 'short' / 'a'} has no rows: of its 2 documents, 2" in caplog.text


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", b""),
        ("a.jsonl", b"\n \n"),
        ("a.jsonl.gz", gzip.compress(b"", mtime=0)),
        ("a.jsonl.zst", b""),
        ("a.txt", b""),
    ],
)
def test_an_input_without_documents_is_refused_and_leaves_nothing(source, name, content) -> None:
    (source / "in" / "a.jsonl").unlink()
    (source / "in" / name).write_bytes(content)
    contexts = "context_splits: {MSL_List: [8, 16], split_fractions: [0.5, 0.5]}"
    for options in ({}, {"setup": f"{TWO_SPLITS}, {contexts}", "processing": "shuffle: true"}):
        with pytest.raises(ConfigError, match=rf"setup\.data: .*{name}"):
            run(source, **options)
        assert not (source / "out").exists()
    (source / "in" / name).unlink()
    write_lines(source / "in" / "b.jsonl", TEXTS)
    run(source)


@pytest.mark.slow
def test_an_error_of_a_worker_is_that_of_one_process(source) -> None:
    (source / "in" / "a.jsonl").write_text('{"text": 1}\n{"text"\n', encoding="utf-8")
    with pytest.raises(ConfigError, match=r"a\.jsonl:2"):
        run(source, processes=2)
