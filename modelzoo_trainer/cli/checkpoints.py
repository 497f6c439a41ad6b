"""The command `checkpoint`: list, info, verify, diff, export, convert, delete, upload.

Commands import torch only if they need it, so that the others start quickly.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final, TypeAlias

from modelzoo_trainer.base.exit_codes import DONE, FAILED, INTERRUPTED, WRONG_USE
from modelzoo_trainer.checkpointing.folder import LATEST
from modelzoo_trainer.checkpointing.stores.urls import is_url
from modelzoo_trainer.cli import converting
from modelzoo_trainer.cli.parser import PROG
from modelzoo_trainer.errors import ConfigError, ModelZooError
from modelzoo_trainer.tools.checkpoints.overview import (
    Overview,
    details,
    details_json,
    find_checkpoints,
    is_meant_as_one,
    overview,
    readable,
    table,
)
from modelzoo_trainer.tools.checkpoints.store_arguments import bring_here, push_deletions, upload

_PROG: Final = f"{PROG} checkpoint"
_EXAMPLES: Final = {
    "list": ("list runs/mnist", "list runs/mnist --verify"),
    "info": ("info runs/mnist/checkpoint_100", "info runs/mnist/latest --json"),
    "verify": ("verify runs/mnist",),
    "diff": ("diff runs/a/checkpoint_100 runs/b/checkpoint_100 --key model",),
    "export": ("export runs/mnist/checkpoint_100 model.safetensors",),
    "delete": ("delete runs/mnist/checkpoint_50",),
    "upload": ("upload ~/.cache/modelzoo_trainer/stores/bucket-runs-a-6c9f1f0a",),
}
_EXIT_CODES: Final = """\
exit codes:
  0    success
  1    a checkpoint is damaged, two checkpoints differ, or reading or writing failed
  2    the command is invalid
  130  stopped by Ctrl-C (SIGINT)
"""


Run: TypeAlias = Callable[[argparse.Namespace], int]


class _WrongUse(Exception):
    """The command is invalid."""


def main(argv: Sequence[str]) -> int:
    """Run a command, given the words after `checkpoint`, and return the exit code."""
    try:
        options = _parser().parse_args(argv)
        bring_here(options)
        run: Run = options.run
        return run(options)
    except _WrongUse as error:
        _complain([str(error)])
        return WRONG_USE
    except ModelZooError as error:
        _complain([str(error)])
        return WRONG_USE if isinstance(error, ConfigError) else FAILED
    except BrokenPipeError:  # a closed pipe is not a failure
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
        return DONE
    except OSError as error:
        _complain([f"{error.filename or 'output'}: {error.strerror or error}"])
        return FAILED
    except KeyboardInterrupt:
        return INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=_PROG,
        description="List, show, verify, compare, export, convert, delete and upload checkpoints.\n"
        "A path may be the URL of an object store, such as s3://bucket/runs/a.",
        epilog=_epilog([example for examples in _EXAMPLES.values() for example in examples]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def add(name: str, run: Run, text: str, examples: Sequence[str] = ()) -> _Parser:
        command = commands.add_parser(
            name,
            help=text,
            description=f"{text[0].upper()}{text[1:]}.",
            epilog=_epilog(examples or _EXAMPLES[name]),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        command.set_defaults(run=run)
        return command

    command = add("list", _list, "list the checkpoints in folders, oldest step first")
    _add_paths(command, "a folder of checkpoints, or a checkpoint")
    command.add_argument(
        "--verify", action="store_true", help="read all files and compare their checksums"
    )
    command = add("info", _info, "show the files and tensors of a checkpoint")
    command.add_argument("path", metavar="CHECKPOINT", type=_path, help="folder of the checkpoint")
    command.add_argument("--json", action="store_true", help="print JSON")
    command = add("verify", _verify, "read all files of checkpoints and compare their checksums")
    _add_paths(command, "a checkpoint, or a folder of checkpoints")
    command = add("diff", _diff, "compare two checkpoints bitwise")
    command.add_argument("before", metavar="A", type=_path, help="folder of a checkpoint")
    command.add_argument("after", metavar="B", type=_path, help="folder of another")
    command.add_argument("--key", help="compare only this part of the state, such as model")
    command = add("export", _export, "write the model's weights to one safetensors file")
    command.add_argument("path", metavar="CHECKPOINT", type=_path, help="folder of the checkpoint")
    command.add_argument(
        "file",
        metavar="FILE",
        type=_path,
        help="the file to write; its name ends with .safetensors",
    )
    command.add_argument("--force", action="store_true", help="overwrite the file if it exists")
    command = add("delete", _delete, "delete checkpoints")
    command.set_defaults(needs_siblings=True)
    _add_paths(command, "a checkpoint", _exact_path)
    command.add_argument(
        "--yes", action="store_true", help="delete even if no intact checkpoint is left"
    )
    command = add("upload", _upload, "upload what a run on an object store could not upload")
    command.add_argument("path", metavar="FOLDER", type=_exact_path, help="the run's local copy")
    converting.add_command(add)
    return parser


def _epilog(examples: Iterable[str]) -> str:
    lines = "\n".join(f"  {_PROG} {example}" for example in examples)
    return f"examples:\n{lines}\n\n{_EXIT_CODES}"


_Parser = argparse.ArgumentParser


def _add_paths(
    command: _Parser, text: str, read: Callable[[str], Path | str] | None = None
) -> None:
    command.add_argument("paths", metavar="PATH", nargs="+", type=read or _path, help=text)


def _exact_path(text: str) -> Path | str:
    """Return a path, without resolving links; a URL as it is."""
    return text if is_url(text) else Path(os.path.abspath(text))


def _path(text: str) -> Path | str:
    path = _exact_path(text)
    if isinstance(path, str):
        return path
    if path.name == LATEST and path.is_symlink():
        return path.with_name(os.readlink(path))
    return path


# ---- the commands


def _list(options: argparse.Namespace) -> int:
    found = [item for path in options.paths for item in _existing(path)]
    if options.verify:
        found = [item.verified(_verified(item.path)) for item in found]
    _say(table(found) if found else ["no checkpoints"])
    return FAILED if any(item.is_damaged for item in found) else DONE


def _info(options: argparse.Namespace) -> int:
    _check_is_folder(options.path)
    lines = details_json(options.path) if options.json else details(options.path)
    _say(lines)
    problems = overview(options.path).problems
    _complain(f"{options.path.name}: {problem}" for problem in problems)
    return FAILED if problems else DONE


def _verify(options: argparse.Namespace) -> int:
    code = DONE
    for path in options.paths:
        found = [item for item in _existing(path) if not item.is_leftover]
        if not found:
            raise _WrongUse(f"{str(path)!r} has no checkpoints.")
        for item in found:
            problems = _verified(item.path)
            if not problems:
                _say([f"{item.path}: intact (step {item.step}, {readable(item.num_bytes)})"])
            _complain(f"{item.path}: {problem}" for problem in problems)
            code = FAILED if problems else code
    return code


def _diff(options: argparse.Namespace) -> int:
    from modelzoo_trainer.checkpointing import load
    from modelzoo_trainer.checkpointing.weights import read_part
    from modelzoo_trainer.tools.checkpoints.compare import compare

    for path in (options.before, options.after):
        _check_is_folder(path)
    if options.key is None:
        before, after = load(options.before), load(options.after)
    else:
        before = {options.key: read_part(options.before, options.key)}
        after = {options.key: read_part(options.after, options.key)}
    differences = compare(before, after)
    _say([f"{item.kind:8} {item.name}: {item.what}" for item in differences])
    if not differences:
        _say(["bitwise equal"])
        return DONE
    counts = dict.fromkeys(("changed", "added", "removed"), 0)
    for item in differences:
        counts[item.kind] += 1
    _say([", ".join(f"{num} {kind}" for kind, num in counts.items() if num)])
    return FAILED


def _export(options: argparse.Namespace) -> int:
    from modelzoo_trainer.checkpointing.weights import TargetError, export, tied_in

    _check_is_folder(options.path)
    try:
        rest = export(options.path, options.file, force=options.force)
    except TargetError as error:
        raise _WrongUse(str(error)) from None
    _complain(f"not exported, because it is not a tensor: {name}" for name in rest)
    _complain(
        f"tied weights are stored once: {name} is saved as {kept} (load with "
        f"safetensors.torch.load_model(model, file), or load_state_dict with strict=False)"
        for name, kept in tied_in(options.file).items()
    )
    _say([f"{options.file}: {readable(options.file.stat().st_size)}"])
    return DONE


def _delete(options: argparse.Namespace) -> int:
    from modelzoo_trainer.checkpointing import delete

    for path in options.paths:
        _check_is_checkpoint(path)
    if not options.yes:
        _check_others_stay(options.paths)
    for path in options.paths:
        delete(path)
        _say([f"{path}: deleted"])
    for folder in {path.parent for path in options.paths}:
        _mend_latest(folder)
        push_deletions(folder)
    return DONE


def _upload(options: argparse.Namespace) -> int:
    _check_is_folder(options.path)
    _say(upload(options.path))
    return DONE


def _mend_latest(folder: Path) -> None:
    """Point `latest` to the newest checkpoint that is left."""
    from modelzoo_trainer.checkpointing import list_checkpoints, mend_latest

    link = folder / LATEST
    if link.is_symlink() and not link.exists():
        left = list_checkpoints(folder)
        mend_latest(folder, left[-1].path.name if left else None)


# ---- shared by the commands


def _existing(path: Path) -> list[Overview]:
    _check_is_folder(path)
    return find_checkpoints(path)


def _check_is_folder(path: Path) -> None:
    if not path.is_dir():
        what = "is a file, not a folder" if path.exists() else "does not exist"
        raise _WrongUse(f"{str(path)!r} {what}.")


def _check_is_checkpoint(path: Path) -> None:
    if path.is_symlink():
        raise _WrongUse(
            f"{str(path)!r} is a symbolic link. Pass the checkpoint itself: {path.resolve()}"
        )
    _check_is_folder(path)
    item = overview(path)
    if item.is_leftover:
        raise _WrongUse(f"{str(path)!r} was not deleted: it is {item.problems[0]}.")
    if not is_meant_as_one(path):
        raise _WrongUse(f"{str(path)!r} was not deleted: it is not a checkpoint.")


def _check_others_stay(paths: Sequence[Path]) -> None:
    for folder in sorted({path.parent for path in paths}):
        intact = {item.path for item in find_checkpoints(folder) if item.is_intact}
        if intact and not intact - set(paths):
            names = ", ".join(repr(path.name) for path in sorted(intact))
            raise _WrongUse(
                f"Nothing was deleted: deleting {names} would leave no intact checkpoint in "
                f"{str(folder)!r}. Use --yes to delete anyway."
            )


def _verified(path: Path) -> list[str]:
    from modelzoo_trainer.checkpointing import verify

    return verify(path)


def _say(lines: Iterable[str]) -> None:
    if sys.stdout is None:  # closed by the parent process
        return
    for line in lines:
        sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _complain(lines: Iterable[str]) -> None:
    for line in lines:
        sys.stderr.write(f"{line}\n")
