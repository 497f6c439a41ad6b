"""Write the model in the format of Hugging Face during and after training."""

from __future__ import annotations

import logging
import re
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import torch
from typing_extensions import override

from modelzoo_trainer import checkpointing
from modelzoo_trainer.callback import Callback, Loader
from modelzoo_trainer.callbacks.side_checkpoints import (
    free_path,
    save_state,
    saving,
    state_of,
    try_to_write,
    write_in_main,
)
from modelzoo_trainer.checkpointing.folder import hidden_name
from modelzoo_trainer.checkpointing.lazy_checkpoint import open_model
from modelzoo_trainer.constraints import PositiveInt, checked
from modelzoo_trainer.conversion.engine import InMemory, PartOf, Source
from modelzoo_trainer.conversion.family import families, family_for
from modelzoo_trainer.conversion.hugging_face import plan_export, write_export
from modelzoo_trainer.conversion.tokenizer_files import TokenizerFiles, read_tokenizer
from modelzoo_trainer.errors import CheckpointError, ConfigError, suggest
from modelzoo_trainer.hugging_face.folders import SETTINGS_PATTERNS, local_folder
from modelzoo_trainer.models.decoder import Decoder
from modelzoo_trainer.models.dpo import Dpo
from modelzoo_trainer.shown_path import shown_path

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer

log = logging.getLogger("modelzoo_trainer.checkpoint")

_OWNER: Final = "HuggingFaceCheckpoint"
_SIZE: Final = re.compile(r"\s*(\d+)\s*([KMGT]?)(i?)B?\s*", re.IGNORECASE | re.ASCII)


class HuggingFaceCheckpoint(Callback):
    """Write the model as a folder that `transformers` loads: weights, config.json, tokenizer.

    For the decoders of this package, also as the policy of `dpo`; a model of transformers has
    `save_pretrained`. A setting that no family of Hugging Face has is refused before training. If a
    folder cannot be written, an error is logged; the run continues.

    Args:
        folder: Path of the folders, relative to `model_dir`; contains the field `{step}` once.
        steps: Write on every n-th step, > 0; None = not by steps.
        at_end: Whether to write at the end of a fit, unless it was interrupted.
        tokenizer: Folder of a tokenizer, its `tokenizer.json`, or a name of the Hub, to copy
            along; None = no tokenizer.
        family: `model_type` of config.json; None = the first family that fits the settings.
        dtype: Of the weights; None = as trained.
        shard_size: Maximum size of a file of weights.

    Cost: Training waits for the write. Sharded weights are written twice.

    Raises:
        ConfigError: If an argument is invalid, the model is no decoder of this package, or one of
            its settings has no counterpart.
    """

    @checked()
    def __init__(  # noqa: PLR0913  # the keys of its YAML section
        self,
        folder: str = "hf_{step}",
        steps: PositiveInt | None = None,
        at_end: bool = True,
        tokenizer: str | None = None,
        family: str | None = None,
        dtype: Literal["float32", "float16", "bfloat16"] | None = None,
        shard_size: str = "5GB",
    ) -> None:
        if steps is None and not at_end:
            raise ConfigError(f"{_OWNER} would never write a folder. Set steps or at_end.")
        if folder.count("{step}") != 1 or re.search(r"[{}]", folder.replace("{step}", "")):
            raise ConfigError(
                f"{_OWNER}.folder is {folder!r}; it must contain the field {{step}} once, such as "
                f"'hf_{{step}}'."
            )
        known = sorted(families())
        if family is not None and family not in known:
            raise ConfigError(f"{_OWNER}.family: {family!r} is unknown. {suggest(family, known)}")
        self.folder = folder
        self.steps = steps
        self.at_end = at_end
        self.tokenizer = tokenizer
        self.family = family
        self.dtype: torch.dtype | None = None if dtype is None else getattr(torch, dtype)
        self.shard_bytes = _bytes_of(shard_size)
        self._files = TokenizerFiles()
        self._last: int | None = None

    @override
    def post_setup(self, trainer: Trainer) -> None:
        model, _ = _decoder_in(trainer)
        if model is None:
            raise ConfigError(
                f"{_OWNER} writes the decoders of this package, such as gpt2 and llama; the model "
                f"is {type(trainer.model).__name__}. Call save_pretrained for a model of "
                f"transformers, or remove the callback."
            )
        if any(".base_layer." in name for name, _ in trainer.model.named_parameters()):
            raise ConfigError(
                f"{_OWNER} does not merge the adapters of the callback Lora. Remove one of the two."
            )
        if self.family is None:
            family_for(model, None)
        else:
            families()[self.family].make_config(model)
        if self.tokenizer is not None:
            key = f"{_OWNER}.tokenizer"
            path = Path(self.tokenizer)
            if not path.is_file():
                path = local_folder(self.tokenizer, key=key, patterns=SETTINGS_PATTERNS)
            self._files = read_tokenizer(path)
            self._files.check(model.vocab_size, key)

    @override
    def on_fit_start(
        self, trainer: Trainer, train_dataloader: Loader, val_dataloader: Loader, loop: Any
    ) -> None:
        self._last = None
        if trainer.backend.comm.is_main and trainer.backend.caps.holds_values:
            try:
                checkpointing.probe(self._path(trainer).parent)
            except CheckpointError as error:
                raise ConfigError(f"{_OWNER}.folder: {error}") from None

    def _path(self, trainer: Trainer) -> Path:
        return trainer.model_dir / self.folder.format(step=trainer.global_step)

    @override
    def on_step_boundary(self, trainer: Trainer) -> None:
        if self.steps is not None and trainer.global_step % self.steps == 0:
            self._write(trainer)

    @override
    def on_fit_end(self, trainer: Trainer, loop: Any) -> None:
        if self.at_end and trainer.interrupted is None and self._last != trainer.global_step:
            self._write(trainer)

    def _write(self, trainer: Trainer) -> None:
        if not trainer.backend.caps.holds_values:
            return
        trainer.drain()
        trainer.checkpoint.finish(trainer)  # its collectives must not interleave with these
        path = trainer.backend.comm.broadcast_object(free_path(self._path(trainer)))
        with saving(trainer):
            if try_to_write(partial(self._write_to, trainer, path), f"Failed to write {path}"):
                log.info("Saved %s.", shown_path(path))
        self._last = trainer.global_step

    def _write_to(self, trainer: Trainer, path: Path) -> None:
        backend = trainer.backend
        if not backend.caps.sharded_state:
            model = backend.writable(state_of(trainer, _OWNER, ("model",))["model"])
            write_in_main(trainer, lambda: self._export(trainer, InMemory(model), path))
            return
        # Via a checkpoint, which several processes can write; one process writes the folder.
        hidden = path.with_name(backend.comm.broadcast_object(hidden_name("tmp", path.name)))
        save_state(trainer, hidden, state_of(trainer, _OWNER, ("model",)))
        try:
            write_in_main(trainer, lambda: self._export(trainer, open_model(hidden), path))
        finally:
            if backend.comm.is_main:
                checkpointing.delete(hidden)

    def _export(self, trainer: Trainer, source: Source, path: Path) -> None:
        model, prefix = _decoder_in(trainer)
        assert model is not None  # checked in post_setup
        export = plan_export(
            PartOf(source, prefix),
            model,
            where="The model of this run",
            family=self.family,
            dtype=self.dtype,
        )
        write_export(export, path, tokenizer=self._files, shard_bytes=self.shard_bytes)


def _decoder_in(trainer: Trainer) -> tuple[Decoder | None, str]:
    """Return the decoder that a run trains, if any, and the start of its weights' names."""
    model = trainer.model
    if isinstance(model, Dpo) and isinstance(model.policy_model, Decoder):
        return model.policy_model, "policy_model."
    return (model, "") if isinstance(model, Decoder) else (None, "")


def _bytes_of(text: str) -> int:
    found = _SIZE.fullmatch(text)
    if found is None or int(found[1]) < 1:
        raise ConfigError(f"{_OWNER}.shard_size: expected a size such as 5GB, got {text!r}.")
    power = " KMGT".index(found[2].upper() or " ")
    return int(int(found[1]) * (1024 if found[3] else 1000) ** power)
