"""The cache folder of the Hugging Face libraries."""

import logging
import os
import sys
from types import ModuleType

import pytest

from modelzoo_trainer import Callback
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.callbacks.csx_noops import HFCacheDir


@pytest.fixture(autouse=True)
def _environment(monkeypatch):
    monkeypatch.setenv("HF_HOME", "/before")
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    for name in ("huggingface_hub", "transformers", "datasets"):
        monkeypatch.delitem(sys.modules, name, raising=False)


def test_the_folder_is_known_before_the_model_is_built_and_until_the_end(make, net, tmp_path):
    seen = []

    class Looks(net):
        def __init__(self):
            super().__init__()
            seen.append((os.environ["HF_HOME"], os.environ["HF_HUB_CACHE"]))

    trainer = make(HFCacheDir(str(tmp_path)), model=Looks)
    assert seen == [(str(tmp_path), str(tmp_path))]
    trainer.close()
    assert os.environ["HF_HOME"] == "/before"
    assert "HF_HUB_CACHE" not in os.environ


def test_it_comes_back_if_the_set_up_fails(make, tmp_path):
    class Fails(Callback):
        def setup(self, trainer):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        make(HFCacheDir(str(tmp_path)), Fails())
    assert os.environ["HF_HOME"] == "/before"


def test_of_two_the_last_one_counts(make, tmp_path):
    trainer = make(HFCacheDir(str(tmp_path / "a")), HFCacheDir(str(tmp_path / "b")))
    assert os.environ["HF_HOME"] == str(tmp_path / "b")
    trainer.close()
    assert os.environ["HF_HOME"] == "/before"


def test_a_library_that_is_there_already_is_reported(make, tmp_path, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "datasets", ModuleType("datasets"))
    with caplog.at_level(logging.WARNING, "modelzoo_trainer"):
        make(HFCacheDir(str(tmp_path)))
    assert "HFCacheDir: already imported libraries (datasets)" in caplog.text


def test_the_users_folder_is_found(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert HFCacheDir("~/cache").cache_dir == tmp_path / "cache"


def test_what_is_no_folder_is_refused(tmp_path):
    with pytest.raises(
        ConfigError, match=r"HFCacheDir.cache_dir: expected the name of a folder, got ''"
    ):
        HFCacheDir("")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"which is a file"):
        HFCacheDir(str(tmp_path / "file"))
