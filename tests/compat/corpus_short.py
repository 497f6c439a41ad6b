"""A published configuration made small: a tiny model, tiny data, three steps; all else as it is."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any, Final

from tests.compat.corpus_expected import Plain, filters_of, only, schedules_for

NUM_STEPS: Final = 3
MICRO_BATCH_SIZE: Final = "csx.performance.micro_batch_size"
_ALWAYS: Final = ("embedding.weight", "layers.0.weight", "layers.0.bias")


def shortened(trainer: Plain) -> dict[str, Any]:
    """Return a file's `trainer` section as one that trains for three steps.

    Args:
        trainer: The section; it stays as it is.
    """
    short = copy.deepcopy(dict(trainer))
    init = short["init"]
    init["model"] = {"tests.compat.corpus_doubles.TinyNamed": _model(init)}
    length = {key: NUM_STEPS for key in ("num_steps", "max_steps") if key in init["loop"]}
    init["loop"] |= length | {"eval_steps": 1}
    for section in ("fit", "validate", "validate_all"):
        for key, given in short.get(section, {}).items():
            if key.endswith(("dataloader", "dataloaders")):
                short[section][key] = _samples(given["batch_size"], is_uneven=key[:3] == "val")
    short["fit"].pop("ckpt_path", None)
    return {"trainer": short}


def _samples(batch_size: int, *, is_uneven: bool) -> dict[str, Any]:
    """Return a dataloader of as large batches, or of one sample more."""
    return {
        "data_processor": "tests.compat.corpus_doubles.TinySamples",
        "batch_size": batch_size + is_uneven,
    }


def _model(init: Plain) -> dict[str, Any]:
    _, optimizer = only(init["optimizer"])
    groups = optimizer.get("adjust_learning_rate") or {}
    names = [
        *_ALWAYS,
        *(f"{group}.weight" for group in groups),
        *names_for(init),
        *names_of_sparse(init),
    ]
    patterns = {group: [f"{group}.*"] for group in groups}
    return {"names": names} | ({"adjustment_groups": patterns} if groups else {})


def names_for(init: Plain) -> list[str]:
    """Return names of parameters that the optimizer's globs match.

    There is one for each glob, a bias where the glob has room for the word, and one for each two
    tags that may meet in a parameter: a schedule of the learning rate has the one, a schedule of
    weight decay the other.
    """
    _, optimizer = only(init["optimizer"])
    filters = list(filters_of(optimizer))
    names = [_filled(glob, middle) for glob, _ in filters for middle in ("part", "bias")]
    pairs: dict[tuple[str, str], str] = {}
    for outer, first in filters:
        for inner, second in filters:
            name = _filled(outer, _filled(inner, "part").strip("*.").removesuffix(".leaf"))
            if (
                first != second
                and fnmatchcase(name, outer)
                and fnmatchcase(name, inner)
                and _has_one_owner(name, optimizer, init["schedulers"])
            ):
                pairs.setdefault((first, second), name)
    return list(dict.fromkeys([*names, *pairs.values()]))


def names_of_sparse(init: Plain) -> list[str]:
    """Return a name of a parameter for each glob of the sparsity's filter."""
    globs = (init.get("sparsity") or {}).get("param_filter") or ()
    # A class of characters is filled with the first of them.
    plain = [re.sub(r"\[(.)[^]]*\]", r"\1", glob) for glob in globs]
    return [f"model.{glob.lstrip('*')}" for glob in plain]


def _filled(glob: str, middle: str) -> str:
    """Return a name that a glob matches.

    Args:
        glob: With stars at its ends and between dots.
        middle: For the first star between dots.
    """
    text = glob.removeprefix("*.").lstrip("*")
    text = text.removesuffix("*") + "leaf" if text.endswith(".*") else text.rstrip("*")
    return ("model." if glob.startswith("*.") else "") + text.replace("*", middle, 1).replace(
        "*", "part"
    )


def _has_one_owner(name: str, optimizer: Plain, schedules: Iterable[Plain]) -> bool:
    """Return whether no two schedules set the same of a parameter."""
    given = list(schedules)
    return all(
        len(schedules_for(name, key, optimizer, given)) <= 1 for key in ("lr", "weight_decay")
    )


def parts_of(trainer: Plain, section: str, dataloader: str, flags: str) -> list[int]:
    """Return the samples of each forward pass for one batch of a dataloader.

    Args:
        trainer: A file's `trainer` section.
        section: Of the dataloader, such as "fit".
        dataloader: Its key there.
        flags: The callback whose flags count: "ScopedTrainFlags" or "ScopedValidateFlags".
    """
    given = trainer[section].get(dataloader)
    if given is None:
        return []
    num = int(given["batch_size"])
    size = _micro_batch_size(trainer["init"], flags) or num
    whole, rest = divmod(num, size)
    return [size] * whole + [rest] * bool(rest)


def _micro_batch_size(init: Plain, flags: str) -> int | None:
    """Return the file's number of samples a pass; None if batches stay whole ("auto")."""
    found: list[Mapping[str, Any]] = [
        given for name, given in map(only, init.get("callbacks") or ()) if name == flags
    ]
    sizes = [given.get(MICRO_BATCH_SIZE) for given in found]
    return next((size for size in sizes if isinstance(size, int)), None)


def checkpoints_of(init: Plain) -> list[str]:
    """Return the names of the checkpoints that a run of three steps leaves behind."""
    given = init.get("checkpoint") or {}
    name = given.get("checkpoint_name", "checkpoint_{step}")
    steps = [0] if given.get("save_initial_checkpoint") else []
    steps += [NUM_STEPS] if given.get("steps") else []
    keep = [args["n"] for one, args in map(only, init.get("callbacks") or ()) if "KeepN" in one]
    return [name.format(step=step) for step in steps][-min(keep, default=len(steps)) :]
