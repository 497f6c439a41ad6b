"""The arguments of an evaluation with `lm_eval`: `eeh_args` of `EleutherEvalHarness`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

from annotated_types import Gt, Le, Predicate

from modelzoo_trainer.base.constraints import (
    FinitePositiveFloat,
    Flag,
    Name,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
)
from modelzoo_trainer.base.nested_settings import made
from modelzoo_trainer.errors import ConfigError

WHERE: Final = "EleutherEvalHarness.eeh_args"
_SEEDS: Final = (0, 1234, 1234, 1234)
_LEVELS: Final = ("CRITICAL", "ERROR", "WARNING", "INFO", "DEBUG")
_CACHING: Final = {"true": {"cache_requests": True}, "delete": {"delete_requests_cache": True}}
_CACHING["refresh"] = {"cache_requests": True, "rewrite_requests_cache": True}

Level = Annotated[str, Predicate(lambda text: text.upper() in _LEVELS), f"one of {_LEVELS}"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HarnessArguments:
    """Arguments of an evaluation, with the names of the command line of `lm_eval`."""

    tasks: Name | Annotated[list[Name], Predicate(bool), "a list of names"]
    num_fewshot: NonNegativeInt | None = None
    output_path: Name | None = None
    limit: FinitePositiveFloat | None = None
    use_cache: Name | None = None
    cache_requests: Literal["true", "refresh", "delete"] | Flag | None = None
    check_integrity: Flag = False
    write_out: Flag = False
    log_samples: Flag = False
    system_instruction: str | None = None
    apply_chat_template: Flag | str = False
    fewshot_as_multiturn: Flag | None = None
    show_config: Flag = False
    include_path: Name | list[Name] | None = None
    predict_only: Flag = False
    confirm_run_unsafe_code: Flag = False
    seed: str | int | list[Any] = "0,1234,1234,1234"
    trust_remote_code: Flag = False
    verbosity: Level = "WARNING"
    max_tokens: PositiveInt | None = None
    temperature: NonNegativeFloat | None = None
    top_k: PositiveInt | None = None
    top_p: Annotated[float, Gt(0), Le(1)] | None = None

    def __post_init__(self) -> None:
        if not self.names:
            raise ConfigError(
                f"tasks: names no task, got {self.tasks!r}. Give names of tasks of lm_eval, "
                f"separated by commas."
            )
        if self.fewshot_as_multiturn and not self.apply_chat_template:
            raise ConfigError(
                "fewshot_as_multiturn: true requires apply_chat_template. Set that, or remove "
                "fewshot_as_multiturn."
            )
        if self.check_integrity:
            raise ConfigError(
                "check_integrity: lm_eval would run tests of its own source code, which its "
                "package does not have. Remove it."
            )
        if self.use_cache is not None:
            raise ConfigError(
                f"use_cache: lm_eval finds answers in the file {self.use_cache!r} by their "
                f"prompts, whatever the weights are, so later evaluations would have the scores "
                f"of the first. Remove it."
            )
        self.seeds  # noqa: B018  # raises if invalid

    @property
    def names(self) -> list[str]:
        """The names of tasks, groups, tags and files of tasks."""
        given = self.tasks.split(",") if isinstance(self.tasks, str) else self.tasks
        return list(dict.fromkeys(name.strip() for name in given if name.strip()))

    @property
    def folders(self) -> list[str]:
        """The folders with tasks besides `lm_eval`'s."""
        given = self.include_path
        return [] if given is None else [given] if isinstance(given, str) else list(given)

    @property
    def seeds(self) -> list[int | None]:
        """The seeds of random, numpy, torch and the examples in prompts; None = not seeded.

        Raises:
            ConfigError: If they are invalid.
        """
        given = self.seed
        parts = given.split(",") if isinstance(given, str) else given
        values = list(parts) if isinstance(parts, list) else [parts] * len(_SEEDS)
        values = values * len(_SEEDS) if len(values) == 1 else values
        values += _SEEDS[len(values) :] if len(values) == len(_SEEDS) - 1 else ()
        if len(values) != len(_SEEDS):
            raise ConfigError(
                f"seed: expected one integer or four (random, numpy, torch, few-shot examples), "
                f"got {given!r}."
            )
        return [_seed(value, given) for value in values]

    @property
    def sampling(self) -> dict[str, Any] | None:
        """What replaces the settings of generating tasks; None = nothing."""
        found: dict[str, Any] = {}
        if self.max_tokens is not None:
            found["max_gen_toks"] = self.max_tokens
        if self.temperature is not None:
            found |= {"temperature": self.temperature, "do_sample": self.temperature > 0}
        found |= {
            name: value
            for name, value in (("top_k", self.top_k), ("top_p", self.top_p))
            if value is not None
        }
        return found or None

    @property
    def writes_samples(self) -> bool:
        """Whether the answers to single requests are written."""
        return self.log_samples or self.predict_only

    @property
    def notes(self) -> list[str]:
        """Arguments without effect."""
        found = []
        if self.trust_remote_code:
            found.append(
                "eeh_args.trust_remote_code: no effect; the library datasets runs no code of "
                "datasets."
            )
        unused = [name for name in ("top_k", "top_p") if getattr(self, name) is not None]
        if unused and self.temperature is None:
            found.append(
                f"eeh_args.{unused[0]}: no effect on tasks that do not sample. Set temperature as "
                f"well."
            )
        elif unused and self.temperature == 0:
            found.append(f"eeh_args.{unused[0]}: no effect with temperature 0.")
        return found

    def for_lm_eval(self, most: int | None = None) -> dict[str, Any]:
        """Return the keyword arguments of `lm_eval.simple_evaluate`, besides model and tasks.

        `most`: maximum number of documents of each task, besides `limit`.
        """
        seeds = self.seeds
        key = str(self.cache_requests).lower()
        limit = self.limit
        if most is not None and (limit is None or limit < 1 or limit > most):
            limit = most
        return {
            "num_fewshot": self.num_fewshot,
            "limit": int(limit) if limit is not None and limit >= 1 else limit,
            "write_out": self.write_out,
            "log_samples": self.writes_samples,
            "system_instruction": self.system_instruction,
            "apply_chat_template": self.apply_chat_template,
            "fewshot_as_multiturn": (
                bool(self.apply_chat_template)
                if self.fewshot_as_multiturn is None
                else self.fewshot_as_multiturn
            ),
            "gen_kwargs": self.sampling,
            "predict_only": self.predict_only,
            "confirm_run_unsafe_code": self.confirm_run_unsafe_code,
            "random_seed": seeds[0],
            "numpy_random_seed": seeds[1],
            "torch_random_seed": seeds[2],
            "fewshot_random_seed": seeds[3],
            **_CACHING.get(key, {}),
        }


def _seed(value: Any, given: Any) -> int | None:
    if value is None or str(value).strip().lower() == "none":
        return None
    try:
        found = int(str(value))
    except ValueError:
        found = -1
    if not 0 <= found < 2**32 or isinstance(value, bool):
        raise ConfigError(
            f"seed: {value!r} in {given!r} is not an integer in [0, 2**32), and not None."
        )
    return found


def read_arguments(given: object) -> HarnessArguments:
    """Return the arguments in `eeh_args`.

    Raises:
        ConfigError: If a key is unknown or missing, or a value is invalid.
    """
    return made(HarnessArguments, given, WHERE)
