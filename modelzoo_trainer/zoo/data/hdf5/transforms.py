"""Changes to batches of token rows: sink tokens, memory tokens, shifted positions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from itertools import pairwise
from typing import Annotated, Any, Final

import numpy as np
import torch
from annotated_types import Ge, Le
from numpy.typing import NDArray
from torch import Tensor

from modelzoo_trainer.base.annotations import annotations_of
from modelzoo_trainer.base.constraints import Flag, NonNegativeSize, Size, check
from modelzoo_trainer.errors import ConfigError, suggest
from modelzoo_trainer.loading.seeded_sampler import mixed_seed
from modelzoo_trainer.zoo.data.hdf5.sending import Batch
from modelzoo_trainer.zoo.rows.hdf5_format import INPUTS, LABELS, MASK, POSITIONS

_TOKENS: Final = (INPUTS, LABELS)

Seeds = tuple[int, int]


class BatchTransform(ABC):
    """A change to batches."""

    @abstractmethod
    def __call__(self, batch: Batch, samples: NDArray[np.int64], seeds: Seeds) -> Batch:
        """Return the changed batch.

        Args:
            batch: A batch (B, S); a new one is returned.
            samples: Indices of its samples; negative ones are padding rows.
            seeds: Of the order, and number of the epoch.
        """

    def length_after(self, length: int) -> int:
        """Return the length of changed samples.

        Raises:
            ConfigError: If samples of this length cannot be changed.
        """
        return length

    def positions_after(self, length: int) -> int:
        """Return one more than the largest position of changed samples."""
        return self.length_after(length)

    def check_vocabulary(self, vocab_size: int) -> None:
        """Check that a model with so many token ids has those that are inserted.

        Raises:
            ConfigError: If it lacks one.
        """
        inserted = self.inserted()
        if inserted is not None and inserted[1] >= vocab_size:
            argument, token = inserted
            raise ConfigError(
                f"data_transforms: {argument} is {token}, but the model's vocab_size is "
                f"{vocab_size}. Use a smaller {argument}, or increase vocab_size."
            )

    def inserted(self) -> tuple[str, int] | None:
        """Return the argument with the token id that is inserted, and the id; None = nothing is."""
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class AddSinkTokens(BatchTransform):
    """Insert tokens that do not count in the loss at one position of each sample.

    Args:
        sink_token_id: The token id.
        num_sink_tokens: How many are inserted.
        sink_token_start_pos: Where.
        truncate_to_original_length: Whether as many tokens are removed at the end.
    """

    sink_token_id: NonNegativeSize = 0
    num_sink_tokens: Size = 1
    sink_token_start_pos: NonNegativeSize = 0
    truncate_to_original_length: Flag = False

    def __call__(self, batch: Batch, samples: NDArray[np.int64], seeds: Seeds) -> Batch:
        """Return the batch with the tokens."""
        start, num, length = self.sink_token_start_pos, self.num_sink_tokens, _length_of(batch)
        found = _with_inserted(batch, [(start, num)], self.sink_token_id)
        if self.truncate_to_original_length:
            changed = (*_TOKENS, MASK)
            found.update({name: found[name][:, :length].contiguous() for name in changed})
        return found

    def length_after(self, length: int) -> int:
        """Return the length of changed samples.

        Raises:
            ConfigError: If samples end before the position.
        """
        if self.sink_token_start_pos > length:
            raise ConfigError(
                f"data_transforms: add_sink_tokens has sink_token_start_pos "
                f"{self.sink_token_start_pos}, but samples have only {length} tokens. Decrease it."
            )
        return length if self.truncate_to_original_length else length + self.num_sink_tokens

    def inserted(self) -> tuple[str, int]:
        """Return the argument with the token id that is inserted, and the id."""
        return "sink_token_id", self.sink_token_id


@dataclass(frozen=True, slots=True, kw_only=True)
class AddMemoryTokens(BatchTransform):
    """Insert tokens that do not count in the loss after each chunk of a sample but the last.

    Args:
        attn_memory_chunk_size: Tokens per chunk.
        num_memory_tokens_per_chunk: How many are inserted after each.
        memory_token_id: The token id.
        return_masks: Whether the batch has `special_token_meta: {memory_token_mask}`, (B, S), bool.
    """

    attn_memory_chunk_size: Size
    num_memory_tokens_per_chunk: Size
    memory_token_id: NonNegativeSize = 0
    return_masks: Flag = False

    def __call__(self, batch: Batch, samples: NDArray[np.int64], seeds: Seeds) -> Batch:
        """Return the batch with the tokens."""
        num = self.num_memory_tokens_per_chunk
        places = [(end, num) for end in self._ends(_length_of(batch))]
        found = _with_inserted(batch, places, self.memory_token_id)
        if self.return_masks:
            mask = torch.zeros(found[INPUTS].shape, dtype=torch.bool)
            for number, (end, _) in enumerate(places):
                mask[:, end + number * num : end + (number + 1) * num] = True
            meta = {**found.get("special_token_meta", {}), "memory_token_mask": mask}
            found["special_token_meta"] = meta
        return found

    def _ends(self, length: int) -> range:
        return range(self.attn_memory_chunk_size, length, self.attn_memory_chunk_size)

    def length_after(self, length: int) -> int:
        """Return the length of changed samples."""
        return length + len(self._ends(length)) * self.num_memory_tokens_per_chunk

    def inserted(self) -> tuple[str, int]:
        """Return the argument with the token id that is inserted, and the id."""
        return "memory_token_id", self.memory_token_id


@dataclass(frozen=True, slots=True, kw_only=True)
class AddPoseShift(BatchTransform):
    """Add int64 `position_ids` that skip positions between segments, in some of the samples.

    Positions increase by 1 within a segment, and by random steps between segments, so that the last
    position is below `target_seq_len`: a model learns distances that are longer than its samples
    (Zhu et al.: PoSE, Efficient context window extension of LLMs via positional skip-wise training,
    ICLR 2024). The random numbers of a sample depend on the seed of the order, the epoch and its
    index, not on the batch or the process.

    Args:
        segment_length: Tokens per segment.
        target_seq_len: Length that positions come from, larger than the samples'.
        ratio_shifted_samples: Probability that a sample is shifted.
    """

    segment_length: Size
    target_seq_len: Size
    ratio_shifted_samples: Annotated[float, Ge(0), Le(1)] = 0.5

    def __call__(self, batch: Batch, samples: NDArray[np.int64], seeds: Seeds) -> Batch:
        """Return the batch with positions."""
        length = _length_of(batch)
        plain = torch.arange(length)
        segments = plain // self.segment_length
        num, room = int(segments[-1]) + 1, self.target_seq_len - length
        rows = []
        for sample in samples.tolist():
            generator = torch.Generator().manual_seed(mixed_seed(*seeds, sample + 1))
            is_shifted = torch.rand((), generator=generator) < self.ratio_shifted_samples
            if sample < 0 or not is_shifted:
                rows.append(plain)
                continue
            skips = torch.randint(room + 1, (num - 1,), generator=generator).sort().values
            rows.append(plain + torch.cat([torch.zeros(1, dtype=torch.int64), skips])[segments])
        return {**batch, POSITIONS: torch.stack(rows)}

    def length_after(self, length: int) -> int:
        """Return the length of samples, which does not change.

        Raises:
            ConfigError: If there are no further positions.
        """
        if self.target_seq_len <= length:
            raise ConfigError(
                f"data_transforms: add_pose_shift has target_seq_len {self.target_seq_len}, but "
                f"samples have {length} tokens. Increase target_seq_len above that."
            )
        return length

    def positions_after(self, length: int) -> int:
        """Return one more than the largest position."""
        return self.target_seq_len


TRANSFORMS: Final[Mapping[str, type[BatchTransform]]] = {
    "add_sink_tokens": AddSinkTokens,
    "add_memory_tokens": AddMemoryTokens,
    "add_pose_shift": AddPoseShift,
}


def parse_transforms(given: Sequence[Any] | None) -> list[BatchTransform]:
    """Return the transforms that `data_transforms` names.

    Raises:
        ConfigError: If a name, an argument or the order is invalid.
    """
    found = [_transform(one, f"data_transforms[{idx}]") for idx, one in enumerate(given or ())]
    for number, (one, _) in enumerate(pairwise(found)):
        if isinstance(one, AddPoseShift):
            raise ConfigError(
                f"data_transforms[{number}]: add_pose_shift must be the last transform, since it "
                f"numbers the tokens that the others insert. Move it to the end."
            )
    return found


def _transform(given: object, where: str) -> BatchTransform:
    if not isinstance(given, Mapping) or not isinstance(given.get("name"), str):
        raise ConfigError(
            f"{where}: expected a mapping with name and the arguments of a transform, got "
            f"{given!r}. Transforms: {', '.join(TRANSFORMS)}."
        )
    name = given["name"].lower()
    cls: Any = TRANSFORMS.get(name)
    if cls is None:
        raise ConfigError(
            f"{where}: there is no transform {given['name']!r}. {suggest(name, TRANSFORMS)}"
        )
    arguments = {key: value for key, value in given.items() if key != "name"}
    kinds = annotations_of(cls)
    known = [field.name for field in fields(cls)]
    for key, value in arguments.items():
        if key not in known:
            raise ConfigError(f"{where}: {name} has no argument {key!r}. {suggest(key, known)}")
        check(f"{where}.{key}", value, kinds[key])
    for field in fields(cls):
        if field.default is MISSING and field.name not in arguments:
            raise ConfigError(f"{where}: {name} requires {field.name}. Set it.")
    made: BatchTransform = cls(**arguments)
    return made


def _length_of(batch: Batch) -> int:
    return int(batch[INPUTS].shape[1])


def _with_inserted(batch: Batch, places: Sequence[tuple[int, int]], token: int) -> Batch:
    """Return a batch with `num` tokens inserted before each position, given in order."""
    found = dict(batch)
    for name in (*_TOKENS, MASK):
        found[name] = _inserted(batch[name], places, 0 if name == MASK else token)
    return found


def _inserted(rows: Tensor, places: Sequence[tuple[int, int]], value: int) -> Tensor:
    parts, begin = [], 0
    for place, num in places:
        parts += [rows[:, begin:place], rows.new_full((len(rows), num), value)]
        begin = place
    return torch.cat([*parts, rows[:, begin:]], dim=1)
