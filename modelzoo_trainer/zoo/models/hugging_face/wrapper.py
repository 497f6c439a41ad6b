"""What models of `transformers` have in common here: names of tensors, and saving."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Final

from torch import nn

from modelzoo_trainer.core.parts.shared_weights import with_shared
from modelzoo_trainer.zoo.hugging_face.stored_names import in_memory
from modelzoo_trainer.zoo.models.hugging_face.adapters import PlainNames
from modelzoo_trainer.zoo.models.hugging_face.building import (
    build,
    is_built_on_meta,
)
from modelzoo_trainer.zoo.models.hugging_face.initializing import Step, reset_steps
from modelzoo_trainer.zoo.models.hugging_face.matching import (
    check_missing,
    check_shapes,
    unused,
    warn_of_frozen,
    warn_of_unused,
)
from modelzoo_trainer.zoo.models.hugging_face.saving import save
from modelzoo_trainer.zoo.models.hugging_face.settings import HfSettings

_PREFIX: Final = "model."


class TransformersModel(nn.Module):
    """A model of `transformers` as the attribute `model`, whose methods work as usual.

    Args:
        settings: Where it comes from.
        auto_class: The class of `transformers` that makes it.
        may_start_anew: Whether tensors that the weights lack get initial values.

    Raises:
        ConfigError: If a setting is invalid, or the folder or its weights do not fit.
    """

    resets_parts: ClassVar[bool] = True
    """Whether `reset_steps` initializes the modules within, too."""

    def __init__(self, settings: HfSettings, auto_class: str, *, may_start_anew: bool) -> None:
        super().__init__()
        self.settings = settings
        built, self._initial = build(settings, auto_class, may_start_anew=may_start_anew)
        self.model: Any = built
        self.warn_of_frozen()
        self._may_start_anew = may_start_anew
        self.weights_folder: Path | None = None
        """The folder whose weights are still to be loaded: of a model that was built on `meta`."""
        if settings.has_weights and is_built_on_meta(settings):
            self.weights_folder = settings.folder()

    @property
    def config(self) -> Any:
        """The settings of the architecture, of `transformers`."""
        return self.model.config

    def save_pretrained(self, folder: str | Path) -> None:
        """Write a folder that `from_pretrained` of `transformers` loads, with merged adapters.

        Args:
            folder: Created if it is missing.

        Raises:
            ConfigError: If adapters of this kind cannot be merged, or the weights are sharded.
        """
        save(self.model, folder)

    def reset_steps(self) -> Iterator[Step]:
        """Yield the parts of the model, each with the function that initializes it.

        Raises:
            ConfigError: As `initializing.reset_steps`.
        """
        return reset_steps(self.model)

    def warn_of_frozen(self) -> None:
        """Warn of tensors with initial values that are not trained, because adapters are."""
        warn_of_frozen(self.model, self._initial)

    def pretrained_state(self, found: Mapping[str, Any]) -> dict[str, Any]:
        """Return an entry for each tensor of the model: of its folder, or its initial value.

        Args:
            found: The tensors of the folder by name.

        Raises:
            ConfigError: If the folder lacks tensors that the model requires, or shapes differ.
        """
        own, entries = self.state_dict(), self.complete_state(found)
        names = PlainNames(own)
        missing = [name for name in own if name not in entries]
        folder, kind = str(self.weights_folder), type(self.model).__name__
        others = unused(self.model, (name for name in entries if name not in own))
        if missing:
            plain = [names.plain.get(name, name).removeprefix(_PREFIX) for name in missing]
            check_missing(folder, kind, plain, others, may_start_anew=self._may_start_anew)
            self._initial = plain
            self.warn_of_frozen()
        warn_of_unused(folder, kind, others)
        for name, value in own.items():
            if name in entries and entries[name].shape != value.shape:
                check_shapes(folder, [(name, entries[name].shape, value.shape)])
        return {name: entries.get(name, value) for name, value in own.items()}

    def complete_state(self, found: Mapping[str, Any]) -> dict[str, Any]:
        """Return the entries of a checkpoint by the names here.

        Weights of `transformers`, also without a head's prefix, get them; shared weights that they
        list once are shared again; adapters keep their initial values if there are none. Tensors
        that the library ignores, such as frequencies of rotary positions, are left out.

        Args:
            found: Entries by name.
        """
        own = self.state_dict()
        if all(name in found for name in own):
            return dict(found)
        names = PlainNames(own)
        plain = {one.removeprefix(_PREFIX): own[name] for name, one in names.plain.items()}
        found = in_memory(self.model, found, plain)
        has_adapters = any(name in found for name in names.added)
        entries: dict[str, Any] = {}
        used: set[str] = set()
        for name in own:
            known = next((one for one in self._other_names(name, names) if one in found), None)
            if known is not None:
                entries[name] = found[known]
                used.add(known)
        if not used:
            return dict(found)
        entries = with_shared(own, entries)
        if not has_adapters:
            entries |= {name: own[name] for name in names.added if name not in entries}
        rest = unused(self.model, (name for name in found if name not in used))
        return entries | {name: found[name] for name in rest}

    def _other_names(self, name: str, names: PlainNames) -> Iterator[str]:
        """Yield the names that an own tensor may have in a file, the best first."""
        yield name
        plain = names.plain.get(name)
        if plain is None:
            return
        yield plain
        theirs = plain.removeprefix(_PREFIX)
        yield theirs
        base = f"{getattr(self.model, 'base_model_prefix', '')}."
        if theirs.startswith(base):
            yield theirs.removeprefix(base)
