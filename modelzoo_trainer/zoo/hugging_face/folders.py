"""Folders of models in the format of Hugging Face: where they are, and what is in them.

Nothing here imports `transformers` or `huggingface_hub` before it is used.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from modelzoo_trainer.base.regular_files import open_regular, read_text
from modelzoo_trainer.errors import ConfigError, reason_of

CONFIG_FILE: Final = "config.json"
SAFETENSORS_FILE: Final = "model.safetensors"
SAFETENSORS_INDEX: Final = "model.safetensors.index.json"
TORCH_FILE: Final = "pytorch_model.bin"
TORCH_INDEX: Final = "pytorch_model.bin.index.json"

SETTINGS_PATTERNS: Final = ("*.json", "*.txt", "*.model", "*.jinja", "*.py")
"""Files of a repository of the Hub besides the weights: settings and tokenizer."""

OF_ADAPTER: Final = (
    "an adapter of peft, which is not a whole model. Give the folder of the model that it was "
    "trained for, or merge it: merge_and_unload, then save_pretrained, of peft."
)
"""What a folder with an adapter of `peft` has, and what to do."""

_WEIGHTS_PATTERNS: Final = (("*.safetensors",), ("pytorch_model*.bin",))
_INSTALL: Final = 'pip install "modelzoo-trainer[huggingface]"'
HUB_NAME: Final = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
"""What names of repositories of the Hub match."""

_OF_OTHERS: Final = ("*.h5", "*.msgpack", "*.onnx", "*.gguf", "*.ckpt", "*.pt", "*.pth", "*.pkl")
# Files of torch.save: an archive, or (before version 1.6) a pickle of this number first.
_ARCHIVE: Final = b"PK\x03\x04"
_LEGACY: Final = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."


def transformers_library(key: str) -> Any:
    """Import `transformers` and return it.

    Args:
        key: The setting that needs it, for the message.

    Raises:
        ConfigError: If it is not installed.
    """
    return _library("transformers", key)


def local_folder(
    name_or_path: str | Path,
    *,
    key: str,
    revision: str | None = None,
    patterns: Sequence[str] | None = None,
) -> Path:
    """Return the folder of a model: a local one as given, or the downloaded one of a Hub name.

    What the Hub has is downloaded to the cache of `huggingface_hub` (`HF_HOME`), once. Files in
    subfolders are not downloaded.

    Args:
        name_or_path: A folder, or a repository of the Hub: `owner/name` or `name`. A folder of that
            name in the working folder takes precedence.
        key: The setting that gives it, for messages.
        revision: Branch, tag or commit of the repository.
        patterns: Files to download, such as `SETTINGS_PATTERNS`; None = these and the weights, as
            safetensors if the repository has them.

    Raises:
        ConfigError: If there is no such folder or repository, or it cannot be downloaded.
    """
    given = str(name_or_path)
    path = Path(given).expanduser()
    if path.is_dir():
        if revision is not None:
            raise ConfigError(
                f"{key}: {given!r} is a local folder, and revision ({revision!r}) has an effect "
                f"only for a name of the Hub. Remove revision."
            )
        return path
    if path.exists():
        raise ConfigError(f"{key}: {given!r} is a file. Give the folder that contains it.")
    if isinstance(name_or_path, Path) or not HUB_NAME.fullmatch(given):
        raise ConfigError(
            f"{key}: there is no folder {given!r}. Give a folder that exists, or the name of a "
            f"repository of the Hub: 'owner/name'."
        )
    if patterns is not None:
        return _download(given, key, revision, patterns)
    for weights in _WEIGHTS_PATTERNS:
        folder = _download(given, key, revision, [*SETTINGS_PATTERNS, *weights])
        if any(folder.glob(weights[0])):
            break
    return folder


def read_config(folder: Path, *, key: str) -> dict[str, Any]:
    """Return the settings in the `config.json` of a folder.

    Args:
        folder: A local folder.
        key: The setting that gives it, for messages.

    Raises:
        ConfigError: If there is no such file, or it is not a JSON object.
    """
    if not (folder / CONFIG_FILE).is_file() and has_adapter(folder):
        raise ConfigError(f"{key}: folder {str(folder)!r} has {OF_ADAPTER}")
    return _read_object(
        folder / CONFIG_FILE,
        key,
        f"folder {str(folder)!r} has no {CONFIG_FILE}, so it is not a model in the format of "
        f"transformers. Give the folder that save_pretrained wrote, or that "
        f"'hf download NAME --local-dir DIR' wrote.",
    )


def has_adapter(folder: Path) -> bool:
    """Return whether a folder has an adapter of `peft`, instead of a model or beside it."""
    return (folder / "adapter_config.json").is_file()


def needs_remote_code(config: Mapping[str, Any], known: Collection[str] = ()) -> bool:
    """Return whether a model's architecture is Python code in its repository.

    Args:
        config: The settings in its `config.json`.
        known: The values of `model_type` whose code `transformers` has; it is used instead.
    """
    return "auto_map" in config and config.get("model_type") not in known


def weight_files(folder: Path, *, key: str, otherwise: str = "") -> list[Path]:
    """Return the files of a folder's weights, safetensors before files of `torch.save`.

    Args:
        folder: A local folder.
        key: The setting that gives it, for messages.
        otherwise: What else one can do if the folder has no weights, for the message.

    Raises:
        ConfigError: If there are none, one that the index names is missing, or there are only
            files that may not be loaded or whose format is another library's.
    """
    for file, index in ((SAFETENSORS_FILE, SAFETENSORS_INDEX), (TORCH_FILE, TORCH_INDEX)):
        if (folder / file).is_file():
            found = [folder / file]
        elif (folder / index).is_file():
            found = _files_of_index(folder / index, key)
        else:
            continue
        for path in found:
            _require_torch_file(path, key)
        return found
    raise ConfigError(
        f"{key}: folder {str(folder)!r} has no weights: {_instead(folder, otherwise)}"
    )


def _files_of_index(index: Path, key: str) -> list[Path]:
    entries = _read_object(index, key, f"{str(index)!r} is missing.").get("weight_map")
    if not isinstance(entries, dict) or not entries:
        raise ConfigError(
            f"{key}: {str(index)!r} has no 'weight_map' that names files. Save or download the "
            f"folder again."
        )
    names = sorted({str(name) for name in entries.values()})
    for name in names:
        if Path(name).name != name:
            raise ConfigError(
                f"{key}: {str(index)!r} names the file {name!r}, which is not in its folder. Save "
                f"or download the folder again."
            )
    missing = [name for name in names if not (index.parent / name).is_file()]
    if missing:
        raise ConfigError(
            f"{key}: {len(missing)} of the {len(names)} files that {str(index)!r} names are "
            f"missing, first {missing[0]!r}. Complete the download, or copy all files."
        )
    return [index.parent / name for name in names]


def _require_torch_file(path: Path, key: str) -> None:
    """Check that a file of weights other than safetensors is one of `torch.save`."""
    if path.suffix == ".safetensors":
        return
    with open_regular(path) as file:
        start = file.read(len(_LEGACY))
    if not start.startswith((_ARCHIVE, _LEGACY)):
        raise ConfigError(
            f"{key}: {str(path)!r} is not a file of torch.save. Other pickles are not loaded, "
            f"because loading one runs the code in it. Convert the weights to safetensors where "
            f"you trust them: from_pretrained, then save_pretrained, of transformers."
        )


def _instead(folder: Path, otherwise: str) -> str:
    """Return what a folder has instead of weights, and what to do."""
    expected = f"neither {SAFETENSORS_FILE} nor {TORCH_FILE}, nor an index of several files"
    if has_adapter(folder):
        return f"{expected}, but {OF_ADAPTER}"
    others = sorted(path.name for kind in _OF_OTHERS for path in folder.glob(kind))
    if others:
        return (
            f"{expected}, only {', '.join(others[:3])}. Convert them to safetensors where you "
            f"trust them: from_pretrained, then save_pretrained, of transformers."
        )
    other = f", or {otherwise}" if otherwise else ""
    return f"{expected}. Complete the download ('hf download NAME --local-dir DIR'){other}."


def _read_object(path: Path, key: str, absent: str) -> dict[str, Any]:
    """Read a JSON object."""
    if not path.is_file():
        raise ConfigError(f"{key}: {absent}")
    try:
        found = json.loads(read_text(path))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{key}: {str(path)!r} cannot be read as JSON ({reason_of(error)}). Save or download "
            f"the folder again."
        ) from error
    if not isinstance(found, dict):
        raise ConfigError(
            f"{key}: {str(path)!r} must contain a JSON object, not a {type(found).__name__}. Save "
            f"or download the folder again."
        )
    return found


def _download(name: str, key: str, revision: str | None, patterns: Sequence[str]) -> Path:
    hub = _library("huggingface_hub", key, given=name)
    errors = import_module("huggingface_hub.errors")
    try:
        found = hub.snapshot_download(
            name, revision=revision, allow_patterns=list(patterns), ignore_patterns=["*/*"]
        )
    except errors.GatedRepoError as error:
        raise ConfigError(
            f"{key}: repository {name!r} of the Hub is gated. Accept its conditions on its page, "
            f"and log in: hf auth login (or set HF_TOKEN)."
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ConfigError(
            f"{key}: there is no folder {name!r}, and no public repository of that name on the "
            f"Hub. Correct the name; for a private repository, log in: hf auth login."
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ConfigError(
            f"{key}: repository {name!r} of the Hub has no revision {revision!r}. Give one of its "
            f"branches, tags or commits."
        ) from error
    except (OSError, ValueError, errors.HfHubHTTPError) as error:
        raise ConfigError(
            f"{key}: there is no folder {name!r}, and the repository of that name cannot be "
            f"downloaded from the Hub ({_first_line(error)}). Without a network, run 'hf download "
            f"{name} --local-dir DIR' elsewhere, copy DIR here, and give its path."
        ) from error
    return Path(found)


def _first_line(error: Exception) -> str:
    return reason_of(error).strip().splitlines()[0].rstrip(".")


def _library(name: str, key: str, given: str | None = None) -> Any:
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
    folder = "" if given is None else f"there is no folder {given!r}, and a name of the Hub "
    raise ConfigError(f"{key}: {folder}requires {name}, which is not installed: {_INSTALL}")
