"""Text files as batches of token windows."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.data.text_files import TextFileProcessor


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    folder = tmp_path / "corpus"
    for number in range(40):
        path = folder / f"part{number % 3}" / f"{number}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"<{number:02}>" * 20)
    return folder


def make(corpus: Path, **changes: Any) -> TextFileProcessor:
    arguments: dict[str, Any] = {
        "data_dir": str(corpus),
        "batch_size": 4,
        "max_sequence_length": 8,
        "cache_dir": str(corpus.parent / "cache"),
    }
    return TextFileProcessor(**{**arguments, **changes})


def texts(processor: TextFileProcessor) -> list[bytes]:
    batches = list(processor.create_dataloader())
    return [bytes(row.tolist()) for batch in batches for row in batch["input_ids"]]


def numbers(processor: TextFileProcessor) -> set[int]:
    text = processor.dataset.__getitems__(list(range(len(processor.dataset))))["input_ids"]
    return {int(found) for found in re.findall(rb"<(\d\d)>", bytes(text.flatten().tolist()))}


def test_labels_are_the_tokens_after_the_inputs(corpus: Path) -> None:
    batch = next(iter(make(corpus).create_dataloader()))

    assert batch["input_ids"].shape == (4, 8)
    assert batch["input_ids"].dtype == batch["labels"].dtype == torch.int32
    assert torch.equal(batch["input_ids"][:, 1:], batch["labels"][:, :-1])
    assert sorted(batch) == ["input_ids", "labels"]


def test_windows_in_order_are_the_text(corpus: Path) -> None:
    processor = make(corpus, shuffle=False, split="all", drop_last=False)

    text = b"".join(texts(processor))

    documents = text.split(b"\0")
    assert len(documents) == 40
    assert {len(document) for document in documents[:-1]} == {80}
    assert all(document == document[:4] * 20 for document in documents[:-1])


def test_the_splits_have_no_document_in_common_and_all_documents_together(corpus: Path) -> None:
    seen = {split: numbers(make(corpus, split=split)) for split in ("train", "val", "all")}

    assert seen["train"] & seen["val"] == set()
    assert seen["train"] | seen["val"] == seen["all"] == set(range(40))
    assert 1 <= len(seen["val"]) <= 12  # 4 of 40 are expected


def test_another_document_moves_none_to_the_other_split(corpus: Path) -> None:
    before = {split: numbers(make(corpus, split=split)) for split in ("train", "val")}
    (corpus / "part0" / "new.txt").write_text("<99>" * 20)

    after = {split: numbers(make(corpus, split=split)) for split in ("train", "val")}

    assert after["train"] - {99} == before["train"]
    assert after["val"] - {99} == before["val"]


def test_of_a_single_document_the_end_is_for_validation(tmp_path: Path) -> None:
    path = tmp_path / "book.txt"
    path.write_bytes(bytes(range(1, 101)))

    def tokens(split: str) -> list[int]:
        processor = make(path, split=split, batch_size=1, max_sequence_length=1, shuffle=False)
        return [text[0] for text in texts(processor)]

    assert tokens("train") == list(range(1, 91))
    assert tokens("val") == list(range(92, 101))


def test_the_order_of_training_depends_on_the_seed_and_changes_with_each_pass(
    corpus: Path,
) -> None:
    one, same = (make(corpus, shuffle_seed=1).create_dataloader() for _ in range(2))
    other = make(corpus, shuffle_seed=2).create_dataloader()

    passes = [torch.cat([b["input_ids"] for b in loader]) for loader in (one, one, same, other)]

    assert torch.equal(passes[0], passes[2])
    assert not torch.equal(passes[0], passes[1])
    assert not torch.equal(passes[0], passes[3])


def test_the_order_of_validation_is_the_same_in_each_pass(corpus: Path) -> None:
    loader = make(corpus, split="val").create_dataloader()

    first, second = (torch.cat([b["labels"] for b in loader]) for _ in range(2))

    assert torch.equal(first, second)


def test_loading_draws_no_global_random_number(corpus: Path) -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()

    list(make(corpus).create_dataloader())

    assert torch.equal(torch.get_rng_state(), before)


def test_workers_give_the_same_batches(corpus: Path) -> None:
    alone = make(corpus).create_dataloader()
    helped = make(corpus, num_workers=1, prefetch_factor=2, persistent_workers=True)

    pairs = zip(alone, helped.create_dataloader(), strict=True)

    assert all(torch.equal(one["labels"], other["labels"]) for one, other in pairs)


def test_worker_options_are_accepted_without_workers(corpus: Path) -> None:
    loader = make(corpus, prefetch_factor=10, persistent_workers=True).create_dataloader()

    assert len(next(iter(loader))["labels"]) == 4


def test_files_need_not_be_utf8_for_bytes(tmp_path: Path) -> None:
    path = tmp_path / "latin.txt"
    path.write_bytes(b"\xe9\xff\x80" * 40)

    assert texts(make(path, shuffle=False))[0] == b"\xe9\xff\x80\xe9\xff\x80\xe9\xff"


def test_a_pattern_chooses_files_of_a_folder(corpus: Path) -> None:
    processor = make(corpus, pattern="part0/*.txt", split="all")

    assert numbers(processor) == set(range(0, 40, 3))


def test_places_may_be_a_list_with_globs_and_a_file_counts_once(corpus: Path) -> None:
    folder, everything = str(corpus / "part1"), str(corpus / "**" / "*.txt")

    processor = make(corpus, data_dir=[folder, everything], split="all")

    assert processor.dataset.num_tokens == 40 * 81


def test_the_standard_library_is_a_corpus_without_its_tests(tmp_path: Path) -> None:
    processor = make(tmp_path, data_dir="stdlib", split="val", val_fraction=0.02)

    assert processor.dataset.num_tokens > 20_000
    assert any(b"import" in text for text in texts(processor))


def test_a_tokenizer_file_makes_the_tokens(corpus: Path, tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = {"<": 0, ">": 1, "[END]": 2, "[UNK]": 3, **{f"{n:02}": 300 + n for n in range(40)}}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Punctuation()
    file = tmp_path / "tokenizer.json"
    tokenizer.save(str(file))

    processor = make(
        corpus, tokenizer_file_path=str(file), eos_token="[END]", shuffle=False, split="all"
    )

    batch = next(iter(processor.create_dataloader()))
    number = batch["input_ids"][0, 1].item()
    assert processor.tokenization.vocab_size == 340
    assert processor.dataset.num_tokens == 40 * 61
    assert batch["input_ids"][0].tolist() == [0, number, 1, 0, number, 1, 0, number]
    assert batch["labels"].max() >= 300


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": 0}, "batch_size: expected an integer > 0 or null, got 0"),
        (
            {"max_sequence_length": -8},
            "max_sequence_length: expected an integer > 0 or null, got -8",
        ),
        ({"num_workers": -1}, "num_workers: expected an integer >= 0, got -1"),
        ({"prefetch_factor": 0}, "prefetch_factor: expected an integer > 0 or null, got 0"),
        ({"val_fraction": 1.0}, r"val_fraction: expected a number in \(0, 1\), got 1.0"),
        ({"pattern": "*.md"}, r"has no file that matches pattern '\*.md'. Set pattern"),
        ({"data_dir": "nowhere"}, "data_dir 'nowhere' does not exist. Give a folder"),
        ({"data_dir": "nowhere/*.txt"}, "has no file that matches"),
        (
            {"max_sequence_length": 5000},
            "max_sequence_length is 5000, but split 'train' has only .* tokens",
        ),
        (
            {"split": "val", "val_fraction": 1e-9},
            "split 'val' has no document: .* all 40 ",
        ),
        ({"tokenizer_file_path": "no.json"}, "tokenizer_file_path 'no.json' does not exist"),
        ({"eos_token": "</s>"}, r"eos_token \('</s>'\) requires tokenizer_file_path"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(
    corpus: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make(corpus, **changes)


def test_more_samples_a_batch_than_there_are_is_refused(corpus: Path) -> None:
    processor = make(corpus, batch_size=10_000)

    with pytest.raises(ConfigError, match=r"batch_size is 10000, but there are only .* samples"):
        processor.create_dataloader()


def test_a_file_that_is_no_tokenizer_is_refused(corpus: Path, tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    file = tmp_path / "tokenizer.json"
    file.write_text("{}")

    with pytest.raises(ConfigError, match=r"cannot be loaded by the tokenizers library"):
        make(corpus, tokenizer_file_path=str(file))


def test_a_folder_is_no_tokenizer(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a file"):
        make(corpus, tokenizer_file_path=str(tmp_path))


def test_a_missing_tokenizers_library_is_reported_with_what_to_install(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_text("{}")
    monkeypatch.setitem(sys.modules, "tokenizers", None)

    with pytest.raises(ConfigError, match="pip install tokenizers"):
        make(corpus, tokenizer_file_path=str(file))
