"""Plans: a checked file as the parts of a trainer and what it will run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol, runtime_checkable

from modelzoo_trainer.base.constraints import PositiveInt
from modelzoo_trainer.base.secrets import without_secrets
from modelzoo_trainer.config.components import Component
from modelzoo_trainer.config.modes import MODES as MODES
from modelzoo_trainer.config.positions import Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodPlan:
    """What the section of a method of the trainer has: the method's arguments."""

    dataloader: str  # its main one
    is_needed: bool = True  # whether it must be given
    others: tuple[str, ...] = ()  # other dataloaders
    several: str | None = None  # the dataloader that may be a list
    ckpt: str = "ckpt_path"
    plain: Mapping[str, Any] = field(default_factory=dict)  # settings, with their annotations
    needs_weights: bool = True  # whether it is refused where there is no checkpoint

    @property
    def keys(self) -> tuple[str, ...]:
        """All keys of the section."""
        return (self.dataloader, *self.others, self.ckpt, *self.plain)


METHODS: Final[Mapping[str, MethodPlan]] = {
    "fit": MethodPlan(
        dataloader="train_dataloader",
        others=("val_dataloader",),
        several="val_dataloader",
        needs_weights=False,
    ),
    "validate": MethodPlan(dataloader="val_dataloader"),
    "validate_all": MethodPlan(
        dataloader="val_dataloaders",
        is_needed=False,
        several="val_dataloaders",
        ckpt="ckpt_paths",
        needs_weights=False,  # it takes all that there are
    ),
    "test": MethodPlan(dataloader="dataloader", plain={"eval_steps": PositiveInt | None}),
    "predict": MethodPlan(
        dataloader="dataloader",
        plain={"output_dir": Path | None, "eval_steps": PositiveInt | None},
    ),
}


@runtime_checkable
class TakesConfig(Protocol):
    """A callback or logger that reads the configuration."""

    def take_config(self, config: Mapping[str, Any]) -> None:
        """Take the trainer's part of the file: plain values without secrets, read-only."""


@dataclass(frozen=True, slots=True)
class TrainerPlan:
    """One checked trainer of a file: its parts and what it will run."""

    trainer: Callable[..., Any]
    init: dict[str, Any]  # its arguments; components are built by `build`
    defaults: dict[str, list[Any]]  # default callbacks and loggers that the file does not remove
    # a key of `MODES`; None if the file has nothing to run and is only checked
    mode: str | None
    # the arguments of the method that the mode runs; dataloaders are components, built when the
    # method asks for them
    call: dict[str, Any]
    # this trainer's part of the file with the overrides of the command line; as YAML it is a
    # configuration itself
    resolved: dict[str, Any]
    # printed once: settings without an effect here
    notes: tuple[Problem, ...] = ()

    @property
    def method(self) -> str | None:
        """The trainer's method that the mode runs, a key of `METHODS`."""
        return None if self.mode is None else MODES[self.mode]

    def build(self) -> Any:
        """Return the trainer.

        Raises:
            ConfigError: If a class rejects its arguments; with the place in the file.
        """
        arguments: dict[str, Any] = {}
        for key, value in self.init.items():
            if key in ("model", "optimizer"):
                arguments[key] = _Maker(value)
            elif key == "schedulers":
                arguments[key] = [component.build for component in value]
            elif key in self.defaults:
                built = [component.build() for component in value] + self.defaults[key]
                self._tell_config(built)
                arguments[key] = built
            else:
                arguments[key] = value.build() if isinstance(value, Component) else value
        if self.method is not None and METHODS[self.method].ckpt == "ckpt_path":
            from modelzoo_trainer.core.checkpoint import Checkpoint  # imports torch

            arguments["checkpoint"] = arguments.get("checkpoint") or Checkpoint()
            arguments["checkpoint"].expected = self.call.get("ckpt_path", ...)
        # CheckLoss is among the file's default callbacks, unless the file removes it.
        trainer = self.trainer(**arguments, check_loss=False)
        trainer.is_from_file = True
        return trainer

    def _tell_config(self, callbacks: list[Any]) -> None:
        """Pass the configuration, without secrets, to the callbacks that read it."""
        config = without_secrets(self.resolved)
        for callback in callbacks:
            if isinstance(callback, TakesConfig):
                callback.take_config(config)

    def run(self, trainer: Any) -> None:
        """Run the method of the mode.

        What is predicted is written to files, also if it is small.

        Raises:
            ConfigError: If no checkpoint is named where one is required, and none is found.
        """
        assert self.method is not None  # a file without one is only checked
        call = {key: _dataloaders(value) for key, value in self.call.items()}
        if self.method == "validate_all" and "ckpt_paths" not in call:
            call["ckpt_paths"] = trainer.checkpoint.all_of(trainer)
        ckpt_path = call.get("ckpt_path", ...)
        if METHODS[self.method].needs_weights and ckpt_path is not None:
            trainer.checkpoint.require_any(trainer, self.method, ckpt_path)
        if self.method == "predict":
            call["output_dir"] = call.get("output_dir") or trainer.model_dir / "predictions"
        getattr(trainer, self.method)(**call)


class _Maker:
    """Builds a component; `makes`: its class."""

    def __init__(self, component: Any) -> None:
        self._component = component
        self.makes = getattr(component, "target", None)

    def __call__(self, *args: Any) -> Any:
        return self._component.build(*args)


def _dataloaders(value: Any) -> Any:
    """Return `value` with callables in place of data processors, which are components."""
    if isinstance(value, Component):
        return _dataloader(value)
    if isinstance(value, list):
        return [_dataloaders(item) for item in value]
    return value


def _dataloader(component: Component) -> Callable[[], Any]:
    """Return a callable that builds the data processor and returns its dataloader.

    `component`: the data processor; one without `create_dataloader` is the dataloader itself.
    """

    def create() -> Any:
        processor = component.build()
        make = getattr(processor, "create_dataloader", None)
        return processor if make is None else component.placed(make, "create_dataloader")

    return create
