"""Folders in the format of Hugging Face; nothing here needs its libraries."""

import json
import pickle
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.hugging_face import folders

KEY = "model.pretrained_model_name_or_path"


def _write(path: Path, value: object) -> None:
    path.write_text(json.dumps(value))


def test_local_folder_stays(tmp_path: Path) -> None:
    assert folders.local_folder(tmp_path, key=KEY) == tmp_path
    assert folders.local_folder(str(tmp_path), key=KEY) == tmp_path


@pytest.mark.parametrize("given", ["./missing", "/missing/folder", "a/b/c", "~/missing"])
def test_missing_folder_is_named(given: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{KEY}: there is no folder '{given}'.*owner/name"):
        folders.local_folder(given, key=KEY)


def test_revision_of_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="revision"):
        folders.local_folder(tmp_path, key=KEY, revision="main")


def test_file_instead_of_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ConfigError, match=r"is a file\. Give the folder"):
        folders.local_folder(tmp_path / "model.safetensors", key=KEY)


def test_config_is_read(tmp_path: Path) -> None:
    _write(tmp_path / "config.json", {"model_type": "llama"})
    assert folders.read_config(tmp_path, key=KEY) == {"model_type": "llama"}


def test_folder_without_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"^{KEY}: .*{tmp_path}.* has no config.json"):
        folders.read_config(tmp_path, key=KEY)


def test_folder_of_an_adapter_is_named(tmp_path: Path) -> None:
    _write(tmp_path / "adapter_config.json", {})
    with pytest.raises(ConfigError, match=rf"^{KEY}: .* has an adapter of peft.*merge_and_unload"):
        folders.read_config(tmp_path, key=KEY)


@pytest.mark.parametrize("text", ["{", "[]", "\xff"])
def test_broken_config_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(ConfigError, match=r"config\.json.*JSON.*again"):
        folders.read_config(tmp_path, key=KEY)


def test_remote_code_is_needed_for_unknown_architectures() -> None:
    config = {"model_type": "mine", "auto_map": {"AutoModel": "mine.Mine"}}
    assert folders.needs_remote_code(config)
    assert not folders.needs_remote_code(config, known=["mine"])
    assert not folders.needs_remote_code({"model_type": "llama"})


def test_weights_are_safetensors_first(tmp_path: Path) -> None:
    torch.save({}, tmp_path / "pytorch_model.bin")
    assert folders.weight_files(tmp_path, key=KEY) == [tmp_path / "pytorch_model.bin"]
    (tmp_path / "model.safetensors").touch()
    assert folders.weight_files(tmp_path, key=KEY) == [tmp_path / "model.safetensors"]


def test_weights_in_several_files(tmp_path: Path) -> None:
    entries = {"a": "model-2.safetensors", "b": "model-1.safetensors", "c": "model-1.safetensors"}
    _write(tmp_path / "model.safetensors.index.json", {"weight_map": entries})
    (tmp_path / "model-2.safetensors").touch()
    with pytest.raises(ConfigError, match=r"1 of the 2 files .*model-1\.safetensors"):
        folders.weight_files(tmp_path, key=KEY)
    (tmp_path / "model-1.safetensors").touch()
    names = [path.name for path in folders.weight_files(tmp_path, key=KEY)]
    assert names == ["model-1.safetensors", "model-2.safetensors"]


@pytest.mark.parametrize("entries", [None, {}, {"a": "../elsewhere.safetensors"}])
def test_invalid_index_is_refused(tmp_path: Path, entries: Any) -> None:
    _write(tmp_path / "model.safetensors.index.json", {"weight_map": entries})
    with pytest.raises(ConfigError, match="download the folder again"):
        folders.weight_files(tmp_path, key=KEY)


def test_legacy_file_of_torch_is_accepted(tmp_path: Path) -> None:
    file = tmp_path / "pytorch_model.bin"
    torch.save({}, file, _use_new_zipfile_serialization=False)
    assert folders.weight_files(tmp_path, key=KEY) == [file]


def test_pickle_is_refused(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps({"a": 1}))
    with pytest.raises(ConfigError, match=r"runs the code in it\. Convert .* safetensors"):
        folders.weight_files(tmp_path, key=KEY)


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("tf_model.h5", "only tf_model.h5. Convert"),
        ("model.pkl", "only model.pkl. Convert"),
        ("adapter_config.json", "adapter of peft.*merge_and_unload"),
        ("config.json", "hf download.*pretrained: false"),
    ],
)
def test_folder_without_weights_says_what_it_has(tmp_path: Path, name: str, advice: str) -> None:
    (tmp_path / name).touch()
    with pytest.raises(ConfigError, match=f"has no weights: .*{advice}"):
        folders.weight_files(tmp_path, key=KEY, otherwise="pretrained: false")


@pytest.mark.parametrize("library", ["transformers", "huggingface_hub"])
def test_missing_library_names_the_extra(monkeypatch: Any, library: str) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    ask = {
        "transformers": lambda: folders.transformers_library(KEY),
        "huggingface_hub": lambda: folders.local_folder("owner/name", key=KEY),
    }
    with pytest.raises(ConfigError, match=rf"{KEY}: .*requires {library}.*\[huggingface\]"):
        ask[library]()


class _Gone(Exception):
    pass


class _Gated(_Gone):
    pass


class _NoRevision(Exception):
    pass


class _Http(Exception):
    pass


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A library without a network: `answer` raises, or returns what the Hub has."""
    state = SimpleNamespace(calls=[], answer=None)

    def download(name: str, **options: Any) -> str:
        state.calls.append((name, options))
        found: str = state.answer(options)
        return found

    library, errors = ModuleType("huggingface_hub"), ModuleType("huggingface_hub.errors")
    vars(library)["snapshot_download"] = download
    vars(errors).update(
        GatedRepoError=_Gated,
        RepositoryNotFoundError=_Gone,
        RevisionNotFoundError=_NoRevision,
        HfHubHTTPError=_Http,
    )
    monkeypatch.setitem(sys.modules, "huggingface_hub", library)
    monkeypatch.setitem(sys.modules, "huggingface_hub.errors", errors)
    return state


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        (_Gated(), "is gated.*hf auth login"),
        (_Gone(), "no public repository.*hf auth login"),
        (_NoRevision(), "no revision 'v9'"),
        (FileNotFoundError("no route\nmore"), r"\(FileNotFoundError: no route\)|\(no route\)"),
        (_Http("503"), "503.*hf download owner/name --local-dir DIR"),
    ],
)
def test_hub_that_refuses(hub: Any, error: Exception, advice: str) -> None:
    def answer(options: Any) -> str:
        raise error

    hub.answer = answer
    with pytest.raises(ConfigError, match=rf"^{KEY}: .*'owner/name'.*{advice}"):
        folders.local_folder("owner/name", key=KEY, revision="v9")


def test_hub_gives_safetensors_or_files_of_torch(hub: Any, tmp_path: Path) -> None:
    hub.answer = lambda options: str(tmp_path)
    assert folders.local_folder("gpt2", key=KEY) == tmp_path
    patterns = [options["allow_patterns"] for _, options in hub.calls]
    assert "*.safetensors" in patterns[0]
    assert "pytorch_model*.bin" in patterns[1]
    assert "*.safetensors" not in patterns[1]
    (tmp_path / "model.safetensors").touch()
    hub.calls.clear()
    folders.local_folder("gpt2", key=KEY, revision="main")
    assert [options["revision"] for _, options in hub.calls] == ["main"]


def test_only_what_is_asked_for_is_downloaded(hub: Any, tmp_path: Path) -> None:
    hub.answer = lambda options: str(tmp_path)
    folders.local_folder("owner/name", key=KEY, patterns=["config.json"])
    assert [options["allow_patterns"] for _, options in hub.calls] == [["config.json"]]
