"""Write the model in the format of Hugging Face during and after training."""

from __future__ import annotations

import logging
import re
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from torch.nn import Module
from typing_extensions import override

from modelzoo_trainer import checkpointing
from modelzoo_trainer.base.constraints import PositiveInt, checked_dataclass
from modelzoo_trainer.base.dtypes import Float, torch_dtype
from modelzoo_trainer.base.shown_path import shown_path
from modelzoo_trainer.callback import Callback, Loader
from modelzoo_trainer.callbacks.model_ema import ModelEma
from modelzoo_trainer.callbacks.parts.side_checkpoints import (
    free_path,
    save_state,
    state_of,
    try_to_write,
    write_in_main,
)
from modelzoo_trainer.checkpointing.folder import hidden_name
from modelzoo_trainer.core.checkpoint import saving
from modelzoo_trainer.errors import CheckpointError, ConfigError, suggest
from modelzoo_trainer.zoo.conversion.adapter_folder import (
    adapter_settings,
    plan_adapters,
    write_adapters,
)
from modelzoo_trainer.zoo.conversion.adapters import LoraLayer, MergedAdapters, lora_layers
from modelzoo_trainer.zoo.conversion.engine import InMemory, PartOf, TensorSource
from modelzoo_trainer.zoo.conversion.family import families
from modelzoo_trainer.zoo.conversion.hugging_face import (
    family_fitting,
    merged_settings,
    plan_export,
    write_export,
)
from modelzoo_trainer.zoo.conversion.lazy_checkpoint import open_model
from modelzoo_trainer.zoo.conversion.tokenizer_files import TokenizerFiles, read_tokenizer
from modelzoo_trainer.zoo.conversion.transformers_model import (
    TheirExport,
    TheirModel,
    plan_transformers,
    their_model,
    tokenizer_beside,
    write_transformers,
)
from modelzoo_trainer.zoo.hugging_face.folders import SETTINGS_PATTERNS, local_folder
from modelzoo_trainer.zoo.models.decoder import Decoder
from modelzoo_trainer.zoo.models.dpo import Dpo

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer

log = logging.getLogger("modelzoo_trainer.checkpoint")

_OWNER: Final = "HuggingFaceCheckpoint"
_WHERE: Final = "The model of this run"
_SIZE: Final = re.compile(r"\s*(\d+)\s*([KMGT]?)(i?)B?\s*", re.IGNORECASE | re.ASCII)


@checked_dataclass
class HuggingFaceCheckpoint(Callback):
    """Write the model as a folder that `transformers` loads: weights, config.json, tokenizer.

    For the decoders of this package, `hf_causal_lm`, `hf_model` and models of `transformers`; of
    `dpo`, its policy. What has no counterpart in Hugging Face is refused before training. If a
    folder cannot be written, an error is logged; the run continues.

    Args:
        folder: Path of the folders, relative to `model_dir`; contains the field `{step}` once.
        steps: Write on every n-th step, > 0; None = not by steps.
        at_end: Whether to write at the end of a fit, unless it was interrupted.
        tokenizer: Folder of a tokenizer, its `tokenizer.json`, or a name of the Hub, to copy
            along; None = for a model of `transformers`, the tokenizer of the folder it was made
            from.
        family: Of a decoder: `model_type` of config.json; None = the first family that fits the
            settings.
        dtype: Of the weights; None = as trained.
        shard_size: Maximum size of a file of weights.
        merge_adapters: Whether LoRA adapters are merged into the weights, in float32; false = of a
            model of `transformers` that started from a folder or the Hub, the adapters alone, in a
            folder that `PeftModel.from_pretrained` loads.
        averaged: Whether to write the averaged weights of `ModelEma` instead of the model's.

    Cost: Training waits for the write. Sharded weights are written twice. `averaged` takes another
        copy of the weights meanwhile.

    Raises:
        ConfigError: If an argument is invalid, or the model, one of its settings or its adapters
            have no counterpart; `averaged` without `ModelEma`.
    """

    folder: str = "hf_{step}"
    steps: PositiveInt | None = None
    at_end: bool = True
    tokenizer: str | None = None
    family: str | None = None
    dtype: Float | None = None
    shard_size: str = "5GB"
    merge_adapters: bool = True
    averaged: bool = False

    def __post_init__(self) -> None:
        folder, family = self.folder, self.family
        if self.steps is None and not self.at_end:
            raise ConfigError(f"{_OWNER} would never write a folder. Set steps or at_end.")
        if folder.count("{step}") != 1 or re.search(r"[{}]", folder.replace("{step}", "")):
            raise ConfigError(
                f"{_OWNER}.folder is {folder!r}; it must contain the field {{step}} once, such as "
                f"'hf_{{step}}'."
            )
        known = sorted(families())
        if family is not None and family not in known:
            raise ConfigError(f"{_OWNER}.family: {family!r} is unknown. {suggest(family, known)}")
        self._dtype = None if self.dtype is None else torch_dtype(self.dtype)
        self.dtype = cast(Any, self._dtype)  # the type, whatever it was written as
        self.shard_bytes = _bytes_of(self.shard_size)
        self._files = TokenizerFiles()
        self._theirs: TheirModel | None = None
        self._layers: dict[str, LoraLayer] = {}
        self._last: int | None = None

    @override
    def post_setup(self, trainer: Trainer) -> None:
        trainer.object_store.refuse_if_split(trainer, f"{_OWNER} makes one folder")
        if self.averaged and trainer.get_callback(ModelEma) is None:
            raise ConfigError(f"{_OWNER}.averaged requires the callback ModelEma. Add it.")
        model, _ = _trained(trainer)
        self._theirs = their_model(model)
        self._layers = lora_layers(model if self._theirs is None else self._theirs.module)
        if self._theirs is None:
            self._check_decoder(model)
        elif self.family is not None:
            raise ConfigError(
                f"{_OWNER}.family has no effect with {type(model).__name__}, whose own config.json "
                f"is written. Remove it."
            )
        elif not self.merge_adapters:
            adapter_settings(self._theirs, self._layers)
        elif trainer.backend.caps.holds_values:
            self._planned(trainer, InMemory(model.state_dict()))
        self._files = self._tokenizer(model)

    def _check_decoder(self, model: Module) -> None:
        if not isinstance(model, Decoder):
            raise ConfigError(
                f"{_OWNER} writes the decoders of this package, such as gpt2 and llama, and models "
                f"of transformers; the model is {type(model).__name__}. Remove the callback."
            )
        if not self.merge_adapters:
            raise ConfigError(
                f"{_OWNER}.merge_adapters is false, but the model is the decoder "
                f"{type(model).__name__}: only the adapters of models of transformers can be "
                f"written alone. Set it to true."
            )
        family_fitting(merged_settings(model, self._layers), family=self.family)

    def _tokenizer(self, model: Module) -> TokenizerFiles:
        if self.tokenizer is None:
            return TokenizerFiles() if self._theirs is None else tokenizer_beside(self._theirs)
        key = f"{_OWNER}.tokenizer"
        path = Path(self.tokenizer)
        if not path.is_file():
            path = local_folder(self.tokenizer, key=key, patterns=SETTINGS_PATTERNS)
        found = read_tokenizer(path)
        sized: Any = model if self._theirs is None else self._theirs
        if sized.vocab_size is not None:
            found.check(sized.vocab_size, key)
        return found

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
        ema = trainer.get_callback(ModelEma)
        average = ema if self.averaged and ema is not None and ema.has_average else None
        which = "averaged weights" if average is not None else "weights, not averaged"
        with saving(trainer), nullcontext() if average is None else average.swap():
            if try_to_write(partial(self._write_to, trainer, path), f"Failed to write {path}"):
                log.info("Saved %s%s.", shown_path(path), "" if ema is None else f" ({which})")
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

    def _export(self, trainer: Trainer, source: TensorSource, path: Path) -> None:
        model, prefix = _trained(trainer)
        source = PartOf(source, prefix)
        if self._theirs is None:
            self._export_decoder(model, source, path)
        elif not self.merge_adapters:
            adapters = plan_adapters(source, self._theirs, self._layers, dtype=self._dtype)
            write_adapters(adapters, path, tokenizer=self._files)
        else:
            write_transformers(
                self._planned(trainer, source),
                path,
                tokenizer=self._files,
                tokenizer_where=f"{_OWNER}.tokenizer",
                shard_bytes=self.shard_bytes,
            )

    def _planned(self, trainer: Trainer, source: TensorSource) -> TheirExport:
        assert self._theirs is not None
        return plan_transformers(
            source, self._theirs, self._layers, where=_WHERE, dtype=self._dtype
        )

    def _export_decoder(self, model: Module, source: TensorSource, path: Path) -> None:
        assert isinstance(model, Decoder)
        export = plan_export(
            MergedAdapters(source, self._layers, where=_WHERE),
            merged_settings(model, self._layers),
            where=_WHERE,
            family=self.family,
            dtype=self._dtype,
        )
        write_export(export, path, tokenizer=self._files, shard_bytes=self.shard_bytes)


def _trained(trainer: Trainer) -> tuple[Module, str]:
    """Return the language model of a run, and what the names of its tensors start with."""
    model = trainer.model
    if isinstance(model, Dpo):
        return model.policy_model, "policy_model."
    return model, ""


def _bytes_of(text: str) -> int:
    found = _SIZE.fullmatch(text)
    if found is None or int(found[1]) < 1:
        raise ConfigError(f"{_OWNER}.shard_size: expected a size such as 5GB, got {text!r}.")
    power = " KMGT".index(found[2].upper() or " ")
    return int(int(found[1]) * (1024 if found[3] else 1000) ** power)
