"""The command `lm_eval`: its options, and what of a file it runs."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

from modelzoo_trainer.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from modelzoo_trainer.config.plan import TrainerPlan

NAME: Final = "lm_eval"
_CALLBACK: Final = "EleutherEvalHarness"
_PATH: Final = f"init.callbacks[{_CALLBACK}]"
_CHECKPOINT: Final = "last"


@dataclass(frozen=True, slots=True)
class _Option:
    """An option that sets an argument of `eeh_args`."""

    name: str
    help: str
    metavar: str | None = "TEXT"  # None = a switch
    letter: str | None = None
    kind: Literal["text", "number", "either"] = "text"  # "either": a text, or a switch


_OPTIONS: Final = (
    _Option("tasks", "names of tasks, separated by commas", "NAMES", "t"),
    _Option("num_fewshot", "examples in the prompt", "N", "f", "number"),
    _Option("limit", "documents per task, or a fraction of them", "N", "L", "number"),
    _Option("include_path", "folder with tasks of your own", "DIR"),
    _Option("output_path", "folder for the results", "DIR"),
    _Option("log_samples", "write the answer to each request", None, "s"),
    _Option("predict_only", "write the answers, compute no metrics", None, "x"),
    _Option("write_out", "print the first prompts", None, "w"),
    _Option("show_config", "print the configurations of the tasks", None),
    _Option("check_integrity", argparse.SUPPRESS, None),  # refused, with the reason
    _Option("use_cache", argparse.SUPPRESS, "FILE"),  # likewise
    _Option("cache_requests", "cache prompts: true, refresh or delete", "KIND"),
    _Option("system_instruction", "system message of chats"),
    _Option("apply_chat_template", "prompts as chats; may name a template", "NAME", kind="either"),
    _Option("fewshot_as_multiturn", "examples as turns of the chat", None),
    _Option("max_tokens", "tokens to generate at most", "N", kind="number"),
    _Option("temperature", "of sampling; 0 = greedy", "X", kind="number"),
    _Option("top_k", "sample among the K most likely tokens", "K", kind="number"),
    _Option("top_p", "sample among tokens with this total probability", "P", kind="number"),
    _Option("seed", "one seed, or four separated by commas", "SEEDS"),
    _Option("trust_remote_code", "accepted for compatibility, no effect", None),
    _Option("confirm_run_unsafe_code", "run tasks that execute what the model writes", None),
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    group = parser.add_argument_group(f"override eeh_args of {_CALLBACK}")
    for option in _OPTIONS:
        names = [f"--{option.name}", *([f"-{option.letter}"] if option.letter else ())]
        dest = f"harness_{option.name}"
        if option.metavar is None:
            group.add_argument(*names, dest=dest, action="store_true", help=option.help)
        elif option.kind == "either":
            group.add_argument(
                *names, dest=dest, nargs="?", const=True, metavar=option.metavar, help=option.help
            )
        else:
            group.add_argument(*names, dest=dest, metavar=option.metavar, help=option.help)
    group.add_argument(
        "--keep_data_dir", action="store_true", help="accepted for compatibility, no effect"
    )


def add_changes(options: argparse.Namespace) -> None:
    """Add what the options of the command set to the changes of the file."""
    changes = [
        f"{_PATH}.eeh_args.{option.name}={_as_yaml(value, option)}"
        for option in _OPTIONS
        if (value := getattr(options, f"harness_{option.name}")) not in (None, False)
    ]
    if options.keep_data_dir:
        changes.append(f"{_PATH}.keep_data_dir=true")
    changes.append("validate_all.val_dataloaders=null")  # makes the section, if it is missing
    options.changes = [*changes, *options.changes]


def _as_yaml(value: Any, option: _Option) -> str:
    if value is True:
        return "true"
    return str(value) if option.kind == "number" else json.dumps(str(value))


def restrict(plans: Sequence[TrainerPlan]) -> Sequence[TrainerPlan]:
    """Have plans evaluate the newest checkpoint, unless the file or an option names others.

    Raises:
        ConfigError: If a plan has no evaluation.
    """
    for plan in plans:
        names = [getattr(one.target, "__name__", "") for one in plan.init.get("callbacks", ())]
        if _CALLBACK not in names:
            raise ConfigError(
                f"{NAME} requires the callback {_CALLBACK} in the file. Add it to init.callbacks, "
                f"with eeh_args and a tokenizer."
            )
        plan.call.pop("val_dataloaders", None)
        plan.call.setdefault("ckpt_paths", _CHECKPOINT)
    return plans
