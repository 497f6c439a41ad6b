"""Toy tokenizers."""

from __future__ import annotations

import pytest

from modelzoo_trainer.zoo.rows.tokenizers import make_tokenizer
from tests.zoo.rows.toys import byte_tokenizer, word_tokenizer


@pytest.fixture(scope="session")
def words(tmp_path_factory):
    return make_tokenizer(
        huggingface_tokenizer=word_tokenizer(tmp_path_factory.mktemp("tokenizers") / "words")
    )


@pytest.fixture(scope="session")
def words_with_bos(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizers") / "bos"
    return make_tokenizer(
        huggingface_tokenizer=word_tokenizer(folder, adds_bos=True, adds_eos=True)
    )


@pytest.fixture(scope="session")
def letters(tmp_path_factory):
    return make_tokenizer(
        huggingface_tokenizer=byte_tokenizer(tmp_path_factory.mktemp("tokenizers") / "bytes")
    )
