"""An interrupted run is continued, with equal bytes; other folders are refused."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.rows.hdf5_format import INCOMPLETE
from modelzoo_trainer.zoo.rows.preprocessing import journal, output, pipeline, readers, shuffling
from modelzoo_trainer.zoo.rows.preprocessing.pipeline import preprocess
from modelzoo_trainer.zoo.rows.preprocessing.summary import report
from tests.zoo.rows.preprocessing.runs import run, settings_for, tree_digest, write_lines


class Interrupted(Exception):
    """Ends a run where it is."""


@pytest.fixture
def source(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "UNIT_BYTES", 300)
    monkeypatch.setattr(shuffling, "BUCKET_BYTES", 1000)
    monkeypatch.setattr(output, "_sync", lambda path: None)
    (tmp_path / "in").mkdir()
    texts = [f"document {number} " + "word " * (number % 13) for number in range(60)]
    write_lines(tmp_path / "in" / "a.jsonl", texts)
    return tmp_path


OPTIONS = [
    {"processing": "write_chunk_size: 1"},
    {"processing": "write_chunk_size: 1, shuffle: true"},
    {"setup": "data_splits: {a: {split_fraction: 0.5}, b: {split_fraction: 0.5}}"},
    {"dataset": "pack_sequences: false", "processing": "token_limit: 1500, write_chunk_size: 1"},
]


def interrupt_at(monkeypatch, count: int) -> None:
    """Raise at the n-th change on disk."""
    left = iter(range(count))

    def limited(function):
        def call(*args):
            if next(left, None) is None:
                raise Interrupted
            return function(*args)

        return call

    for module, name in ((output, "write_rows"), (output, "write_bytes"), (output, "write_text")):
        monkeypatch.setattr(module, name, limited(getattr(module, name)))
    monkeypatch.setattr(journal, "write_bytes", output.write_bytes)
    monkeypatch.setattr(journal, "write_text", output.write_text)
    monkeypatch.setattr(shuffling, "write_rows", output.write_rows)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.slow_cases(every=4)
def test_a_run_is_continued_after_every_interruption(source, monkeypatch, options) -> None:
    run(source, out="whole", **options)
    interruptions = 0
    for count in (0, 1, 2, 3, 5, 8, 9, 10, 11, 13, 14, 20, 1000):
        with monkeypatch.context() as patch:
            interrupt_at(patch, count)
            try:
                run(source, **options)
            except Interrupted:
                interruptions += 1
            else:
                break
    assert interruptions > 4
    assert tree_digest(source / "out") == tree_digest(source / "whole")


def interrupted(source, monkeypatch, count=6, **options) -> None:
    with monkeypatch.context() as patch:
        interrupt_at(patch, count)
        with pytest.raises(Interrupted):
            run(source, processing="write_chunk_size: 1", **options)


def test_an_unfinished_folder_is_marked(source, monkeypatch) -> None:
    splits = "data_splits: {a: {split_fraction: 0.5}, b: {split_fraction: 0.5}}"
    interrupted(source, monkeypatch, setup=splits)
    for folder in ("out", "out/a", "out/b"):
        assert "note" in json.loads((source / folder / INCOMPLETE).read_text("utf-8"))
    run(source, processing="write_chunk_size: 1", setup=splits)
    assert not [*(source / "out").rglob("INCOMPLETE*")]


def test_other_settings_or_inputs_are_refused(source, monkeypatch) -> None:
    interrupted(source, monkeypatch)
    with pytest.raises(ConfigError, match="other settings"):
        run(source, processing="write_chunk_size: 2")
    write_lines(source / "in" / "b.jsonl", ["another"])
    with pytest.raises(ConfigError, match="other input files"):
        run(source, processing="write_chunk_size: 1")
    (source / "in" / "b.jsonl").unlink()
    run(source, processing="write_chunk_size: 1, write_in_batch: true")


def own_code(folder, text) -> None:
    (folder / "own_code.py").write_text(
        f"def hook(entry, text_key):\n    return [{{'content': [{{'text': {text!r}}}]}}]\n",
        encoding="utf-8",
    )


def test_a_changed_module_of_the_hook_is_refused_unless_it_is_accepted(source, monkeypatch) -> None:
    monkeypatch.syspath_prepend(source)
    own_code(source, "a")
    settings = settings_for(source, processing="write_chunk_size: 1")
    processing = replace(settings.processing, read_hook="own_code:hook")
    settings = replace(settings, processing=processing)
    with monkeypatch.context() as patch:
        interrupt_at(patch, 2)
        with pytest.raises(Interrupted):
            preprocess(settings, save_s=0)
    own_code(source, "b")
    with pytest.raises(ConfigError, match=r"processing\.read_hook.*'read_hook'.*INCOMPLETE\.json"):
        preprocess(settings, save_s=0)
    mark = source / "out" / INCOMPLETE
    kept = json.loads(mark.read_text("utf-8"))
    del kept["read_hook"]
    mark.write_text(json.dumps(kept), encoding="utf-8")
    preprocess(settings, save_s=0)


def test_changed_files_of_the_tokenizer_are_refused(source, monkeypatch) -> None:
    interrupted(source, monkeypatch)
    config = source / "bytes" / "tokenizer_config.json"
    before = config.read_text("utf-8")
    changed = json.loads(before) | {"chat_template": "{{ messages }}"}
    config.write_text(json.dumps(changed), encoding="utf-8")
    with pytest.raises(ConfigError, match="files of the tokenizer"):
        run(source, processing="write_chunk_size: 1")
    config.write_text(before, encoding="utf-8")
    run(source, processing="write_chunk_size: 1")


class FromFolder:
    """A user's tokenizer with files in a folder."""

    eos_token_id, pad_token_id, vocab_size, eos_token = 0, None, 128, "\0"

    def __init__(self, folder) -> None:
        self.folder = folder

    def encode(self, text):
        return [ord(letter) for letter in text]

    def decode(self, ids):
        return "".join(map(chr, ids))


def test_files_of_a_users_tokenizer_are_compared_by_content(source, monkeypatch) -> None:
    folder = source / "own"
    folder.mkdir()
    (folder / "words.txt").write_text("a", encoding="utf-8")
    settings = settings_for(source, processing="write_chunk_size: 1")
    processing = replace(
        settings.processing,
        huggingface_tokenizer=None,
        custom_tokenizer=f"{__name__}:FromFolder",
        tokenizer_params={"folder": str(folder)},
    )
    settings = replace(settings, processing=processing)
    with monkeypatch.context() as patch:
        interrupt_at(patch, 6)
        with pytest.raises(Interrupted):
            preprocess(settings, save_s=0)
    (folder / "words.txt").write_text("b", encoding="utf-8")
    with pytest.raises(ConfigError, match="files of the tokenizer"):
        preprocess(settings, save_s=0)
    (folder / "words.txt").write_text("a", encoding="utf-8")
    preprocess(settings, save_s=0)  # although the file is newer


@pytest.mark.parametrize(
    ("name", "content"),
    [(INCOMPLETE, b"{"), (INCOMPLETE, b"[]"), (journal.STATE, b"PK\3\4")],
)
def test_a_damaged_file_of_an_unfinished_run_is_named(source, monkeypatch, name, content) -> None:
    interrupted(source, monkeypatch)
    path = source / "out" / name
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=rf"{name}'.*cannot be read"):
        run(source, processing="write_chunk_size: 1")


@pytest.mark.parametrize("shuffles", [False, True])
def test_rows_of_an_unfinished_run_that_are_gone_are_named(source, monkeypatch, shuffles) -> None:
    options = {"processing": f"write_chunk_size: 1, shuffle: {str(shuffles).lower()}"}
    with monkeypatch.context() as patch:
        interrupt_at(patch, 6)
        with pytest.raises(Interrupted):
            run(source, **options)
    gone = min((source / "out").rglob("*.bin" if shuffles else "*.h5"))
    content = gone.read_bytes()
    gone.unlink()
    with pytest.raises(ConfigError, match=gone.name):
        run(source, **options)
    gone.write_bytes(content)
    run(source, **options)


def test_a_state_without_its_mark_is_not_continued(source, monkeypatch) -> None:
    options = {"processing": "write_chunk_size: 1"}
    run(source, out="whole", **options)
    interrupted(source, monkeypatch)
    for path in [source / "out" / INCOMPLETE, *(source / "out").glob("*.h5")]:
        path.unlink()
    run(source, **options)
    assert tree_digest(source / "out") == tree_digest(source / "whole")


@pytest.mark.parametrize("options", [{}, OPTIONS[2]])
def test_runs_of_subfolders_are_continued_after_every_interruption(
    source, monkeypatch, options
) -> None:
    for name in ("x", "y"):
        (source / "in" / name).mkdir()
        write_lines(source / "in" / name / "b.jsonl", [name * 30, "", "", name * 9])

    def subsets(out: str) -> str:
        settings = settings_for(source, out=out, **options)
        settings.setup.data["top_level_as_subsets"] = True
        return report(preprocess(settings, save_s=0)).replace(str(source / out), "")

    whole = subsets("whole")
    assert ("/x/a:" if options else "/x:") in whole
    interruptions = 0
    while not (source / "out").exists() or [*(source / "out").rglob("INCOMPLETE*")]:
        with monkeypatch.context() as patch:
            interrupt_at(patch, 4 + interruptions)
            try:
                continued = subsets("out")
            except Interrupted:
                interruptions += 1
        assert interruptions < 30
    assert interruptions > 2
    assert continued == whole
    assert tree_digest(source / "out") == tree_digest(source / "whole")
    with pytest.raises(ConfigError, match="already has rows"):
        subsets("out")


def test_a_folder_with_rows_is_refused(source) -> None:
    run(source)
    with pytest.raises(ConfigError, match=r"already has rows \(data_params\.json\)"):
        run(source)
    (source / "out" / "data_params.json").unlink()
    with pytest.raises(ConfigError, match=r"output_chunk_0_0\.h5"):
        run(source)


def test_a_folder_that_another_process_writes_to_is_refused(source) -> None:
    settings = settings_for(source)
    work = pipeline.UnitWork(settings)
    first = pipeline._Run(settings, work, pipeline.find_inputs(settings.setup), 0)
    first._journal.open()
    with pytest.raises(ConfigError, match="another process"):
        preprocess(settings)
    first.close()
    preprocess(settings)
