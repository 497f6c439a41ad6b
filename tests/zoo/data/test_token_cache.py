"""Cached tokens: built once, rebuilt when something changes, and written atomically."""

import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest

from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.data.token_cache import cached_tokens, default_cache_dir, find_documents
from modelzoo_trainer.zoo.data.tokenization import ByteTokenization, Tokens


class CountingTokenization(ByteTokenization):
    """Count the encoded documents; fail on the word "bad"."""

    def __init__(self) -> None:
        self.num_encoded = 0

    def encode(self, text: bytes) -> Tokens:
        self.num_encoded += 1
        if text == b"bad":
            raise RuntimeError("cannot be encoded")
        return super().encode(text)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    folder = tmp_path / "corpus"
    folder.mkdir()
    for number in range(10):
        (folder / f"{number}.txt").write_text(f"document {number}")
    return folder


def build(corpus: Path, tokenization: CountingTokenization | None = None) -> Path:
    return cached_tokens(
        find_documents(str(corpus), None),
        tokenization or CountingTokenization(),
        split="all",
        val_fraction=0.1,
        cache_dir=corpus.parent / "cache",
    )


def cached(corpus: Path) -> Iterator[Path]:
    return (corpus.parent / "cache").iterdir()


def test_the_second_use_encodes_nothing(corpus: Path) -> None:
    tokenization = CountingTokenization()

    first = build(corpus, tokenization)
    second = build(corpus, tokenization)

    assert first == second
    assert tokenization.num_encoded == 10
    assert len(np.load(first, mmap_mode="r")) == 10 * len("document 0.")


def test_byte_tokens_take_one_byte_on_disk(corpus: Path) -> None:
    assert np.load(build(corpus), mmap_mode="r").dtype == np.uint8


def test_a_changed_file_is_encoded_again(corpus: Path) -> None:
    before = build(corpus)
    changed = corpus / "3.txt"
    changed.write_text("document X")
    os.utime(changed, ns=(1, 1))

    after = build(corpus)

    assert after != before
    assert b"document X" in np.load(after).tobytes()


def test_a_new_file_is_encoded(corpus: Path) -> None:
    before = build(corpus)
    (corpus / "new.txt").write_text("one more")

    assert build(corpus) != before


def test_another_tokenization_has_another_file(corpus: Path) -> None:
    other = CountingTokenization()
    other.identity = "other"  # type: ignore[misc]  # as another tokenizer file would

    assert build(corpus, other) != build(corpus)


def test_a_failure_leaves_nothing_behind(corpus: Path) -> None:
    (corpus / "5.txt").write_text("bad")

    with pytest.raises(RuntimeError, match="cannot be encoded"):
        build(corpus)

    assert list(cached(corpus)) == []


def test_two_processes_that_build_at_once_make_one_whole_file(corpus: Path) -> None:
    for number in range(200):
        (corpus / f"more{number}.txt").write_text(f"document {number}" * 200)

    with ProcessPoolExecutor(2, mp_context=get_context("fork")) as pool:
        paths = list(pool.map(build, [corpus] * 6))

    assert list(cached(corpus)) == [paths[0]]
    assert set(paths) == {paths[0]}
    assert np.load(paths[0]).tobytes().count(b"\0") == 210


def test_a_folder_that_cannot_be_written_is_named_with_the_way_out(corpus: Path) -> None:
    in_the_way = corpus.parent / "cache"
    in_the_way.write_text("a file")

    with pytest.raises(ConfigError, match=r"cache_dir '.*cache' cannot be written .*Set cache_dir"):
        build(corpus)


def test_a_document_that_cannot_be_read_is_named(
    corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", refuse)

    with pytest.raises(ConfigError, match=r"data_dir: '.*txt' cannot be read \(Permission denied"):
        build(corpus)


def test_the_default_folder_is_below_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "home", lambda: Path("/somewhere"))

    assert default_cache_dir() == Path("/somewhere/.cache/modelzoo_trainer/tokens")


# ---- damage


def truncated(content: bytes) -> bytes:
    return content[: len(content) // 2]


def extended(content: bytes) -> bytes:
    return content + b"more"


def altered(content: bytes) -> bytes:
    at = content.index(b"document 3")
    return content[:at] + b"D" + content[at + 1 :]


def of_another_type(content: bytes) -> bytes:
    return content.replace(b"'|u1'", b"'|i1'")


def emptied(content: bytes) -> bytes:
    return b""


@pytest.mark.parametrize("damage", [truncated, extended, altered, of_another_type, emptied])
def test_a_damaged_file_is_made_again_and_that_is_logged(corpus: Path, caplog, damage) -> None:
    path = build(corpus)
    whole = path.read_bytes()
    assert damage(whole) != whole
    path.write_bytes(damage(whole))
    tokenization = CountingTokenization()

    assert build(corpus, tokenization) == path

    assert path.read_bytes() == whole
    assert tokenization.num_encoded == 10
    [record] = [one for one in caplog.records if one.levelname == "WARNING"]
    assert "is damaged" in record.message
    assert record.message.endswith(f"rebuilding {path}")


def test_a_whole_file_of_an_earlier_version_which_wrote_no_digest_is_used(corpus: Path) -> None:
    path = build(corpus)
    before, tokens = path.read_bytes()[:-16], np.load(path)
    path.write_bytes(before)
    tokenization = CountingTokenization()

    assert build(corpus, tokenization) == path

    assert tokenization.num_encoded == 0
    assert path.read_bytes() == before
    assert np.load(path, mmap_mode="r").tolist() == tokens.tolist()


def test_what_is_no_file_in_the_place_of_one_is_replaced(corpus: Path) -> None:
    path = build(corpus)
    whole = path.read_bytes()
    path.unlink()
    os.mkfifo(path)

    assert build(corpus).read_bytes() == whole
