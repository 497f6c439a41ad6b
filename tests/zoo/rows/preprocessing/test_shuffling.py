"""Rows in random order, in two passes."""

from __future__ import annotations

import numpy as np
import pytest

from modelzoo_trainer.zoo.rows.preprocessing import shuffling
from modelzoo_trainer.zoo.rows.preprocessing.shuffling import hashes, num_buckets, permutation
from tests.zoo.rows.preprocessing.runs import rows_of, run, tree_digest, write_lines


def test_a_permutation_is_one_and_depends_on_the_seed() -> None:
    assert sorted(permutation(100, 3).tolist()) == list(range(100))
    assert permutation(100, 3).tolist() != permutation(100, 4).tolist()
    # fixed: an output folder may be continued by another release
    assert hashes(np.arange(2), 1).tolist() == HASHES


HASHES = [17629623748622851610, 13810761654074628661]


def test_buckets_are_counted_from_the_size_of_the_input() -> None:
    sizes = (0, 3 << 26, 1 << 50)
    assert [num_buckets(size) for size in sizes] == [1, 3, 512]


@pytest.mark.parametrize("buckets", [1, 3])
def test_shuffled_rows_are_those_of_the_input(tmp_path, monkeypatch, buckets) -> None:
    monkeypatch.setattr(shuffling, "BUCKET_BYTES", 1)
    monkeypatch.setattr(shuffling, "MAX_BUCKETS", buckets)
    (tmp_path / "in").mkdir()
    write_lines(tmp_path / "in" / "a.jsonl", [f"text number {one}" for one in range(60)])
    run(tmp_path, out="plain")
    run(tmp_path, out="one", processing="shuffle: true, shuffle_seed: 1, write_chunk_size: 1")
    run(tmp_path, out="two", processing="shuffle: true, shuffle_seed: 2, write_chunk_size: 1")
    plain, one, two = (rows_of(tmp_path / name).tolist() for name in ("plain", "one", "two"))
    assert sorted(one) == sorted(two) == sorted(plain)
    assert len({str(rows) for rows in (one, two, plain)}) == 3
    assert len([*(tmp_path / "one").iterdir()]) == len([*(tmp_path / "one").glob("*.h5")]) + 1
    assert tree_digest(tmp_path / "one") != tree_digest(tmp_path / "two")
